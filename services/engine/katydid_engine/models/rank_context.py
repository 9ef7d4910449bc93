"""What every part of a model on one rank is built with: its plan, its groups, and the memory that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from katydid_engine.collectives import Collectives
from katydid_engine.layers.expert_share import ExpertShare
from katydid_engine.layers.few_rows_exchange import FewRowPeers
from katydid_engine.layers.part_exchange import RowCopies
from katydid_engine.layers.peer_exchange import RowPeers
from katydid_engine.layers.rows_to_all import RowsToAll
from katydid_engine.model_config import ModelConfig
from katydid_engine.models.pipeline import Stage
from katydid_engine.parallel import ParallelPlan

__all__ = ["HALVED_FROM", "RankContext", "RankPeers", "dispatches"]


class RankPeers(RowPeers, FewRowPeers, Protocol):
    """The memory of a TP group's GPUs."""


# Halves of fewer tokens would cost more, for every expert's weights are read twice, than their transfers.
HALVED_FROM = 8192


@dataclass(frozen=True, slots=True)
class RankContext:
    """What every part of a model on this rank is built with.

    Attributes:
        collectives: the TP group.
        experts: the ranks that hold whole experts between them; a group of one where experts are cut by column.
        kv_dtype: of the pages.
        micro_batches: parts that a batch is cut into so that one computes while another's rows are under way, or so
            that pipeline stages work at the same time.
        peers: what sums few rows, or sends rows of a split residual, where all ranks are GPUs of one host.
        copies: likewise what sends rows of a part of a chunk while another part is computed.
        halved_from: tokens of a pass from which a split residual's are computed in two parts, with micro-batches.
        expert_peers: what brings few rows to all ranks that hold experts, where those are GPUs of one host.
    """

    config: ModelConfig
    plan: ParallelPlan
    collectives: Collectives
    experts: Collectives
    stage: Stage
    kv_dtype: torch.dtype
    micro_batches: int = 1
    peers: RankPeers | None = None
    copies: RowCopies | None = None
    halved_from: int = HALVED_FROM
    expert_peers: FewRowPeers | None = None

    @property
    def dispatches(self) -> bool:
        """As the function has it."""
        return dispatches(self.config, self.plan)

    @property
    def rows_to_all(self) -> RowsToAll | None:
        """How few rows go to all ranks that hold experts; None where they do not."""
        if self.expert_peers is None:
            return None
        return RowsToAll(self.expert_peers, self.experts.rank, self.experts.size)

    def expert_share(self, num_experts: int) -> ExpertShare:
        if self.plan.ep == 1:
            return ExpertShare.of_columns(num_experts, self.collectives.rank, self.collectives.size)
        return ExpertShare.of_whole(num_experts, self.experts, self.plan.redundant_experts)


def dispatches(config: ModelConfig, plan: ParallelPlan) -> bool:
    """Whether rows are sent to the ranks of their experts, each to those that it needs. Where that is most of them
    rows go to all ranks of the TP group instead, in the exchange that there is anyway."""
    moe = config.moe
    if moe is None or not plan.dispatches:
        return False
    gathers = plan.ep == plan.tp and plan.ep <= moe.top_k and not plan.redundant_experts
    return not gathers or moe.shared_intermediate_size % plan.tp > 0
