"""Parts of a chunk over what copy engines do: the turns are kept, and the model is the one of collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from katydid_engine.collectives import SingleRank
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.layers.exchange import Exchange
from katydid_engine.layers.part_copies import PartCopies
from katydid_engine.layers.part_exchange import CopiedPartExchange
from katydid_engine.loader import load_model
from katydid_engine.parallel import ParallelPlan
from katydid_kernels import quantize_fp8
from katydid_kernels.peer_reduce import add_rms_norm_of_ranks_reference, emulated_peers
from torch import Tensor

from tests.engine.thread_group import ThreadGroup, on_ranks
from tests.tiny_model import write_tiny_model

RANKS = 2


class ReferenceCopies:
    """What `PeerCopies` is defined by, over a group of threads; it fails where a room would be written over unread."""

    def __init__(self, group: ThreadGroup) -> None:
        self._group = group
        self._sent: dict[int, list[Tensor]] = {}
        self._leaving: dict[int, Tensor] = {}
        self._gathered: dict[int, tuple[list[Tensor], list[Tensor | None]]] = {}
        self._beside = False
        self.joined = 0
        self.ways: list[int] = []
        self.order: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def beside(self, part: int) -> Iterator[None]:
        self._beside = True
        yield
        self._beside = False

    def quantize(self, part: int, x: Tensor) -> None:
        assert not self._beside, "it would wait for the product behind it"
        self.order.append(("quantize", part))

    def scatter(self, part: int, x: Tensor) -> None:
        assert self._beside
        assert part not in self._sent
        assert part not in self._gathered
        self.order.append(("scatter", part))
        self._sent[part] = self._group._exchange(x)

    def sum(self, part: int, x: Tensor, residual: Tensor, weight: Tensor, eps: float, own: Tensor) -> Tensor:
        self.order.append(("sum", part))
        rank, share = self._group.rank, len(residual)
        mine = slice(rank * share, min((rank + 1) * share, len(x)))
        rows = [
            sent[mine] if source == rank else _rounded(sent[mine]) for source, sent in enumerate(self._sent.pop(part))
        ]
        count = len(rows[0])
        y, total = add_rms_norm_of_ranks_reference(rows, residual[:count], weight, eps)
        kept = torch.zeros_like(residual)
        kept[:count], own[:count] = total, y
        own[count:] = 0
        self._leaving[part] = y
        return kept

    def gather(self, part: int, tokens: int, told: Tensor | None = None) -> None:
        self.order.append(("gather", part))
        rows = self._leaving.pop(part)
        self._gathered[part] = (
            self._group._exchange(rows),
            self._group._exchange(None if told is None else told[: len(rows)]),
        )

    def gathered(self, part: int, tokens: int, told: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        self.order.append(("gathered", part))
        rows, others = self._gathered.pop(part)
        values, scale = quantize_fp8(torch.cat(rows))
        assert len(values) == tokens
        columns = torch.cat([part for part in others if part is not None]) if told else torch.empty((tokens, 0))
        return values, scale, columns

    def make_way(self, part: int) -> None:
        self.ways.append(part)

    def join(self) -> None:
        self.joined += 1


def _rounded(x: Tensor) -> Tensor:
    values, scale = quantize_fp8(x)
    return values.float() * scale[:, None]


@pytest.mark.parametrize("plan", ["tp2,sp,ep2,fp8", "tp2,sp,fp8"])
def test_copies_take_turns_and_lose_what_fp8_loses(plan: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = write_tiny_model(tmp_path / "tiny", "hy_v3")
    ids = [(7 * place + place * place) % 250 for place in range(61)]

    def logits(group: ThreadGroup | None, copies: ReferenceCopies | None = None) -> Tensor:
        options = {}
        if group is not None:
            options = {"plan": ParallelPlan.parse(plan), "collectives": group, "micro_batches": 2, "halved_from": 16}
        model = load_model(folder, copies=copies, **options)
        return model.logits(model.forward(ForwardBatch.pack([TokenRun(ids, 0, [0])]), model.new_kv_cache(1)))

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor, ReferenceCopies]:
        copies = ReferenceCopies(group)
        return logits(group), logits(group, copies), copies

    whole = logits(None)
    for by_collectives, by_copies, copies in on_ranks(RANKS, work):
        loss = float((by_collectives - whole).norm() / whole.norm())
        assert 0.01 < float((by_copies - whole).norm() / whole.norm()) < 1.7 * loss
        assert copies.joined == 2
        assert set(copies.ways) == {0, 1}
        # A part is on its way from one block to the next while the other part computes one.
        between = [[(step, part) for step in ("quantize", "scatter", "sum", "gather")] for part in (0, 1)]
        assert copies.order[:8] == [*between[0], *between[1]]
        assert copies.order[8:18] == [("gathered", 0), *between[0], ("gathered", 1), *between[1]]


def test_a_long_kernel_waits_until_the_other_parts_rows_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    (memory,) = emulated_peers(1, PartCopies.nbytes(1, 16, tokens=4, told=0), "cpu")
    copies, waited = PartCopies(memory, 16, tokens=4, told=0), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_event=waited.append))
    ways = [CopiedPartExchange(Exchange(SingleRank(), sequence_parallel=True), copies, part) for part in (0, 1)]
    ways[0].make_way()
    assert waited == [], "nothing was sent yet"
    copies._leaving = {0: "rows of 0", 1: "rows of 1"}  # type: ignore[dict-item]
    for way in ways:
        way.make_way()
    assert waited == ["rows of 1", "rows of 0"]


def test_what_leaves_a_rank_is_copied_before_its_own_rows() -> None:
    copied: list[tuple[int, str]] = []

    class Noting(PartCopies):
        def _copy(self, peer: int, name: str, part: int, first: int, values: Tensor) -> None:
            copied.append((peer, name))
            super()._copy(peer, name, part, first, values)

    sizes = {"tokens": 8, "told": 2}
    memories = emulated_peers(4, PartCopies.nbytes(4, 16, **sizes), "cpu")
    copies = Noting(memories[1], 16, **sizes)
    copies._rows("leaving", 0, 2).copy_(torch.ones(2, 16))
    told = torch.tensor([[7, 8], [9, 10]], dtype=torch.int32)
    copies.gather(0, 8, told)
    assert [peer for peer, name in copied if name == "gathered told"] == [2, 3, 0, 1]
    for memory in memories:
        rows, _, others = PartCopies(memory, 16, **sizes).gathered(0, 8, 2)
        assert (rows.float().sum(1) != 0).tolist() == [False] * 2 + [True] * 2 + [False] * 4
        assert torch.equal(others[2:4], told)


def test_summands_made_ready_before_are_those_that_are_sent() -> None:
    sizes = {"tokens": 8, "told": 0}
    memories = emulated_peers(2, PartCopies.nbytes(2, 16, **sizes), "cpu")
    ends = [PartCopies(memory, 16, **sizes) for memory in memories]
    summands = [torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(2)]
    for end, x in zip(ends, summands, strict=True):
        end.quantize(0, x)
        end.scatter(0, x)
    for rank, end in enumerate(ends):
        values, scales = quantize_fp8(summands[1 - rank][4 * rank :][:4])
        first = 4 * (1 - rank)
        assert torch.equal(end._rows("summands", 0, 8)[first : first + 4].float(), values.float())
        assert torch.equal(end._scales("summand scales", 0, 8)[first : first + 4], scales)
