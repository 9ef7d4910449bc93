"""The plain-Triton GEMM against float64, in the interpreter where there is no GPU."""

import pytest
import torch
from katydid_kernels.gemm.combine import combine, combine_reference
from katydid_kernels.gemm.plain import plain_gemm, plain_grouped_gemm
from katydid_kernels.gemm.plan import plan_routes_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# fp32 sums of up to 200 products; fp16 rounds the result to 11 bits.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-4}
BLOCK = (16, 32, 32)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return ((out.double() - reference).norm() / reference.norm()).item()


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (16, 32, 32), (17, 33, 70), (48, 5, 200)])
@pytest.mark.parametrize("promote", [False, True])
def test_matches_float64(dtype: torch.dtype, m: int, n: int, k: int, promote: bool) -> None:
    a, b = torch.randn(m, k, device=DEVICE, dtype=dtype), torch.randn(n, k, device=DEVICE, dtype=dtype)
    out = plain_gemm(a, b, poisoned(m, n, dtype=dtype), promote=promote, block=BLOCK)
    assert relative_error(out, a.double() @ b.double().T) < TOLERANCE[dtype]


def test_scales_bias_and_residual() -> None:
    m, n, k = 19, 37, 40
    a, b = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE)
    row, col = torch.rand(m, device=DEVICE), torch.rand(n, device=DEVICE)
    bias, residual = torch.randn(n, device=DEVICE), torch.randn(m, n, device=DEVICE)
    out = poisoned(m, n, dtype=torch.float32)
    plain_gemm(a, b, out, row_scale=row, col_scale=col, bias=bias, residual=residual, block=BLOCK)
    reference = (a.double() @ b.double().T) * row[:, None] * col + bias + residual
    assert relative_error(out, reference) < 1e-6


def test_padded_rows_are_neither_read_nor_written() -> None:
    storage = torch.full((20, 48), float("nan"), device=DEVICE)
    a = storage[:9, :40]
    a.copy_(torch.randn(9, 40))
    b = torch.randn(7, 40, device=DEVICE)
    out = poisoned(9, 16, dtype=torch.float32)
    plain_gemm(a, b, out[:, :7], block=BLOCK)
    assert relative_error(out[:, :7], a.double() @ b.double().T) < 1e-6
    assert out[:, 7:].isnan().all()


def test_grouped_reads_rows_through_the_index_and_skips_empty_groups() -> None:
    torch.manual_seed(0)
    experts, tokens, top_k, n, k = 6, 23, 2, 40, 48
    ids = torch.stack([torch.randperm(4)[:top_k] for _ in range(tokens)]).int().to(DEVICE)
    plan = plan_routes_reference(ids, experts, BLOCK[0])
    x, w = torch.randn(tokens, k, device=DEVICE), torch.randn(experts, n, k, device=DEVICE)
    scale = torch.rand(experts, device=DEVICE)
    out = poisoned(len(plan.rows), n, dtype=torch.float32)
    plain_grouped_gemm(x, w, out, plan.tiles, rows=plan.rows, col_scale=scale, block=BLOCK)
    for token in range(tokens):
        for choice in range(top_k):
            expert = ids[token, choice]
            reference = (w[expert].double() @ x[token].double()) * scale[expert]
            assert relative_error(out[plan.slots[token, choice]], reference) < 1e-6


@pytest.mark.parametrize(("tokens", "n", "top_k"), [(1, 64, 8), (5, 1500, 3)])
@pytest.mark.parametrize("with_shared", [False, True])
def test_combine_leaves_out_rows_nobody_wrote(tokens: int, n: int, top_k: int, with_shared: bool) -> None:
    y = torch.randn(tokens * top_k + 1, n, device=DEVICE)
    slots = torch.randperm(tokens * top_k, device=DEVICE).view(tokens, top_k).int()
    slots[0, 0] = -1
    y[-1] = float("nan")
    weights = torch.rand(tokens, top_k, device=DEVICE)
    shared = torch.randn(tokens, n, device=DEVICE) if with_shared else None
    out = combine(y, slots, weights, poisoned(tokens, n, dtype=torch.float32), shared=shared)
    expected = combine_reference(y, slots, weights, shared=shared)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("grouped", [False, True])
def test_scales_of_blocks(grouped: bool) -> None:
    torch.manual_seed(0)
    m, n, k = 20, 150, 256
    a, b = torch.randn(m, k, device=DEVICE), torch.randn(1, n, k, device=DEVICE)
    rows, cols = torch.rand(m, 2, device=DEVICE) + 0.5, torch.rand(1, 2, 2, device=DEVICE) + 0.5
    out = poisoned(m, n, dtype=torch.float32)
    if grouped:
        tiles = torch.tensor([[0, start, m, 0] for start in range(0, m, BLOCK[0])], dtype=torch.int32, device=DEVICE)
        plain_grouped_gemm(a, b, out, tiles, row_scale=rows, col_scale=cols, block=BLOCK)
    else:
        plain_gemm(a, b[0], out, row_scale=rows, col_scale=cols[0], block=BLOCK)
    wide_b = b[0].double() * cols[0].double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    assert relative_error(out, (a.double() * rows.double().repeat_interleave(128, 1)) @ wide_b.T) < 1e-6


@pytest.mark.parametrize("n", [128, 384, 2048])
def test_combine_of_columns_in_pairs(n: int) -> None:
    y, slots = torch.randn(9, n, device=DEVICE), torch.randint(-1, 9, (5, 3), device=DEVICE).int()
    weights, shared = torch.rand(5, 3, device=DEVICE), torch.randn(5, n, device=DEVICE)
    blocks = y.view(9, n // 128, 64, 2).transpose(2, 3)  # the even columns of every 128 before the odd ones
    out = combine(blocks.reshape(9, n), slots, weights, poisoned(5, n, dtype=torch.float32), shared=shared, paired=True)
    torch.testing.assert_close(out, combine_reference(y, slots, weights, shared=shared))
