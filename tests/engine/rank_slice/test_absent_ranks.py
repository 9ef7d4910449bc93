"""Collectives of a rank alone, and kernels over the memory of peers that are not there."""

from __future__ import annotations

import pytest
import torch
from katydid_engine.rank_slice.absent_peers import AbsentPeers
from katydid_engine.rank_slice.absent_ranks import AbsentRanks, ExpertMessages
from katydid_kernels.sample_part import best_of_part, best_of_parts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_what_arrives_lies_where_it_lay_before() -> None:
    group = AbsentRanks(1, 4)
    first = group.all_gather(torch.full((2, 3), 5.0), 0)
    second = group.all_gather(torch.full((2, 3), 7.0), 0)
    assert first.data_ptr() == second.data_ptr()
    assert second[:, 0].tolist() == [5, 5, 7, 7, 5, 5, 5, 5]
    assert group.traffic["all_gather"].calls == 2
    assert group.traffic["all_gather"].sent_bytes == 2 * 3 * 24


def test_a_group_has_its_ranks() -> None:
    with pytest.raises(ValueError, match="rank=4: expected 0 <= rank < size=4"):
        AbsentRanks(4, 4)


def test_other_ranks_logits_are_never_chosen() -> None:
    logits = AbsentRanks(2, 4).all_gather(torch.full((1, 8), -50.0), 1)
    assert logits.argmax().item() == 16
    assert torch.isfinite(logits).all()


def test_nor_the_best_of_them() -> None:
    """Whatever this rank's best were when they were gathered first."""
    group, parameters = AbsentRanks(1, 4), (torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2).int())
    for best in (9, 2, 5):
        logits = torch.arange(10.0).repeat(2, 1)
        logits[:, best] += 30 - best
        told = best_of_part(logits, *parameters, first=10, room=10)
        tokens, sound = best_of_parts(group.all_gather(told, 1))
        assert tokens.tolist() == [10 + best] * 2
        assert sound.all()


def test_sums_are_ones_own() -> None:
    group = AbsentRanks(0, 8)
    x = torch.ones(4, 2)
    assert group.all_reduce(x) is x
    assert group.traffic["all_reduce"].sent_bytes == 2 * 32 * 7 / 8


@pytest.mark.parametrize("counts", [[1, 2, 1], None])
def test_rows_for_other_ranks_come_back_for_this_ones_experts(counts: list[int] | None) -> None:
    """Rank 1 of three, with two experts each: ids of the rank a row is sent to become those of rank 1."""
    group = AbsentRanks(1, 3)
    group.messages = ExpertMessages(row_bytes=4 + 16, first_byte=4, top_k=2, slots=2)
    ids = torch.tensor([[0, 5], [2, 3], [3, 1], [4, 2]] if counts else [[0, 5], [2, 1], [5, 4]], dtype=torch.int32)
    rows = torch.zeros(len(ids), 20, dtype=torch.uint8)
    rows[:, 4:12] = ids.view(torch.uint8)
    arrived = group.all_to_all(rows, counts, counts).wait()
    found = arrived[:, 4:12].contiguous().view(torch.int32).tolist()
    assert found == ([[2, 6], [2, 3], [3, 6], [2, 6]] if counts else [[2, 6], [2, 6], [3, 2]])
    assert group.traffic["all_to_all"].sent_bytes == 2 * 20
    again = group.all_to_all(rows, counts, counts).wait()
    assert again.data_ptr() == arrived.data_ptr()
    back = torch.zeros(3, 8, dtype=torch.uint8)
    assert group.all_to_all(back).wait() is back


@pytest.mark.parametrize("capacity", [64, 128])
def test_rows_that_are_all_alike_stand_for_others(capacity: int) -> None:
    """A graph may be captured before any step, and reads them ever after: all experts are to be hit."""
    group = AbsentRanks(1, 4)
    group.messages = ExpertMessages(row_bytes=4 + 32, first_byte=4, top_k=8, slots=24)
    nowhere, ids = 96, torch.full((4, capacity, 8), 96, dtype=torch.int32)
    chosen = torch.tensor([3, 9, 30, 31, 50, 60, 70, 71], dtype=torch.int32)
    for owner in range(3):
        ids[owner] = torch.where(chosen // 24 == owner, chosen, nowhere)
    rows = torch.zeros(4 * capacity, 36, dtype=torch.uint8)
    rows[:, 4:] = ids.flatten(0, 1).view(torch.uint8)
    arrived = group.all_to_all(rows).wait()[:, 4:].contiguous().view(torch.int32)
    assert (arrived != nowhere).sum() == 8 * capacity
    hits = torch.bincount(arrived[arrived != nowhere], minlength=48)[24:]
    assert hits.min() > 0.5 * hits.float().mean()
    apart = [len(set(row)) == len(row) for row in (row[row != nowhere].tolist() for row in arrived)]
    assert all(apart), "no row has an expert twice"


def test_peers_that_are_not_there() -> None:
    """Nobody is waited for; every row of a result has a scale, as if all ranks had sent theirs."""
    group = AbsentRanks(1, 4)
    peers = AbsentPeers(group, 32, 16, DEVICE)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 32, generator=generator).bfloat16().to(DEVICE)
    residual = torch.randn(4, 32, generator=generator).bfloat16().to(DEVICE)
    weight = torch.ones(32, device=DEVICE)
    y, scale, total = peers.all_reduce_many(x, residual, weight, 1e-5, quantized=True, fp8=True)
    assert scale is not None
    assert (scale > 1e-6).all()
    assert torch.equal(y[:4].view(torch.uint8), y[4:8].view(torch.uint8))
    # Its own summand of its own rows is here; the others' are zeros.
    torch.testing.assert_close(total.float(), (x[4:8].float() + residual.float()), atol=0.3, rtol=0.1)
    values, scales = peers.quantized_all_gather(x[:4].contiguous())
    assert (len(values), len(scales)) == (16, 16)
    assert (scales > 1e-6).all()
    assert peers.quantized_reduce_scatter(x).shape == (4, 32)
    sent = {name: traffic.sent_bytes for name, traffic in group.traffic.items()}
    row = 32 + 4
    assert sent == {
        "peers reduce and gather": 2 * 12 * row,
        "peers gather": 12 * row,
        "peers reduce-scatter": 12 * row,
    }


def test_few_rows_wait_for_nobody() -> None:
    group = AbsentRanks(0, 4)
    peers = AbsentPeers(group, 32, 16, torch.device("cpu"))
    x, residual = torch.randn(2, 2, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert peers.sum_few(x) is x
    for fp8 in (False, True):
        y, scale, total = peers.all_reduce_few(x, residual, torch.ones(32), 1e-5, fp8=fp8)
        assert torch.equal(total, x + residual)
        assert (scale is None) != fp8
        plain = y.float() if scale is None else y.float() * scale[:, None]
        assert plain.square().mean().sqrt().item() == pytest.approx(1, rel=0.05)
    assert group.traffic["peers sum of few"].sent_bytes == 3 * 3 * 2 * 64
