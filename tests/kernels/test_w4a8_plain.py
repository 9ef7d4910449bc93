"""The plain-Triton product with packed int4 against float64, in the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from katydid_kernels.gemm.plan import plan_routes_reference
from katydid_kernels.w4a8.packing import Int4Weight, dequantize_int4, pack_int4, quantize_int4
from katydid_kernels.w4a8.plain import plain_grouped_w4a8, plain_w4a8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter reads no e4m3: fp16 there, which holds every value of it.
X = torch.float8_e4m3fn if DEVICE == "cuda" else torch.float16
BLOCK = (16, 32)


def packed(*shape: int, gated: bool = False) -> tuple[Int4Weight, torch.Tensor]:
    codes, scales = quantize_int4(torch.randn(*shape, device=DEVICE), "mse")
    return pack_int4(codes, scales, gated=gated), dequantize_int4(codes, scales).double()


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return ((out.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (17, 70, 200), (5, 130, 64)])
def test_matches_float64(m: int, n: int, k: int) -> None:
    weight, exact = packed(n, k)
    x = torch.randn(m, k, device=DEVICE).to(torch.float8_e4m3fn).to(X)
    scale, bias, residual = (
        torch.rand(m, device=DEVICE),
        torch.randn(n, device=DEVICE),
        torch.randn(m, n, device=DEVICE),
    )
    out = torch.full((m, n), float("nan"), device=DEVICE)
    plain_w4a8(x, weight, out, x_scale=scale, bias=bias, residual=residual, block=BLOCK)
    reference = x.double() @ exact.T * scale.double()[:, None] + bias + residual
    assert relative_error(out, reference) < 1e-6


@pytest.mark.parametrize("gated", [False, True])
def test_grouped_reads_rows_through_the_index(gated: bool) -> None:
    torch.manual_seed(0)
    experts, tokens, n, k = 4, 23, 128, 192
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(tokens)]).int().to(DEVICE)
    plan = plan_routes_reference(ids, experts, BLOCK[0])
    weight, exact = packed(experts, n, k, gated=gated)
    if gated:
        # Packed order: eight rows of gate, eight of up.
        exact = exact.unflatten(1, (2, -1, 8)).transpose(1, 2).flatten(1, 3)
    x, scale = torch.randn(tokens, k, device=DEVICE).to(X), torch.rand(tokens, device=DEVICE)
    out = torch.full((len(plan.rows), n), float("nan"), device=DEVICE)
    plain_grouped_w4a8(x, weight, out, plan.tiles, rows=plan.rows, x_scale=scale, block=BLOCK)
    for token in range(tokens):
        for choice in range(2):
            expert = int(ids[token, choice])
            if expert < experts:
                reference = exact[expert] @ x[token].double() * scale[token]
                assert relative_error(out[plan.slots[token, choice]], reference) < 1e-6
