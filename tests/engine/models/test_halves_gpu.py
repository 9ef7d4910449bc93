"""A chunk in two parts whose rows go by copies, between ranks that share a GPU: one process's logits, every time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.parallel import ParallelPlan
from katydid_kernels.peer_reduce import PeerCopies, emulated_peers
from torch import Tensor

from tests.engine.thread_group import ThreadGroup, on_ranks

pytestmark = pytest.mark.gpu

# Ranks wait for each other by their streams: none may stand behind another's in a queue.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

TINY = Path(__file__).parents[3] / "models" / "hy3-tiny"
TOKENS, HIDDEN, TOLD, PASSES = 300, 256, 10, 3
_T = TypeVar("_T")


class OneGpu(ThreadGroup):
    """Streams of one GPU: what is laid down is there, and stays as long as somebody may read it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept: list[Any] = []

    def _exchange(self, mine: _T) -> list[_T]:
        torch.cuda.current_stream().synchronize()
        taken = super()._exchange(mine)
        self._kept.append(taken)
        return taken


def logits(model: DecoderLM) -> Tensor:
    ids = torch.randint(3, 4000, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    cache, found = model.new_kv_cache(5), []
    # A chunk, and one behind it.
    for start, end in ((0, 200), (200, TOKENS)):
        batch = ForwardBatch.pack([TokenRun(ids[start:end], start, range(5))], device=model.device)
        found.append(model.logits(model.forward(batch, cache)))
    return torch.cat(found)


@pytest.mark.parametrize("plan", ["tp2,sp,ep2,fp8", "tp2,sp,fp8"])
def test_two_parts_over_copies_give_the_logits_of_one_process(plan: str) -> None:
    device = torch.device("cuda")
    alone = logits(load_model(TINY, device=device, dtype=torch.bfloat16))
    sizes = {"tokens": TOKENS // 2, "told": TOLD}
    memories = emulated_peers(2, PeerCopies.nbytes(2, HIDDEN, **sizes), device)
    parsed = ParallelPlan.parse(plan)

    def work(group: ThreadGroup) -> dict[int, list[Tensor]]:
        found: dict[int, list[Tensor]] = {}
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            for parts in (1, 2):
                model = load_model(
                    TINY,
                    device=device,
                    dtype=torch.bfloat16,
                    plan=parsed,
                    collectives=group,
                    copies=PeerCopies(memories[group.rank], HIDDEN, **sizes) if parts > 1 else None,
                    micro_batches=parts,
                    halved_from=64,
                )
                found[parts] = [logits(model).clone() for _ in range(PASSES)]
            torch.cuda.current_stream().synchronize()
        return found

    for found in on_ranks(2, work, OneGpu):
        one, two = (relative(found[parts][0], alone) for parts in (1, 2))
        # fp8 transfers round in either; in two parts no worse.
        assert one < 0.1
        assert two < 1.5 * one
        for first, *again in found.values():
            assert all(torch.equal(first, other) for other in again)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
