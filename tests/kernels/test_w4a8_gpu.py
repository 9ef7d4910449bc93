"""The W4A8 kernels on the GPU against float64: odd shapes, poisoned outputs, empty and crowded experts."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from katydid_kernels import (  # noqa: E402
    RouterWeight,
    fused_moe_w4a8,
    fused_moe_w4a8_reference,
    linear_w4a8,
    linear_w4a8_reference,
    quantize_fp8,
    router,
)
from katydid_kernels.fused_moe_w4a8 import pairs_to_place_w4a8  # noqa: E402
from katydid_kernels.gemm.checking import E4M3, ExpertCase, relative_error  # noqa: E402
from katydid_kernels.w4a8.checking import check_experts, check_linear, random_weight  # noqa: E402
from katydid_kernels.w4a8.plain import plain_w4a8  # noqa: E402
from katydid_kernels.w4a8.tuning import (  # noqa: E402
    DecodeTile,
    FewTile,
    GroupedTile,
    NarrowTile,
    grouped_tile,
    narrow_tile,
)

from tests.kernels.e4m3_draws import assert_error  # noqa: E402

# The result is rounded to bf16 (2^-9 relative, uniform: 1.7e-3 in norm).
ROUNDING = 2.2e-3
FEW_RESULTS = 4e-3  # half a unit in the last place: what one result may err
# h is rounded to e4m3 before the second product on both sides, where a tie can fall either way.
QUANTISED_HIDDEN = 1.5e-2


@pytest.mark.parametrize("tile", [narrow_tile(m) for m in (8, 16, 32, 64)], ids=str)
def test_narrow(tile: NarrowTile) -> None:
    for m, n, k in [
        (1, 8, 64),
        (5, 264, 112),
        (tile.tokens, 1000, 1040),
        (3, 10240, 4096),
        (tile.tokens - 1, 72, 8192),
    ]:
        bound = ROUNDING if m * n > 1000 else FEW_RESULTS
        assert check_linear((m, n, k), tile, hooks=True) < bound, (m, n, k)


@pytest.mark.parametrize("tile", [FewTile(4), FewTile(8), FewTile(16)], ids=str)
def test_few_rows(tile: FewTile) -> None:
    for m, n, k in [(1, 8, 64), (5, 264, 112), (3, 1000, 1040), (7, 1280, 192), (2, 4096, 1664), (8, 72, 4096)]:
        bound = ROUNDING if m * n > 1000 else FEW_RESULTS
        assert check_linear((m, n, k), tile, hooks=True) < bound, (m, n, k)


def test_many_rows() -> None:
    for shape in [(130, 264, 128), (700, 1000, 1024), (129, 4104, 4096)]:
        assert check_linear(shape, grouped_tile(), hooks=True) < ROUNDING, shape


EXPERT_CASES = [
    ((5, 192, 37, 2, 0), 512),
    ((16, 384, 41, 8, 4), 4096),
    ((192, 192, 64, 8, 0), 4096),
    ((24, 1536, 300, 8, 8), 4096),
    ((128, 64, 90, 1, 0), 384),
    ((257, 192, 64, 1, 0), 1024),
]


@pytest.mark.parametrize("tile", [DecodeTile(8, 11), DecodeTile(16, 10), DecodeTile(32, 8), DecodeTile(64, 6)], ids=str)
@pytest.mark.parametrize(("case", "hidden"), EXPERT_CASES)
def test_experts_decode(case: ExpertCase, hidden: int, tile: DecodeTile) -> None:
    assert_error(partial(check_experts, case, hidden, tile=tile), QUANTISED_HIDDEN, case[2])


@pytest.mark.parametrize("tile", [grouped_tile()], ids=str)
@pytest.mark.parametrize(("case", "hidden"), EXPERT_CASES)
def test_experts_grouped(case: ExpertCase, hidden: int, tile: GroupedTile) -> None:
    assert_error(partial(check_experts, case, hidden, tile=tile), QUANTISED_HIDDEN, case[2])


def test_few_tokens_without_a_plan() -> None:
    for tokens in (1, 2, 5, 6):
        assert_error(partial(check_experts, (192, 192, tokens, 8, 0), 4096), QUANTISED_HIDDEN, tokens)
    for case in ((16, 384, 5, 8, 4), (10, 192, 6, 5, 0), (24, 1536, 2, 8, 0), (128, 64, 9, 1, 0)):
        assert_error(partial(check_experts, case, 384), QUANTISED_HIDDEN, case[2])


def test_every_token_to_one_expert() -> None:
    assert check_experts((192, 192, 1000, 8, 0), 4096, crowd=True) < QUANTISED_HIDDEN
    assert check_experts((192, 192, 60, 8, 0), 4096, crowd=True) < QUANTISED_HIDDEN


def test_the_same_every_time() -> None:
    x, weight, one = torch.randn(3, 4096, device="cuda").to(E4M3), random_weight(1280, 4096), torch.ones(1).cuda()
    first = linear_w4a8(x, weight, one)
    assert all(torch.equal(first, linear_w4a8(x, weight, one)) for _ in range(5))


def test_public_forms_agree_with_their_references() -> None:
    one, h_scale = torch.ones(1, device="cuda"), torch.full((1,), 1 / 16, device="cuda")
    w13, w2 = random_weight(16, 384, 1024, gated=True), random_weight(16, 1024, 192)

    def experts_error(tokens: int) -> float:
        x = torch.randn(tokens, 1024, device="cuda").to(E4M3)
        ids, weights = torch.rand(tokens, 16, device="cuda").topk(4).indices.int(), torch.rand(tokens, 4, device="cuda")
        found = fused_moe_w4a8(x, w13, w2, weights, ids, one, h_scale)
        expected = fused_moe_w4a8_reference(x, w13, w2, weights, ids, one, h_scale)
        return relative_error(found, expected.double()) if tokens else float(found.numel())

    for tokens in (0, 3, 65, 700):
        assert_error(partial(experts_error, tokens), QUANTISED_HIDDEN, tokens)
        x = torch.randn(tokens, 1024, device="cuda").to(E4M3)
        dense = random_weight(200, 1024)
        expected = linear_w4a8_reference(x, dense, one).double()
        out = torch.empty(tokens, 200, device="cuda", dtype=torch.bfloat16)
        assert tokens == 0 or relative_error(linear_w4a8(x, dense, one), expected) < 2 * ROUNDING
        assert tokens == 0 or relative_error(plain_w4a8(x, dense, out), expected) < 2 * ROUNDING


@pytest.mark.parametrize("tokens", [4, 6, 16, 33, 64, 65])
@pytest.mark.parametrize(("first", "here"), [(0, 193), (48, 24)])
def test_a_plan_that_the_router_filled(tokens: int, first: int, here: int) -> None:
    """The very bytes that the experts' own plan gives; of the fewest pairs there is no plan to fill."""
    torch.manual_seed(tokens)
    hidden, width = 1024, 192
    gate = RouterWeight.prepare(torch.randn(192, hidden, device="cuda") / 32)
    w13, w2 = random_weight(here, 2 * width, hidden, gated=True), random_weight(here, hidden, width)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    rows, scale = quantize_fp8(x)
    placed = pairs_to_place_w4a8(tokens, 9, w2, first_expert=first)
    assert (placed is None) == (9 * tokens <= min(48, here) or 9 * tokens / here > 64)
    weights, ids = router(x, gate, top_k=8, scoring="sigmoid", shared=True, placed=placed)
    h_scale = torch.full((1,), 0.05, device="cuda")
    filled, own = (
        fused_moe_w4a8(rows, w13, w2, weights, ids, scale, h_scale, first_expert=first, placed=plan)
        for plan in (placed, None)
    )
    assert torch.equal(own, filled)
