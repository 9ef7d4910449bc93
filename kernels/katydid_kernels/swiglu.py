"""SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020): silu(gate) * up, the product in fp32, rounded once.

Bound by memory: two elements read for one written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["swiglu", "swiglu_reference"]

_COLUMNS = 1024


def swiglu(gate_up: Tensor) -> Tensor:
    """``[T, 2 * n]`` (gate in the first half, up in the second) -> ``[T, n]``, same dtype."""
    if not _has_kernel(gate_up):
        return swiglu_reference(gate_up)
    tokens, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, n, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        blocks = triton.cdiv(n, _COLUMNS)
        _swiglu_kernel[(tokens * blocks,)](
            gate_up, out, n, gate_up.stride(0), blocks, BLOCK=min(_COLUMNS, triton.next_power_of_2(n)), num_warps=4
        )
    return out


def _has_kernel(gate_up: Tensor) -> bool:
    return gate_up.is_cuda


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, n, row_stride, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    source = gate_up_ptr + row * row_stride + col
    gate = tl.load(source, mask=col < n, other=0.0).to(tl.float32)
    up = tl.load(source + n, mask=col < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n + col, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=col < n)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    # Written out: torch's silu and sigmoid round the last few elements of a tensor by another path than the rest, so
    # that a row's bits would depend on the number of rows.
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)
