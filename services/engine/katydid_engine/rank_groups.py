"""The groups that a rank of a plan computes in, made once when all ranks have found each other."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from katydid_engine.collectives import Collectives, SingleRank, TorchCollectives
from katydid_engine.models.pipeline import Stage, TorchLink
from katydid_engine.parallel import ParallelPlan

__all__ = ["RankGroups", "join_groups"]

_ALONE = SingleRank()
_ONLY_STAGE = Stage()


@dataclass(frozen=True, slots=True)
class RankGroups:
    """One rank's groups.

    Attributes:
        tensor: ranks that share every layer.
        experts: ranks that hold whole experts between them; a group of one where experts are cut by column.
        step: ranks that must forward together, on the CPU; a group of one where only a TP group does.
        movers: as ``experts``, for weights that move while requests are computed.
        stage: of the pipeline.
    """

    tensor: Collectives = _ALONE
    experts: Collectives = _ALONE
    step: Collectives = _ALONE
    movers: Collectives = _ALONE
    stage: Stage = _ONLY_STAGE


def join_groups(plan: ParallelPlan, rank: int, *, timeout_s: float) -> RankGroups:
    """Every rank of ``plan`` calls it after ``init_process_group``.

    Args:
        timeout_s: how long a rank waits for another before the group has failed.
    """
    timeout = timedelta(seconds=timeout_s)
    place = plan.place(rank)

    def number(tp: int, dp: int, pp: int) -> int:
        return (pp * plan.dp + dp) * plan.tp + tp

    def group_of(sets: list[list[int]], backend: str | None = None) -> Collectives:
        """Every rank makes all groups, in the same order."""
        ours: Collectives = SingleRank()
        for ranks in sets:
            if len(ranks) > 1:
                group = dist.new_group(ranks, timeout=timeout, backend=backend)
                if rank in ranks:
                    ours = TorchCollectives(group)
        return ours

    lines = [[number(tp, dp, pp) for tp in range(plan.tp)] for pp in range(plan.pp) for dp in range(plan.dp)]
    stages = [[number(tp, dp, pp) for dp in range(plan.dp) for tp in range(plan.tp)] for pp in range(plan.pp)]
    tensor = group_of(lines)
    experts: Collectives = SingleRank()
    if plan.ep > 1:
        experts = tensor if plan.ep == plan.tp else group_of(stages)
    link: TorchLink | None = None
    if plan.pp > 1:
        for tp, dp in itertools.product(range(plan.tp), range(plan.dp)):
            pipeline = [number(tp, dp, stage) for stage in range(plan.pp)]
            group = dist.new_group(pipeline, timeout=timeout)
            if rank in pipeline:
                link = TorchLink(pipeline, group)
    moves = plan.redundant_experts > 0
    sets = stages if plan.ep == plan.tp * plan.dp else lines
    return RankGroups(
        tensor,
        experts,
        group_of(stages, "gloo") if plan.shares_experts or moves else SingleRank(),
        group_of(sets) if moves else SingleRank(),
        Stage(place.pp, plan.pp, link),
    )
