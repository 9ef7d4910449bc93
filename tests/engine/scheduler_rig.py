"""A scheduler with a runner on paper and a face that keeps what it is told."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable

from katydid_engine.block_pool import BlockPool
from katydid_engine.draft_depth import DraftDepth
from katydid_engine.ledger import Outcome
from katydid_engine.plan import StepPlan
from katydid_engine.request import FinishReason, Request, Sampling
from katydid_engine.scheduler import Scheduler, SchedulerConfig
from katydid_engine.token_budget import TokenBudget
from katydid_runtime.block_hash import ChainKey

from tests.engine.paper_runner import VOCAB, PaperRunner, expected_output

EOS = frozenset({3})
STREAMS = [[(7 * i * i + 11 * i + s) % VOCAB for i in range(400)] for s in range(2)]


class Rig:
    """A scheduler, its runner, and a face that keeps what it is told. With ``ahead`` a step is planned while the one
    before is in flight; with a ``budget``, or a target of the time to a first token, it learns what steps take."""

    def __init__(
        self,
        *,
        num_pages: int = 12,
        slots: int = 0,
        ahead: bool = False,
        drafts: int = 0,
        lingers: Callable[[], bool] = lambda: False,
        budget: TokenBudget | None = None,
        ttft_target_s: float | None = None,
        **config: object,
    ) -> None:
        values = {"max_model_tokens": 300, "max_batch_tokens": 96, "max_sequences": 4, "eos_token_ids": EOS}
        self.config = SchedulerConfig(**(values | config))  # type: ignore[arg-type]
        self.now = 0.0
        self.pool = BlockPool(num_pages)
        self.scheduler = Scheduler(
            self.config, self.pool, lambda: self.now, range(slots), DraftDepth(drafts), budget, ttft_target_s
        )
        self.by_time = budget is not None or ttft_target_s is not None
        self.runner = PaperRunner(num_pages, 2 * slots, lingers)
        self.requests: dict[int, Request] = {}
        self.output: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.ends: dict[tuple[int, int], FinishReason] = {}
        self.outcomes: list[Outcome] = []
        self.prompt_targets: dict[int, list[float]] = defaultdict(list)
        self.steps: list[StepPlan] = []
        self.ahead = ahead
        self.in_flight: deque[StepPlan] = deque()

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
            self.in_flight.append(plan)
            assert plan.num_prefill_tokens + plan.num_decodes * plan.decode_q_len <= self.config.max_batch_tokens
            assert len(plan.runs) <= self.config.max_sequences
        if callable(between):
            between()
        done = None
        if len(self.in_flight) > (plan is not None and self.ahead):
            done = self.in_flight.popleft()
            self.scheduler.commit(done, self.runner.run(done))
            if self.by_time:
                self.scheduler.took(done, 0.002 + 1e-4 * done.num_prefill_tokens)
        self.collect()
        return plan is not None or done is not None

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
        choices = {(r.handle, choice) for r in self.requests.values() for choice in range(r.sampling.n)}
        assert set(self.ends) == choices, "a choice never ended"
        assert self.pool.num_available == self.pool.num_pages
