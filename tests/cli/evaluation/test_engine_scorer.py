"""The engine's session as a scorer, against the model in this process: one real engine, started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from katydid_cli.evaluation.engine_process import running_engine
from katydid_cli.evaluation.engine_scorer import EngineScorer
from katydid_cli.evaluation.scorer import EvaluationError
from katydid_engine.scoring import ModelScorer
from katydid_runtime.errors import SettingsError

from tests.tiny_model import VOCAB_SIZE, write_tiny_model

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "hy_v3")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[EngineScorer]:
    options = ["--kv-pages", "16", "--threads", "1"]
    with running_engine(folder, options, start_timeout_s=60) as address, EngineScorer(address) as scorer:
        yield scorer


def test_scores_and_continuations_equal_the_models_own(engine: EngineScorer, folder: Path) -> None:
    model = ModelScorer(folder)
    ids = [(7 * i * i) % 256 for i in range(150)]
    ours, theirs = engine.score(ids), model.score(ids)
    assert engine.vocabulary == VOCAB_SIZE
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert ours.greedy == theirs.greedy
    assert engine.generate(ids[:40], 12).ids == model.generate(ids[:40], 12, model.model.config.eos_token_ids).ids


def test_a_stop_token_is_no_part_of_the_continuation(engine: EngineScorer) -> None:
    ids = [(3 * i) % 256 for i in range(30)]
    whole = engine.generate(ids, 8).ids
    stop = whole[3]
    assert engine.generate(ids, 8, (stop,)).ids == whole[: whole.index(stop)]


def test_refusals_are_the_engines_own(engine: EngineScorer) -> None:
    with pytest.raises(EvaluationError, match="the engine refused: "):
        engine.score([1] * (engine.max_length + 100))
    with pytest.raises(EvaluationError, match="does not report acceptance by depth"):
        engine.generate([1, 2], 4, (), 3)
    assert len(engine.score([1, 2, 3]).logprobs) == 2, "the session goes on after a refusal"


def test_an_engine_that_cannot_start_says_why(folder: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(SettingsError, match=r"the engine ended with exit code 2: .*dtype"),
        running_engine(folder, ["--dtype=int3"], start_timeout_s=60),
    ):
        pass
    with (
        pytest.raises(SettingsError, match="the engine ended with exit code 2"),
        running_engine(tmp_path, [], start_timeout_s=60),
    ):
        pass
