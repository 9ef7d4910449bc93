"""Sparse prefill in the engine: the option, which prompts and layers it touches, and chunks that change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from katydid_engine.scoring import ModelScorer
from katydid_engine.sparse_prefill import SparsePrefill
from torch import Tensor

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
    scorer = ModelScorer(folder, sparse_prefill=SparsePrefill(**options))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("katydid_engine.scoring._CHUNK", chunk)
        return torch.tensor(scorer.score(PROMPT).logprobs)


def test_prompts_below_the_least_length_and_dense_layers_stay_as_they_are(folder: Path, dense: Tensor) -> None:
    assert torch.equal(scored(folder, min_tokens=1601), dense)
    assert torch.equal(scored(folder, min_tokens=1, dense_layers=2), dense)


def test_a_whole_budget_changes_nothing_and_a_small_one_does(folder: Path, dense: Tensor) -> None:
    torch.testing.assert_close(scored(folder, min_tokens=1, budget=1.0, dense_layers=0), dense, atol=1e-5, rtol=0)
    small = scored(folder, min_tokens=1, budget=0.5, dense_layers=1)
    # The first nine blocks keep all of theirs.
    torch.testing.assert_close(small[:1151], dense[:1151], atol=1e-5, rtol=0)
    assert float((small - dense).abs().max()) > 1e-4


def test_chunks_compute_what_the_whole_prompt_does(folder: Path) -> None:
    options = {"min_tokens": 1, "budget": 0.5, "dense_layers": 0}
    torch.testing.assert_close(scored(folder, chunk=384, **options), scored(folder, **options), atol=1e-5, rtol=0)


def test_the_option_as_text() -> None:
    options = SparsePrefill.parse("stem:budget=0.3,dense_layers=1,min_tokens=1000")
    assert options == SparsePrefill(budget=0.3, dense_layers=1, min_tokens=1000)
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
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparsePrefill.parse(text)
