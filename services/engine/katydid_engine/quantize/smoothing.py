"""Moves the scale of a channel from what is multiplied to what multiplies it, where rounding then loses less.

    y = (x / s) (s W)^T        for any s > 0, one for each channel

x / s costs nothing at run time: it is folded into what makes x. Four seams of a layer allow that: a norm's gain before
q, k, v and before gate, up and the router; v before o; up before down. s = max|x|^a / max|W|^(1 - a) (Xiao et al.,
"SmoothQuant", 2022, equation 4), normalised to geometric mean 1; a is searched for every seam, and no smoothing at all
is among the candidates. Folded gains are rounded as the checkpoint stores them, and s is what the rounding left, so
that the unquantised model's answers do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from katydid_engine.quantize.block import Block
from katydid_engine.quantize.rows import e4m3_rows

__all__ = ["ALPHAS", "SEAMS", "smooth"]

SEAMS = ("attention_input", "value_output", "feed_forward_input", "down")
ALPHAS = tuple(0.3 + 0.1 * step for step in range(8))
_ROWS = 512  # calibration rows a candidate is tried on
_MATRICES = 16  # and matrices, where a seam has more
_COLUMNS_OUT = 256  # and rows of each

_Many = TypeVar("_Many", tuple[int, ...], Tensor)

Quantise = Callable[[str, Tensor], Tensor]
"""Weights fp32 ``[B, N, K]`` as they will be multiplied, by the name of the first matrix."""


@dataclass(frozen=True)
class _Seam:
    """Matrices that share rows, and where the factors go.

    Attributes:
        matrices: whose columns are multiplied by s.
        gain: a norm's weight that is divided by s.
        source: a matrix whose rows (and bias) are divided by s.
        repeat: consecutive channels of the rows that one row of ``source`` makes; q heads of a kv head.
        exact: further matrices of the same rows that stay unquantised (the router).
    """

    matrices: tuple[str, ...]
    gain: str = ""
    source: str = ""
    exact: tuple[str, ...] = ()
    head_dim: int = 0
    repeat: int = 1


def smooth(
    block: Block, seams: Iterable[str], rows: Mapping[str, Tensor], quantise: Quantise, gain_dtype: torch.dtype
) -> tuple[Block, dict[str, float]]:
    """The same layer with folded factors, and the exponent that each seam got (absent: none helped).

    Args:
        rows: calibration rows ``[n, K]`` by the name of a matrix that multiplies them.
        gain_dtype: of the norms in the checkpoint that will be written.
    """
    tensors = dict(block.tensors)
    chosen: dict[str, float] = {}
    for kind in seams:
        for alike in _alike(tensors, _seams(block, kind), rows):
            samples = [rows[seam.matrices[0]] for seam in alike]
            for seam, found in zip(alike, _search(tensors, alike, samples, quantise), strict=True):
                if found is not None:
                    alpha, factors = found
                    _fold(tensors, seam, factors, gain_dtype)
                    chosen[f"{kind}:{seam.matrices[0]}" if kind == "down" else kind] = alpha
    return replace(block, tensors=tensors), chosen


def _alike(tensors: Mapping[str, Tensor], seams: list[_Seam], rows: Mapping[str, Tensor]) -> list[list[_Seam]]:
    """Seams that rows are known of, those together whose matrices have the same shapes: the experts."""
    found: dict[tuple[int, ...], list[_Seam]] = {}
    for seam in seams:
        if len(rows.get(seam.matrices[0], ())):
            shape = tensors[f"{seam.matrices[0]}.weight"].shape
            found.setdefault((len(seam.matrices), _is_routed(seam.matrices[0]), *shape), []).append(seam)
    return list(found.values())


def _is_routed(matrix: str) -> bool:
    return ".experts." in matrix


def _seams(block: Block, kind: str) -> list[_Seam]:
    config = block.config
    if kind == "attention_input":
        return [_Seam(tuple(f"self_attn.{name}_proj" for name in "qkv"), gain="input_layernorm.weight")]
    if kind == "value_output":
        group = config.num_heads // config.num_kv_heads
        return [_Seam(("self_attn.o_proj",), source="self_attn.v_proj", head_dim=config.head_dim, repeat=group)]
    if kind == "feed_forward_input":
        names = tuple(f"{one}.{part}_proj" for one in block.dense_blocks() for part in ("gate", "up"))
        exact = (block.router.removesuffix(".weight"),) if block.sparse else ()
        return [_Seam(names, gain="post_attention_layernorm.weight", exact=exact)]
    return [_Seam((f"{one}.down_proj",), source=f"{one}.up_proj") for one in block.dense_blocks()]


def _search(
    tensors: Mapping[str, Tensor], seams: list[_Seam], samples: list[Tensor], quantise: Quantise
) -> list[tuple[float, Tensor] | None]:
    """The best exponent and its factors for each of the seams, all of them at once; None where nothing helps."""
    rows = torch.stack([_as_many(sample, min(_ROWS, max(map(len, samples)))) for sample in samples])
    weights = _stacks(tensors, seams)
    wanted = [rows[:, None] @ stack.mT for stack in weights.values()]
    largest_rows = _shared(rows.abs().amax(1), seams[0])
    largest_weights = _shared(
        torch.stack(
            [torch.stack([tensors[f"{name}.weight"].abs().amax(0) for name in seam.matrices]).amax(0) for seam in seams]
        ),
        seams[0],
    )
    # A channel that is never used says nothing about its scale.
    usable = (largest_rows > 0).all(1) & (largest_weights > 0).all(1)
    largest_rows, largest_weights = largest_rows.clamp(min=1e-30), largest_weights.clamp(min=1e-30)

    def error(factors: Tensor) -> Tensor:
        wide = _widened(factors, seams[0])
        made = e4m3_rows(rows / wide[:, None])
        total = rows.new_zeros(len(rows))
        for (name, stack), want in zip(weights.items(), wanted, strict=True):
            rounded = quantise(name, (stack * wide[:, None, None]).flatten(0, 1)).view_as(stack)
            total += (made[:, None] @ rounded.mT - want).square().sum((1, 2, 3))
        return total

    best: list[tuple[float, Tensor] | None] = [None] * len(seams)
    least = error(torch.ones_like(largest_rows))
    for alpha in ALPHAS:
        factors = largest_rows**alpha / largest_weights ** (1 - alpha)
        factors = factors / factors.log().mean(1, keepdim=True).exp()
        found = error(factors)
        better = (found < least) & usable
        for index in better.nonzero().flatten().tolist():
            best[index] = (alpha, factors[index])
        least = torch.minimum(found, least)
    return best


def _stacks(tensors: Mapping[str, Tensor], seams: list[_Seam]) -> dict[str, Tensor]:
    """Some rows of some matrices ``[seams, matrices, N, K]``, by the name of the first, those together that are rounded
    alike and have as many rows."""
    places: dict[tuple[bool, int], list[int]] = {}
    for place in _spread(tuple(range(len(seams[0].matrices))), _MATRICES):
        name = seams[0].matrices[place]
        places.setdefault((_is_routed(name), len(tensors[f"{name}.weight"])), []).append(place)
    return {
        seams[0].matrices[some[0]]: torch.stack(
            [
                torch.stack([_spread(tensors[f"{seam.matrices[place]}.weight"], _COLUMNS_OUT) for place in some])
                for seam in seams
            ]
        )
        for some in places.values()
    }


def _fold(tensors: dict[str, Tensor], seam: _Seam, factors: Tensor, gain_dtype: torch.dtype) -> None:
    if seam.gain:
        gain = tensors[seam.gain]
        stored = (gain / factors).to(gain_dtype).float()
        usable = stored != 0
        factors = torch.where(usable, gain / torch.where(usable, stored, torch.ones_like(stored)), factors)
        factors = torch.where(factors > 0, factors, torch.ones_like(factors))
        tensors[seam.gain] = torch.where(usable, stored, gain)
    else:
        for name in (f"{seam.source}.weight", f"{seam.source}.bias"):
            if name in tensors:
                tensor = tensors[name]
                tensors[name] = tensor / (factors[:, None] if tensor.ndim == 2 else factors)
    wide = _widened(factors, seam)
    for name in (*seam.matrices, *seam.exact):
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * wide


def _shared(channels: Tensor, seam: _Seam) -> Tensor:
    """Channels of the rows ``[B, K]`` reduced to those of the source: the largest of the heads that read it."""
    if seam.repeat == 1:
        return channels
    return channels.view(len(channels), -1, seam.repeat, seam.head_dim).amax(2).flatten(1)


def _widened(factors: Tensor, seam: _Seam) -> Tensor:
    if seam.repeat == 1:
        return factors
    heads = factors.reshape(*factors.shape[:-1], -1, seam.head_dim)
    return heads.repeat_interleave(seam.repeat, -2).flatten(-2)


def _as_many(rows: Tensor, count: int) -> Tensor:
    """``count`` rows; where there are fewer, some of them again."""
    return rows[torch.arange(count, device=rows.device) % len(rows)]


def _spread(many: _Many, count: int) -> _Many:
    """At most ``count``, evenly."""
    return many[:: max(1, -(-len(many) // count))]
