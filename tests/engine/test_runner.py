"""The runner with real models: the same seed gives the same tokens whatever shares the batch, and however it is cut."""

from __future__ import annotations

import time
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from katydid_engine.block_pool import BlockPool
from katydid_engine.collectives import SingleRank
from katydid_engine.compiled_grammars import CompiledGrammars
from katydid_engine.draft_depth import DraftDepth
from katydid_engine.loader import load_model
from katydid_engine.messages import ChoiceEnd
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.plan import Run, SampleRow, Start, StepPlan
from katydid_engine.request import Request, Sampling
from katydid_engine.runner import Runner
from katydid_engine.scheduler import Scheduler, SchedulerConfig
from katydid_engine.step_outcome import Launched
from katydid_runtime.block_hash import ChainKey
from katydid_runtime.errors import EngineLostError

from tests.tiny_model import write_tiny_model

Output = dict[tuple[int, int], list[int]]


@pytest.fixture(scope="module", params=["llama", "hy_v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderLM:
    torch.set_num_threads(1)
    return load_model(write_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param))


def generate(
    model: DecoderLM,
    requests: Iterable[Request],
    *,
    num_pages: int = 64,
    chunk: int = 512,
    most: int = 600,
    grammars: CompiledGrammars | None = None,
    drafts: int = 0,
    automatic: bool = False,
    ahead: bool = False,
    buckets: bool = False,
    finished: list[ChoiceEnd] | None = None,
) -> Output:
    """Tokens by request and choice; ``finished`` gets the ends, ``most`` is the longest that a sequence may become."""
    pool = BlockPool(num_pages)
    config = SchedulerConfig(
        max_model_tokens=most,
        max_batch_tokens=chunk,
        max_sequences=min(8, chunk),
        eos_token_ids=frozenset(model.config.eos_token_ids),
    )
    depth = DraftDepth(drafts, automatic=automatic)
    scheduler = Scheduler(config, pool, time.monotonic, drafts=depth)
    runner = Runner(model, num_pages, collectives=SingleRank(), grammars=grammars, drafts=drafts > 0, ahead=ahead)
    if buckets:
        runner.prepare_decodes(5, config.max_model_tokens, {0, *depth.depths}, capture=model.device.type == "cuda")
    runner.warm_up()
    output: Output = defaultdict(list)
    for request in requests:
        scheduler.add(request)
    in_flight: deque[tuple[StepPlan, Launched]] = deque()
    while (plan := scheduler.schedule()) is not None or in_flight:
        if plan is not None:
            in_flight.append((plan, runner.launch(plan)))
        if len(in_flight) > (ahead and plan is not None):
            done, launched = in_flight.popleft()
            scheduler.commit(done, launched.output())
            scheduler.took(done, 0.001)
        outcome = scheduler.take_outcome()
        for row in outcome.tokens:
            output[row.handle, row.choice] += row.tokens
            assert row.logprobs is None or len(row.logprobs.chosen) == len(row.tokens)
        if finished is not None:
            finished += outcome.ends
    scheduler.check_integrity()
    assert pool.num_available == num_pages
    return dict(output)


def requests() -> list[Request]:
    """Lengths around block borders, every kind of sampling, shared prefixes, several choices."""
    samplings = [
        Sampling(max_tokens=24),
        Sampling(max_tokens=24, temperature=1.0, top_p=0.9, n=2),
        Sampling(max_tokens=24, temperature=0.8, top_k=20, min_p=0.02, repetition_penalty=1.3),
        Sampling(max_tokens=24, temperature=1.2, presence_penalty=0.5, frequency_penalty=0.5, logprobs=2),
        Sampling(max_tokens=24, logit_bias=((7, 3.0), (9, -100.0)), stop_token_ids=(7,), min_tokens=5),
    ]
    lengths = [1, 63, 64, 65, 128, 130, 200, 128, 65, 64]
    return [
        Request(
            handle,
            array("I", [(position * 7 + position * position) % 250 for position in range(length)]),
            ChainKey(b"m" * 32),
            replace(samplings[handle % len(samplings)], seed=(1 << 64) - 1 - handle // 5, ignore_eos=True),
        )
        for handle, length in enumerate(lengths)
    ]


def test_tokens_depend_on_the_request_alone(model: DecoderLM) -> None:
    alone: Output = {}
    for request in requests():
        alone |= generate(model, [request])
    assert len(alone) == 12
    assert generate(model, requests()) == alone, "all at once"
    assert generate(model, reversed(requests())) == alone, "in another order"
    assert generate(model, requests(), chunk=24) == alone, "in small chunks"
    assert generate(model, requests(), num_pages=10, chunk=100) == alone, "preempted again and again"
    resumed = []
    for request in requests():
        if request.sampling.n == 1:
            first = alone[request.handle, 0][: len(alone[request.handle, 0]) // 2]
            resumed.append(replace(request, generated=array("I", first)))
    rest = generate(model, resumed)
    assert {key: [*request.generated, *rest[key]] for request in resumed for key in [(request.handle, 0)]} == {
        (request.handle, 0): alone[request.handle, 0] for request in resumed
    }


def test_runs_whose_logits_are_no_numbers_are_named(model: DecoderLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(model, 4, collectives=SingleRank())
    starts = tuple(Start(sequence, Sampling(n=2), 3, array("I", (1, 2, 3))) for sequence in range(2))
    runs = tuple(Run(start.sequence, 0, start.tokens, 0, array("I", (start.sequence,))) for start in starts)
    plan = StepPlan(1, starts=starts, runs=runs, samples=(SampleRow(0, 0), SampleRow(1, 0), SampleRow(1, 1)))
    logits = torch.zeros(3, 272)
    logits[1:, 5] = torch.nan
    monkeypatch.setattr(type(model), "logits", lambda *_: logits)
    output = runner.run(plan)
    assert output.broken == {1}
    assert list(output.tokens[0]) == [0]


def test_what_is_wrong_with_a_step_is_asked_when_it_is_told(model: DecoderLM) -> None:
    def check() -> None:
        raise EngineLostError("a rank did not come")

    runner = Runner(model, 4, collectives=SingleRank(), check=check)
    start = Start(0, Sampling(), 3, array("I", (1, 2, 3)))
    launched = runner.launch(StepPlan(1, starts=(start,), runs=(Run(0, 0, start.tokens, 0, array("I", (0,))),)))
    with pytest.raises(EngineLostError, match="did not come"):
        launched.output()


def test_profile(model: DecoderLM, tmp_path: Path) -> None:
    from katydid_engine.profiling import StepProfiler

    profiler = StepProfiler()
    assert not profiler.step_done()
    profiler.start(2, str(tmp_path / "trace.json"))
    with pytest.raises(RuntimeError, match="being recorded"):
        profiler.start(1, "elsewhere")
    assert [profiler.step_done(), profiler.step_done(), profiler.step_done()] == [False, True, False]
    assert (tmp_path / "trace.json").exists()
