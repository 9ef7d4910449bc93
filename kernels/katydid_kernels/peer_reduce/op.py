"""One rank's end of the reductions: its buffers, its counters of rounds, and the launches.

Every rank of a group makes the same calls with the same shapes in the same order. A rank that stays away is waited for
up to a bound; then the call goes on with what there is and `PeerReducer.check` raises.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from katydid_kernels.peer_reduce.lamport_kernel import EMPTY, lamport_kernel
from katydid_kernels.peer_reduce.peers import PeerMemory
from katydid_kernels.peer_reduce.quantized_kernels import all_gather_kernel, reduce_scatter_kernel
from katydid_kernels.peer_reduce.two_shot_kernel import two_shot_kernel
from katydid_kernels.quantize_rows import quantize_fp8_reference
from katydid_kernels.rms_norm import rms_norm_reference

__all__ = [
    "PeerReducer",
    "add_rms_norm_of_ranks_reference",
    "quantized_all_gather_reference",
    "quantized_reduce_scatter_reference",
]

_E4M3 = torch.float8_e4m3fn
_ALIGNMENT = 256
_KINDS = 3


class PeerReducer:
    """Reductions of bf16 rows of ``hidden`` elements over the ranks of ``memory``.

    Args:
        memory: at least ``nbytes(...)`` of each rank, zeroed, and used by nothing else.
        few_tokens: most rows of `all_reduce_few`.
        tokens: most rows of the other calls, over all ranks together.
        ctas: programs of the calls for many rows. What is emulated on one GPU must fit it at once: ranks times ctas.
        patience: how often a flag or a row is looked at before a rank is given up; about a microsecond each.

    Ranks must meet between making theirs and the first call.

    Raises ValueError for ranks that are no power of two, a hidden size that is not a multiple of 16, and memory that is
    too small.
    """

    def __init__(
        self, memory: PeerMemory, hidden: int, *, few_tokens: int = 128, tokens: int = 8192, ctas: int = 528,
        patience: int = 1 << 22,
    ) -> None:  # fmt: skip
        if memory.size & (memory.size - 1):
            raise ValueError(f"ranks must be a power of two, got {memory.size}")
        if hidden % 16:
            raise ValueError(f"hidden must be a multiple of 16, got {hidden}")
        needed = self.nbytes(memory.size, hidden, few_tokens=few_tokens, tokens=tokens, ctas=ctas)
        if memory.own.numel() < needed:
            raise ValueError(f"memory must have {needed} bytes a rank, got {memory.own.numel()}")
        self.memory, self.hidden = memory, hidden
        self.few_tokens, self.tokens, self._ctas, self._patience = few_tokens, tokens, ctas, patience
        self._share = -(-tokens // memory.size)
        self._offsets = _offsets(memory.size, hidden, few_tokens, tokens, ctas)
        # Rounds of each row, and of each program of each kind of call: on the device, so that a graph can be replayed.
        self._row_rounds = torch.zeros(few_tokens, dtype=torch.int32, device=memory.own.device)
        self._rounds = torch.zeros(_KINDS, -(-ctas // 4) * 4, dtype=torch.int32, device=memory.own.device)
        # On the host, so that to look at it costs nothing.
        self._failed = torch.zeros(1, dtype=torch.int32, pin_memory=memory.own.is_cuda)
        begin, end = self._offsets["few"], self._offsets["sent"]
        memory.own[begin:end].view(torch.int32).fill_(EMPTY)
        self._few_pointers = memory.pointers + begin

    @staticmethod
    def nbytes(ranks: int, hidden: int, *, few_tokens: int = 128, tokens: int = 8192, ctas: int = 528) -> int:
        """Bytes that a rank needs."""
        return _offsets(ranks, hidden, few_tokens, tokens, ctas)["end"]

    def check(self) -> None:
        """Raises RuntimeError if a rank was given up in a call that the device has done with; does not wait for it."""
        if self._failed[0]:
            raise RuntimeError("a rank did not come in time: results since then are wrong")

    def all_reduce_few(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, fp8: bool = False, overlap: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns ``(y, scale, total)``: normed rows, e4m3 with fp32 ``[T]`` or bf16 with None, and the new residual.

        Args:
            x: bf16 ``[T, hidden]``, contiguous, this rank's summand; T at most ``few_tokens``.
            residual: bf16 ``[T, hidden]``, the same on all ranks. The sum is taken in fp32 and rounded once, then
                normed.
            overlap: let the kernel start before the preceding one ends (programmatic dependent launch).
        """
        tokens = self._rows_of("x", x, self.few_tokens)
        y, scale = self._result(tokens, fp8)
        total = torch.empty_like(residual)
        if tokens:
            self._few(x, residual, total, weight, eps, y, scale, send=True, receive=True, early=overlap)
        return y, scale, total

    def sum_few(self, x: Tensor, *, overlap: bool = False) -> Tensor:
        """The sum of all ranks' x, bf16 ``[T, hidden]``, T at most ``few_tokens``; made in fp32 and rounded once."""
        total = torch.empty_like(x)
        if self._rows_of("x", x, self.few_tokens):
            self._few(x, None, None, None, 0.0, total, None, send=True, receive=True, early=overlap)
        return total

    def all_reduce_many(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, quantized: bool = False, fp8: bool = False,
        own: Tensor | None = None, overlap: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
        """Returns as `all_reduce_few`, all rows of y on every rank.

        y and its scale are views of shared memory, overwritten by the next call. Residual and its sum are those of this
        rank's share, rows ``rank * ceil(T / ranks)`` on.

        Args:
            x: bf16 ``[T, hidden]``, contiguous, this rank's summand; T at most ``tokens``.
            quantized: summands travel in e4m3 with a scale a token.
            fp8: so do results.
            own: bf16, of the residual's shape: gets y's rows of this rank's share unquantised.
        """
        tokens = self._rows_of("x", x, self.tokens)
        total = torch.empty_like(residual)
        if tokens:
            self._many(
                x, residual, total, weight, eps, own, quantized=quantized, fp8=fp8, send=True, sync=True, receive=True,
                early=overlap,
            )  # fmt: skip
        return *self._many_result(tokens, fp8), total

    def quantized_all_gather(self, x: Tensor, *, overlap: bool = False) -> tuple[Tensor, Tensor]:
        """``[m, hidden]`` of every rank to ``([ranks * m, hidden], [ranks * m])`` on all, e4m3 and fp32.

        Views of shared memory, overwritten by the next call.
        """
        rows = self._rows_of("x", x, self._share)
        if rows:
            self._gather(x, sync=True, early=overlap)
        total = rows * self.memory.size
        return self._view("gathered", _E4M3, total, self.hidden), self._view("gathered scales", torch.float32, total)

    def quantized_reduce_scatter(self, x: Tensor, *, overlap: bool = False) -> Tensor:
        """``[ranks * m, hidden]`` of every rank to this rank's m rows of their sum, bf16; summands travel in e4m3."""
        rows = self._rows_of("x", x, self.tokens)
        if rows % self.memory.size:
            raise ValueError(f"x must have a multiple of {self.memory.size} rows, got {rows}")
        out = torch.empty(rows // self.memory.size, self.hidden, dtype=torch.bfloat16, device=x.device)
        if rows:
            self._scatter(x, out, send=True, sync=True, receive=True, early=overlap)
        return out

    def _few(
        self, x: Tensor, residual: Tensor | None, total: Tensor | None, weight: Tensor | None, eps: float, y: Tensor,
        scale: Tensor | None, *, send: bool, receive: bool, early: bool,
    ) -> None:  # fmt: skip
        lamport_kernel[(len(x),)](
            x.view(torch.int32), self._few_pointers, self._row_rounds, self._failed, residual, total, weight, y, scale,
            self.memory.rank, self.few_tokens, self.hidden, eps, self._patience, SEND=send, RECEIVE=receive,
            EARLY=early, num_warps=16, **self._options(early),
        )  # fmt: skip

    def _many(
        self, x: Tensor, residual: Tensor, total: Tensor, weight: Tensor, eps: float, own: Tensor | None, *,
        quantized: bool, fp8: bool, send: bool, sync: bool, receive: bool, early: bool,
    ) -> None:  # fmt: skip
        two_shot_kernel[self._grid(-(-len(x) // self.memory.size))](
            x, self.memory.pointers, self._rounds[0], self._failed, residual, total, weight, own, self.memory.rank,
            len(x), self.hidden, eps, self._signals(0), self._offsets["sent"], self._offsets["sent scales"],
            self._offsets["results"], self._offsets["result scales"], self._patience, QUANTIZED=quantized, FP8=fp8,
            SEND=send, SYNC=sync, RECEIVE=receive, EARLY=early, num_warps=4, maxnreg=128, **self._options(early),
        )  # fmt: skip

    def _gather(self, x: Tensor, *, sync: bool, early: bool) -> None:
        all_gather_kernel[self._grid(len(x))](
            x, self.memory.pointers, self._rounds[1], self._failed, self.memory.rank, len(x), self.hidden,
            self._signals(1), self._offsets["gathered"], self._offsets["gathered scales"], self._patience, SYNC=sync,
            EARLY=early, num_warps=4, **self._options(early),
        )  # fmt: skip

    def _scatter(self, x: Tensor, out: Tensor, *, send: bool, sync: bool, receive: bool, early: bool) -> None:
        reduce_scatter_kernel[self._grid(len(out))](
            x, out, self.memory.pointers, self._rounds[2], self._failed, self.memory.rank, len(out), self._share,
            self.hidden, self._signals(2), self._offsets["scattered"], self._offsets["scattered scales"],
            self._patience, SEND=send, SYNC=sync, RECEIVE=receive, EARLY=early, num_warps=4, **self._options(early),
        )  # fmt: skip

    def _grid(self, rows: int) -> tuple[int]:
        """Programs of a call for many rows: no more than have a row."""
        return (min(self._ctas, rows),)

    def _options(self, early: bool) -> dict[str, int | bool]:
        block = triton.next_power_of_2(self.hidden)
        return {"RANKS": self.memory.size, "BLOCK": block, **({"launch_pdl": True} if early else {})}

    def _signals(self, kind: int) -> int:
        return kind * self._ctas * self.memory.size

    def _many_result(self, tokens: int, fp8: bool) -> tuple[Tensor, Tensor | None]:
        y = self._view("results", _E4M3 if fp8 else torch.bfloat16, tokens, self.hidden)
        return y, self._view("result scales", torch.float32, tokens) if fp8 else None

    def _result(self, tokens: int, fp8: bool) -> tuple[Tensor, Tensor | None]:
        device = self.memory.own.device
        y = torch.empty(tokens, self.hidden, dtype=_E4M3 if fp8 else torch.bfloat16, device=device)
        return y, torch.empty(tokens, device=device) if fp8 else None

    def _view(self, what: str, dtype: torch.dtype, *shape: int) -> Tensor:
        begin = self._offsets[what]
        count = torch.Size(shape).numel()
        return self.memory.own[begin : begin + count * dtype.itemsize].view(dtype).view(shape)

    def _rows_of(self, name: str, x: Tensor, most: int) -> int:
        if x.ndim != 2 or x.shape[1] != self.hidden or x.dtype != torch.bfloat16 or not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous bf16 [T, {self.hidden}], got {x.dtype} {list(x.shape)}")
        if len(x) > most:
            raise ValueError(f"{name} must have at most {most} rows, got {len(x)}")
        return len(x)


def _offsets(ranks: int, hidden: int, few_tokens: int, tokens: int, ctas: int) -> dict[str, int]:
    """Where each part of a rank's buffer begins, in bytes; flags first."""
    share = -(-tokens // ranks)
    sizes = {
        "signals": 4 * _KINDS * ctas * ranks,
        "few": 3 * ranks * few_tokens * hidden * 2,
        "sent": ranks * share * hidden * 2,
        "sent scales": ranks * share * 4,
        "results": tokens * hidden * 2,
        "result scales": tokens * 4,
        "gathered": share * ranks * hidden,
        "gathered scales": share * ranks * 4,
        "scattered": 2 * ranks * share * hidden,
        "scattered scales": 2 * ranks * share * 4,
    }
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return {**offsets, "end": end}


def add_rms_norm_of_ranks_reference(
    summands: list[Tensor], residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``(y, total)`` in the residual's dtype: summed in fp32 in the order of the ranks, rounded once, then normed."""
    total = torch.zeros(residual.shape, dtype=torch.float32, device=residual.device)
    for summand in summands:
        total = total + summand.float()
    total = (total + residual.float()).to(residual.dtype)
    return rms_norm_reference(total, weight, eps), total


def quantized_all_gather_reference(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The rows of all ranks in e4m3 and their scales, one a row."""
    quantized = [quantize_fp8_reference(part) for part in parts]
    return torch.cat([q for q, _ in quantized]), torch.cat([scale for _, scale in quantized])


def quantized_reduce_scatter_reference(summands: list[Tensor], rank: int) -> Tensor:
    """This rank's share of the rows' sum, bf16; summands quantised a row before they are summed."""
    rows = len(summands[0]) // len(summands)
    total = torch.zeros(rows, summands[0].shape[1], device=summands[0].device)
    for summand in summands:
        q, scale = quantize_fp8_reference(summand[rank * rows : (rank + 1) * rows])
        total = total + q.float() * scale[:, None]
    return total.to(torch.bfloat16)
