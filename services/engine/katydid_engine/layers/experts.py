"""Routed experts of one rank, in the kind of weights that the checkpoint or the engine's settings chose; each kind has
its op. ``expert_loading`` makes them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from katydid_kernels import ExpertScales, Int4Weight, fused_moe, fused_moe_w4a8
from katydid_kernels.fused_moe import pairs_to_place
from katydid_kernels.fused_moe_w4a8 import pairs_to_place_w4a8
from katydid_kernels.gemm.plan import PlacedPairs
from torch import Tensor

from katydid_engine.layers.activations import Activations, Fp8Input

__all__ = ["Experts", "Fp8Experts", "Int4Experts", "PlainExperts"]


class Experts(Protocol):
    """This rank's experts of one layer; ``input`` is what they want of x, None for plain rows."""

    @property
    def input(self) -> Fp8Input | None: ...

    def __call__(
        self,
        x: Activations,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_output: Tensor | None,
        placed: PlacedPairs | None = None,
    ) -> Tensor:
        """This rank's summand ``[T, hidden]``, with ``shared_output`` added."""
        ...

    def placed(self, tokens: int, columns: int) -> PlacedPairs | None:
        """A plan of ids ``[tokens, columns]`` that the router may fill, to be passed on with the call."""
        ...

    @property
    def slots(self) -> tuple[Tensor, ...]:
        """Every tensor that has a row for each expert ``[E, ...]``: what moves when an expert does."""
        ...


class PlainExperts:
    """Weights in the dtype of x: w13 ``[E, 2n, hidden]`` (gate's rows, then up's), w2 ``[E, hidden, n]``."""

    input = None

    def __init__(self, w13: Tensor, w2: Tensor, first_expert: int) -> None:
        self._w13, self._w2 = w13, w2
        self._first_expert = first_expert

    def __call__(
        self,
        x: Activations,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_output: Tensor | None,
        placed: PlacedPairs | None = None,
    ) -> Tensor:
        assert isinstance(x, Tensor)
        return fused_moe(
            x,
            self._w13,
            self._w2,
            topk_weights,
            topk_ids,
            first_expert=self._first_expert,
            shared_output=shared_output,
            placed=placed,
        )

    def placed(self, tokens: int, columns: int) -> PlacedPairs | None:
        return pairs_to_place(tokens, columns, self._w2, dtype=self._w2.dtype, first_expert=self._first_expert)

    @property
    def slots(self) -> tuple[Tensor, ...]:
        return self._w13, self._w2


class Fp8Experts:
    """Weights, rows and what stands between the two products in e4m3.

    Args:
        scales: without those of rows, where rows have one each.
        rows: how rows are quantised.
        dtype: of the result.
    """

    def __init__(
        self, w13: Tensor, w2: Tensor, scales: ExpertScales, rows: Fp8Input, first_expert: int, dtype: torch.dtype
    ) -> None:
        self.input = rows
        self._w13, self._w2 = w13, w2
        self._scales = scales
        self._first_expert = first_expert
        self._dtype = dtype

    def __call__(
        self,
        x: Activations,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_output: Tensor | None,
        placed: PlacedPairs | None = None,
    ) -> Tensor:
        rows = self.input.quantize(x)
        scales = self._scales if self.input.scale is not None else replace(self._scales, token=rows.scale)
        out = fused_moe(
            rows.values,
            self._w13,
            self._w2,
            topk_weights,
            topk_ids,
            first_expert=self._first_expert,
            shared_output=shared_output,
            scales=scales,
            placed=placed,
        )
        return out.to(self._dtype)

    def placed(self, tokens: int, columns: int) -> PlacedPairs | None:
        return pairs_to_place(
            tokens,
            columns,
            self._w2,
            dtype=self._w2.dtype,
            first_expert=self._first_expert,
            of_blocks=self._scales.of_blocks,
        )

    @property
    def slots(self) -> tuple[Tensor, ...]:
        return self._w13, self._w2, self._scales.up, self._scales.down


class Int4Experts:
    """Weights in packed int4, rows in e4m3 with a scale each, and what stands between the products with one for all.

    Args:
        h_scale: fp32 ``[1]``.
        dtype: of the result.
    """

    def __init__(self, w13: Int4Weight, w2: Int4Weight, h_scale: Tensor, first_expert: int, dtype: torch.dtype) -> None:
        self.input = Fp8Input()
        self._w13, self._w2 = w13, w2
        self._h_scale = h_scale
        self._first_expert = first_expert
        self._dtype = dtype

    def __call__(
        self,
        x: Activations,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_output: Tensor | None,
        placed: PlacedPairs | None = None,
    ) -> Tensor:
        rows = self.input.quantize(x)
        out = fused_moe_w4a8(
            rows.values,
            self._w13,
            self._w2,
            topk_weights,
            topk_ids,
            rows.scale,
            self._h_scale,
            first_expert=self._first_expert,
            shared_output=shared_output,
            placed=placed,
        )
        return out.to(self._dtype)

    def placed(self, tokens: int, columns: int) -> PlacedPairs | None:
        return pairs_to_place_w4a8(tokens, columns, self._w2, first_expert=self._first_expert)

    @property
    def slots(self) -> tuple[Tensor, ...]:
        return self._w13.codes, self._w13.scales, self._w2.codes, self._w2.scales
