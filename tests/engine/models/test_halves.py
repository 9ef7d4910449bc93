"""A chunk in two parts whose rows travel in turns: one process's logits and pages, whatever is cut and wherever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.layers.steps import interleave
from katydid_engine.loader import load_model
from katydid_engine.models import decoder_lm
from katydid_engine.parallel import ParallelPlan
from torch import Tensor

from tests.engine.thread_group import ThreadGroup, on_ranks
from tests.tiny_model import write_tiny_model


def ids(count: int, seed: int) -> list[int]:
    return [(7 * place + 13 * seed + place * place) % 250 for place in range(count)]


CASES = {
    "one prompt": ([TokenRun(ids(90, 1), 0, [0, 1])], 0),
    "a prompt of odd length": ([TokenRun(ids(77, 1), 0, [0, 1])], 0),
    "a border between two": ([TokenRun(ids(20, 1), 0, [0]), TokenRun(ids(20, 2), 0, [1])], 0),
    "ragged": ([TokenRun(ids(n, n), 0, [n]) for n in (3, 30, 1, 7)], 0),
    "decodes before": ([*(TokenRun([5 + n], 0, [n]) for n in range(3)), TokenRun(ids(50, 2), 0, [3])], 3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "hy_v3")


def passes(model: decoder_lm.DecoderLM) -> list[tuple[Tensor, Tensor]]:
    """Logits and written keys of every case, and of a chunk behind one that is in the pages."""
    found = []
    for runs, decodes in CASES.values():
        cache = model.new_kv_cache(40)
        found.append(_pass(model, ForwardBatch.pack(runs, num_decodes=decodes), cache))
    cache, whole = model.new_kv_cache(3), ids(150, 4)
    for start, end in ((0, 60), (60, 150)):
        found.append(_pass(model, ForwardBatch.pack([TokenRun(whole[start:end], start, [0, 1, 2])]), cache))
    return found


def _pass(model: decoder_lm.DecoderLM, batch: ForwardBatch, cache) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    logits = model.logits(model.forward(batch, cache))
    return logits, torch.stack([pages.float() for pages in cache.k_pages])


@pytest.mark.parametrize(
    ("plan", "limit"),
    [("tp2,sp", 1e-4), ("tp4,sp,ep4", 1e-4), ("tp2,sp,ep2,fp8", 0.3), ("tp4,sp,fp8", 0.3)],
)
def test_halves_give_the_logits_of_one_process(
    folder: Path, plan: str, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = passes(load_model(folder))
    halved = []
    monkeypatch.setattr(decoder_lm, "interleave", lambda works: (halved.append(len(works)), interleave(works))[1])

    def work(group: ThreadGroup) -> list[tuple[Tensor, Tensor]]:
        parsed = ParallelPlan.parse(plan)
        model = load_model(folder, plan=parsed, collectives=group, micro_batches=2, halved_from=20)
        return passes(model)

    for rank, found in enumerate(on_ranks(ParallelPlan.parse(plan).tp, work)):
        for (logits, keys), (expected, expected_keys) in zip(found, alone, strict=True):
            assert float((logits - expected).norm() / expected.norm()) < limit
            heads = expected_keys.shape[2] // keys.shape[2] if keys.shape[2] < expected_keys.shape[2] else 1
            own = expected_keys.chunk(heads, dim=2)[rank * heads // ParallelPlan.parse(plan).tp]
            assert float((keys - own).norm() / own.norm()) < limit
    assert halved.count(2) == len(CASES) * ParallelPlan.parse(plan).tp + 2 * ParallelPlan.parse(plan).tp
