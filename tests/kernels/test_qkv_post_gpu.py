"""qkv_post's kernel on the GPU against float64: types, widths, head counts, the last position, slots left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from katydid_kernels import QkNorm, qkv_post, qkv_post_fp8, rope_table  # noqa: E402
from torch import Tensor  # noqa: E402

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LAST = 262143
# A value is rounded once: 2^-9 of it in bf16, 2^-4 in e4m3, uniformly; in norm over random values about these.
ROUNDING = {BF16: 2.2e-3, E4M3: 3.2e-2, torch.float32: 1e-5}


def turned(x: Tensor, weight: Tensor, qk_norm: QkNorm, eps: float, angles: Tensor, hadamard: bool) -> Tensor:
    """Norm, RoPE and Hadamard of ``[T, heads, D]`` in float64; angles ``[T, D / 2]``."""

    def norm(y: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()

    y = norm(x.double()) if qk_norm == "before_rope" else x.double()
    first, second = y.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    y = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    y = norm(y) if qk_norm == "after_rope" else y
    if hadamard:
        i = torch.arange(y.shape[-1], device=y.device)
        signs = i[:, None] & i[None, :]
        parity = sum((signs >> bit) & 1 for bit in range(8)) % 2
        y = y @ (1 - 2 * parity).double() * y.shape[-1] ** -0.5
    return y


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("pages_dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("q_kind", ["plain", "dynamic", "static"])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "qk_norm", "hadamard"),
    [(64, 8, 128, "before_rope", False), (8, 1, 128, "before_rope", True), (5, 3, 64, "after_rope", False),
     (16, 2, 256, "none", True), (9, 9, 64, "after_rope", True)],
)  # fmt: skip
@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize("tokens", [1, 33, 64, 200])
def test_against_float64(
    tokens: int, means: bool, q_heads: int, kv_heads: int, dim: int, qk_norm: QkNorm, hadamard: bool, q_kind: str,
    pages_dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(tokens)
    device, eps, pages = "cuda", 1e-5, 8
    storage = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim + 8, device=device).to(BF16)
    qkv = storage[:, :-8]
    frequencies = 11158840.0 ** -(torch.arange(0, dim, 2, device=device) / dim)
    positions = torch.randint(0, LAST, (tokens,), device=device, dtype=torch.int32)
    positions[-1] = LAST
    # The table's own angles: fp32 products, as the model defines them.
    angles = (positions.float()[:, None] * frequencies[None, :]).double()
    rows = torch.cat((positions.long(), torch.tensor([0, LAST], device=device)))
    table = torch.full((LAST + 1, dim), float("nan"), device=device)
    table[rows] = torch.cat(((a := rows.float()[:, None] * frequencies).cos(), a.sin()), -1)
    slots = torch.randperm(pages * 64, device=device)[:tokens].int()
    slots[tokens // 2] = slots[tokens // 2] if tokens == 1 else -1
    poison = torch.full((pages * kv_heads * 64 * dim,), 0x7F, dtype=torch.uint8, device=device)
    k_pages, v_pages = (
        (poison.clone().view(E4M3) if pages_dtype == E4M3 else torch.full_like(poison, 0, dtype=BF16) + 7.0).view(shape)
        for shape in ((pages, kv_heads, 64, dim), (pages, kv_heads, dim, 64))
    )
    before = k_pages.view(torch.uint8).clone(), v_pages.view(torch.uint8).clone()
    scales = torch.rand(kv_heads, device=device) * 0.02 + 0.01 if pages_dtype == E4M3 else None
    weights = [torch.rand(dim, device=device).to(BF16) + 0.5 for _ in range(2)]
    arguments: dict[str, Any] = {"qk_norm": qk_norm, "eps": eps, "k_scale": scales, "v_scale": scales}
    if qk_norm != "none":
        arguments |= {"q_norm_weight": weights[0], "k_norm_weight": weights[1]}
    if means:
        arguments["k_mean"] = torch.randn(kv_heads, dim, device=device)

    q_in, k_in, v_in = qkv.reshape(tokens, -1, dim).split([q_heads, kv_heads, kv_heads], 1)
    expected_q = turned(q_in, weights[0], qk_norm, eps, angles, hadamard)
    if q_kind == "plain":
        q = qkv_post(qkv, table, positions, slots, k_pages, v_pages, hadamard=hadamard, **arguments)
        assert error(q, expected_q) < ROUNDING[BF16]
    else:
        q_scale = torch.tensor([0.02], device=device) if q_kind == "static" else None
        q, q_scales = qkv_post_fp8(
            qkv, table, positions, slots, k_pages, v_pages, hadamard=hadamard, q_scale=q_scale, **arguments
        )
        assert error(q.double() * q_scales.double()[..., None], expected_q) < ROUNDING[E4M3]
        expected_scales = (
            expected_q.abs().amax(-1) / 448 if q_scale is None else torch.full_like(q_scales, 0.02).double()
        )
        torch.testing.assert_close(q_scales.double(), expected_scales, rtol=1e-5, atol=0)

    stored = slots >= 0
    page, offset = slots[stored].long() // 64, slots[stored].long() % 64
    factor = 1.0 if scales is None else scales.double()[:, None]
    expected_k = turned(k_in, weights[1], qk_norm, eps, angles, hadamard)
    if means:
        expected_k -= arguments["k_mean"].double()
    if scales is not None:  # keys without a mean that is not theirs can leave the range
        expected_k = expected_k.clamp(-448 * factor, 448 * factor)
    assert error(k_pages[page, :, offset].double() * factor, expected_k[stored]) < ROUNDING[pages_dtype]
    assert error(v_pages[page, :, :, offset].double() * factor, v_in.double()[stored]) < ROUNDING[pages_dtype]
    untouched = torch.ones(pages, 64, dtype=torch.bool, device=device)
    untouched[page, offset] = False
    for found, old, order in (
        (k_pages, before[0], (0, 2, 1, 3)),
        (v_pages, before[1], (0, 3, 1, 2)),
    ):
        if pages_dtype == E4M3:
            assert torch.equal(found.view(torch.uint8).permute(order)[untouched], old.permute(order)[untouched])
        else:
            assert (found.permute(order)[untouched] == 7).all()


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("qk_norm", ["before_rope", "after_rope"])
@pytest.mark.parametrize("tokens", [3, 200])
def test_eps_decides_for_small_heads(tokens: int, qk_norm: QkNorm, eps: float) -> None:
    """The mean square of a head is 1e-6, so that one eps or the other is a factor of two in q and k."""
    torch.manual_seed(tokens)
    qkv = (1e-3 * torch.randn(tokens, 80 * 128, device="cuda")).to(BF16)
    frequencies = 11158840.0 ** -(torch.arange(0, 128, 2, device="cuda") / 128)
    places = torch.arange(tokens, device="cuda").int()
    angles = (places.float()[:, None] * frequencies).double()
    k_pages = torch.zeros(4, 8, 64, 128, device="cuda", dtype=BF16)
    v_pages = torch.zeros(4, 8, 128, 64, device="cuda", dtype=BF16)
    weights = [torch.rand(128, device="cuda").to(BF16) + 0.5 for _ in range(2)]
    norms: dict[str, Any] = {"q_norm_weight": weights[0], "k_norm_weight": weights[1], "qk_norm": qk_norm, "eps": eps}
    q = qkv_post(qkv, rope_table(frequencies, tokens), places, places, k_pages, v_pages, **norms)
    q_in, k_in, _ = qkv.view(tokens, -1, 128).split([64, 8, 8], 1)
    assert error(q, turned(q_in, weights[0], qk_norm, eps, angles, False)) < ROUNDING[BF16]
    stored = k_pages[places.long() // 64, :, places.long() % 64]
    assert error(stored, turned(k_in, weights[1], qk_norm, eps, angles, False)) < ROUNDING[BF16]


def test_rope_table_reaches_the_last_position() -> None:
    frequencies = (11158840.0 ** -(torch.arange(0, 128, 2) / 128)).cuda()
    table = rope_table(frequencies, LAST + 1)
    qkv = torch.randn(1, 3 * 128, device="cuda")
    pages = torch.zeros(1, 1, 64, 128, device="cuda"), torch.zeros(1, 1, 128, 64, device="cuda")
    position, slot = torch.tensor([LAST], device="cuda").int(), torch.tensor([63], device="cuda").int()
    q = qkv_post(qkv, table, position, slot, *pages)
    angles = (position.float()[:, None] * frequencies).double()
    assert error(q, turned(qkv[:, None, :128], frequencies, "none", 0.0, angles, False)) < ROUNDING[torch.float32]
    assert torch.equal(pages[1][0, 0, :, 63], qkv[0, 256:])


def test_overlap_gives_the_same_in_a_graph() -> None:
    qkv = torch.randn(300, 80 * 128, device="cuda").to(BF16)
    table = torch.randn(400, 128, device="cuda")
    positions = torch.arange(300, device="cuda").int()
    k_pages = torch.zeros(6, 8, 64, 128, device="cuda", dtype=BF16)
    v_pages = torch.zeros(6, 8, 128, 64, device="cuda", dtype=BF16)
    expected = qkv_post(qkv, table, positions, positions, k_pages, v_pages)
    result = torch.empty_like(expected)
    source = torch.zeros_like(qkv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            source.copy_(qkv)
            result.copy_(qkv_post(source, table, positions, positions, k_pages, v_pages, overlap=True))
            source.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, expected)
