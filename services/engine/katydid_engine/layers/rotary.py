"""Rotary frequencies of a model: the one table all its layers read."""

from __future__ import annotations

import math

import torch
from katydid_kernels import rope_table
from torch import Tensor

from katydid_engine.model_config import RopeConfig

__all__ = ["inverse_frequencies", "rotary_table"]


def rotary_table(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> Tensor:
    """fp32 ``[max_positions, head_dim]``: cosines, then sines."""
    return rope_table(inverse_frequencies(rope, head_dim).to(device), max_positions)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """fp32 ``[head_dim / 2]``, radians per position.

    The exponent and power are taken in fp32, as the models were trained with: at position 262,143 the rounding of a
    frequency is a visible part of the angle.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _stretch_long_waves(frequencies, rope)
    return frequencies


def _stretch_long_waves(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: waves longer than the original context are slowed by ``factor``, short ones kept, others blended."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_max_positions / rope.high_freq_factor
    shortest_slowed = rope.original_max_positions / rope.low_freq_factor
    share_kept = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    slowed = frequencies / rope.factor
    blended = (1 - share_kept) * slowed + share_kept * frequencies
    stretched = torch.where(wavelengths > shortest_slowed, slowed, blended)
    return torch.where(wavelengths < longest_kept, frequencies, stretched)
