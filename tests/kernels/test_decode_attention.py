"""Decode attention: the split kernel and the Hopper kernel against the reference, on every mix a batch can bring."""

from __future__ import annotations

import pytest
import torch
from katydid_kernels.decode_attention import (
    DecodeScratch,
    decode_attention,
    decode_attention_reference,
    decode_ctas,
)
from katydid_kernels.decode_attention.launch import DecodeProblem, launch_split
from katydid_kernels.decode_plan import decode_plan, decode_plan_static
from katydid_kernels.prefill_attention import prefill_attention
from katydid_kernels.quantize_rows import quantize_fp8

from tests.kernels.paged import FP8, make_pages, relative_error, scales

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Rounding of the probabilities to the operand dtype dominates: 2^-9 for bf16, 2^-12 for fp16, 2^-5 for e4m3.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3, FP8: 3e-2}
if DEVICE == "cpu":
    TOLERANCE[FP8] = 0.12  # the interpreter truncates its fp8 casts
EDGES = [0, 1, 63, 64, 65, 700]


def queries(batch: int, q_len: int, heads: int, head_dim: int, dtype: torch.dtype, device: str = DEVICE):
    return torch.randn(batch, q_len, heads, head_dim, device=device).to(dtype)


@pytest.mark.parametrize(
    ("lens", "kv_heads", "group", "head_dim", "q_len", "soft_cap", "window", "dtype"),
    [
        (EDGES, 2, 4, 64, 1, None, None, torch.float16),
        ([3, 200, 1000], 1, 8, 128, 3, None, None, torch.float32),
        ([3, 200, 1000], 1, 3, 64, 2, 20.0, 100, torch.float16),
        ([130, 1000], 2, 2, 32, 1, None, None, FP8),
    ],
)
def test_the_split_kernel_equals_the_reference(lens, kv_heads, group, head_dim, q_len, soft_cap, window, dtype):
    pages = make_pages(lens, kv_heads, head_dim, dtype, DEVICE)
    q = queries(len(lens), q_len, kv_heads * group, head_dim, dtype)
    scale = scales(q.shape[:3], kv_heads, per_head=True, device=DEVICE) if dtype == FP8 else {}
    plan = decode_plan(pages.lens, kv_heads, ctas=6, q_len=q_len, window=window, min_tiles=3)
    scratch = DecodeScratch.allocate(6, q_len, group, head_dim, q.device)
    out = torch.full(q.shape, float("nan"), device=DEVICE)
    lse = torch.full(q.shape[:3], float("nan"), device=DEVICE)
    launch_split(DecodeProblem(q, *pages, out, lse, head_dim**-0.5, soft_cap, window, **scale), plan, scratch)
    expected, expected_lse = decode_attention_reference(
        q, *pages, soft_cap=soft_cap, window=window, dtype=torch.float64, **scale
    )
    assert relative_error(out, expected) < TOLERANCE[dtype]
    torch.testing.assert_close(lse.double(), expected_lse, atol=5e-3, rtol=1e-3)
    assert not scratch.counters.any()


def test_a_row_is_the_same_alone_and_in_company():
    pages = make_pages([300, 0, 77], 2, 16, torch.float32)
    q = queries(3, 2, 6, 16, torch.float32, "cpu")
    together, _ = decode_attention(q, *pages)
    for row in range(3):
        alone, _ = decode_attention(
            q[row : row + 1].contiguous(), pages.k, pages.v, pages.table[row : row + 1], pages.lens[row : row + 1]
        )
        assert torch.equal(alone[0], together[row])
    assert not together[1].any()


def test_decoding_a_token_equals_prefilling_it():
    pages = make_pages([300], 2, 16, torch.float32)
    q = queries(1, 3, 6, 16, torch.float32, "cpu")
    decoded, _ = decode_attention(q, *pages)
    prefilled, _ = prefill_attention(q[0], *pages, torch.tensor([0, 3], dtype=torch.int32))
    assert torch.equal(decoded[0], prefilled)


def test_rows_may_share_the_pages_of_a_prefix():
    pages = make_pages([640, 640], 1, 16, torch.float32)
    pages.table[1, :5] = pages.table[0, :5]
    q = queries(1, 1, 2, 16, torch.float32, "cpu").expand(2, -1, -1, -1).contiguous()
    windowed, _ = decode_attention(q, pages.k, pages.v, pages.table, torch.tensor([320, 320], dtype=torch.int32))
    assert torch.equal(windowed[0], windowed[1])


def test_the_op_says_what_it_writes_and_compiles():
    pages = make_pages([300, 0, 77], 2, 16, torch.float32)
    q = queries(3, 2, 6, 16, torch.float32, "cpu")
    out, lse = torch.empty_like(q), torch.empty(3, 2, 6)
    op = torch.ops.katydid.decode_attention
    torch.library.opcheck(op.default, (q, *pages, out, lse, 0.25, *[None] * 9, False, None))
    compiled = torch.compile(lambda q: decode_attention(q, *pages)[0] + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q), decode_attention(q, *pages)[0] + 1)


def test_what_does_not_fit_is_named():
    pages = make_pages([65], 2, 16, torch.float32)
    with pytest.raises(ValueError, match=r"q_len 1..8, got \[1, 9, 4, 16\]"):
        decode_attention(torch.zeros(1, 9, 4, 16), *pages)
    with pytest.raises(ValueError, match="q must have context_lens' batch 1, got 2"):
        decode_attention(torch.zeros(2, 1, 4, 16), *pages)
    with pytest.raises(ValueError, match="k_pages must be contiguous"):
        decode_attention(torch.zeros(1, 1, 4, 16), pages.k[::2], pages.v[::2], pages.table, pages.lens)


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(DEVICE == "cpu", reason="needs a Hopper GPU")(test))


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize(
    ("lens", "kv_heads", "group", "head_dim", "q_len", "soft_cap", "window"),
    [
        ([0, 1, 63, 64, 65, 8191], 1, 8, 128, 1, None, None),
        ([0, 1, 63, 64, 65, 8191], 8, 8, 128, 2, None, None),
        ([0, 1, 63, 64, 65, 8191], 1, 8, 128, 8, None, None),
        ([262144], 1, 8, 128, 1, None, None),
        ([65536, 64, 4096], 1, 8, 128, 4, None, None),
        ([512] * 64, 1, 8, 128, 4, None, None),
        ([4096] * 64, 1, 8, 128, 1, None, None),
        ([3000, 0, 77, 64, 1, 900] * 80, 2, 4, 128, 1, None, None),
        ([200, 0, 77, 64, 1, 90, 65, 64] * 256, 1, 8, 128, 1, None, None),
        ([100, 5000, 700], 1, 8, 128, 2, 30.0, 300),
        ([100, 5000, 700], 1, 8, 128, 4, 30.0, 300),
        ([100, 5000, 700], 2, 8, 64, 3, None, 300),
        ([20000, 5000] + [700] * 40, 8, 8, 128, 1, None, None),
        ([1, 63, 8191], 3, 3, 64, 5, None, None),
        ([1, 63, 8191], 1, 16, 256, 1, None, None),
        ([1, 63, 8191], 8, 1, 128, 1, None, None),
    ],
)
def test_the_hopper_kernel_equals_the_reference(dtype, lens, kv_heads, group, head_dim, q_len, soft_cap, window):
    pages = make_pages(lens, kv_heads, head_dim, dtype, "cuda")
    q = queries(len(lens), q_len, kv_heads * group, head_dim, dtype, "cuda")
    scale = scales(q.shape[:3], kv_heads, per_head=group > 1, device="cuda") if dtype == FP8 else {}
    ctas = decode_ctas(q.device)
    scratch = DecodeScratch.allocate(ctas, q_len, group, head_dim, q.device)
    table = pages.table if window is None else None
    plan = decode_plan(pages.lens, kv_heads, ctas=ctas, q_len=q_len, window=window, block_table=table)
    runs = [
        decode_attention(
            q, *pages, soft_cap=soft_cap, window=window, plan=plan, scratch=scratch, overlap=again, **scale
        )
        for again in (False, True, True)
    ]
    expected, expected_lse = decode_attention_reference(
        q, *pages, soft_cap=soft_cap, window=window, dtype=torch.float64, **scale
    )
    for out, lse in runs:
        assert relative_error(out, expected) < TOLERANCE[dtype]
        torch.testing.assert_close(lse.double(), expected_lse, atol=5e-3, rtol=1e-3)
        assert torch.equal(out, runs[0][0])
    assert not scratch.counters.any()


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize("q_len", [1, 4])
def test_the_decode_and_the_prefill_kernel_agree_on_a_token(dtype, q_len):
    lens = [4096, 64, 700]
    pages = make_pages(lens, 1, 128, dtype, "cuda")
    q = queries(3, q_len, 8, 128, dtype, "cuda")
    decoded, decoded_lse = decode_attention(q, *pages)
    cu = torch.arange(0, 3 * q_len + 1, q_len, dtype=torch.int32, device="cuda")
    prefilled, prefilled_lse = prefill_attention(q.flatten(0, 1), *pages, cu)
    assert relative_error(decoded.flatten(0, 1), prefilled) < 1.5 * TOLERANCE[dtype]
    torch.testing.assert_close(decoded_lse.flatten(0, 1), prefilled_lse, atol=5e-3, rtol=1e-3)


@gpu
@pytest.mark.parametrize("splits", [4, 16])
def test_the_static_plan_gives_the_same_result(splits):
    pages = make_pages([4096, 0, 65, 700], 2, 128, torch.bfloat16, "cuda")
    q = queries(4, 1, 16, 128, torch.bfloat16, "cuda")
    out, _ = decode_attention(q, *pages, plan=decode_plan_static(pages.lens, 2, splits))
    expected, _ = decode_attention_reference(q, *pages, dtype=torch.float64)
    assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]


@gpu
def test_rows_that_share_the_pages_of_a_prefix_get_what_they_would_alone():
    pages = make_pages([640, 1000], 1, 128, torch.bfloat16, "cuda")
    pages.table[1, :5] = pages.table[0, :5]
    q = queries(2, 1, 8, 128, torch.bfloat16, "cuda")
    out, _ = decode_attention(q, *pages)
    expected, _ = decode_attention_reference(q, *pages, dtype=torch.float64)
    assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]


@gpu
def test_a_graph_follows_the_lengths():
    """Plan and attention in one graph: what changes between replays is in device memory alone."""
    pages = make_pages([20000, 4096, 64, 700], 1, 128, torch.bfloat16, "cuda")
    q = queries(4, 1, 8, 128, torch.bfloat16, "cuda")
    ctas = decode_ctas(q.device)
    scratch = DecodeScratch.allocate(ctas, 1, 8, 128, q.device)
    plan = decode_plan(pages.lens, 1, ctas=ctas, block_table=pages.table)
    out, lse = decode_attention(q, *pages, plan=plan, scratch=scratch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_plan(pages.lens, 1, ctas=ctas, block_table=pages.table, out=plan)
        decode_attention(q, *pages, plan=plan, scratch=scratch, out=out, lse=lse)
    for lens in ([20000, 4096, 64, 700], [1, 0, 63, 65], [9000, 4000, 64, 1]):
        pages.lens.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        expected, _ = decode_attention_reference(q, *pages, dtype=torch.float64)
        assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]


@gpu
def test_the_fp8_error_does_not_grow_with_the_context():
    errors = []
    for length in (4096, 131072, 262144):
        pages = make_pages([length], 1, 128, FP8, "cuda")
        q = queries(1, 1, 8, 128, FP8, "cuda")
        out, _ = decode_attention(q, *pages)
        expected, _ = decode_attention_reference(q, *pages, dtype=torch.float64)
        errors.append(relative_error(out, expected))
    assert max(errors[1:]) < 1.5 * errors[0]


@pytest.mark.parametrize("q_len", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(FP8, marks=pytest.mark.gpu)])
def test_quantised_output_is_the_output_quantised(dtype: torch.dtype, q_len: int) -> None:
    """Also where an item is cut into pieces, and of a row of length zero."""
    device = "cuda" if dtype == FP8 else "cpu"
    lens = [0, 5, 700, 5000]
    pages = make_pages(lens, 1, 128, dtype, device)
    q = queries(len(lens), q_len, 8, 128, dtype, device)
    scale = scales(q.shape[:3], 1, per_head=False, device=device) if dtype == FP8 else {}
    plain, _ = decode_attention(q, *pages, **scale)
    out = torch.full(q.shape, 3.0, device=device).to(FP8)
    out_scale = torch.full(q.shape[:2], float("nan"), device=device)
    decode_attention(q, *pages, out=out, out_scale=out_scale, **scale)
    values, wanted = quantize_fp8(plain.flatten(0, 1).flatten(1))
    assert torch.equal(out_scale.flatten(), wanted)
    assert torch.equal(out.view(torch.uint8).flatten(), values.view(torch.uint8).flatten())


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "shape", "names"),
    [(2, FP8, (1, 1), "one kv head"), (1, torch.float32, (1, 1), "out must be"), (1, FP8, (1, 8), "out_scale must be")],
)
def test_what_cannot_be_quantised_is_refused(
    kv_heads: int, dtype: torch.dtype, shape: tuple[int, int], names: str
) -> None:
    pages = make_pages([9], kv_heads, 16, torch.float32)
    q = queries(1, 1, 8, 16, torch.float32, "cpu")
    with pytest.raises(ValueError, match=names):
        decode_attention(q, *pages, out=q.to(dtype), out_scale=torch.empty(shape))
