"""Quantises one decoder layer by the rows it sees: smooth, then round matrix after matrix in the order of computation.

Two streams of hidden states walk through the layers: what the original model computes, and what the quantised one
does. Every matrix is rounded for the rows of the second (its inputs rounded to e4m3 as at run time) towards the
products of the first, so that errors of earlier layers are worked against and not added to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from katydid_runtime.errors import ModelFolderError
from torch import Tensor

from katydid_engine.layers.rotary import inverse_frequencies
from katydid_engine.matrices import Fp8Matrix, Int4Matrix
from katydid_engine.quantize.balance import balance_keys
from katydid_engine.quantize.block import Block, rotated
from katydid_engine.quantize.gptq import follow_drift, output_error
from katydid_engine.quantize.pages import PageRounding, PageScales, mean_rotation, page_scales
from katydid_engine.quantize.parts import Fp8Scales
from katydid_engine.quantize.precision import fp32_products, tf32_products
from katydid_engine.quantize.recipe import Recipe
from katydid_engine.quantize.rotation import hadamard
from katydid_engine.quantize.rounding import Fp8Rounding, Int4Rounding, Rounded, Rounding
from katydid_engine.quantize.routed_rows import RoutedRows
from katydid_engine.quantize.rows import rows_of
from katydid_engine.quantize.smoothing import smooth

__all__ = ["LayerResult", "Streams", "quantise_layer"]

_SAMPLE_ROWS = 512
_HESSIAN_BYTES = 4 << 30


@dataclass
class Streams:
    """Hidden states ``[sequences, tokens, hidden]`` in batches, of the original and of the quantised model."""

    original: list[Tensor]
    quantised: list[Tensor]


@dataclass
class LayerResult:
    """A quantised layer.

    Attributes:
        block: with the folded tensors, unquantised.
        matrices: as they are stored, by name.
        errors: relative error of each product on the calibration rows, and by round-to-nearest.
        alphas: what smoothing chose.
        tokens: calibration tokens that each routed expert saw.
        outliers: the largest channel over the median channel of rows, by a matrix that multiplies them.
        largest_key, largest_value: largest magnitudes ``[kv_heads]``, of K without the mean that pages leave out.
        pages: scales and means, where a recipe wants them.
    """

    block: Block
    matrices: dict[str, Int4Matrix | Fp8Matrix] = field(default_factory=dict)
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    outliers: dict[str, float] = field(default_factory=dict)
    largest_key: Tensor | None = None
    largest_value: Tensor | None = None
    pages: PageScales | None = None


@dataclass
class _Sums:
    """Sums over calibration rows: x' x'^T of the quantised stream, (x - x') x'^T of the difference."""

    hessian: Tensor
    drift: Tensor | None
    count: int = 0

    def add(self, original: Tensor, quantised: Tensor) -> None:
        self.hessian += quantised.T @ quantised
        if self.drift is not None:
            self.drift += (original - quantised).T @ quantised
        self.count += len(quantised)


def quantise_layer(
    block: Block,
    streams: Streams,
    angles: tuple[Tensor, Tensor],
    recipe: Recipe,
    *,
    int4: Callable[[str], bool],
    gain_dtype: torch.dtype,
) -> LayerResult:
    """Quantises, and moves both streams behind the layer. ``block`` and ``streams`` lie on one device.

    Args:
        int4: whether a matrix of this name becomes int4; others become e4m3.

    Raises:
        ModelFolderError: rows or weights that are not finite.
    """
    with tf32_products(streams.original[0].device):
        alphas: dict[str, float] = {}
        sample = _sample_rows(block, streams.original[0], angles)
        outliers = {name: _outlier(rows) for name, rows in sample.items() if len(rows) and "experts" not in name}
        if recipe.smooth:
            block, alphas = smooth(block, recipe.smooth, sample, functools.partial(_round, recipe, int4), gain_dtype)
        if recipe.balance_keys:
            turn = _mean_turn(block) if recipe.key_means else None
            block = balance_keys(block, streams.original[0], angles, turn, gain_dtype)
        layer = _Layer(block, recipe, int4=int4)
        result = LayerResult(block, layer.matrices, layer.errors, alphas, layer.tokens, outliers)
        _walk_attention(layer, streams, angles, result)
        _walk_feed_forward(layer, streams)
    return result


class _Layer:
    """The layer as it was and as far as it is quantised."""

    def __init__(self, block: Block, recipe: Recipe, *, int4: Callable[[str], bool]) -> None:
        self.original = block
        self.rows = rows_of(recipe.fp8_scales)
        self.quantised = replace(block, tensors=dict(block.tensors), rows=self.rows)
        self.recipe = recipe
        self.gptq = recipe.gptq
        self._to_int4 = int4
        self.matrices: dict[str, Int4Matrix | Fp8Matrix] = {}
        self.errors: dict[str, tuple[float, float]] = {}
        self.tokens: dict[str, int] = {}

    def by_data(self, name: str) -> bool:
        """Whether the rows decide how a matrix is rounded."""
        return self.gptq is not None or self._to_int4(name)

    @property
    def starved_tokens(self) -> int:
        return self.gptq.starved_tokens if self.gptq is not None else 0

    def sums(self, columns: int, device: torch.device) -> _Sums:
        zeros = torch.zeros(columns, columns, device=device)
        return _Sums(zeros, torch.zeros_like(zeros) if self.gptq and self.gptq.follow_drift else None)

    def round(self, groups: Sequence[tuple[str, ...]], sums: Sequence[_Sums]) -> None:
        """Rounds matrices; those of a group are multiplied with the same rows, groups have equal shapes."""
        tensors = self.quantised.tensors
        heights = [len(tensors[f"{name}.weight"]) for name in groups[0]]
        rounding: Rounding = Fp8Rounding(heights, self.recipe.fp8_scales)
        if self._to_int4(groups[0][0]):
            rounding = Int4Rounding(self.recipe.clip)
        weight = torch.stack([torch.cat([tensors[f"{name}.weight"] for name in group]) for group in groups])
        if not sums:
            self._keep(groups, heights, rounding, rounding.nearest(weight))
            return
        with fp32_products(weight.device):
            hessian = torch.stack([one.hessian for one in sums])
            drift = torch.stack([one.hessian if one.drift is None else one.drift for one in sums])
            _check_finite(groups[0][0], hessian, drift)
            plain_error = output_error(weight, hessian, rounding.plain(weight).weight)
            target = weight
            if self.gptq is None:
                rounded = rounding.nearest(weight)
            else:
                if self.gptq.follow_drift:
                    target = follow_drift(weight, hessian, drift, damping=self.gptq.damping)
                    _check_finite(groups[0][0], target)
                rounded = rounding.by_hessian(target, hessian, self.gptq)
            error = output_error(target, hessian, rounded.weight)
        self._keep(groups, heights, rounding, rounded)
        for group, found, plain in zip(groups, error.tolist(), plain_error.tolist(), strict=True):
            self.errors |= dict.fromkeys(group, (found, plain))

    def _keep(
        self, groups: Sequence[tuple[str, ...]], heights: list[int], rounding: Rounding, rounded: Rounded
    ) -> None:
        for index, group in enumerate(groups):
            begin = 0
            for name, height in zip(group, heights, strict=True):
                rows = slice(begin, begin := begin + height)
                self.matrices[name] = rounding.matrix(rounded, index, rows)
                self.quantised.tensors[f"{name}.weight"] = rounded.weight[index, rows].clone()


def _walk_attention(layer: _Layer, streams: Streams, angles: tuple[Tensor, Tensor], result: LayerResult) -> None:
    names = tuple(f"self_attn.{name}_proj" for name in "qkv")
    rows = Streams(
        [layer.original.enter_attention(x) for x in streams.original],
        [layer.quantised.enter_attention(x) for x in streams.quantised],
    )
    _round_shared(layer, names, rows)
    recipe = layer.recipe
    mean = _key_mean(layer, rows.quantised, angles) if recipe.key_means else None
    result.largest_key, result.largest_value = _largest_heads(layer, rows.quantised, angles, mean)
    if recipe.kv_scales != "none":
        by_head = recipe.kv_scales == "head"
        result.pages = page_scales(result.largest_key, result.largest_value, by_head=by_head, key_mean=mean)
        layer.quantised = replace(layer.quantised, pages=PageRounding(result.pages, recipe.rotate_keys))
    for stream, block in ((rows.original, layer.original), (rows.quantised, layer.quantised)):
        stream[:] = [block.attend(batch, angles) for batch in stream]
    _round_shared(layer, ("self_attn.o_proj",), rows)
    for stream, attended, block in (
        (streams.original, rows.original, layer.original),
        (streams.quantised, rows.quantised, layer.quantised),
    ):
        stream[:] = [block.leave_attention(x, one) for x, one in zip(stream, attended, strict=True)]


def _key_mean(layer: _Layer, rows: list[Tensor], angles: tuple[Tensor, Tensor]) -> Tensor:
    """What is taken off all keys, ``[kv_heads, head_dim]`` as pages have them: their mean in front of RoPE, turned as
    RoPE turns it on average over all positions of the model."""
    cos, sin = angles
    means = []
    for batch in rows:
        _, k, _ = layer.quantised.heads(batch, angles)
        means.append(rotated(k, cos, -sin).mean(1).sum(0))
    mean = torch.stack(means).sum(0) / sum(len(batch) for batch in rows)
    mean = rotated(mean, *(part.to(mean.device) for part in _mean_turn(layer.original)))
    return mean @ hadamard(mean.shape[-1], mean.device) if layer.recipe.rotate_keys else mean


def _mean_turn(block: Block) -> tuple[Tensor, Tensor]:
    config = block.config
    return mean_rotation(inverse_frequencies(config.rope, config.head_dim), config.max_positions)


def _largest_heads(
    layer: _Layer, rows: list[Tensor], angles: tuple[Tensor, Tensor], mean: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Largest magnitudes of K, rotated where keys are, without its mean, and of V: ``[kv_heads]`` each."""
    found = []
    for batch in rows:
        _, k, v = layer.quantised.heads(batch, angles)
        if layer.recipe.rotate_keys:
            k = k @ hadamard(k.shape[-1], k.device)
        if mean is not None:
            k = k - mean
        found.append(torch.stack([part.abs().amax((0, 1, 3)) for part in (k, v)]))
    key, value = torch.stack(found).amax(0)
    return key, value


def _walk_feed_forward(layer: _Layer, streams: Streams) -> None:
    plain, rounded = (
        [block.enter_feed_forward(x).flatten(0, 1) for x in stream]
        for block, stream in ((layer.original, streams.original), (layer.quantised, streams.quantised))
    )
    if layer.original.sparse:
        _round_experts(layer, plain, rounded)
    for block in [layer.original.shared] if layer.original.sparse else ["mlp"]:
        if block:
            rows = Streams(list(plain), [layer.rows(x) for x in rounded])
            _round_shared(layer, (f"{block}.gate_proj", f"{block}.up_proj"), rows)
            hidden = Streams(
                [layer.original.hidden(block, x) for x in rows.original],
                [layer.quantised.hidden(block, x) for x in rows.quantised],
            )
            _round_shared(layer, (f"{block}.down_proj",), hidden)
    for stream, entered, one in (
        (streams.original, plain, layer.original),
        (streams.quantised, rounded, layer.quantised),
    ):
        stream[:] = [
            one.leave_feed_forward(x.flatten(0, 1), rows).view_as(x) for x, rows in zip(stream, entered, strict=True)
        ]


def _round_shared(layer: _Layer, names: tuple[str, ...], rows: Streams) -> None:
    if not layer.by_data(names[0]):
        layer.round([names], [])
        return
    first = rows.quantised[0]
    sums = layer.sums(first.shape[-1], first.device)
    for original, quantised in zip(rows.original, rows.quantised, strict=True):
        sums.add(original.reshape(-1, original.shape[-1]), quantised.reshape(-1, quantised.shape[-1]))
    layer.round([names], [sums])


def _round_experts(layer: _Layer, plain: list[Tensor], rounded: list[Tensor]) -> None:
    """Some experts at a time, each by the tokens routed to it in the quantised model; a token counts by the square of
    its routing weight, as its error does. An expert that saw too few is rounded by all tokens."""
    experts = layer.original.experts()
    routed = RoutedRows(
        plain, [layer.rows(x) for x in rounded], [layer.quantised.route(x) for x in rounded], len(experts)
    )
    layer.tokens |= zip(experts, routed.counts, strict=True)
    hidden, device = plain[0].shape[-1], plain[0].device
    chunk = max(1, _HESSIAN_BYTES // (4 * hidden * hidden * 2))
    for begin in range(0, len(experts), chunk):
        some = list(enumerate(experts))[begin : begin + chunk]
        if not layer.by_data(f"{some[0][1]}.gate_proj"):
            for part in ("gate", "up", "down"):
                layer.round([(f"{block}.{part}_proj",) for _, block in some], [])
            continue
        entering, leaving = [], []
        for index, _ in some:
            sums = layer.sums(hidden, device)
            for original, quantised, weights in routed.of(index, layer.starved_tokens):
                sums.add(original * weights, quantised * weights)
            entering.append(sums)
        layer.round([(f"{block}.gate_proj", f"{block}.up_proj") for _, block in some], entering)
        for index, block in some:
            sums = layer.sums(len(layer.original.tensors[f"{block}.up_proj.weight"]), device)
            for original, quantised, weights in routed.of(index, layer.starved_tokens):
                made = layer.original.hidden(block, original), layer.quantised.hidden(block, quantised)
                sums.add(made[0] * weights, made[1] * weights)
            leaving.append(sums)
        layer.round([(f"{block}.down_proj",) for _, block in some], leaving)


def _sample_rows(block: Block, x: Tensor, angles: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Rows of the original layer, by the first matrix of each seam."""
    rows = block.enter_attention(x)
    attended = block.attend(rows, angles)
    x = block.leave_attention(x, attended)
    entered = block.enter_feed_forward(x).flatten(0, 1)
    sample = {"self_attn.q_proj": _some(rows.flatten(0, 1)), "self_attn.o_proj": _some(attended.flatten(0, 1))}
    sample[f"{block.dense_blocks()[0]}.gate_proj"] = _some(entered)
    ids = block.route(entered)[1] if block.sparse else None
    for index, one in enumerate(block.dense_blocks()):
        routed = ids is not None and one != block.shared
        rows = entered[(ids == index).any(1)] if routed and ids is not None else entered
        sample[f"{one}.down_proj"] = block.hidden(one, _some(rows))
    return sample


def _check_finite(name: str, *tensors: Tensor) -> None:
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise ModelFolderError(f"calibration rows of {name} are not finite", field=name)


def _outlier(rows: Tensor) -> float:
    channels = rows.abs().amax(0)
    return float(channels.amax() / channels.median().clamp(min=1e-12))


def _some(rows: Tensor) -> Tensor:
    return rows[:: max(1, len(rows) // _SAMPLE_ROWS)][:_SAMPLE_ROWS]


def _round(recipe: Recipe, int4: Callable[[str], bool], name: str, weights: Tensor) -> Tensor:
    # Some rows of a matrix are given, whose blocks are not the matrix's.
    scales: Fp8Scales = "channel" if recipe.fp8_scales == "block" else recipe.fp8_scales
    rounding = Int4Rounding(recipe.clip) if int4(name) else Fp8Rounding([weights.shape[1]], scales)
    return rounding.nearest(weights).weight
