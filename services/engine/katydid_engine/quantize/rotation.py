"""Rotates the residual stream, so that no channel of it stands out: folded into weights, nothing at run time.

With R orthonormal and x' = x R, RMSNorm without a gain commutes with R. Gains are therefore multiplied into what
follows them, and then

    embedding:  W' = W R        o, down:  W' = R^T W        q, k, v, gate, up, router, head:  W' = W diag(g) R

give the same answers (Ashkboos et al., "QuaRot", 2024, stage 1). R is a Hadamard matrix whose rows have random signs,
block-diagonal where the width is no power of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Rotation", "hadamard"]

_READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate")
_WRITERS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Rotation:
    """R of a model's width, fp32 ``[hidden, hidden]``."""

    matrix: Tensor

    @classmethod
    def make(cls, hidden_size: int, *, seed: int, device: torch.device | str) -> Rotation:
        """The same R for the same width and seed, whatever the device."""
        block = hidden_size & -hidden_size
        signs = torch.randint(2, (hidden_size, 1), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0
        whole = torch.kron(torch.eye(hidden_size // block), hadamard(block))
        return cls((signs * whole).to(device))

    def layer(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A decoder layer's tensors, by their names below its prefix."""
        rotated = {}
        for name, tensor in tensors.items():
            kind = name.split(".")[-2]
            if name.startswith("self_attn.") and kind in _READERS and name.endswith(".weight"):
                rotated[name] = self.reader(tensor, tensors["input_layernorm.weight"])
            elif name.startswith("mlp.") and kind in _READERS and name.endswith(".weight"):
                rotated[name] = self.reader(tensor, tensors["post_attention_layernorm.weight"])
            elif kind in _WRITERS:
                rotated[name] = self.matrix.T @ tensor if tensor.ndim == 2 else tensor @ self.matrix
            elif name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                rotated[name] = torch.ones_like(tensor)
            else:
                rotated[name] = tensor
        return rotated

    def reader(self, weight: Tensor, gain: Tensor) -> Tensor:
        """A weight ``[out, hidden]`` behind a norm with this gain, which it takes in."""
        return (weight * gain) @ self.matrix

    def embedding(self, weight: Tensor) -> Tensor:
        """``[vocab, hidden]``."""
        return weight @ self.matrix


def hadamard(size: int, device: torch.device | str = "cpu") -> Tensor:
    """The orthonormal Hadamard matrix of a power of two, by Sylvester's construction."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    orthonormal: Tensor = matrix / size**0.5
    return orthonormal
