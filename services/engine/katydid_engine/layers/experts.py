"""Routed experts of one rank: their weights read matrix by matrix, kept in the kind that the checkpoint or the engine's
settings chose, and multiplied by the op of that kind.

Between the two products of a quantised expert stands h = silu(gate) * up, quantised with a scale that must be known
beforehand: the checkpoint's ``input_scale`` of down, or else one made of the weights. e4m3 is a float: it keeps its
full precision over 448 / 2^-6, so a scale only has to put the typical h in the middle of that range. Of rows x with
unit rms and the norm's gain g,

    rms(h) ~ 0.6 * sqrt(mean over i of |gate_i * g|^2 |up_i * g|^2)          i: a column of h

as silu(gate)^2 has a mean between a quarter and a half of gate^2. The scale is twice that: h is clamped where it is
900 times as large as usual, and its subnormals begin at a thirtieth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from katydid_kernels import ExpertScales, Int4Weight, fused_moe, fused_moe_w4a8, pack_int4
from katydid_runtime.errors import ModelFolderError, SettingsError
from torch import Tensor

from katydid_engine.layers.activations import Activations, Fp8Input
from katydid_engine.matrices import (
    BLOCK,
    Fp8Matrix,
    Int4Matrix,
    Matrix,
    PlainMatrix,
    quantised,
    read_matrix,
    skip_matrix,
)
from katydid_engine.model_config import MoeConfig
from katydid_engine.weights import Weights

__all__ = ["Experts", "load_experts"]

_GATED_ROWS = 32
_TYPICAL_H = 0.6
_SCALE_OVER_TYPICAL = 2.0


class Experts(Protocol):
    """This rank's experts of one layer; ``input`` is what they want of x, None for plain rows."""

    @property
    def input(self) -> Fp8Input | None: ...

    def __call__(self, x: Activations, topk_weights: Tensor, topk_ids: Tensor, shared_output: Tensor | None) -> Tensor:
        """This rank's summand ``[T, hidden]``, with ``shared_output`` added."""
        ...


class PlainExperts:
    """Weights in the dtype of x: w13 ``[E, 2n, hidden]``, w2 ``[E, hidden, n]``."""

    input = None

    def __init__(self, experts: int, first_expert: int) -> None:
        self._w13, self._w2 = _Stack(experts), _Stack(experts)
        self._first_expert = first_expert

    def put(self, local: int, gate: PlainMatrix, up: PlainMatrix, down: PlainMatrix) -> None:
        self._w13.put(local, torch.cat((gate.weight, up.weight)))
        self._w2.put(local, down.weight)

    def __call__(self, x: Activations, topk_weights: Tensor, topk_ids: Tensor, shared_output: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        return fused_moe(
            x, self._w13.whole, self._w2.whole, topk_weights, topk_ids,
            first_expert=self._first_expert, shared_output=shared_output,
        )  # fmt: skip


class Fp8Experts:
    """Weights, rows and h in e4m3; a scale for each gate, up and down matrix, or for its blocks of 128 x 128.

    Constant scales of x and h are one for all experts: the largest. With blocks, every 128 columns of a row of x or h
    have a scale of their own.
    """

    def __init__(self, experts: int, first_expert: int, gain: Tensor, dtype: torch.dtype) -> None:
        self.input: Fp8Input | None = None
        self._w13, self._w2 = _Stack(experts), _Stack(experts)
        self._up, self._down = _Stack(experts), _Stack(experts)
        self._typical_h = _Stack(experts)
        self._input_scales: list[Tensor] = []
        self._h_scales: list[Tensor] = []
        self._first_expert = first_expert
        self._gain = gain
        self._dtype = dtype
        self._scales: ExpertScales | None = None

    def put(self, local: int, gate: Fp8Matrix, up: Fp8Matrix, down: Fp8Matrix) -> None:
        self._w13.put(local, torch.cat((gate.weight, up.weight)))
        self._w2.put(local, down.weight)
        self._up.put(local, torch.cat((gate.scale, up.scale)))
        self._down.put(local, down.scale)
        if gate.of_blocks:
            return
        self._input_scales += [matrix.input_scale for matrix in (gate, up) if matrix.input_scale is not None]
        if down.input_scale is not None:
            self._h_scales.append(down.input_scale)
        else:
            self._typical_h.put(local, _typical_h(gate, up, self._gain))

    def finish(self) -> None:
        """Joins the scales, once every expert is there."""
        up, down = self._up.whole, self._down.whole
        if up.ndim == 3:
            self._scales = ExpertScales(up, down, torch.ones(1, device=up.device))
            self.input = Fp8Input(group=BLOCK)
            return
        if self._h_scales:
            h_scale = torch.cat(self._h_scales).amax().reshape(1)
        else:
            h_scale = _SCALE_OVER_TYPICAL * self._typical_h.whole.amax().reshape(1)
        input_scale = torch.cat(self._input_scales).amax().reshape(1) if self._input_scales else None
        up = up if input_scale is None else up * input_scale
        self._scales = ExpertScales(up, (down[:, 0] * h_scale).contiguous(), 1 / h_scale)
        self.input = Fp8Input(input_scale)

    def __call__(self, x: Activations, topk_weights: Tensor, topk_ids: Tensor, shared_output: Tensor | None) -> Tensor:
        assert self.input is not None
        assert self._scales is not None
        rows = self.input.quantize(x)
        scales = self._scales if self.input.scale is not None else replace(self._scales, token=rows.scale)
        return fused_moe(
            rows.values, self._w13.whole, self._w2.whole, topk_weights, topk_ids,
            first_expert=self._first_expert, shared_output=shared_output, scales=scales,
        ).to(self._dtype)  # fmt: skip


class Int4Experts:
    """Weights in packed int4, rows and h in e4m3; rows have a scale each, h one for all."""

    def __init__(self, experts: int, first_expert: int, gain: Tensor, dtype: torch.dtype) -> None:
        self.input = Fp8Input()
        self._codes13, self._scales13 = _Stack(experts), _Stack(experts)
        self._codes2, self._scales2 = _Stack(experts), _Stack(experts)
        self._typical_h = _Stack(experts)
        self._first_expert = first_expert
        self._gain = gain
        self._dtype = dtype

    def put(self, local: int, gate: Int4Matrix, up: Int4Matrix, down: Int4Matrix) -> None:
        if len(gate.codes) % _GATED_ROWS:
            raise SettingsError(
                f"this rank's experts have {len(gate.codes)} columns, int4 needs a multiple of {_GATED_ROWS}",
                field="tp",
                value=len(gate.codes),
                allowed=f"a multiple of {_GATED_ROWS}",
            )
        w13 = pack_int4(torch.cat((gate.codes, up.codes)), torch.cat((gate.scales, up.scales)), gated=True)
        w2 = pack_int4(down.codes, down.scales)
        self._codes13.put(local, w13.codes)
        self._scales13.put(local, w13.scales)
        self._codes2.put(local, w2.codes)
        self._scales2.put(local, w2.scales)
        self._typical_h.put(local, _typical_h(gate, up, self._gain))
        self._shapes = (w13.rows, w13.cols), (w2.rows, w2.cols)

    def finish(self) -> None:
        """Makes the weights of all experts one, once every expert is there."""
        up, down = self._shapes
        self._w13 = Int4Weight(self._codes13.whole, self._scales13.whole, *up, gated=True)
        self._w2 = Int4Weight(self._codes2.whole, self._scales2.whole, *down)
        self._h_scale = _SCALE_OVER_TYPICAL * self._typical_h.whole.amax().reshape(1)

    def __call__(self, x: Activations, topk_weights: Tensor, topk_ids: Tensor, shared_output: Tensor | None) -> Tensor:
        rows = self.input.quantize(x)
        return fused_moe_w4a8(
            rows.values, self._w13, self._w2, topk_weights, topk_ids, rows.scale, self._h_scale,
            first_expert=self._first_expert, shared_output=shared_output,
        ).to(self._dtype)  # fmt: skip


def _typical_h(gate: Fp8Matrix | Int4Matrix, up: Fp8Matrix | Int4Matrix, gain: Tensor) -> Tensor:
    squares = [(matrix.dequantised() * gain).square().sum(1) for matrix in (gate, up)]
    return _TYPICAL_H * (squares[0] * squares[1]).mean().sqrt()


def load_experts(weights: Weights, moe: MoeConfig, hidden_size: int, gain: Tensor, *, expert_parallel: bool) -> Experts:
    """Reads this rank's experts, whole ones by id (``expert_parallel``) or some columns of each.

    Args:
        gain: ``[hidden]``, the weight of the norm before the experts.

    Raises:
        ModelFolderError: a matrix is missing or wrong, or experts of a layer are stored differently.
    """
    reader = _ExpertReader(weights, moe, hidden_size, expert_parallel)
    experts: PlainExperts | Fp8Experts | Int4Experts | None = None
    for expert in range(moe.num_experts):
        local = expert - reader.first
        if not 0 <= local < reader.count:
            reader.skip(expert)
            continue
        gate, up, down = reader.read(expert)
        if experts is None and isinstance(gate, PlainMatrix):
            experts = PlainExperts(reader.count, reader.first)
        elif experts is None:
            kind = Fp8Experts if isinstance(gate, Fp8Matrix) else Int4Experts
            experts = kind(reader.count, reader.first, gain.float(), weights.dtype)
        match experts, gate, up, down:
            case PlainExperts(), PlainMatrix(), PlainMatrix(), PlainMatrix():
                experts.put(local, gate, up, down)
            case Fp8Experts(), Fp8Matrix(), Fp8Matrix(), Fp8Matrix():
                experts.put(local, gate, up, down)
            case Int4Experts(), Int4Matrix(), Int4Matrix(), Int4Matrix():
                experts.put(local, gate, up, down)
            case _:
                raise ModelFolderError(
                    f"experts under {weights.prefix} are multiplied as one, but not all are stored alike",
                    field=f"{weights.prefix}experts.{expert}",
                )
    assert experts is not None
    if not isinstance(experts, PlainExperts):
        experts.finish()
    return experts


class _ExpertReader:
    """The matrices of a layer's experts, stored one by one or, as transformers 5 can save them, all in one tensor."""

    def __init__(self, weights: Weights, moe: MoeConfig, hidden_size: int, expert_parallel: bool) -> None:
        self._weights = weights
        self._experts, self._width, self._hidden = moe.num_experts, moe.intermediate_size, hidden_size
        self._joined = weights.has("experts.gate_up_proj")
        parts = weights.size
        self.count = moe.num_experts // parts if expert_parallel else moe.num_experts
        self.first = weights.rank * self.count if expert_parallel else 0
        step = self._width if expert_parallel else self._width // parts
        start = 0 if expert_parallel else weights.rank * step
        self._columns = slice(start, start + step)

    def read(self, expert: int) -> tuple[Matrix, Matrix, Matrix]:
        """gate ``[n, hidden]``, up and down ``[hidden, n]`` of this rank's share."""
        every, ours = slice(0, self._hidden), self._columns
        if self._joined:
            up_columns = slice(self._width + ours.start, self._width + ours.stop)
            parts = [("gate_up", ours, every), ("gate_up", up_columns, every), ("down", every, ours)]
            gate, up, down = (self._read_joined(expert, name, (rows, columns)) for name, rows, columns in parts)
            return gate, up, down
        scope = self._weights.scope(f"experts.{expert}")
        wide, narrow = (self._width, self._hidden), (self._hidden, self._width)
        return (
            read_matrix(scope.scope("gate_proj"), wide, (ours, every), row_scales=False),
            read_matrix(scope.scope("up_proj"), wide, (ours, every), row_scales=False),
            read_matrix(scope.scope("down_proj"), narrow, (every, ours), row_scales=False),
        )

    def skip(self, expert: int) -> None:
        """Checks the matrices of an expert that another rank holds."""
        if not self._joined:
            scope = self._weights.scope(f"experts.{expert}")
            skip_matrix(scope.scope("gate_proj"), (self._width, self._hidden))
            skip_matrix(scope.scope("up_proj"), (self._width, self._hidden))
            skip_matrix(scope.scope("down_proj"), (self._hidden, self._width))

    def _read_joined(self, expert: int, name: str, part: tuple[slice, slice]) -> Matrix:
        rows, columns = (2 * self._width, self._hidden) if name == "gate_up" else (self._hidden, self._width)
        shape = (self._experts, rows, columns)
        matrix = self._weights.slice(f"experts.{name}_proj", shape, (slice(expert, expert + 1), *part))[0]
        return quantised(matrix, self._weights.scheme)


class _Stack:
    """Tensors of one shape gathered into one, allocated with the first of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._whole: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        assert self._whole is not None
        return self._whole

    def put(self, index: int, tensor: Tensor) -> None:
        if self._whole is None:
            self._whole = tensor.new_empty((self._count, *tensor.shape))
        self._whole[index] = tensor
