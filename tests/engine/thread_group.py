"""A group of ranks that are threads of one process: what gloo does, without its seconds to start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["ThreadGroup", "on_ranks"]

_T = TypeVar("_T")
_TIMEOUT_S = 30.0


class _Table:
    """What the ranks have laid down in the present call."""

    def __init__(self, size: int) -> None:
        self.laid: list[Any] = [None] * size
        self.all_here = threading.Barrier(size, timeout=_TIMEOUT_S)


class _Here:
    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def done(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self._rows


class ThreadGroup:
    """One rank's end."""

    def __init__(self, table: _Table, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._table = table

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0, dtype=x.dtype)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._exchange(x), dim)

    def gather(self, x: Tensor) -> _Here:
        return _Here(self.all_gather(x, 0))

    def all_to_all(
        self,
        x: Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> _Here:
        each = [len(x) // self.size] * self.size if send is None else list(send)
        parts = [rows.split(counts)[self.rank] for rows, counts in self._exchange((x, each))]
        if receive is not None:
            assert [len(part) for part in parts] == list(receive)
        rows = torch.cat(parts)
        return _Here(rows if out is None else out.copy_(rows))

    def _exchange(self, mine: _T) -> list[_T]:
        table = self._table
        table.laid[self.rank] = mine
        table.all_here.wait()
        taken = list(table.laid)
        table.all_here.wait()
        return taken


def on_ranks(size: int, work: Callable[[ThreadGroup], _T]) -> list[_T]:
    """Runs ``work`` on every rank; raises what one of them raised."""
    table = _Table(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def turn(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(table, rank, size))
        except BaseException as error:
            errors.append(error)
            table.all_here.abort()

    threads = [threading.Thread(target=turn, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if errors:
        raise errors[0]
    return results
