"""What is scored side by side, behind pages that are shared, scores as it does alone."""

from __future__ import annotations

import pytest
from katydid_engine.forward_batch import PAGE_SIZE, ForwardBatch
from katydid_engine.kv_cache import KvCache
from katydid_engine.scoring import ModelScorer
from katydid_runtime.errors import InvalidRequestError
from torch import Tensor

from tests.tiny_model import VOCAB_SIZE, write_tiny_model


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> ModelScorer:
    return ModelScorer(write_tiny_model(tmp_path_factory.mktemp("model"), "hy_v3"))


def ids(count: int, seed: int) -> list[int]:
    return [(seed + 7 * at * at + at * seed) % VOCAB_SIZE for at in range(count)]


@pytest.mark.parametrize(
    ("common", "tails"),
    [
        (2 * PAGE_SIZE + 9, (1, 40, 70)),
        (PAGE_SIZE, (5, 5)),  # what is shared ends with a page
        (PAGE_SIZE - 1, (3, 64)),  # no whole page is shared
        (2 * PAGE_SIZE, (0, 30)),  # one begins another
        (0, (2, 3)),
    ],
)
def test_many_score_as_each_alone(scorer: ModelScorer, common: int, tails: tuple[int, ...]) -> None:
    sequences = [ids(common, 1) + ids(tail, seed) for seed, tail in enumerate(tails, start=3)]
    for made, alone in zip(scorer.score_many(sequences), map(scorer.score, sequences), strict=True):
        assert made.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        assert made.greedy == alone.greedy


def test_pieces_of_long_sequences_stay_in_order(scorer: ModelScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [ids(90, 1) + ids(tail, 2 + tail) for tail in (30, 75, 4)]
    whole = scorer.score_many(sequences)
    monkeypatch.setattr("katydid_engine.scoring._CHUNK", 32)
    for made, alone in zip(scorer.score_many(sequences), whole, strict=True):
        assert made.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_the_shared_pages_are_computed_once(scorer: ModelScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    forward = scorer.model.forward

    def counted(batch: ForwardBatch, cache: KvCache) -> Tensor:
        computed.append(batch.num_tokens)
        return forward(batch, cache)

    monkeypatch.setattr(scorer.model, "forward", counted)
    scorer.score_many([[*ids(130, 1), token] for token in range(4)])
    assert computed == [128, 4 * 3]


def test_none_and_too_short(scorer: ModelScorer) -> None:
    assert scorer.score_many([]) == []
    with pytest.raises(InvalidRequestError, match="at least 2 are needed"):
        scorer.score_many([ids(9, 1), [1]])
