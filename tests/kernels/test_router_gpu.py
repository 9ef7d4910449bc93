"""The router's kernels on the GPU against float64: odd sizes, equal logits, three terms, the same bits every time."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from katydid_kernels import RouterWeight, add_rms_norm_route, router  # noqa: E402
from katydid_kernels.gemm.plan import PlacedPairs, RoutePlan  # noqa: E402
from katydid_kernels.router.launch import Choice, Slices, launch_few, launch_many  # noqa: E402
from torch import Tensor  # noqa: E402

Scoring = Literal["sigmoid", "softmax"]
FEW_SLICES = {
    1: Slices(2, 1, 1), 2: Slices(4, 2, 2), 4: Slices(4, 4, 1, 64), 8: Slices(8, 2, 1, 32), 16: Slices(4, 1, 4, 8),
}  # fmt: skip
TOKENS = [1, 7, 8, 33, 64, 65, 130, 1000, 4097, 17000]


def oracle(x: Tensor, weight: Tensor, bias: Tensor | None, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Preferences and scores in float64."""
    logits = x.double() @ weight.double().T
    scores = torch.sigmoid(logits) if scoring == "sigmoid" else logits.softmax(1)
    return scores if bias is None else scores + bias.double(), scores


def assert_chosen(
    found: tuple[Tensor, Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, scoring: Scoring, renormalise: bool
) -> None:
    """Ids in order of float64's preference up to rounding, none twice, weights to rounding."""
    weights, ids = found
    top_k = ids.shape[1]
    assert not weights.isnan().any()
    assert ids.min() >= 0
    assert ids.max() < weight.shape[0]
    preference, scores = oracle(x, weight, bias, scoring)
    best = preference.topk(top_k).values
    assert (preference.gather(1, ids.long()) - best).abs().max() < 3e-6
    assert (ids.sort(1).values.diff(dim=1) > 0).all()
    expected = scores.gather(1, ids.long())
    if renormalise:
        expected = expected / expected.sum(1, keepdim=True)
    torch.testing.assert_close(weights.double(), 2.5 * expected, atol=1e-7, rtol=2e-5)


@pytest.mark.parametrize(
    ("experts", "hidden", "top_k", "scoring", "terms"),
    [(192, 4096, 8, "sigmoid", 2), (192, 4096, 8, "sigmoid", 3), (128, 2048, 8, "softmax", 2),
     (257, 960, 1, "sigmoid", 2), (5, 64, 5, "softmax", 2)],
)  # fmt: skip
def test_against_float64(experts: int, hidden: int, top_k: int, scoring: Scoring, terms: Literal[2, 3]) -> None:
    torch.manual_seed(experts)
    weight = torch.randn(experts, hidden, device="cuda") * hidden**-0.5
    prepared = RouterWeight.prepare(weight, terms=terms)
    bias = 0.1 * torch.randn(experts, device="cuda") if scoring == "sigmoid" else None
    for tokens in TOKENS:
        # A row stride that is not the width, and NaN where no row is.
        storage = torch.full((tokens + 1, hidden + 8), float("nan"), device="cuda", dtype=torch.bfloat16)
        x = storage[:tokens, :hidden]
        x.copy_(torch.randn(tokens, hidden, device="cuda"))
        for renormalise in (True, False) if experts == 5 else (True,):
            found = router(
                x, prepared, top_k=top_k, scoring=scoring, selection_bias=bias, renormalise=renormalise, scale=2.5
            )
            assert_chosen(found, x, weight, bias, scoring, renormalise)
            beside = router(
                x, prepared, top_k=top_k, scoring=scoring, selection_bias=bias, renormalise=renormalise, scale=2.5,
                shared=True,
            )  # fmt: skip
            assert torch.equal(beside[0][:, :top_k], found[0])
            assert torch.equal(beside[1][:, :top_k], found[1])
            assert (beside[0][:, top_k] == 1).all()
            assert (beside[1][:, top_k] == experts).all()


@pytest.mark.parametrize("slices", [1, 2, 4, 8, 16])
def test_any_slicing_of_k(slices: int) -> None:
    weight = torch.randn(257, 1024, device="cuda") * 0.03
    prepared = RouterWeight.prepare(weight)
    assert prepared.hopper is not None
    for launch, tokens in ((launch_few, 61), (launch_many, 333)):
        x = torch.randn(tokens, 1024, device="cuda").bfloat16()
        weights = torch.full((tokens, 8), float("nan"), device="cuda")
        ids = torch.full((tokens, 8), -1, device="cuda", dtype=torch.int32)
        choice = Choice(8, "sigmoid", None, True, 2.5, weights, ids)
        if launch is launch_few:
            launch_few(x, prepared.hopper, 257, choice, slices=FEW_SLICES[slices])
        else:
            launch_many(x, prepared.hopper, 257, choice, splits=slices)
        assert_chosen((weights, ids), x, weight, None, "sigmoid", True)
        assert (prepared.hopper.handover == -1).all()
        assert not prepared.hopper.counters.any()


@pytest.mark.parametrize("tokens", [1, 64, 300, 5000])
def test_equal_logits_go_to_the_lower_expert(tokens: int) -> None:
    weight = torch.randn(192, 512, device="cuda")
    weight[1::2] = weight[::2]
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    _, ids = router(x, RouterWeight.prepare(weight), top_k=8, scoring="sigmoid")
    assert (ids[:, ::2] % 2 == 0).all()
    assert torch.equal(ids[:, 1::2], ids[:, ::2] + 1)
    _, ids = router(x * 0, RouterWeight.prepare(weight), top_k=8, scoring="sigmoid")
    assert (ids == torch.arange(8, device="cuda")).all()


def test_the_same_bits_every_time_and_in_a_graph() -> None:
    prepared = RouterWeight.prepare(torch.randn(192, 4096, device="cuda") * 0.02)
    for tokens in (3, 64, 1024, 4096):
        x = torch.randn(tokens, 4096, device="cuda").bfloat16()
        first = router(x, prepared, top_k=8, scoring="sigmoid")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [router(x, prepared, top_k=8, scoring="sigmoid") for _ in range(3)]
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        for weights, ids in found:
            assert torch.equal(weights, first[0])
            assert torch.equal(ids, first[1])


def test_a_token_does_not_depend_on_its_batch() -> None:
    prepared = RouterWeight.prepare(torch.randn(192, 4096, device="cuda") * 0.02)
    x = torch.randn(64, 4096, device="cuda").bfloat16()
    whole = router(x, prepared, top_k=8, scoring="sigmoid")
    for count in (1, 9, 33):
        part = router(x[:count], prepared, top_k=8, scoring="sigmoid")
        assert torch.equal(part[0], whole[0][:count])
        assert torch.equal(part[1], whole[1][:count])


def test_nan_chooses_experts_that_exist() -> None:
    prepared = RouterWeight.prepare(torch.randn(192, 512, device="cuda"))
    for tokens in (2, 300):
        x = torch.randn(tokens, 512, device="cuda").bfloat16()
        x[1] = float("nan")
        _, ids = router(x, prepared, top_k=8, scoring="sigmoid")
        assert ids.min() >= 0
        assert ids.max() < 192


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", ["bf16", "fp8 a token", "fp8 static"])
def test_norm_and_router_in_one_launch(tokens: int, kind: str) -> None:
    torch.manual_seed(tokens)
    hidden, experts = 4096, 192
    storage = torch.full((2 * tokens, hidden + 8), float("nan"), device="cuda", dtype=torch.bfloat16)
    x, residual = storage[:tokens, :hidden], storage[tokens:, :hidden]
    x.copy_(torch.randn(tokens, hidden, device="cuda"))
    residual.copy_(torch.randn(tokens, hidden, device="cuda"))
    norm = (torch.rand(hidden, device="cuda") + 0.5).bfloat16()
    weight = RouterWeight.prepare(0.02 * torch.randn(experts, hidden, device="cuda"))
    bias = 0.1 * torch.randn(experts, device="cuda")
    scale = torch.tensor([0.01], device="cuda") if kind == "fp8 static" else None
    found = add_rms_norm_route(
        x, residual, norm, 1e-5, weight, top_k=8, scoring="sigmoid", selection_bias=bias, scale=2.5,
        fp8=kind != "bf16", fp8_scale=scale,
    )  # fmt: skip
    total = x + residual
    wide = total.double()
    y = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.double()
    assert torch.equal(found.total, total)
    # One step of bf16 where fp32 and float64 round to different sides.
    assert (found.y.double() - y).abs().max() <= (2.0**-8 * y.abs()).max()
    assert ((found.y.double() - y).norm() / y.norm()).item() < 2e-3
    assert_chosen((found.weights, found.ids), found.y, weight.weight, bias, "sigmoid", True)
    if kind == "bf16":
        assert found.q is None
        return
    assert found.q is not None
    assert found.q_scale is not None
    expected = found.y.float().abs().amax(-1) / 448 if scale is None else scale
    torch.testing.assert_close(found.q_scale, expected, rtol=2.0**-8, atol=0)
    back = found.q.float() * (found.q_scale[:, None] if scale is None else scale)
    clamped = found.y.float().clamp(-4.48, 4.48) if scale is not None else found.y.float()
    assert ((back - clamped).norm() / clamped.norm()).item() < 3.5e-2


@pytest.mark.parametrize("tokens", [8, 9, 17, 64, 100])
@pytest.mark.parametrize(("first", "here"), [(0, 193), (48, 24)])
def test_pairs_placed_by_the_router(tokens: int, first: int, here: int) -> None:
    """Every pair has a row of its expert's, tiles cover them, and counters are zero for the next launch."""
    torch.manual_seed(tokens)
    weight = RouterWeight.prepare(torch.randn(192, 4096, device="cuda") / 64)
    placed = PlacedPairs(RoutePlan.allocate(128, 9, here, "cuda"), here, 8, first)
    for _ in range(3):
        x = torch.randn(tokens, 4096, device="cuda").bfloat16()
        options = {"top_k": 8, "scoring": "sigmoid", "shared": True}
        _, ids = router(x, weight, placed=placed, **options)  # type: ignore[arg-type]
        assert torch.equal(ids, router(x, weight, **options)[1])  # type: ignore[arg-type]
        check_plan(placed, ids)


def check_plan(placed: PlacedPairs, ids: Tensor) -> None:
    plan, local = placed.plan, ids.flatten() - placed.first_expert
    valid = (local >= 0) & (local < placed.experts)
    slots = plan.slots.flatten()[: len(local)]
    assert (slots[~valid] == -1).all()
    count = int(valid.sum())
    assert slots[valid].sort().values.tolist() == list(range(count))
    owner = torch.empty(count, dtype=torch.int32, device="cuda")
    owner[slots[valid].long()] = local[valid]
    token = torch.arange(len(local), device="cuda") // ids.shape[1]
    assert torch.equal(plan.rows[slots[valid].long()].long(), token[valid])
    covered = []
    for expert, row, end, _ in plan.tiles[: int(plan.tile_count)].tolist():
        mine = list(range(row, min(end, row + placed.tile_rows)))
        assert owner[mine].tolist() == [expert] * len(mine)
        covered += mine
    assert sorted(covered) == list(range(count))
    counters = [*plan.scratch[: placed.experts].tolist(), int(plan.scratch[2 * placed.experts])]
    assert not any(counters)
