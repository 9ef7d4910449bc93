"""Sparse prefill in the engine: the option, which prompts and layers it touches, and chunks that change nothing."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import pytest
import torch
from katydid_engine.collectives import SingleRank
from katydid_engine.forward_batch import ForwardBatch, PrefillChunk
from katydid_engine.loader import load_model
from katydid_engine.plan import Run, Start, StepPlan
from katydid_engine.request import Sampling
from katydid_engine.runner import Runner
from katydid_engine.scoring import ModelScorer
from katydid_engine.sparse_prefill import SparsePrefill, whole_blocks
from katydid_kernels import StemRule
from katydid_kernels.stem_select.budget import kept_blocks
from torch import Tensor

from tests.engine.engine_process import engine, session
from tests.tiny_model import write_tiny_model

# Long enough for a budget to bind: 13 blocks of which 9 are always kept.
PROMPT = [(37 * i + i // 50) % 250 for i in range(1600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def dense(folder: Path) -> Tensor:
    return torch.tensor(ModelScorer(folder).score(PROMPT).logprobs)


def scored(folder: Path, chunk: int = 2048, **options: float) -> Tensor:
    scorer = ModelScorer(folder, sparse_prefill=SparsePrefill(**{"tail_blocks": 0, **options}))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("katydid_engine.scoring._CHUNK", chunk)
        return torch.tensor(scorer.score(PROMPT).logprobs)


def test_prompts_below_the_least_length_and_dense_layers_stay_as_they_are(folder: Path, dense: Tensor) -> None:
    assert torch.equal(scored(folder, min_tokens=1601), dense)
    assert torch.equal(scored(folder, min_tokens=1, dense_layers=2), dense)


def test_a_whole_budget_changes_nothing_and_a_small_one_does(folder: Path, dense: Tensor) -> None:
    torch.testing.assert_close(scored(folder, min_tokens=1, budget=1.0, dense_layers=0), dense, atol=1e-5, rtol=0)
    everything_is_tail = scored(folder, min_tokens=1, budget=0.5, dense_layers=0, tail_blocks=13)
    torch.testing.assert_close(everything_is_tail, dense, atol=1e-5, rtol=0)
    small = scored(folder, min_tokens=1, budget=0.5, dense_layers=1)
    # The first nine blocks keep all of theirs.
    torch.testing.assert_close(small[:1151], dense[:1151], atol=1e-5, rtol=0)
    assert float((small - dense).abs().max()) > 1e-4


def test_chunks_compute_what_the_whole_prompt_does(folder: Path) -> None:
    options = {"min_tokens": 1, "budget": 0.5, "dense_layers": 0}
    torch.testing.assert_close(scored(folder, chunk=384, **options), scored(folder, **options), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("start", "chunk", "expected"),
    [(0, 300, 256), (0, 256, 256), (64, 300, 192), (250, 5, 5), (250, 7, 6), (256, 0, 0)],
)
def test_chunks_end_between_blocks(start: int, chunk: int, expected: int) -> None:
    assert whole_blocks(start, chunk) == expected


@pytest.mark.parametrize("prompt", [33_000, 131_072, 200_001])
@pytest.mark.parametrize("budget", [0.15, 0.25, 0.5])
def test_how_many_pairs_there_are(prompt: int, budget: float) -> None:
    options = SparsePrefill(budget=budget)
    kept = kept_blocks(StemRule(budget, tail=4), prompt)
    blocks = [(start, min(128, prompt - start)) for start in range(0, prompt, 128)]
    told = [options.pairs(start, count, prompt) for start, count in blocks]
    assert sum(told) == pytest.approx(options.pairs(0, prompt, prompt))
    assert sum(told) == pytest.approx(sum(kept) * 128 * 128, rel=0.1)
    assert told[-1] == pytest.approx(blocks[-1][1] * prompt, rel=0.01), "the tail attends to everything"
    for at in (10, len(kept) // 2, len(kept) - 5, len(kept) - 4):
        assert options.attended(128 * at, prompt) == pytest.approx(kept[at] * 128, rel=0.25)


def test_the_option_as_text() -> None:
    options = SparsePrefill.parse("stem:budget=0.3,dense_layers=1,min_tokens=1000,tail_blocks=2")
    assert options == SparsePrefill(budget=0.3, dense_layers=1, min_tokens=1000, tail_blocks=2)
    assert SparsePrefill.parse("stem:") == SparsePrefill()
    assert SparsePrefill.parse(str(options)) == options
    assert str(options) != str(SparsePrefill())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sparse", "sparse prefill by 'sparse': allowed is stem:key=value"),
        ("stem:budget=2", "budget is 2.0: allowed is above 0, at most 1"),
        ("stem:budget=x", "budget is 'x': allowed is above 0"),
        ("stem:blocks=3", "'blocks=3': allowed are budget, rule, decay, dense_layers, min_tokens"),
        ("stem:decay=1,decay=1", "'decay=1': allowed are"),
        ("stem:rule=best", "rule is best: allowed is share, paper, released"),
        ("stem:min_tokens=0", "min_tokens is 0: allowed is a number of tokens above 0"),
        ("stem:tail_blocks=-1", "tail_blocks is -1: allowed is a number of blocks of 128 tokens"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparsePrefill.parse(text)


def test_the_runner_tells_the_model_which_prompts_are_sparse(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(folder)
    model.use_sparse_prefill(SparsePrefill(min_tokens=250))
    batches: list[ForwardBatch] = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda batch, cache: batches.append(batch) or forward(batch, cache))
    runner = Runner(model, 32, collectives=SingleRank())
    prompt, pages = array("I", PROMPT[:300]), array("I", range(5))
    starts = tuple(Start(n, Sampling(), 300, prompt, sparse_prefill=n == 1) for n in (1, 2))
    starts += (Start(3, Sampling(), 249, prompt[:249], sparse_prefill=True),)
    runs = tuple(Run(n, 0, prompt[:200], 0, array("I", (page + 5 * n for page in pages))) for n in (1, 2))
    runner.run(StepPlan(0, starts=starts, runs=runs))
    assert batches[-1].prefills == (PrefillChunk(200, 200, 300), PrefillChunk(200, 200, None))
    runner.run(
        StepPlan(
            1, runs=(Run(2, 200, prompt[200:], 5, array("I")), Run(3, 0, prompt[:200], 0, array("I", range(10, 15))))
        )
    )
    assert batches[-1].prefills == (), "one may not be, the other is too short"


def test_what_a_prompt_keeps_is_worked_out_before_its_first_step(folder: Path) -> None:
    model = load_model(folder)
    model.use_sparse_prefill(SparsePrefill(min_tokens=1000, budget=0.31))
    before = kept_blocks.cache_info().misses
    for length in (999, 1000, 70_000):
        model.expect(length)
    assert kept_blocks.cache_info().misses == before + 2
    kept_blocks(StemRule(0.31, tail=4), 70_000)
    assert kept_blocks.cache_info().misses == before + 2


@pytest.mark.e2e
def test_pages_serve_only_those_who_allow_what_made_them(folder: Path, tmp_path: Path) -> None:
    with engine(
        folder, tmp_path, "--sparse-prefill", "stem:budget=0.5,dense_layers=0,min_tokens=1000,tail_blocks=0"
    ) as service:

        async def scenario() -> None:
            async with session(service.address) as client:

                async def ask(allow: bool) -> tuple[int, list[int]]:
                    answer = client.submit(PROMPT, allow_sparse_prefill=allow, max_tokens=4, ignore_eos=True)
                    await asyncio.wait_for(answer.done.wait(), 60)
                    return answer.cached()[0], answer.output

                asked = [await ask(allow) for allow in (True, False, True, False)]
                assert [cached for cached, _ in asked] == [0, 0, 1599, 1599]
                assert asked[0][1] == asked[2][1]
                assert asked[1][1] == asked[3][1]

        asyncio.run(scenario())
