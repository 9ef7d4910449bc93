"""The sparse feed-forward block where each rank has rows of its own: they are sent to the ranks of their experts.

So it is with sequence parallelism (a rank has some tokens of every request) and with data-parallel attention (all
tokens of some requests). The shared expert is whole on every rank and computed while the rows are under way. Few rows
go to all ranks instead, where those are GPUs of one host.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from katydid_engine.layers.activations import Activations
from katydid_engine.layers.expert_exchange import ExpertExchange
from katydid_engine.layers.expert_loading import load_experts
from katydid_engine.layers.expert_share import ExpertShare
from katydid_engine.layers.expert_table import ExpertTable
from katydid_engine.layers.moe import shared_expert
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.layers.routing import MoeNames, Routing
from katydid_engine.layers.rows_to_all import RowsToAll
from katydid_engine.layers.steps import Steps
from katydid_engine.model_config import MoeConfig
from katydid_engine.weights import Weights

__all__ = ["DispatchedMoe"]


class DispatchedMoe:
    """Router replicated, whole experts spread over the ranks, shared expert replicated.

    Args:
        gain: ``[hidden]``, the weight of the norm before the block.
        share: the experts of this rank.
        copies: redundant experts of all ranks together.
        fp8: rows are sent in e4m3 whatever the experts are.
        to_all: how few rows go to all ranks; None where they do not. With copies no expert has one place.

    Attributes:
        table: where each expert lies now, and how often each was chosen.
        exchange: its ``capacity`` decides between the two forms.
    """

    def __init__(
        self,
        weights: Weights,
        moe: MoeConfig,
        hidden_size: int,
        names: MoeNames,
        gain: Tensor,
        share: ExpertShare,
        *,
        copies: int,
        fp8: bool,
        to_all: RowsToAll | None = None,
    ) -> None:
        whole = replace(weights, rank=0, size=1)
        self._routing = Routing(whole, moe, hidden_size, names)
        self._experts = load_experts(whole, moe, hidden_size, gain, share)
        self._shared = shared_expert(whole, moe, hidden_size, names)
        self._dtype = weights.dtype
        self._hidden, self._top_k = hidden_size, moe.top_k
        self._to_all = None if copies else to_all
        self.table = ExpertTable(moe.num_experts, copies, weights.device)
        self.exchange = ExpertExchange(
            share.group, len(share.experts), hidden_size, weights.dtype, consumer=self._experts.input, fp8=fp8
        )

    @property
    def slots(self) -> tuple[Tensor, ...]:
        """Tensors with a row for each expert of this rank."""
        return self._experts.slots

    def steps(self, norm: RmsNorm, x: Tensor, residual: Tensor, num_rows: int) -> Steps[tuple[Tensor, Tensor]]:
        """Of ``norm(x + residual)``, and that sum; only the first ``num_rows`` rows are tokens."""
        if (room := self._room_at_all) is not None:
            y, total = norm.add(x, residual)
            return self._over_all(y, num_rows, room), total
        routed, total = self._routing.after_norm(norm, x, residual, self._experts.input)
        slots = self.table.slots(routed.ids, num_rows, self.exchange.nowhere)
        shared = self._shared

        def beside() -> Tensor | None:
            return None if shared is None else shared(routed.x)

        out = yield from self.exchange.run(routed.rows, routed.weights, slots, self._compute, beside)
        return out, total

    def take_part(self) -> Steps[None]:
        """Computes what others send while this rank has no row of its own."""
        device = self.table.device
        rows = torch.empty((0, self._hidden), dtype=self._dtype, device=device)
        if (room := self._room_at_all) is not None:
            self._over_all(rows, 0, room)
            return
        weights = torch.empty((0, self._top_k), device=device)
        ids = torch.empty((0, self._top_k), dtype=torch.int32, device=device)
        yield from self.exchange.run(rows, weights, ids, self._compute, lambda: None)

    @property
    def _room_at_all(self) -> int | None:
        """That each rank's rows have where they go to all ranks in this pass."""
        room = self.exchange.capacity
        return room if self._to_all is not None and self._to_all.takes(room) else None

    def _over_all(self, own: Tensor, num_rows: int, room: int) -> Tensor:
        """Of normed rows. All ranks route the same rows to the same experts; each computes its own experts' part."""
        assert self._to_all is not None
        routed = self._routing.of(self._to_all.gather(own[:num_rows], room), self._experts.input)
        shared = self._shared(own) if self._shared is not None and len(own) else None
        out = self._to_all.own_sums(self._experts(routed.rows, routed.weights, routed.ids, None), len(own))
        return out if shared is None else out + shared

    def _compute(self, rows: Activations, weights: Tensor, ids: Tensor) -> Tensor:
        return self._experts(rows, weights, ids, None)
