"""qkv_post by both ways, torch and the kernel (in the interpreter where there is no GPU), against separate steps.

The interpreter does not round to e4m3 as the GPU does; there the kernel writes q as fp16: everything but the rounding.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from katydid_kernels import QkNorm, qkv_post, qkv_post_fp8, rope, rope_table
from torch import Tensor

# The package names its ops' functions, which hide the folders of the same names from a plain import statement.
op = importlib.import_module("katydid_kernels.qkv_post.op")
CUDA = torch.cuda.is_available()
TOKENS, Q_HEADS, KV_HEADS, DIM, EPS = 9, 6, 2, 8, 1e-5
TABLE = rope_table(torch.tensor([1.0, 0.5, 0.1, 0.01]), 300)
POSITIONS = torch.tensor([0, 1, 2, 100, 101, 250, 3, 4, 299], dtype=torch.int32)
SLOTS = torch.tensor([0, 1, 2, 64 * 3 + 36, 64 * 3 + 37, 64 * 4 + 63, -1, 64, -1], dtype=torch.int32)


@pytest.fixture(params=["torch", "kernel", "kernel of many tokens"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of both runs: "torch" or "kernel"."""
    if request.param == "torch":
        monkeypatch.setattr(op, "_has_kernel", lambda qkv: False)
        return "torch"
    if CUDA:
        pytest.skip("test_qkv_post_gpu.py has it")
    monkeypatch.setattr(op, "_has_kernel", lambda qkv: True)
    monkeypatch.setattr(op, "_E4M3", torch.float16)
    if request.param == "kernel of many tokens":
        monkeypatch.setattr(op, "FEW_TOKENS", 0)
    return "kernel"


@pytest.fixture
def pages() -> tuple[Tensor, Tensor]:
    return torch.full((5, KV_HEADS, 64, DIM), 7.0), torch.full((5, KV_HEADS, DIM, 64), 7.0)


@pytest.fixture(scope="module")
def case() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "qkv": torch.randn(TOKENS, (Q_HEADS + 2 * KV_HEADS) * DIM),
        "q_norm_weight": torch.rand(DIM) + 0.5,
        "k_norm_weight": torch.rand(DIM) + 0.5,
    }


def expected_heads(x: Tensor, weight: Tensor, qk_norm: QkNorm) -> Tensor:
    if qk_norm == "before_rope":
        return rope(F.rms_norm(x, (DIM,), weight, EPS), TABLE, POSITIONS)
    if qk_norm == "after_rope":
        return F.rms_norm(rope(x, TABLE, POSITIONS), (DIM,), weight, EPS)
    return rope(x, TABLE, POSITIONS)


@pytest.mark.parametrize("qk_norm", ["none", "before_rope", "after_rope"])
def test_against_the_separate_steps(case: dict[str, Tensor], pages: tuple[Tensor, Tensor], qk_norm: QkNorm) -> None:
    k_pages, v_pages = pages
    norms: dict[str, Any] = {} if qk_norm == "none" else {k: v for k, v in case.items() if k != "qkv"}
    q = qkv_post(case["qkv"], TABLE, POSITIONS, SLOTS, k_pages, v_pages, qk_norm=qk_norm, eps=EPS, **norms)
    q_in, k_in, v_in = case["qkv"].view(TOKENS, -1, DIM).split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
    torch.testing.assert_close(q, expected_heads(q_in, case["q_norm_weight"], qk_norm))
    k = expected_heads(k_in, case["k_norm_weight"], qk_norm)
    written = torch.zeros(5, 64, dtype=torch.bool)
    for token, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, 64)
            written[page, offset] = True
            torch.testing.assert_close(k_pages[page, :, offset], k[token])
            assert torch.equal(v_pages[page, :, :, offset], v_in[token])
    # Every other slot, negative ones' neighbours included, is as it was.
    assert (k_pages.transpose(1, 2)[~written] == 7).all()
    assert (v_pages.permute(0, 3, 1, 2)[~written] == 7).all()


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_eps_decides_for_small_heads(case: dict[str, Tensor], pages: tuple[Tensor, Tensor], eps: float) -> None:
    """The mean square of a head is about 1e-6, so that one eps or the other is a factor of two."""
    small = case | {"qkv": 1e-3 * case["qkv"]}
    norms = {name: value for name, value in small.items() if name != "qkv"}
    q = qkv_post(small["qkv"], TABLE, POSITIONS, SLOTS, *pages, qk_norm="before_rope", eps=eps, **norms)
    heads = small["qkv"].view(TOKENS, -1, DIM)[:, :Q_HEADS].double()
    normed = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt() * small["q_norm_weight"].double()
    torch.testing.assert_close(q.double(), rope(normed.float(), TABLE, POSITIONS).double(), rtol=1e-4, atol=1e-5)


def hadamard_matrix(size: int) -> Tensor:
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]) * size**-0.5


@pytest.mark.parametrize("qk_norm", ["none", "before_rope", "after_rope"])
def test_hadamard_turns_q_and_k_last(case: dict[str, Tensor], pages: tuple[Tensor, Tensor], qk_norm: QkNorm) -> None:
    k_pages, v_pages = pages
    norms: dict[str, Any] = {} if qk_norm == "none" else {k: v for k, v in case.items() if k != "qkv"}
    q = qkv_post(
        case["qkv"], TABLE, POSITIONS, SLOTS, k_pages, v_pages, qk_norm=qk_norm, eps=EPS, hadamard=True, **norms
    )
    q_in, k_in, _ = case["qkv"].view(TOKENS, -1, DIM).split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
    matrix = hadamard_matrix(DIM)
    torch.testing.assert_close(q, expected_heads(q_in, case["q_norm_weight"], qk_norm) @ matrix)
    k = expected_heads(k_in, case["k_norm_weight"], qk_norm) @ matrix
    torch.testing.assert_close(k_pages[0, :, 2], k[2])


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("qk_norm", ["none", "before_rope", "after_rope"])
def test_means_are_taken_off_keys_alone(
    case: dict[str, Tensor], pages: tuple[Tensor, Tensor], qk_norm: QkNorm, hadamard: bool
) -> None:
    """Behind RoPE and rotation, in front of the scale; q and V are as without."""
    torch.manual_seed(1)
    mean, scale = torch.randn(KV_HEADS, DIM), torch.tensor([0.5, 0.25])
    norms: dict[str, Any] = {} if qk_norm == "none" else {k: v for k, v in case.items() if k != "qkv"}
    arguments: dict[str, Any] = {"qk_norm": qk_norm, "eps": EPS, "hadamard": hadamard, "k_scale": scale} | norms
    plain = [page.clone() for page in pages]
    expected_q = qkv_post(case["qkv"], TABLE, POSITIONS, SLOTS, *plain, v_scale=scale, **arguments)
    q = qkv_post(case["qkv"], TABLE, POSITIONS, SLOTS, *pages, v_scale=scale, k_mean=mean, **arguments)
    assert torch.equal(q, expected_q)
    assert torch.equal(pages[1], plain[1])
    k_in = case["qkv"].view(TOKENS, -1, DIM)[:, Q_HEADS : Q_HEADS + KV_HEADS]
    k = expected_heads(k_in, case["k_norm_weight"], qk_norm).double()
    k = (k @ hadamard_matrix(DIM).double() if hadamard else k) - mean.double()
    for token, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            stored = pages[0][slot // 64, :, slot % 64].double() * scale.double()[:, None]
            torch.testing.assert_close(stored, k[token], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("static", [False, True])
def test_q_in_e4m3(case: dict[str, Tensor], pages: tuple[Tensor, Tensor], static: bool, way: str) -> None:
    norms = {name: value for name, value in case.items() if name != "qkv"}
    arguments: dict[str, Any] = {"qk_norm": "before_rope", "eps": EPS, **norms}
    plain = qkv_post(case["qkv"], TABLE, POSITIONS, SLOTS, *pages, **arguments)
    q, scales = qkv_post_fp8(
        case["qkv"], TABLE, POSITIONS, SLOTS, *pages, q_scale=torch.tensor([0.01]) if static else None, **arguments
    )
    assert scales.shape == (TOKENS, Q_HEADS)
    torch.testing.assert_close(scales, torch.full_like(scales, 0.01) if static else plain.abs().amax(-1) / 448)
    assert q.dtype == (torch.float16 if way == "kernel" else torch.float8_e4m3fn)
    # fp16 keeps 10 bits, e4m3 three, and nine steps below the largest value of a row.
    rtol = 2**-10 if way == "kernel" else 2**-4
    torch.testing.assert_close(
        q.float() * scales.unsqueeze(-1), plain, rtol=rtol, atol=1e-5 if way == "kernel" else 2e-5
    )


def test_shapes_that_do_not_fit(case: dict[str, Tensor], pages: tuple[Tensor, Tensor]) -> None:
    k_pages, v_pages = pages
    with pytest.raises(ValueError, match="v_pages must be k_pages' shape"):
        qkv_post(case["qkv"], TABLE, POSITIONS, SLOTS, k_pages, k_pages)
    with pytest.raises(ValueError, match="rows of q, k and v heads of 8, with 2 k and v heads, got 79"):
        qkv_post(case["qkv"][:, :79], TABLE, POSITIONS, SLOTS, k_pages, v_pages)
    with pytest.raises(ValueError, match=r"k_mean must be fp32 \[2, 8\], got float32 \[8\]"):
        qkv_post(case["qkv"], TABLE, POSITIONS, SLOTS, k_pages, v_pages, k_mean=torch.zeros(8))
    with pytest.raises(ValueError, match="the table's width 4"):
        qkv_post(case["qkv"], TABLE[:, :4], POSITIONS, SLOTS, k_pages, v_pages)


def test_no_tokens(pages: tuple[Tensor, Tensor]) -> None:
    none = torch.empty(0, dtype=torch.int32)
    assert qkv_post(torch.empty(0, 80), TABLE, none, none, *pages).shape == (0, 6, 8)


def test_pages_of_fp8_are_scaled_and_saturate(case: dict[str, Tensor], way: str) -> None:
    if way == "kernel":
        pytest.skip("the interpreter rounds to e4m3 in its own way")
    k_pages = torch.zeros(5, KV_HEADS, 64, DIM, dtype=torch.float8_e4m3fn)
    v_pages = torch.zeros(5, KV_HEADS, DIM, 64, dtype=torch.float8_e4m3fn)
    scales = torch.tensor([0.5, 1e-4])
    qkv_post(case["qkv"], TABLE, POSITIONS, SLOTS, k_pages, v_pages, k_scale=scales, v_scale=scales)
    v_in = case["qkv"].view(TOKENS, -1, DIM)[0, -KV_HEADS:]
    stored = v_pages[0, :, :, 0].float()
    torch.testing.assert_close(stored[0], v_in[0] / 0.5, rtol=2**-4, atol=2**-9)  # e4m3 keeps 3 bits
    assert torch.equal(stored[1], 448.0 * v_in[1].sign())


def test_norm_weights_come_with_a_norm(case: dict[str, Tensor], pages: tuple[Tensor, Tensor]) -> None:
    weight = case["q_norm_weight"]
    for arguments in ({"qk_norm": "before_rope"}, {"q_norm_weight": weight, "k_norm_weight": weight}):
        with pytest.raises(ValueError, match="expected both norm weights exactly when it is not 'none'"):
            qkv_post(case["qkv"], TABLE, POSITIONS, SLOTS, *pages, **arguments)
