"""How exactly a GPU multiplies fp32 matrices: in TF32 where sums over many rows or rounding to e4m3 follow, which are
far coarser than its 11 bits, and in whole fp32 where a system of equations is solved. Attention goes to bf16 with the
former: GPUs have no fast kernel for it in fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["causal_attention", "fp32_products", "tf32_products"]


def tf32_products(device: torch.device | str) -> contextlib.AbstractContextManager[None]:
    """Products on a GPU in TF32; on a CPU nothing changes."""
    return _precision("high", device)


def fp32_products(device: torch.device | str) -> contextlib.AbstractContextManager[None]:
    """Products in fp32."""
    return _precision("highest", device)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """fp32 ``[S, heads, T, head_dim]`` each; on a GPU in bf16 under ``tf32_products``."""
    if q.is_cuda and torch.get_float32_matmul_precision() == "high":
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).float()


@contextlib.contextmanager
def _precision(wanted: str, device: torch.device | str) -> Iterator[None]:
    if torch.device(device).type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
