"""The scheduler against a runner on paper: whatever happens, every page read is right and no page is lost."""

from __future__ import annotations

from array import array
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from katydid_engine.block_pool import BlockPool
from katydid_engine.ledger import Outcome
from katydid_engine.messages import KvArrived, KvCancel, KvFound, KvLookup, KvReadSlotsFree, KvStore
from katydid_engine.plan import StepPlan
from katydid_engine.request import FinishReason, Phase, Request, Sampling, Tier
from katydid_engine.scheduler import Scheduler, SchedulerConfig
from katydid_runtime.block_hash import ChainKey
from tests.engine.paper_runner import PAGE, VOCAB, PaperRunner, expected_output

EOS = frozenset({3})
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 150, 192, 250]
STREAMS = [[(7 * i * i + 11 * i + s) % VOCAB for i in range(400)] for s in range(2)]


class Rig:
    """A scheduler, its runner, and a face that keeps what it is told."""

    def __init__(self, *, num_pages: int = 12, slots: int = 0, **config: object) -> None:
        values = {"max_model_tokens": 300, "max_batch_tokens": 96, "max_sequences": 4, "eos_token_ids": EOS}
        self.config = SchedulerConfig(**(values | config))  # type: ignore[arg-type]
        self.now = 0.0
        self.pool = BlockPool(num_pages)
        self.scheduler = Scheduler(self.config, self.pool, lambda: self.now, range(slots))
        self.runner = PaperRunner(num_pages, 2 * slots)
        self.requests: dict[int, Request] = {}
        self.output: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.ends: dict[tuple[int, int], FinishReason] = {}
        self.outcomes: list[Outcome] = []
        self.prompt_targets: dict[int, list[float]] = defaultdict(list)
        self.steps: list[StepPlan] = []

    def submit(self, prompt: list[int], **fields: object) -> Request:
        sampling = fields.pop("sampling", None) or Sampling(seed=5, max_tokens=4)
        chain = ChainKey(b"m" * 32, salt=b"s", public_blocks=1)
        request = Request(len(self.requests) + 1, array("I", prompt), chain, sampling, received_at=self.now, **fields)  # type: ignore[arg-type]
        self.requests[request.handle] = request
        self.scheduler.add(request)
        return request

    def step(self, between: object = None) -> bool:
        self.now += 0.01
        plan = self.scheduler.schedule()
        if plan is not None:
            self.steps.append(plan)
            assert sum(len(run.tokens) for run in plan.runs) <= self.config.max_batch_tokens
            assert len(plan.runs) <= self.config.max_sequences
            output = self.runner.run(plan)
            if callable(between):
                between()
            self.scheduler.commit(plan, output)
        self.collect()
        return plan is not None

    def collect(self) -> Outcome:
        outcome = self.scheduler.take_outcome()
        self.outcomes.append(outcome)
        for row in outcome.tokens:
            assert (row.handle, row.choice) not in self.ends, "a token after the end"
            self.output[row.handle, row.choice].extend(row.tokens)
            if row.prompt_logprobs is not None:
                self.prompt_targets[row.handle].extend(row.prompt_logprobs.chosen)
        for end in outcome.ends:
            assert (end.handle, end.choice) not in self.ends, "a choice ended twice"
            self.ends[end.handle, end.choice] = end.reason
            assert end.output_tokens == len(self.output[end.handle, end.choice])
        self.scheduler.check_integrity()
        return outcome

    def run_out(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        assert self.scheduler.num_requests == 0, "a request never ended"

    def check_outputs(self) -> None:
        for (handle, choice), reason in self.ends.items():
            want, ending = expected_output(self.requests[handle], choice, EOS, self.config.max_model_tokens)
            got = self.output[handle, choice]
            if reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert got == want[: len(got)]
            else:
                assert (got, reason) == (want, ending)
        assert self.pool.num_available == self.pool.num_pages


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of shared prefixes, aborts at any time, a cache service that comes, goes, and finds part of it."""

    @initialize(num_pages=st.sampled_from([5, 6, 9, 16]), batch=st.sampled_from([5, 70, 300]), watermark=st.integers(0, 1))
    def build(self, num_pages: int, batch: int, watermark: int) -> None:
        self.rig = Rig(num_pages=num_pages, slots=3, max_batch_tokens=batch, watermark_pages=watermark, max_bypass=2)
        self.store: dict[bytes, list[int]] = {}
        self.lookups: list[KvLookup] = []
        self.fetches: dict[int, list[bytes]] = {}
        self.stores: list[KvStore] = []
        self.free_read_slots = [3, 4, 5]
        self.lent: set[int] = set()

    def take_asks(self) -> None:
        for outcome in self.rig.outcomes:
            for ask in outcome.kv:
                if isinstance(ask, KvLookup):
                    self.lookups.append(ask)
                elif isinstance(ask, KvStore):
                    self.stores.append(ask)
                elif isinstance(ask, KvReadSlotsFree):
                    assert self.lent >= set(ask.slots), "a slot was given back twice"
                    self.lent -= set(ask.slots)
                    self.free_read_slots += ask.slots
                else:
                    assert isinstance(ask, KvCancel)
                    self.lookups = [lookup for lookup in self.lookups if lookup.ticket != ask.ticket]
                    self.fetches.pop(ask.ticket, None)
        self.rig.outcomes.clear()

    @rule(
        stream=st.integers(0, 1),
        length=st.sampled_from(LENGTHS),
        max_tokens=st.sampled_from([1, 2, 5, 70]),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 2),
        flags=st.sets(st.sampled_from(["bypass", "prompt_logprobs", "deadline", "ignore_eos", "generated"])),
        seed=st.integers(0, 3),
    )
    def submit(
        self, stream: int, length: int, max_tokens: int, n: int, priority: int, flags: set[str], seed: int
    ) -> None:
        generated = array("I")
        if "generated" in flags and n == 1:
            generated = array("I", STREAMS[stream][length : length + 30])
            max_tokens += 30
        sampling = Sampling(
            seed=seed, n=n, max_tokens=max_tokens, ignore_eos="ignore_eos" in flags, stop_token_ids=(9,),
            prompt_logprobs=0 if "prompt_logprobs" in flags else None,
        )  # fmt: skip
        self.rig.submit(
            STREAMS[stream][:length],
            sampling=sampling,
            generated=generated,
            priority=priority,
            bypass_cache="bypass" in flags,
            deadline=self.rig.now + 0.5 if "deadline" in flags else None,
        )

    @rule(between=st.booleans(), pick=st.integers(0, 30))
    def step(self, between: bool, pick: int) -> None:
        self.rig.step((lambda: self.abort(pick)) if between else None)
        self.take_asks()

    @precondition(lambda self: self.rig.requests)
    @rule(pick=st.integers(0, 30))
    def abort(self, pick: int) -> None:
        self.rig.scheduler.abort(1 + pick % len(self.rig.requests))

    @rule()
    def flush(self) -> None:
        self.rig.pool.flush()

    @rule(attached=st.booleans())
    def attach(self, attached: bool) -> None:
        self.rig.scheduler.kv.set_attached(attached)

    @precondition(lambda self: self.lookups)
    @rule(fraction=st.floats(0, 1))
    def answer_lookup(self, fraction: float) -> None:
        ask = self.lookups.pop(0)
        hashes = [ask.hashes[i : i + 32] for i in range(0, len(ask.hashes), 32)]
        found = next((i for i, h in enumerate(hashes) if h not in self.store), len(hashes))
        found = round(found * fraction)
        runs = [(Tier.HOST, found // 2), (Tier.DISK, found - found // 2)]
        self.rig.scheduler.kv_found(KvFound(ask.ticket, tuple(run for run in runs if run[1])))
        if found:
            self.fetches[ask.ticket] = hashes[:found]

    @precondition(lambda self: self.fetches)
    @rule(count=st.integers(0, 3), give_up=st.booleans())
    def arrive(self, count: int, give_up: bool) -> None:
        ticket = next(iter(self.fetches))
        left = self.fetches[ticket]
        count = min(count, len(left), len(self.free_read_slots))
        slots = [self.free_read_slots.pop() for _ in range(count)]
        for slot, block_hash in zip(slots, left, strict=False):
            self.rig.runner.slots[slot] = self.store[block_hash][:]
        self.lent |= set(slots)
        del left[:count]
        last = give_up or not left
        if last:
            del self.fetches[ticket]
        self.rig.scheduler.kv_arrived(KvArrived(ticket, tuple(slots), last))

    @precondition(lambda self: self.stores)
    @rule()
    def store_block(self) -> None:
        ask = self.stores.pop(0)
        self.store[ask.hash] = self.rig.runner.slots[ask.slot][:]
        self.rig.scheduler.kv.free_write_slots((ask.slot,))

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "rig"):
            self.rig.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for _ in range(4000):
            self.step(False, 0)
            while self.lookups:
                self.answer_lookup(1.0)
            while self.fetches and self.free_read_slots:
                self.arrive(2, False)
            while self.stores:
                self.store_block()
            if self.rig.scheduler.num_requests == 0:
                break
        self.rig.run_out()
        self.take_asks()
        assert not self.lent, "a read slot was never given back"
        self.rig.check_outputs()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase
