"""Reads a rank's experts matrix by matrix, gathers them and settles their scales.

Between the two products of a quantised expert stands h = silu(gate) * up, quantised with a scale that must be known
beforehand: the checkpoint's ``input_scale`` of down, or else one made of the weights. e4m3 is a float: it keeps its
full precision over 448 / 2^-6, so a scale only has to put the usual h in the middle of that range. Of rows x with unit
rms and the norm's gain g,

    rms(h) ~ 0.6 * sqrt(mean over i of |gate_i * g|^2 |up_i * g|^2)          i: a column of h

as silu(gate)^2 has a mean between a quarter and a half of gate^2. The scale is twice that: h is clamped where it is
900 times as large as usual, and its subnormals begin at a thirtieth.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from katydid_kernels import ExpertScales, Int4Weight, pack_int4
from katydid_runtime.errors import ModelFolderError, SettingsError
from torch import Tensor

from katydid_engine.layers.activations import Fp8Input
from katydid_engine.layers.expert_share import ExpertShare
from katydid_engine.layers.experts import Experts, Fp8Experts, Int4Experts, PlainExperts
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
from katydid_engine.quantization import GROUP
from katydid_engine.weights import Weights

__all__ = ["load_experts"]

_GATED_ROWS = 32
_USUAL_H = 0.6
_SCALE_OVER_USUAL = 2.0


def load_experts(
    weights: Weights,
    moe: MoeConfig,
    hidden_size: int,
    gain: Tensor,
    share: ExpertShare,
    shared: Weights | None = None,
) -> Experts:
    """Reads this rank's experts.

    Args:
        gain: ``[hidden]``, the weight of the norm before the experts.
        shared: of a shared expert that stands behind the others as one of them.

    Raises:
        ModelFolderError: a matrix is missing or wrong, or experts of a layer are stored differently.
        SettingsError: this rank's part of an int4 expert is too narrow.
    """
    reader = _Reader(weights, moe, hidden_size, share, shared)
    gathered: _Plain | _Fp8 | _Int4 | None = None
    for slots, (gate, up, down) in reader:
        if gathered is None:
            gathered = _gatherer(gate, len(share.experts) + (shared is not None), gain)
        for slot in slots:
            match gathered, gate, up, down:
                case _Plain(), PlainMatrix(), PlainMatrix(), PlainMatrix():
                    gathered.put(slot, gate, up, down)
                case _Fp8(), Fp8Matrix(), Fp8Matrix(), Fp8Matrix():
                    gathered.put(slot, gate, up, down)
                case _Int4(), Int4Matrix(), Int4Matrix(), Int4Matrix():
                    gathered.put(slot, gate, up, down)
                case _:
                    raise ModelFolderError(
                        f"experts under {weights.prefix} are multiplied as one, but not all are stored alike",
                        field=f"{weights.prefix}experts.{[*share.experts, 'shared'][slots[0]]}",
                    )
    assert gathered is not None
    return gathered.finish(share, weights.dtype)


class _Reader:
    """Yields slots and what is to lie in them, gate ``[n, hidden]``, up and down ``[hidden, n]``, expert by expert, and
    checks those of other ranks. They are stored one by one or, as transformers 5 can save them, all in one tensor."""

    def __init__(
        self, weights: Weights, moe: MoeConfig, hidden_size: int, share: ExpertShare, shared: Weights | None
    ) -> None:
        self._weights = weights
        self._shared = shared
        self._experts, self._width, self._hidden = moe.num_experts, moe.intermediate_size, hidden_size
        self._joined = weights.has("experts.gate_up_proj")
        self._share = share
        step = self._width // share.column_parts
        self._columns = slice(share.column_part * step, (share.column_part + 1) * step)

    def __iter__(self) -> Iterator[tuple[list[int], tuple[Matrix, Matrix, Matrix]]]:
        every, ours = slice(0, self._hidden), self._columns
        wide, narrow = (self._width, self._hidden), (self._hidden, self._width)
        if self._shared is not None:
            yield [len(self._share.experts)], self._matrices(self._shared)
        for expert in range(self._experts):
            slots = [slot for slot, held in enumerate(self._share.experts) if held == expert]
            if self._joined and slots:
                up_columns = slice(self._width + ours.start, self._width + ours.stop)
                yield (
                    slots,
                    (
                        self._joined_part(expert, "gate_up", (ours, every)),
                        self._joined_part(expert, "gate_up", (up_columns, every)),
                        self._joined_part(expert, "down", (every, ours)),
                    ),
                )
            elif not self._joined:
                scope = self._weights.scope(f"experts.{expert}")
                if slots:
                    yield slots, self._matrices(scope)
                else:
                    gate, up, down = _projections(scope)
                    skip_matrix(gate, wide)
                    skip_matrix(up, wide)
                    skip_matrix(down, narrow)

    def _matrices(self, expert: Weights) -> tuple[Matrix, Matrix, Matrix]:
        every, ours = slice(0, self._hidden), self._columns
        wide, narrow = (self._width, self._hidden), (self._hidden, self._width)
        gate, up, down = _projections(expert)
        return (
            read_matrix(gate, wide, (ours, every), row_scales=False),
            read_matrix(up, wide, (ours, every), row_scales=False),
            read_matrix(down, narrow, (every, ours), row_scales=False),
        )

    def _joined_part(self, expert: int, name: str, part: tuple[slice, slice]) -> Matrix:
        rows, columns = (2 * self._width, self._hidden) if name == "gate_up" else (self._hidden, self._width)
        shape = (self._experts, rows, columns)
        matrix = self._weights.slice(f"experts.{name}_proj", shape, (slice(expert, expert + 1), *part))[0]
        return quantised(matrix, self._weights.scheme)


def _projections(expert: Weights) -> tuple[Weights, Weights, Weights]:
    return expert.scope("gate_proj"), expert.scope("up_proj"), expert.scope("down_proj")


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


class _Plain:
    def __init__(self, count: int) -> None:
        self._w13, self._w2 = _Stack(count), _Stack(count)

    def put(self, local: int, gate: PlainMatrix, up: PlainMatrix, down: PlainMatrix) -> None:
        self._w13.put(local, torch.cat((gate.weight, up.weight)))
        self._w2.put(local, down.weight)

    def finish(self, share: ExpertShare, _dtype: torch.dtype) -> PlainExperts:
        return PlainExperts(self._w13.whole, self._w2.whole, share.first)


class _Fp8:
    """A scale for each gate, up and down matrix, or for its blocks of 128 x 128. Constant scales of x and h are one for
    all experts, the largest; with blocks, every 128 columns of a row of x or h have their own."""

    def __init__(self, count: int, gain: Tensor) -> None:
        self._gain = gain
        self._w13, self._w2 = _Stack(count), _Stack(count)
        self._up, self._down = _Stack(count), _Stack(count)
        self._x_scales: list[Tensor] = []
        self._h_scales: list[Tensor] = []

    def put(self, local: int, gate: Fp8Matrix, up: Fp8Matrix, down: Fp8Matrix) -> None:
        self._w13.put(local, torch.cat((gate.weight, up.weight)))
        self._w2.put(local, down.weight)
        self._up.put(local, torch.cat((gate.scale, up.scale)))
        self._down.put(local, down.scale)
        if gate.of_blocks:
            return
        self._x_scales += [matrix.input_scale for matrix in (gate, up) if matrix.input_scale is not None]
        self._h_scales.append(_h_scale(gate, up, self._gain) if down.input_scale is None else down.input_scale)

    def finish(self, share: ExpertShare, dtype: torch.dtype) -> Fp8Experts:
        up, down = self._up.whole, self._down.whole
        if up.ndim == 3:
            rows, scales = Fp8Input(group=BLOCK), ExpertScales(up, down, torch.ones(1, device=up.device))
        else:
            h_scale = _largest(self._h_scales, share)
            rows = Fp8Input(_largest(self._x_scales, share) if self._x_scales else None)
            up = up if rows.scale is None else up * rows.scale
            scales = ExpertScales(up, (down[:, 0] * h_scale).contiguous(), 1 / h_scale)
        return Fp8Experts(self._w13.whole, self._w2.whole, scales, rows, share.first, dtype)


class _Int4:
    def __init__(self, count: int, gain: Tensor) -> None:
        self._gain = gain
        self._w13, self._w2 = _PackedStack(count), _PackedStack(count)
        self._h_scales: list[Tensor] = []

    def put(self, local: int, gate: Int4Matrix, up: Int4Matrix, down: Int4Matrix) -> None:
        self._h_scales.append(_h_scale(gate, up, self._gain))
        gate, up, down = _from_whole_groups(gate, up, down)
        if len(gate.codes) % _GATED_ROWS:
            raise SettingsError(
                f"this rank's experts have {len(gate.codes)} columns, int4 needs a multiple of {_GATED_ROWS}",
                field="tp",
                value=len(gate.codes),
                allowed=f"a multiple of {_GATED_ROWS}",
            )
        codes, scales = torch.cat((gate.codes, up.codes)), torch.cat((gate.scales, up.scales))
        self._w13.put(local, pack_int4(codes, scales, gated=True))
        self._w2.put(local, pack_int4(down.codes, down.scales))

    def finish(self, share: ExpertShare, dtype: torch.dtype) -> Int4Experts:
        return Int4Experts(self._w13.whole, self._w2.whole, _largest(self._h_scales, share), share.first, dtype)


def _from_whole_groups(gate: Int4Matrix, up: Int4Matrix, down: Int4Matrix) -> tuple[Int4Matrix, Int4Matrix, Int4Matrix]:
    """The same expert with its columns in another order, where down's begin inside a group: that part of a group comes
    last, behind as many zeros as fill the group ahead of it."""
    if not down.lead:
        return gate, up, down
    codes, rest = down.codes[:, down.lead : GROUP], down.codes[:, GROUP:]
    fill, first = -rest.shape[1] % GROUP, codes.shape[1]

    def turned(rows: Tensor) -> Tensor:
        return torch.cat((F.pad(rows[first:], (0, 0, 0, fill)), rows[:first]))

    scales = torch.cat((down.scales[:, 1:], down.scales[:, :1]), 1)
    gate, up = (Int4Matrix(turned(matrix.codes), turned(matrix.scales)) for matrix in (gate, up))
    return gate, up, Int4Matrix(torch.cat((F.pad(rest, (0, fill)), codes), 1), scales)


class _PackedStack:
    """Packed matrices of one shape gathered into one."""

    def __init__(self, count: int) -> None:
        self._codes, self._scales = _Stack(count), _Stack(count)
        self._one: Int4Weight | None = None

    @property
    def whole(self) -> Int4Weight:
        assert self._one is not None
        return Int4Weight(self._codes.whole, self._scales.whole, self._one.rows, self._one.cols, self._one.gated)

    def put(self, index: int, weight: Int4Weight) -> None:
        self._codes.put(index, weight.codes)
        self._scales.put(index, weight.scales)
        self._one = weight


def _gatherer(matrix: Matrix, count: int, gain: Tensor) -> _Plain | _Fp8 | _Int4:
    if isinstance(matrix, PlainMatrix):
        return _Plain(count)
    return _Fp8(count, gain.float()) if isinstance(matrix, Fp8Matrix) else _Int4(count, gain.float())


def _h_scale(gate: Fp8Matrix | Int4Matrix, up: Fp8Matrix | Int4Matrix, gain: Tensor) -> Tensor:
    """fp32 ``[1]`` of one expert, out of its weights."""
    squares = [(matrix.dequantised() * gain).square().sum(1) for matrix in (gate, up)]
    return _SCALE_OVER_USUAL * _USUAL_H * (squares[0] * squares[1]).mean().sqrt().reshape(1)


def _largest(scales: list[Tensor], share: ExpertShare) -> Tensor:
    """One scale for all experts, wherever they lie: one that moves to another rank keeps its results."""
    return share.group.all_gather(torch.cat(scales).amax().reshape(1), 0).amax().reshape(1)
