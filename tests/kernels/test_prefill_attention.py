"""Prefill attention: the reference against dense softmax, chunking that changes no bit, and the kernels against it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_kernels.prefill_attention import prefill_attention, prefill_attention_reference, prefill_plan
from katydid_kernels.prefill_attention.launch import PrefillProblem, launch_tile
from katydid_kernels.prefill_attention.plan import prefill_plan_reference

from tests.kernels.paged import FP8, dense, make_pages, relative_error, scales

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Rounding of the probabilities to the operand dtype dominates: 2^-9 for bf16, 2^-12 for fp16, 2^-5 for e4m3.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3, FP8: 3e-2}
if DEVICE == "cpu":
    TOLERANCE[FP8] = 0.12  # the interpreter truncates its fp8 casts


def cumulative(q_lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *q_lens]).cumsum(0).int().to(DEVICE)


def naive(q, pages, q_lens, scale, soft_cap=None, window=None):
    out, begin = [], 0
    for row, q_len in enumerate(q_lens):
        keys, values = dense(pages, row) if q_len else (None, None)
        for i in range(q_len):
            at = int(pages.lens[row]) - q_len + i
            first = max(0, at - window + 1) if window else 0
            group = q.shape[1] // pages.k.shape[1]
            k = keys[:, first : at + 1].repeat_interleave(group, 0)
            v = values[:, first : at + 1].repeat_interleave(group, 0)
            scores = (k @ q[begin + i].double()[:, :, None]).squeeze(2) * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            out.append((torch.softmax(scores, 1)[:, None] @ v).squeeze(1))
        begin += q_len
    return torch.stack(out)


@pytest.mark.parametrize(("soft_cap", "window"), [(None, None), (2.0, None), (None, 70), (1.5, 3)])
def test_the_reference_equals_dense_softmax(soft_cap, window):
    q_lens, lens = [5, 0, 64, 1, 66], [5, 9, 130, 65, 300]
    pages = make_pages(lens, 2, 16, torch.float32, DEVICE)
    q = torch.randn(sum(q_lens), 6, 16, device=DEVICE)
    out, lse = prefill_attention_reference(
        q, pages.k, pages.v, pages.table, pages.lens, cumulative(q_lens),
        soft_cap=soft_cap, window=window, dtype=torch.float64,
    )  # fmt: skip
    assert relative_error(out, naive(q, pages, q_lens, 0.25, soft_cap, window)) < 1e-12
    assert torch.isfinite(lse).all()


@given(st.integers(1, 400), st.lists(st.integers(1, 130), min_size=1, max_size=8), st.sampled_from([1, 3, 8]))
@settings(max_examples=15, deadline=None)
def test_chunking_and_company_change_no_bit(prefix, chunks, group):
    torch.set_num_threads(1)
    total = prefix + sum(chunks)
    pages = make_pages([total, 77], 2, 16, torch.float32)
    q = torch.randn(total, 2 * group, 16)
    whole, whole_lse = prefill_attention(
        q, pages.k, pages.v, pages.table[:1], pages.lens[:1], torch.tensor([0, total]).int()
    )
    at = prefix
    for chunk in chunks:
        rows = torch.cat([q[at : at + chunk], torch.randn(3, 2 * group, 16)])
        lens = torch.tensor([at + chunk, 77], dtype=torch.int32)
        cu = torch.tensor([0, chunk, chunk + 3], dtype=torch.int32)
        out, lse = prefill_attention(rows, pages.k, pages.v, pages.table, lens, cu)
        assert torch.equal(out[:chunk], whole[at : at + chunk])
        assert torch.equal(lse[:chunk], whole_lse[at : at + chunk])
        at += chunk


@given(st.lists(st.tuples(st.sampled_from([0, 1, 127, 128, 129, 1000]), st.integers(0, 300)), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None)
def test_the_device_plan_equals_its_twin(rows):
    q_lens = [q for q, _ in rows]
    if not sum(q_lens):
        return
    lens = [q + prefix for q, prefix in rows]
    cu = cumulative(q_lens)
    plan = prefill_plan(torch.tensor(lens, dtype=torch.int32, device=DEVICE), cu, sum(q_lens)).tolist()
    expected = prefill_plan_reference(lens, cu.tolist())
    assert plan[0][0] == len(expected)
    assert [tuple(record[:5]) for record in plan[1 : 1 + len(expected)]] == expected


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "soft_cap", "window"),
    [
        (torch.float16, 64, 3, None, None),
        (torch.float32, 64, 2, 20.0, 100),
        (FP8, 32, 4, None, None),
    ],
)
def test_the_tile_kernel_equals_the_reference(dtype, head_dim, group, soft_cap, window):
    q_lens, lens = [130, 1, 0, 40], [130, 65, 10, 200]
    pages = make_pages(lens, 2, head_dim, dtype, DEVICE)
    q = torch.randn(sum(q_lens), 2 * group, head_dim, device=DEVICE).to(dtype)
    cu = cumulative(q_lens)
    scale = scales(q.shape[:2], 2, per_head=True, device=DEVICE) if dtype == FP8 else {}
    out = torch.full(q.shape, float("nan"), device=DEVICE)
    lse = torch.full(q.shape[:2], float("nan"), device=DEVICE)
    problem = PrefillProblem(q, pages.k, pages.v, pages.table, out, lse, head_dim**-0.5, soft_cap, window, **scale)
    launch_tile(problem, prefill_plan(pages.lens, cu, len(q)))
    expected, expected_lse = prefill_attention_reference(
        q, pages.k, pages.v, pages.table, pages.lens, cu, soft_cap=soft_cap, window=window, dtype=torch.float64, **scale
    )
    assert relative_error(out, expected) < TOLERANCE[dtype]
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize(
    ("q_lens", "lens", "kv_heads", "group", "head_dim", "soft_cap", "window"),
    [
        ([256], [256], 1, 8, 128, None, None),
        ([300, 17, 128, 0, 1], [300, 1000, 640, 5, 8191], 2, 4, 128, None, None),
        ([2000], [5001], 1, 8, 128, None, None),
        ([300, 400], [3000, 401], 1, 2, 128, 20.0, 200),
        ([300, 17], [300, 1000], 3, 3, 64, None, None),
        ([300, 17], [300, 1000], 2, 2, 256, None, None),
        ([100, 1], [262144, 64], 1, 8, 128, None, None),
    ],
)
def test_the_hopper_kernel_equals_the_reference(dtype, q_lens, lens, kv_heads, group, head_dim, soft_cap, window):
    pages = make_pages(lens, kv_heads, head_dim, dtype, "cuda")
    q = torch.randn(sum(q_lens), kv_heads * group, head_dim, device="cuda").to(dtype)
    cu = cumulative(q_lens)
    scale = scales(q.shape[:2], kv_heads, per_head=True, device="cuda") if dtype == FP8 else {}
    out, lse = prefill_attention(
        q, pages.k, pages.v, pages.table, pages.lens, cu, soft_cap=soft_cap, window=window, **scale
    )
    expected, expected_lse = prefill_attention_reference(
        q, pages.k, pages.v, pages.table, pages.lens, cu, soft_cap=soft_cap, window=window, dtype=torch.float64, **scale
    )
    assert relative_error(out, expected) < TOLERANCE[dtype]
    torch.testing.assert_close(lse.double(), expected_lse, atol=5e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a Hopper GPU")
def test_the_fp8_error_does_not_grow_with_the_context():
    errors = []
    for length in (4096, 131072, 262144):
        pages = make_pages([length], 1, 128, FP8, "cuda")
        q = torch.randn(128, 8, 128, device="cuda").to(FP8)
        cu = cumulative([128])
        out, _ = prefill_attention(q, *pages, cu)
        expected, _ = prefill_attention_reference(q, *pages, cu, dtype=torch.float64)
        errors.append(relative_error(out, expected))
    assert max(errors[1:]) < 1.5 * errors[0]


def test_the_op_says_what_it_writes():
    pages = make_pages([300, 77], 2, 16, torch.float32)
    q = torch.randn(5, 6, 16)
    out, lse = torch.empty_like(q), torch.empty(5, 6)
    cu = torch.tensor([0, 4, 5], dtype=torch.int32)
    op = torch.ops.katydid.prefill_attention
    torch.library.opcheck(op.default, (q, *pages, cu, out, lse, 0.25, *[None] * 6))


def test_what_does_not_fit_is_named():
    pages = make_pages([65], 2, 16, torch.float32)
    q = torch.zeros(1, 4, 16)
    cu = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads 2, got 3"):
        prefill_attention(q[:, :3].contiguous(), pages.k, pages.v, pages.table, pages.lens, cu)
    with pytest.raises(ValueError, match=r"v_pages must be \[5, 2, 16, 64\]"):
        prefill_attention(q, pages.k, pages.k, pages.table, pages.lens, cu)
    with pytest.raises(ValueError, match=r"cu_q_lens must be int32 \[2\]"):
        prefill_attention(q, pages.k, pages.v, pages.table, pages.lens, cu.long())
    with pytest.raises(ValueError, match="k_scale and v_scale must be given together"):
        prefill_attention(q, pages.k, pages.v, pages.table, pages.lens, cu, k_scale=torch.ones(1))
