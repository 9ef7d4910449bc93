"""Which matrices stay in e4m3 where a recipe makes the others int4, told by their names; what their scales stand for.

The patterns that decide here are the ones that are written as compressed-tensors' targets, so that they cannot differ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from katydid_engine.model_config import ModelConfig

__all__ = ["Fp8Scales", "Part", "Parts"]

Part = Literal["attention", "dense", "shared", "draft"]
"""Of a model: attention's projections, dense feed-forward blocks, shared experts, all of its draft layers."""

Fp8Scales = Literal["tensor", "channel", "block"]
"""What one scale of e4m3 stands for: a matrix, one of its rows, or 128 x 128 of its weights."""

_PLACES = {
    "attention": r"self_attn\.[qkvo]_proj$",
    "dense": r"layers\.\d+\.mlp\.(gate|up|down)_proj$",
    "shared": r"mlp\.shared_(mlp|experts)\.(gate|up|down)_proj$",
    "experts": r"mlp\.experts\.\d+\.(gate|up|down)_proj$",
}


@dataclass(frozen=True)
class Parts:
    """The parts that stay in e4m3.

    Attributes:
        kept: by name.
        draft_layers: numbers of the model's draft layers.
        layers: numbers of layers that stay as a whole.
        scales: of all matrices in e4m3.
        places: which of attention, dense, shared and experts the model has.
    """

    kept: tuple[Part, ...] = ()
    draft_layers: tuple[int, ...] = ()
    places: tuple[str, ...] = tuple(_PLACES)
    layers: tuple[int, ...] = ()
    scales: Fp8Scales = "tensor"

    @classmethod
    def of(
        cls,
        kept: tuple[Part, ...],
        config: ModelConfig,
        *,
        layers: tuple[int, ...] = (),
        scales: Fp8Scales = "tensor",
    ) -> Parts:
        """In a model."""
        end = config.num_layers + config.num_mtp_layers
        places = ["attention"]
        if config.moe is None or not all(config.sparse_layers):
            places.append("dense")
        if config.moe is not None:
            places += ["experts", *(["shared"] if config.moe.shared_intermediate_size else [])]
        return cls(kept, tuple(range(config.num_layers, end)), tuple(places), layers, scales)

    def is_fp8(self, name: str) -> bool:
        """Of a matrix's full name, with or without ".weight"."""
        stem = name.removesuffix(".weight")
        return any(re.match(target, stem) for target in self.fp8_targets)

    @cached_property
    def fp8_targets(self) -> list[str]:
        """Patterns of the names of matrices in e4m3, for ``re.match``."""
        targets = [f".*{place}" for kind, place in self._places if kind in self.kept]
        return [*targets, f".*{self._whole}.*_proj$"] if self._whole else targets

    @cached_property
    def int4_targets(self) -> list[str]:
        """Patterns of all others."""
        before = f"(?!.*{self._whole})" if self._whole else ""
        return [f"{before}.*{place}" for kind, place in self._places if kind not in self.kept]

    @property
    def _places(self) -> list[tuple[str, str]]:
        return [(kind, place) for kind, place in _PLACES.items() if kind in self.places]

    @property
    def _whole(self) -> str:
        """Pattern of the layers of which nothing is int4; empty for none."""
        layers = [*self.layers, *(self.draft_layers if "draft" in self.kept else ())]
        return rf"layers\.({'|'.join(map(str, layers))})\." if layers else ""
