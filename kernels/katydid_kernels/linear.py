"""y = x W^T + b, with one promise the rest of the engine leans on: a row of y depends on that row of x alone.

CPU BLAS picks its inner kernel by the number of rows, and one to three rows (or an odd share per thread) round
differently from the same rows in a larger batch. The reference therefore pads to a multiple of eight rows, where
every row is computed by the same full tile: the same request then gets the same bits whatever else is in the batch.
MKL on Intel's CPUs also cuts the sums over ``in`` by the number of rows unless its results are to be strictly
reproducible (conditional numerical reproducibility); it reads that from the environment at its first product. On other
CPUs the same request would undo the promise.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["linear", "linear_reference", "linear_unrounded"]

_ROW_TILE = 8

_VECTORS, _CPU = torch.backends.cpu.get_cpu_capability(), Path("/proc/cpuinfo")
if _VECTORS in ("AVX2", "AVX512") and _CPU.exists() and "GenuineIntel" in _CPU.read_text():
    os.environ.setdefault("MKL_CBWR", f"{_VECTORS},STRICT")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[..., in] x [out, in] -> [..., out]`` in the dtype of ``x``, which ``weight`` shares.

    Args:
        bias: ``[out]`` or None.
    """
    return linear_reference(x, weight, bias)


def linear_unrounded(x: Tensor, weight: Tensor) -> Tensor:
    """``[M, in] x [out, in] -> [M, out]`` in fp32, of bf16 or fp16 operands: their products are exact in fp32, so this
    is what fp32 copies of both would give, for half the bytes."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return linear_reference(x.float(), weight.float())


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    padding = -rows.shape[0] % _ROW_TILE
    if padding:
        out = F.linear(F.pad(rows, (0, 0, 0, padding)), weight, bias)[: rows.shape[0]]
    else:
        out = F.linear(rows, weight, bias)
    return out.reshape(*x.shape[:-1], weight.shape[0])
