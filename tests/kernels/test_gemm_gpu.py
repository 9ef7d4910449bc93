"""The Gluon GEMM kernels on the GPU against float64: odd shapes, poisoned outputs, empty and crowded experts."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from katydid_kernels import fused_moe  # noqa: E402
from katydid_kernels.gemm.checking import (  # noqa: E402
    E4M3,
    block_operands,
    check_block_experts,
    check_experts,
    check_gemm,
    relative_error,
)
from katydid_kernels.gemm.dense import gemm, gemm_reference  # noqa: E402
from katydid_kernels.gemm.tuning import DecodeTile, FewTile, NarrowTile, UpTile, WideTile, wide_tile  # noqa: E402

from tests.kernels.e4m3_draws import assert_error  # noqa: E402

BF16 = torch.bfloat16
# The result is rounded to bf16 (2^-9 relative, uniform: 1.7e-3 in norm). The tensor cores' short accumulator adds up to
# 3e-3 more at K = 12288 where it is not promoted.
ROUNDING = 2.2e-3
SHORT_ACCUMULATOR = 5e-3
FEW_RESULTS = 4e-3  # half a unit in the last place: what one result may err
WIDE = [WideTile(64, 256, 64, 2, 4, 8), WideTile(64, 128, 64, 1, 5, 8, 3), WideTile(64, 128, 64, 2, 6, 8)]
SHAPES = [
    (128, 256, 128),
    (1, 8, 16),
    (37, 264, 96),
    (300, 520, 1040),
    (1000, 1000, 4096),
    (2049, 4104, 512),
    (513, 392, 12288),
]


@pytest.mark.parametrize("tile", WIDE, ids=str)
@pytest.mark.parametrize(("dtype", "promote"), [(BF16, False), (E4M3, False), (E4M3, True)], ids=str)
def test_wide(tile: WideTile, dtype: torch.dtype, promote: bool) -> None:
    bound = SHORT_ACCUMULATOR if dtype == E4M3 and not promote else ROUNDING
    for shape in SHAPES:
        error = check_gemm(shape, dtype, tile, promote=promote, hooks=False)
        assert error < (bound if shape[0] * shape[1] > 1000 else max(bound, FEW_RESULTS)), shape
    assert check_gemm((333, 520, 1024), dtype, tile, promote=promote, hooks=True) < bound


@pytest.mark.parametrize(
    "shape", [(1, 128, 128), (300, 520, 1024), (37, 96, 4096), (2049, 4104, 512), (513, 392, 12288)]
)
def test_scales_of_blocks(shape: tuple[int, int, int]) -> None:
    tile = wide_tile(*shape[:2], promote=True, blocks=True)
    assert check_gemm(shape, E4M3, tile, promote=True, hooks=False, blocks=True) < ROUNDING


@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_narrow(tokens: int, warpgroups: int, dtype: torch.dtype) -> None:
    tile = NarrowTile(tokens, warpgroups, 7)
    for m, n, k in [(1, 8, 64), (5, 264, 112), (tokens, 1000, 1040), (3, 10240, 4096), (tokens - 1, 4104, 8192)]:
        bound = ROUNDING if m * n > 1000 else FEW_RESULTS
        assert check_gemm((m, n, k), dtype, tile, promote=dtype == E4M3, hooks=True) < bound, (m, n, k)


def test_gemm_is_the_same_every_time() -> None:
    for m in (3, 700):
        a, b = torch.randn(m, 4096, device="cuda").to(E4M3), torch.randn(1280, 4096, device="cuda").to(E4M3)
        first = gemm(a, b)
        assert all(torch.equal(first, gemm(a, b)) for _ in range(5))


def test_gemm_takes_what_the_copy_engine_cannot() -> None:
    storage = torch.randn(65, 300, device="cuda").bfloat16()
    a, b = storage[:, 1:130], torch.randn(77, 129, device="cuda").bfloat16()
    assert relative_error(gemm(a, b), gemm_reference(a, b).double()) < ROUNDING


# In fp8 h is rounded to e4m3 before the second product on both sides, where a tie can fall either way, by an eighth of
# its largest element: hence the wider bound. Tiles without promotion add the short accumulator's error, the more the
# fewer results there are. A wrong row or column makes an error near one.
EXPERTS = {BF16: 5e-3, E4M3: 1.5e-2}
UNPROMOTED_EXPERTS = 3e-2
EXPERT_CASES = [
    ((5, 192, 37, 2, 0), 512),
    ((8, 384, 41, 8, 4), 4096),
    ((192, 192, 1, 8, 0), 4096),
    ((192, 192, 64, 8, 0), 4096),
    ((24, 1536, 300, 8, 8), 4096),
    ((128, 64, 9, 1, 0), 128),
    ((24, 192, 3, 8, 4), 4096),
    ((257, 192, 64, 1, 0), 1024),
    ((5, 320, 23, 3, 0), 384),
]


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize(("case", "hidden"), EXPERT_CASES)
def test_experts_decode(case: tuple[int, int, int, int, int], hidden: int, dtype: torch.dtype) -> None:
    for tokens, stages in ((8, 11), (16, 8), (64, 7)):
        tile = DecodeTile(tokens, 64, 2, stages, dtype == E4M3)
        assert_error(partial(check_experts, case, hidden, dtype, tile=tile), EXPERTS[dtype], case[2])


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize(("case", "hidden"), EXPERT_CASES)
def test_experts_of_few_tokens(case: tuple[int, int, int, int, int], hidden: int, dtype: torch.dtype) -> None:
    experts, width, tokens, top_k, first = case
    for count in {1, min(tokens, 5), min(tokens, 48)}:
        for tile in (FewTile(22, dtype == E4M3), FewTile(11, dtype == E4M3, ctas=2)):
            check = partial(check_experts, (experts, width, count, top_k, first), hidden, dtype, tile=tile)
            assert_error(check, EXPERTS[dtype], count)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize(("case", "hidden"), [c for c in EXPERT_CASES if c[1] % 256 == 0])
def test_experts_prefill(case: tuple[int, int, int, int, int], hidden: int, dtype: torch.dtype) -> None:
    promote = dtype == E4M3
    tiles = [UpTile(128, 64, 2, 6, promote, 216, 56)]
    if case[1] % 96 == 0:
        tiles = [UpTile(192, 64, 3, 4, False, 152, 56), UpTile(128, 64, 3, 5, promote, 152, 56)]
    for tile in tiles:
        bound = UNPROMOTED_EXPERTS if dtype == E4M3 and not tile.promote else EXPERTS[dtype]
        assert_error(partial(check_experts, case, hidden, dtype, tile=tile), bound, case[2])


@pytest.mark.parametrize(
    ("case", "hidden"),
    [
        ((24, 1536, 301, 8, 8), 4096),
        ((5, 256, 37, 2, 0), 512),
        ((128, 128, 1, 8, 0), 1024),
        ((128, 768, 64, 8, 0), 2048),
    ],
)
def test_experts_with_scales_of_blocks(case: tuple[int, int, int, int, int], hidden: int) -> None:
    assert_error(partial(check_block_experts, case, hidden), EXPERTS[E4M3], case[2])


def test_block_scales_through_the_op() -> None:
    from katydid_kernels.fused_moe import fused_moe_reference

    x, w13, w2, weights, ids, scales = block_operands((16, 256, 50, 4, 0), 512)
    expected = fused_moe_reference(x, w13, w2, weights, ids, first_expert=0, shared_output=None, scales=scales)
    assert relative_error(fused_moe(x, w13, w2, weights, ids, scales=scales), expected.double()) < EXPERTS[E4M3]


def test_every_token_to_one_expert() -> None:
    assert check_experts((192, 192, 1000, 8, 0), 4096, E4M3, crowd=True) < UNPROMOTED_EXPERTS
    assert check_experts((192, 192, 60, 8, 0), 4096, E4M3, crowd=True) < UNPROMOTED_EXPERTS


def test_tuned_tiles_over_sizes() -> None:
    for tokens in (1, 3, 4, 6, 33, 130, 300, 511, 1025, 20000):
        assert_error(partial(check_experts, (192, 192, tokens, 8, 0), 4096, E4M3), UNPROMOTED_EXPERTS, tokens)
    assert wide_tile(64, 128, promote=True).block_n == 128


def test_fused_moe_agrees_with_its_reference() -> None:
    from katydid_kernels.fused_moe import fused_moe_reference

    for tokens in (3, 700):
        x = torch.randn(tokens, 1024, device="cuda").bfloat16()
        w13 = torch.randn(16, 384, 1024, device="cuda").bfloat16() / 32
        w2 = torch.randn(16, 1024, 192, device="cuda").bfloat16() / 14
        ids = torch.rand(tokens, 16, device="cuda").topk(4).indices.int()
        weights = torch.rand(tokens, 4, device="cuda")
        expected = fused_moe_reference(x, w13, w2, weights, ids, first_expert=0, shared_output=None)
        assert relative_error(fused_moe(x, w13, w2, weights, ids), expected.double()) < 1e-2
