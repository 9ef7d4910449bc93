"""The plan that sorts routed pairs by expert, against the one torch makes, in the interpreter where there is no GPU."""

import pytest
import torch
from katydid_kernels.gemm.plan import SINGLE_LAUNCH_PAIRS, RoutePlan, max_tiles, plan_routes, plan_routes_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(ids: torch.Tensor, experts: int, tile_rows: int, first_expert: int = 0, repeats: int = 2) -> RoutePlan:
    tokens, top_k = ids.shape
    plan = RoutePlan.allocate(tokens + 3, top_k, experts, DEVICE)
    reference = plan_routes_reference(ids, experts, tile_rows, first_expert=first_expert)
    for _ in range(repeats):  # the second call finds the scratch as the first left it
        plan.slots.fill_(-7)
        plan_routes(ids, plan, experts, tile_rows, first_expert=first_expert)
        slots_of = plan.slots[:tokens]
        count = int(plan.tile_count)
        assert count == int(reference.tile_count)
        assert torch.equal(plan.tiles[:count], reference.tiles)
        assert torch.equal(slots_of < 0, reference.slots < 0)
        local = slots_of >= 0
        slots = slots_of[local].long()
        assert torch.equal(slots.sort().values, torch.arange(len(reference.rows), device=DEVICE))
        token = torch.arange(tokens, device=DEVICE)[:, None].expand(tokens, top_k)
        assert torch.equal(plan.rows[slots].long(), token[local])
        expert_of_row = torch.repeat_interleave(
            torch.arange(experts, device=DEVICE), torch.bincount(ids[local].long() - first_expert, minlength=experts)
        )
        assert torch.equal(expert_of_row[slots], ids[local].long() - first_expert)
    return plan


def routes(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    return torch.rand(tokens, experts).topk(top_k, 1).indices.int().to(DEVICE)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(1, 8, 192), (37, 8, 192), (5, 1, 257), (64, 2, 5), (3, 8, 128)]
)
@pytest.mark.parametrize("tile_rows", [8, 128])
def test_matches_torch(tokens: int, top_k: int, experts: int, tile_rows: int) -> None:
    check(routes(tokens, top_k, experts), experts, tile_rows)


@pytest.mark.parametrize(("experts", "first", "count"), [(24, 0, 24), (257, 0, 257), (64, 16, 32)])
def test_many_pairs_take_the_two_launch_way(experts: int, first: int, count: int) -> None:
    tokens = SINGLE_LAUNCH_PAIRS // 8 + 131
    check(routes(tokens, 8, experts), count, 64, first_expert=first)


def test_an_expert_that_every_token_goes_to() -> None:
    tokens = SINGLE_LAUNCH_PAIRS // 4 + 3
    shared = torch.full((tokens, 1), 24, dtype=torch.int32, device=DEVICE)
    check(torch.cat((routes(tokens, 4, 24), shared), dim=1), 25, 64)


def test_experts_of_other_ranks_are_skipped() -> None:
    check(routes(41, 8, 64), 16, 16, first_expert=24)


@pytest.mark.parametrize("ids", [[[0]] * 50, [[63], [63], [0]], [[-1], [64], [5]]])
def test_one_expert_last_expert_and_ids_outside(ids: list[list[int]]) -> None:
    check(torch.tensor(ids, dtype=torch.int32, device=DEVICE), 64, 16)


def test_no_local_pair() -> None:
    plan = check(torch.full((4, 2), 9, dtype=torch.int32, device=DEVICE), 8, 16)
    assert int(plan.tile_count) == 0


@pytest.mark.parametrize("tile_rows", [8, 16, 128])
def test_max_tiles_holds_for_the_worst_split(tile_rows: int) -> None:
    for pairs in (1, 7, 200, 1000):
        for experts in (1, 5, 192):
            hit = min(pairs, experts)
            # One row each, and the rest on one expert: the most ragged tiles there can be.
            counts = [1] * (hit - 1) + [pairs - hit + 1]
            assert sum(-(-c // tile_rows) for c in counts) <= max_tiles(pairs, experts, tile_rows)
