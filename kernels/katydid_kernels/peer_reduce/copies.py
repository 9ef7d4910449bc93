"""Sums and norms of a split residual whose rows travel by copy engines, beside what the multiprocessors compute.

    scatter   each rank's summands, e4m3 with a scale a row, to the owners of their rows
    sum       of what came and this rank's own summand, the residual and the norm: of the rows that it owns
    gather    those, e4m3 with a scale a row, to all

A copy takes no multiprocessor, so a product beside it loses nothing but a little of the memory's bandwidth. A rank
writes into its peers' rooms and then raises a flag there, all by its stream; whoever reads waits for the flags by its
own stream, takes them down, and goes on. The host waits for nothing, and a CUDA graph can hold it all.

A batch has `PARTS` parts, each with rooms and a stream of its own, so that one is on its way, the sum between its two
transfers included, while another is computed. No room is written to before it has been read, although nobody says so: a
rank scatters the next summands of a part when it has gathered the rows before from everyone, who had read the summands
before by then; and gathers when it has everyone's summands, which came of the rows before. So every scatter of a part
must be followed by its gather.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl
from torch import Tensor

from katydid_kernels.peer_reduce.peers import PeerMemory
from katydid_kernels.peer_reduce.rows import normed_row, quantized_row

__all__ = ["PARTS", "PeerCopies"]

PARTS = 2
_E4M3 = torch.float8_e4m3fn
_ALIGNMENT = 256
_EQUAL = 1
_KINDS = ("scatter", "gather")


class PeerCopies:
    """One rank's end; bf16 rows of ``hidden`` elements, at most ``tokens`` of a part over all ranks together.

    Ranks must meet between making theirs and the first call, and make the same calls in the same order. What a call
    returns lies in shared memory until the next of its kind and part. Ranks of a host's memory run in turn.

    Args:
        memory: at least ``nbytes(...)`` of each rank, zeroed, and used by nothing else.
        told: int32 columns that may be gathered beside each row.

    Raises ValueError for a hidden size that is not a multiple of 16, and memory that is too small.
    """

    def __init__(self, memory: PeerMemory, hidden: int, *, tokens: int, told: int) -> None:
        if hidden % 16:
            raise ValueError(f"hidden must be a multiple of 16, got {hidden}")
        needed = self.nbytes(memory.size, hidden, tokens=tokens, told=told)
        if memory.own.numel() < needed:
            raise ValueError(f"memory must have {needed} bytes a rank, got {memory.own.numel()}")
        self.memory, self.hidden, self.tokens, self.told = memory, hidden, tokens, told
        self._share = -(-tokens // memory.size)
        self._offsets = _offsets(memory.size, hidden, tokens, told)
        # What is on its way goes first: the other part's next block is long.
        self._streams = [torch.cuda.Stream(memory.own.device, priority=-1) for _ in range(PARTS * memory.own.is_cuda)]

    @staticmethod
    def nbytes(ranks: int, hidden: int, *, tokens: int, told: int) -> int:
        """Bytes that a rank needs."""
        return _offsets(ranks, hidden, tokens, told)["end"]

    def beside(self, part: int) -> AbstractContextManager[object]:
        """What is done within is done by the part's own stream, behind all that was begun before."""
        if not self._streams:
            return contextlib.nullcontext()
        stream = self._streams[part]
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def scatter(self, part: int, x: Tensor) -> None:
        """Sends summands to the owners of their rows.

        Args:
            x: bf16 ``[T, hidden]``, contiguous; row i belongs to rank ``i // ceil(T / ranks)``.
        """
        tokens, size = len(x), self.memory.size
        share = -(-tokens // size)
        values, scales = self._rows("outgoing", part, tokens), self._scales("outgoing scales", part, tokens)
        _quantize_kernel[(tokens,)](x, values, scales, self.hidden, BLOCK=triton.next_power_of_2(self.hidden))
        for step in range(1, size):
            peer = (self.memory.rank + step) % size
            first, last = peer * share, min((peer + 1) * share, tokens)
            if first < last:
                there = self.memory.rank * self._share
                self._copy(peer, "summands", part, there, values[first:last])
                self._copy(peer, "summand scales", part, there, scales[first:last])
            self._raise(peer, "scatter", part)

    def sum(self, part: int, x: Tensor, residual: Tensor, weight: Tensor, eps: float, own: Tensor) -> Tensor:
        """When all summands of this rank's rows are there: returns the new residual, and fills ``own`` with its norm,
        both bf16 ``[share, hidden]``; the rows are ready to be gathered. ``x`` is what was scattered."""
        tokens, size = len(x), self.memory.size
        share = -(-tokens // size)
        total = torch.empty_like(residual)
        rows = min(share, max(0, tokens - self.memory.rank * share))
        self._await("scatter", part)
        if rows < share:
            total[rows:] = 0
            own[rows:] = 0
        if rows:
            room = size * self._share
            _sum_kernel[(rows,)](
                x, self._rows("summands", part, room), self._scales("summand scales", part, room), residual, total,
                weight, own, self._rows("leaving", part, share), self._scales("leaving scales", part, share),
                self.memory.rank, share, self._share, self.hidden, eps, RANKS=size,
                BLOCK=triton.next_power_of_2(self.hidden),
            )  # fmt: skip
        return total

    def gather(self, part: int, tokens: int, told: Tensor | None = None) -> None:
        """Sends the rows that `sum` left to all ranks, with ``told``, int32 ``[share, columns]``, beside them."""
        size, rank = self.memory.size, self.memory.rank
        share = -(-tokens // size)
        first = rank * share
        rows = min(share, max(0, tokens - first))
        parts = [
            ("gathered", self._rows("leaving", part, rows)),
            ("gathered scales", self._scales("leaving scales", part, rows)),
        ]
        if told is not None:
            kept = self._told("leaving told", part, rows, told.shape[1])
            kept.copy_(told[:rows])
            parts.append(("gathered told", kept))
        for step in range(size):
            peer = (rank + step) % size
            for name, values in parts if rows else ():
                self._copy(peer, name, part, first, values)
            self._raise(peer, "gather", part)

    def gathered(self, part: int, tokens: int, told: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """All rows, once they are there: e4m3 ``[T, hidden]``, their scales fp32 ``[T]``, and what was told of them,
        int32 ``[T, told]``."""
        self._await("gather", part)
        return (
            self._rows("gathered", part, tokens),
            self._scales("gathered scales", part, tokens),
            self._told("gathered told", part, tokens, told),
        )

    def join(self) -> None:
        """The present stream goes on when what was sent has left: a capture must end with it."""
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)

    def _copy(self, peer: int, name: str, part: int, first: int, values: Tensor) -> None:
        begin = self._offsets[f"{name} {part}"] + first * values[0].nbytes
        self.memory.buffers[peer][begin : begin + values.nbytes].copy_(values.view(torch.uint8).view(-1))

    def _raise(self, peer: int, kind: str, part: int) -> None:
        if self._streams:
            stream = torch.cuda.current_stream().cuda_stream
            _call("cuStreamWriteValue32_v2", stream, self._flag(peer, kind, part, self.memory.rank), 1, 0)

    def _await(self, kind: str, part: int) -> None:
        if not self._streams:
            return
        stream, rank = torch.cuda.current_stream().cuda_stream, self.memory.rank
        sources = [source for source in range(self.memory.size) if source != rank or kind == "gather"]
        for source in sources:
            _call("cuStreamWaitValue32_v2", stream, self._flag(rank, kind, part, source), 1, _EQUAL)
        for source in sources:
            _call("cuStreamWriteValue32_v2", stream, self._flag(rank, kind, part, source), 0, 0)

    def _flag(self, holder: int, kind: str, part: int, source: int) -> int:
        word = (_KINDS.index(kind) * PARTS + part) * self.memory.size + source
        return self.memory.buffers[holder].data_ptr() + 4 * word

    def _rows(self, name: str, part: int, rows: int) -> Tensor:
        return self._view(f"{name} {part}", _E4M3, rows * self.hidden).view(rows, self.hidden)

    def _scales(self, name: str, part: int, rows: int) -> Tensor:
        return self._view(f"{name} {part}", torch.float32, rows)

    def _told(self, name: str, part: int, rows: int, columns: int) -> Tensor:
        return self._view(f"{name} {part}", torch.int32, rows * columns).view(rows, columns)

    def _view(self, what: str, dtype: torch.dtype, count: int) -> Tensor:
        begin = self._offsets[what]
        return self.memory.own[begin : begin + count * dtype.itemsize].view(dtype)


@triton.jit
def _quantize_kernel(x_ptr, q_ptr, scale_ptr, hidden, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    q, scale = quantized_row(tl.load(x_ptr + row * hidden + column, mask=inside, other=0.0).to(tl.float32))
    tl.store(q_ptr + row * hidden + column, q, mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit(do_not_specialize=["rank", "share", "room"])
def _sum_kernel(
    x_ptr, sent_ptr, sent_scale_ptr, residual_ptr, total_ptr, weight_ptr, own_ptr, q_ptr, scale_ptr, rank, share, room,
    hidden, eps, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i: row i of this rank's share. sent: ``[source][row of the share][hidden]``, ``room`` rows a source;
    summed in the order of the ranks, this one's own unrounded."""
    i = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for source in tl.static_range(RANKS):
        if source == rank:
            total += tl.load(x_ptr + (rank * share + i) * hidden + column, mask=inside, other=0.0).to(tl.float32)
        else:
            place = source * room + i
            q = tl.load(sent_ptr + place * hidden + column, mask=inside, other=0.0).to(tl.float32)
            total += q * tl.load(sent_scale_ptr + place)
    y = normed_row(total, i, residual_ptr, total_ptr, weight_ptr, hidden, eps, BLOCK)
    tl.store(own_ptr + i * hidden + column, y.to(own_ptr.dtype.element_ty), mask=inside)
    q, scale = quantized_row(y)
    tl.store(q_ptr + i * hidden + column, q, mask=inside)
    tl.store(scale_ptr + i, scale)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, stream: int, address: int, value: int, flags: int) -> None:
    """A wait or a write by a stream, of a word of 32 bits; captured where the stream is."""
    code = getattr(_driver(), name)(
        ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint32(flags)
    )
    if code:
        raise RuntimeError(f"{name} failed with CUDA error {code}")


def _offsets(ranks: int, hidden: int, tokens: int, told: int) -> dict[str, int]:
    """Where each room begins, in bytes; flags first."""
    share = -(-tokens // ranks)
    sizes = {"flags": 4 * len(_KINDS) * PARTS * ranks}
    for part in range(PARTS):
        rows = {"outgoing": tokens, "summands": ranks * share, "leaving": share, "gathered": tokens}
        for name, count in rows.items():
            sizes[f"{name} {part}"] = count * hidden
            scales = "summand scales" if name == "summands" else f"{name} scales"
            sizes[f"{scales} {part}"] = 4 * count
        sizes[f"leaving told {part}"] = 4 * share * told
        sizes[f"gathered told {part}"] = 4 * tokens * told
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return {**offsets, "end": end}
