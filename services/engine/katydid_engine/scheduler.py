"""Decides what every step computes: continuous batching with chunked prefill over a paged, prefix-cached KV store.

    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(plan, runner.run(plan))

Rules, each the cure of a failure known from the field:
- Decodes come first and cost one token of the budget each, so a long prefill never starves them; what they leave goes
  to prompts so that a long one does not starve a short newcomer either (``prefills.py``).
- A sequence is admitted only with pages for its whole input (and ``watermark_pages`` to spare), never for its first
  chunk alone. One that does not fit lets smaller ones pass, but only ``max_bypass`` times.
- When pages run out the last in order (lowest priority, then newest) is preempted and recomputed later; the first in
  order is never a victim, so there is always progress. A step that preempted for pages admits nobody.
- Blocks are published only from committed tokens. A prompt that is cached entirely recomputes its last token without
  writing it again.
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Callable

from katydid_runtime.block_hash import BLOCK_TOKENS

from katydid_engine.admission import Admission
from katydid_engine.block_pool import BlockPool, IntegrityError
from katydid_engine.draft_depth import DraftDepth
from katydid_engine.fetched import Fetched
from katydid_engine.kv_traffic import KvTraffic
from katydid_engine.ledger import Ledger, Outcome
from katydid_engine.messages import KvArrived, KvFound, Load
from katydid_engine.plan import Logprobs, Run, SampleRow, StepOutput, StepPlan
from katydid_engine.prefills import Prefills
from katydid_engine.request import CachedTokens, FinishReason, LiveRequest, Phase, Request, Sequence, State
from katydid_engine.residency import Residency
from katydid_engine.scheduler_config import SchedulerConfig
from katydid_engine.step_flight import StepFlight, decode_run, prefill_run, start_of
from katydid_engine.token_budget import TokenBudget

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """One per TP group. ``clock`` gives the monotonic seconds on which deadlines and phases are measured;
    ``write_slots`` are the staging slots for finished blocks on their way to the cache service; ``drafts`` says how
    many tokens are drafted behind each, ``budget`` how many prompt tokens go into a step with decodes; prompts are to
    have their first token within ``ttft_target_s``; without it they take turns beside decodes for whose time
    ``budget`` has a target, and are else computed side by side.

    Raises:
        ValueError: ``max_model_tokens`` exceeds what the pages hold.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        clock: Callable[[], float],
        write_slots: range = range(0),
        drafts: DraftDepth | None = None,
        budget: TokenBudget | None = None,
        ttft_target_s: float | None = None,
    ) -> None:
        if config.max_model_tokens > pool.num_pages * BLOCK_TOKENS:
            raise ValueError(
                f"max_model_tokens={config.max_model_tokens}: {pool.num_pages} pages hold "
                f"{pool.num_pages * BLOCK_TOKENS} tokens"
            )
        self.kv = KvTraffic(write_slots)
        self._config = config
        self._pool = pool
        self._clock = clock
        self._queues = Residency(pool, self.kv)
        self._ledger = Ledger()
        self._ids = itertools.count(1)
        self._arrivals = itertools.count(1)
        self._step = 0
        self._flights: deque[StepFlight] = deque()
        # Drafts that the last step with runs was told to make.
        self._drafts = 0
        self._depth = drafts or DraftDepth(0)
        self._budget = budget or TokenBudget(None, 1)
        self._prefills = Prefills(self._budget, ttft_target_s, config.sparse)
        self._fetched = Fetched(self._queues, compute=self._compute, preempt=self._preempt)
        self._admission = Admission(config, pool, self._queues, preempt=self._preempt, load=self._load)

    @property
    def num_requests(self) -> int:
        return len(self._ledger.requests)

    def load(self) -> Load:
        waiting, running, loading = self._queues.waiting, self._queues.running, self.kv.sequences()
        uncached = sum(max(1, s.num_unscheduled - s.likely_cached) for s in waiting if not s.request.fetch_only)
        loads = (s for s in (*loading, *running) if not (s.decodes or s.request.fetch_only))
        uncached += sum(sequence.num_unscheduled for sequence in loads)
        return Load(
            running=len(running) + len(loading),
            waiting=len(waiting),
            waiting_uncached_tokens=uncached - self.kv.coming_tokens(),
            free_pages=self._pool.num_available,
            total_pages=self._pool.num_pages,
        )

    def add(self, request: Request) -> None:
        """Queues a validated request; its handle must be new."""
        live = LiveRequest(request, next(self._arrivals))
        sequence = Sequence(next(self._ids), live)
        self._ledger.open(live, sequence)
        self._queues.enqueue(sequence)

    def abort(self, handle: int) -> None:
        """Ends all choices of a request, in whatever state; one that has ended already is no error."""
        self._end_request(handle, FinishReason.ABORT)

    def kv_found(self, message: KvFound) -> None:
        ticket = self.kv.found(message.ticket, message.runs, more=message.more)
        if ticket is None:
            return
        if (tier := ticket.next_tier) is None:
            if not message.more:
                self._compute(ticket.sequence)
        else:
            ticket.sequence.state = State.FETCHING
            ticket.sequence.live.enter(Phase.FETCH, self._clock(), tier, ticket.fetch_span_id)

    def kv_arrived(self, message: KvArrived) -> None:
        self.kv.arrive(message.ticket, message.slots, message.last, message.checksums)

    def schedule(self) -> StepPlan | None:
        """The next step; None when there is nothing to compute or move now. Plans are committed in their order; a plan
        made while others are in flight continues what these will have sampled."""
        now = self._clock()
        for handle in self._ledger.expired(now):
            self._end_request(handle, FinishReason.ERROR, "DEADLINE_EXCEEDED", "the request's deadline passed")
        decodes, q_len, short = self._schedule_decodes()
        if not short:
            self._admission.admit(now)
            decodes = [sequence for sequence in decodes if sequence.state is State.RUNNING]
        q_len = q_len if decodes else 1
        # Taken behind all that takes pages away: what lost its own just now is not moved.
        packs = self.kv.take_packs(self._pool.hash_of)
        unpacking = self._fetched.begin(now, decodes=bool(decodes))
        copies = self._queues.take_copies()
        prefills = self._schedule_prefills(decodes, q_len)
        # With nothing else to do a step sees what transfers are over.
        if not (decodes or prefills or packs or copies or unpacking or (self._queues.moves and not self._flights)):
            return None
        self._step += 1
        self._queues.step_planned(self._step)
        sequences = [*decodes, *(sequence for sequence, _ in prefills)]
        samples = tuple(
            SampleRow(index, sequence.choice + fork)
            for index, sequence in enumerate(sequences)
            if index < len(decodes) or prefills[index - len(decodes)][1] == sequence.num_unscheduled
            for fork in range(sequence.num_slots)
        )
        plan = StepPlan(
            number=self._step,
            ends=self._queues.take_ended_ids(),
            starts=tuple(start_of(sequence) for sequence in sequences if self._queues.start(sequence)),
            packs=tuple(transfer for transfer, _ in packs),
            copies=copies,
            unpacks=tuple(transfer for arrival in unpacking for transfer in arrival.transfers),
            runs=(*map(decode_run, decodes), *(prefill_run(sequence, count) for sequence, count in prefills)),
            num_decodes=len(decodes),
            decode_q_len=q_len,
            samples=samples,
            drafts=self._depth.choose(len(samples)) if samples else 0,
            waits=self._fetched.rely(sequences, unpacking),
            sparse=any(self._prefills.sparse(sequence) for sequence, _ in prefills),
            sparse_pairs=sum(self._prefills.pairs(sequence, count) for sequence, count in prefills),
        )
        self._flights.append(StepFlight(plan, tuple(sequences), tuple(sequence.stay for sequence in sequences)))
        self._queues.moves.begin(plan, tuple(store for _, store in packs), unpacking)
        if plan.runs:
            self._drafts = plan.drafts
        for sequence in decodes:
            sequence.num_scheduled = sequence.num_tokens
            sequence.num_coming += q_len
        for sequence, count in prefills:
            sequence.num_scheduled += count
            sequence.num_coming += sequence.num_unscheduled == 0
        return plan

    def commit(self, plan: StepPlan, output: StepOutput) -> None:
        """Takes over a step's results: moved and finished blocks, tokens, ends."""
        if not self._flights or plan is not self._flights[0].plan:
            raise IntegrityError(f"step {plan.number} is not the next to be committed")
        flight = self._flights.popleft()
        now = self._clock()
        done_at = now - output.late_s
        self._queues.step_done(plan.number)
        for moved in output.packed:
            for store, checksum in self._queues.moves.packed(moved):
                self.kv.packed(store, checksum)
        for moved in output.unpacked:
            for arrival, sums in self._queues.moves.unpacked(moved):
                self._fetched.commit(arrival, sums, now)
        for index, run in enumerate(plan.runs):
            if (sequence := flight.sequence(index)) is None:
                continue
            if index in output.broken:
                self._end_broken(sequence)
            elif index in output.misfits:
                self._end(sequence, FinishReason.ERROR, "INVALID_REQUEST", output.misfits[index])
            elif index >= plan.num_decodes:
                self._commit_prefill(sequence, run, output.prompt_logprobs.get(index))
        # All choices fork before the first of them can end and take its pages along.
        sampled = [self._choice(flight.sequence(row.run), row.choice) for row in plan.samples]
        for index, sequence in enumerate(sampled):
            if sequence is not None:
                self._commit_tokens(sequence, flight, index, output, done_at)

    def took(self, plan: StepPlan, seconds: float) -> None:
        """How long a step took."""
        if plan.num_decodes and plan.num_decodes == len(plan.runs) and plan.decode_q_len == 1 + plan.drafts:
            self._depth.took(plan.num_decodes, plan.drafts, seconds)
        if plan.num_prefill_tokens and self._prefills.by_time:
            self._budget.took(plan, seconds)

    def take_outcome(self) -> Outcome:
        """What happened since the last call, for the face."""
        return self._ledger.take(self._pool.take_events(), self.kv.take_asks())

    def next_wake(self) -> float | None:
        """When something will be due without a message: the end of an injected queue delay, or a deadline."""
        delay = self._config.queue_delay_s
        times = [sequence.request.received_at + delay for sequence in self._queues.waiting] if delay else []
        now = self._clock()
        return min((time for time in (*times, *self._ledger.deadlines()) if time > now), default=None)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless pages, queues and live requests agree with each other."""
        self._queues.check_integrity()
        live = sorted(sequence.id for live in self._ledger.requests.values() for sequence in live.choices.values())
        if live != sorted(sequence.id for sequence in (*self._queues.waiting, *self._queues.holders())):
            raise IntegrityError("a live choice is in no queue, or in two")

    def _schedule_decodes(self) -> tuple[list[Sequence], int, bool]:
        """Every sequence that decodes, each with pages for what it may compute; how many tokens each computes; and
        whether there were too few pages."""
        due = [
            sequence
            for sequence in self._queues.running
            if sequence.decodes and sequence.may_go_on(self._config.max_model_tokens)
        ]
        q_len = min(1 + self._drafts, self._config.max_batch_tokens // max(1, len(due)))
        decodes: list[Sequence] = []
        short = False
        for sequence in due:
            while sequence.state is State.RUNNING and not self._queues.grow(
                sequence, sequence.most_tokens(q_len, self._config.max_model_tokens)
            ):
                short = True
                if self._queues.pages_return:
                    break  # it waits for the steps in flight; to preempt for it would take more than it needs
                # The victim is this sequence or one behind it, which is not in ``decodes`` yet.
                self._preempt(self._queues.last_holder())
            else:
                if sequence.state is State.RUNNING:
                    decodes.append(sequence)
        return decodes, q_len, short

    def _schedule_prefills(self, decodes: list[Sequence], q_len: int) -> list[tuple[Sequence, int]]:
        """Chunks of the sequences that prefill, for what decodes leave of the step's tokens and of its time."""
        prefills = [sequence for sequence in self._queues.running if not sequence.decodes]
        most = self._config.max_batch_tokens - len(decodes) * q_len
        yields = self._depth.tokens(q_len - 1)
        chunks = self._prefills.choose(prefills, decodes, most, yields, self._clock(), self._step)
        return [(sequence, chunk) for sequence, chunk in zip(prefills, chunks, strict=True) if chunk]

    def _load(self, sequence: Sequence, now: float) -> None:
        """Sends an admitted sequence to the cache service for more of its blocks, or straight to computing."""
        live = sequence.live
        if not live.has_first_token:
            live.cached = CachedTokens(device=min(sequence.num_computed, sequence.most_reused))
        if self.kv.attached and sequence.reads_cache and sequence.num_published < len(sequence.hashes()):
            sequence.state = State.LOOKUP
            ticket = self.kv.look_up(sequence, sequence.num_published, now)
            live.enter(Phase.LOOKUP, now, span_id=ticket.span_id)
        else:
            self._compute(sequence)

    def _compute(self, sequence: Sequence) -> None:
        """All that the caches hold is in the pages: what is left is computed, the last token in any case."""
        sequence.num_computed = sequence.num_scheduled = min(sequence.num_computed, sequence.num_tokens - 1)
        self._queues.run(sequence)
        if sequence.request.fetch_only:
            self._end(sequence, FinishReason.LENGTH)
        else:
            sequence.live.enter(Phase.PREFILL, self._clock())

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's pages; it is computed again from its tokens when there is room."""
        self._queues.leave(sequence)
        sequence.live.preemptions += 1
        sequence.live.enter(Phase.QUEUE, self._clock())
        self._queues.enqueue(sequence)

    def _end_request(self, handle: int, reason: FinishReason, error: str = "", message: str = "") -> None:
        live = self._ledger.requests.get(handle)
        if live is not None:
            for sequence in list(live.choices.values()):
                self._end(sequence, reason, error, message)

    def _end(
        self, sequence: Sequence, reason: FinishReason, error: str = "", message: str = "", at: float | None = None
    ) -> None:
        self._queues.leave(sequence)
        sequence.state = State.FINISHED
        self._ledger.end(sequence, reason, self._clock() if at is None else at, error, message)

    def _end_broken(self, sequence: Sequence) -> None:
        """The model made no numbers of a sequence: it ends alone, and nobody reads what it left in the cache."""
        self._pool.withdraw(sequence.pages)
        self._end(sequence, FinishReason.ERROR, "INTERNAL", "the model produced logits that are no numbers")

    def _commit_prefill(self, sequence: Sequence, run: Run, prompt_logprobs: Logprobs | None) -> None:
        sequence.num_computed = run.start + len(run.tokens)
        if prompt_logprobs is not None:
            self._ledger.prompt_logprobs(sequence, prompt_logprobs)
        self._publish(sequence)

    def _choice(self, sequence: Sequence | None, choice: int) -> Sequence | None:
        """The sequence that gets a sampled token: the one computed, or a new fork of it; None when it has left."""
        if sequence is None or choice == sequence.choice:
            return sequence
        twin = sequence.fork(next(self._ids), choice)
        self._ledger.open(sequence.live, twin)
        self._queues.fork(sequence, twin)
        return twin

    def _commit_tokens(self, sequence: Sequence, flight: StepFlight, row: int, output: StepOutput, at: float) -> None:
        plan, tokens = flight.plan, output.tokens[row]
        decoded = plan.samples[row].run < plan.num_decodes
        reason = None
        new = array("I")
        for token in tokens:
            sequence.tokens.append(token)
            new.append(token)
            complete = len(new) == len(tokens) and row in output.complete
            reason = sequence.finish_reason(self._config.eos_token_ids, self._config.max_model_tokens, complete)
            if reason is not None:
                break
        if plan.samples[row].choice == flight.sequences[plan.samples[row].run].choice:
            sequence.num_coming -= plan.decode_q_len if decoded else 1
            self._depth.verified(output.drafted[row], len(tokens) - 1)
            self._ledger.verified(output.drafted[row], len(new) - 1)
            sequence.num_drafted += output.drafted[row]
            sequence.num_accepted += len(new) - 1
        if decoded:
            # The newest token before, and the drafts that were accepted.
            sequence.num_computed += len(new)
        if not sequence.num_coming:
            sequence.num_scheduled = sequence.num_computed
        else:
            sequence.num_scheduled = sequence.num_tokens
        if decoded:
            self._publish(sequence)
        logprobs = output.logprobs.get(row)
        self._ledger.new_tokens(sequence, new, None if logprobs is None else logprobs.first(len(new)), at)
        if reason is not None:
            self._end(sequence, reason, at=at)

    def _publish(self, sequence: Sequence) -> None:
        if not sequence.request.bypass_cache:
            self._queues.publish(sequence, sequence.num_computed, computed=True)
