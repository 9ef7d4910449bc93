from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from katydid_kernels import QkNorm, qkv_post, rope, rope_table
from torch import Tensor

TOKENS, Q_HEADS, KV_HEADS, DIM, EPS = 9, 4, 2, 8, 1e-5
TABLE = rope_table(torch.tensor([1.0, 0.5, 0.1, 0.01]), 300)
POSITIONS = torch.tensor([0, 1, 2, 100, 101, 250, 3, 4, 299], dtype=torch.int32)
SLOTS = torch.tensor([0, 1, 2, 64 * 3 + 36, 64 * 3 + 37, 64 * 4 + 63, -1, 64, -1], dtype=torch.int32)


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


def test_pages_of_fp8_are_scaled_and_saturate(case: dict[str, Tensor]) -> None:
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
