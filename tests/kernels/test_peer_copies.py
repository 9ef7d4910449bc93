"""Sums and norms whose rows travel by copies, against the sums of what all ranks hold; ranks in turn, in one memory."""

from __future__ import annotations

import pytest
import torch
from katydid_kernels.peer_reduce import PeerCopies, add_rms_norm_of_ranks_reference, emulated_peers
from katydid_kernels.quantize_rows import quantize_fp8_reference

HIDDEN, TOLD, EPS = 48, 3, 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 9), (4, 8), (4, 5)])
def test_sums_come_to_their_owners_and_norms_to_all(ranks: int, tokens: int) -> None:
    size = PeerCopies.nbytes(ranks, HIDDEN, tokens=12, told=TOLD)
    memories = emulated_peers(ranks, size, DEVICE)
    own = [PeerCopies(memory, HIDDEN, tokens=12, told=TOLD) for memory in memories]
    share = -(-tokens // ranks)
    weight = torch.rand(HIDDEN, device=DEVICE) + 0.5
    generator = torch.Generator().manual_seed(ranks)
    residual = torch.randn(ranks * share, HIDDEN, generator=generator).to(DEVICE, torch.bfloat16)
    residual[tokens:] = 0
    for part in (0, 1, 0):
        summands = [torch.randn(tokens, HIDDEN, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(ranks)]
        for copies, x in zip(own, summands, strict=True):
            copies.scatter(part, x)
        totals, kept = [], []
        for rank, (copies, x) in enumerate(zip(own, summands, strict=True)):
            mine = torch.full((share, HIDDEN), torch.nan, dtype=torch.bfloat16, device=DEVICE)
            rows = residual[rank * share : (rank + 1) * share]
            totals.append(copies.sum(part, x, rows, weight, EPS, mine))
            kept.append(mine)
        for rank, copies in enumerate(own):
            told = torch.arange(share * TOLD, dtype=torch.int32, device=DEVICE).view(share, TOLD) + 1000 * rank
            copies.gather(part, tokens, told)
        found = [copies.gathered(part, tokens, TOLD) for copies in own]
        for rank in range(ranks):
            # Another rank's summands are rounded for the way, a rank's own are not.
            mine = slice(rank * share, min((rank + 1) * share, tokens))
            rounded = [x.float() if source == rank else dequantized(x) for source, x in enumerate(summands)]
            y, total = add_rms_norm_of_ranks_reference([x[mine] for x in rounded], residual[mine], weight, EPS)
            count = len(y)
            # The interpreter cuts what a GPU rounds.
            assert relative(totals[rank][:count], total) < 0.15
            assert relative(kept[rank][:count], y) < 0.15
            assert not totals[rank][count:].any()
            assert not kept[rank][count:].any()
            for values, scales, told in found:
                arrived = values[mine].float() * scales[mine, None]
                assert relative(arrived, kept[rank][:count]) < 0.15
                assert told[mine].tolist() == [
                    [1000 * rank + TOLD * row + column for column in range(TOLD)] for row in range(count)
                ]
        residual = torch.cat(totals)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-9))


def dequantized(x: torch.Tensor) -> torch.Tensor:
    values, scale = quantize_fp8_reference(x)
    return values.float() * scale[:, None]


def test_what_does_not_fit_is_refused() -> None:
    (memory,) = emulated_peers(1, 100, "cpu")
    with pytest.raises(ValueError, match="memory must have"):
        PeerCopies(memory, HIDDEN, tokens=12, told=0)
    with pytest.raises(ValueError, match="multiple of 16"):
        PeerCopies(memory, 40, tokens=12, told=0)
