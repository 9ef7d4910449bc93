"""Block-sparse attention: the reference against a masked softmax, all blocks against the dense op, the kernels."""

from __future__ import annotations

import math

import pytest
import torch
from katydid_kernels.block_sparse_prefill import block_sparse_prefill, block_sparse_prefill_reference
from katydid_kernels.block_sparse_prefill.combine_kernel import ROWS, combine_kernel
from katydid_kernels.block_sparse_prefill.launch import SparseProblem, launch_tile
from katydid_kernels.prefill_attention import prefill_attention
from katydid_kernels.stem_select import SparsePlan, StemRule, sparse_plan, stem_select_reference
from torch import Tensor

from tests.kernels.paged import FP8, Pages, dense, make_pages, relative_error, scales

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# As in the dense kernel's tests; fewer keys average less rounding away.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3, FP8: 3e-2 if DEVICE == "cuda" else 0.12}
RULE = StemRule(budget=0.5, sink=1, window=1)


def lists_at_random(plan: SparsePlan, heads: int, seed: int) -> Tensor:
    """Any lists that hold the tile's own block and none after it; what lies behind a list is out of range."""
    generator = torch.Generator().manual_seed(seed)
    lists = torch.full((plan.tiles, heads, plan.most + 3), 1 << 20, dtype=torch.int32)
    for tile, record in enumerate(plan.in_order.tolist()):
        own, count = record[3] // 128, record[5]
        for head in range(heads):
            others = torch.randperm(own, generator=generator)[: count - 1].sort(descending=True).values
            lists[tile, head, :count] = torch.cat((torch.tensor([own]), others)).int()
    return lists.to(DEVICE)


def masked(q: Tensor, pages: Pages, plan: SparsePlan, lists: Tensor) -> Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // pages.k.shape[1]
    for tile, (row, first, end, position, _, count, *_) in enumerate(plan.in_order.tolist()):
        keys, values = dense(pages, row)
        for head in range(q.shape[1]):
            allowed = torch.zeros(keys.shape[1], dtype=torch.bool)
            for block in lists[tile, head, :count].tolist():
                allowed[block * 128 : block * 128 + 128] = True
            for at, token in enumerate(range(first, end), start=position):
                scores = keys[head // group] @ q[token, head].double() * q.shape[2] ** -0.5
                seen = allowed & (torch.arange(len(allowed)) <= at)
                weights = torch.softmax(scores.masked_fill(~seen.to(scores.device), -torch.inf), 0)
                out[token, head] = weights @ values[head // group]
    return out


def case(q_lens: list[int], lens: list[int], kv_heads: int, group: int, dim: int, dtype: torch.dtype):
    pages = make_pages(lens, kv_heads, dim, dtype, DEVICE)
    q = torch.randn(sum(q_lens), kv_heads * group, dim, generator=torch.Generator().manual_seed(3)).to(DEVICE).to(dtype)
    plan = sparse_plan(RULE, q_lens, lens, [length + 300 for length in lens], DEVICE)
    return pages, q, plan, lists_at_random(plan, kv_heads * group, seed=4)


def test_the_reference_equals_a_masked_softmax() -> None:
    pages, q, plan, lists = case([70, 40, 1], [600, 40, 257], 2, 2, 16, torch.float32)
    found = block_sparse_prefill_reference(q, *pages[:3], plan, lists, dtype=torch.float64)
    assert relative_error(found, masked(q, pages, plan, lists)) < 1e-12


def test_all_blocks_are_dense_attention() -> None:
    q_lens, lens = [200, 3], [500, 130]
    pages = make_pages(lens, 2, 16, torch.float32, DEVICE)
    q = torch.randn(203, 4, 16, device=DEVICE)
    plan = sparse_plan(RULE, q_lens, lens, [None, None], DEVICE)
    lists = stem_select_reference(q, *pages[:3], plan)
    cu = torch.tensor([0, 200, 203], dtype=torch.int32, device=DEVICE)
    expected, _ = prefill_attention(q, *pages, cu)
    found = block_sparse_prefill(q, *pages, plan, lists)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group"), [(torch.float16, 64, 3), (torch.float32, 32, 1), (FP8, 32, 2)], ids=str
)
def test_the_tile_kernel_equals_the_reference(dtype: torch.dtype, head_dim: int, group: int) -> None:
    pages, q, plan, lists = case([130, 40], [700, 40], 2, group, head_dim, dtype)
    extra = scales(q.shape[:2], 2, per_head=True, device=DEVICE) if dtype == FP8 else {}
    out = torch.full(q.shape, float("nan"), device=DEVICE)
    launch_tile(SparseProblem(q, *pages[:3], plan, lists, out, head_dim**-0.5, **extra))
    expected = block_sparse_prefill_reference(q, *pages[:3], plan, lists, dtype=torch.float64, **extra)
    assert relative_error(out, expected) < TOLERANCE[dtype]


def test_pieces_are_weighted_by_their_sums() -> None:
    heads, dim, parts = 3, 32, [5, 2]
    partials = torch.randn(sum(parts) + 1, heads, 128, dim, device=DEVICE)
    sums = 40 * torch.randn(sum(parts) + 1, heads, 128, device=DEVICE)
    cuts = torch.tensor([[1, 5, 0, 128], [6, 2, 200, 277]], dtype=torch.int32, device=DEVICE)
    out = torch.full((277, heads, dim), float("nan"), device=DEVICE)
    combine_kernel[(2, heads, 128 // ROWS)](partials, sums, cuts, out, heads, D=dim, ROWS=ROWS, EARLY=False)
    for begin, count, first, end in cuts.tolist():
        piece = slice(begin, begin + count)
        weights = torch.softmax(sums[piece].double() * math.log(2), 0)
        expected = (partials[piece].double() * weights[..., None]).sum(0)[:, : end - first].transpose(0, 1)
        torch.testing.assert_close(out[first:end].double(), expected, atol=1e-5, rtol=1e-4)
    assert out[128:200].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8], ids=str)
@pytest.mark.parametrize(
    ("q_lens", "lens", "kv_heads", "group", "head_dim"),
    [
        ([256], [256], 1, 8, 128),
        ([300, 17, 128, 0, 1], [300, 1000, 640, 5, 8191], 2, 4, 128),
        ([2000], [5001], 1, 8, 128),
        ([8192], [32768], 1, 8, 128),
        ([300, 17], [300, 1000], 3, 3, 64),
        ([300, 17], [300, 1000], 2, 2, 256),
        ([64, 1], [131136, 64], 1, 8, 128),
        ([300], [40300], 2, 4, 64),
    ],
)
def test_the_hopper_kernel_equals_the_reference(dtype, q_lens, lens, kv_heads, group, head_dim):
    pages, q, plan, lists = case(q_lens, lens, kv_heads, group, head_dim, dtype)
    extra = scales(q.shape[:2], kv_heads, per_head=True, device="cuda") if dtype == FP8 else {}
    poisoned = torch.full(q.shape, float("nan"), device="cuda", dtype=torch.bfloat16 if dtype == FP8 else dtype)
    found = block_sparse_prefill(q, *pages, plan, lists, out=poisoned, **extra)
    expected = block_sparse_prefill_reference(q, *pages[:3], plan, lists, dtype=torch.float64, **extra)
    assert relative_error(found, expected) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a Hopper GPU")
def test_the_fp8_error_does_not_grow_with_the_context():
    errors = []
    for length in (4096, 131072, 262144):
        pages, q, plan, lists = case([128], [length], 1, 8, 128, FP8)
        expected = block_sparse_prefill_reference(q, *pages[:3], plan, lists, dtype=torch.float64)
        errors.append(relative_error(block_sparse_prefill(q, *pages, plan, lists), expected))
    assert max(errors[1:]) < 1.5 * errors[0]


def test_what_does_not_fit_is_named() -> None:
    pages, q, plan, lists = case([70], [200], 1, 2, 16, torch.float32)
    with pytest.raises(ValueError, match=r"blocks must be int32 \[1, 2, 2\], got torch.int32 \[1, 1"):
        block_sparse_prefill(q, *pages, plan, lists[:, :1])
    with pytest.raises(ValueError, match="blocks must be int32"):
        block_sparse_prefill(q, *pages, plan, lists.long())
