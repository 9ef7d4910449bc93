"""The seam between layers and the ranks that share them: alone, or over torch.distributed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch.distributed as dist
from katydid_runtime.errors import EngineLostError
from torch import Tensor

__all__ = ["Collectives", "Pending", "Settled", "SingleRank", "TorchCollectives"]

# Its name from torch 2.13 on, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending(Protocol):
    """Rows under way; work that does not need them goes between the start and ``wait``."""

    def done(self) -> bool:
        """Whether they have come: ``wait`` would return at once."""
        ...

    def wait(self) -> Tensor: ...


class Collectives(Protocol):
    """One group of ranks. Every method is called by all ranks of the group in the same order; ``all_to_all`` takes
    parts of any size, the others equal shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks; same shape on each. May reuse ``x``'s memory."""
        ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenation over ranks along ``dim``, in rank order."""
        ...

    def gather(self, x: Tensor) -> Pending:
        """As ``all_gather`` along the first dimension, under way."""
        ...

    def all_to_all(
        self,
        x: Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Rows for each rank, in rank order -> rows from each rank, in rank order.

        Args:
            x: ``[rows, ...]``.
            send: rows for each rank; equal parts where there are none. No size is read from a device then.
            receive: rows from each rank; given exactly when ``send`` is.
            out: where they are to lie; by default new memory.
        """
        ...


class Settled:
    """Rows that are there already."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def done(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self._rows


class SingleRank:
    """A group of one: nothing moves."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:  # noqa: ARG002
        return x

    def gather(self, x: Tensor) -> Pending:
        return Settled(x)

    def all_to_all(
        self,
        x: Tensor,
        send: Sequence[int] | None = None,  # noqa: ARG002
        receive: Sequence[int] | None = None,  # noqa: ARG002
        out: Tensor | None = None,
    ) -> Pending:
        if out is not None:
            x = out.copy_(x)
        return Settled(x)


@contextlib.contextmanager
def _ranks_answer() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise EngineLostError(f"a rank of the group is gone or silent: {error}") from error


class TorchCollectives:
    """A ``torch.distributed`` group: gloo on CPU, NCCL on GPUs.

    Every method raises EngineLostError when another rank is gone, or silent for as long as the group was made to wait.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        with _ranks_answer():
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        parts = x.new_empty((self.size, *x.shape))
        with _ranks_answer():
            _all_gather(parts.flatten(0, 1), x.contiguous(), group=self.group)
        return parts.movedim(0, dim).flatten(dim, dim + 1)

    def gather(self, x: Tensor) -> Pending:
        out = x.new_empty((self.size * len(x), *x.shape[1:]))
        with _ranks_answer():
            work = _all_gather(out, x.contiguous(), group=self.group, async_op=True)
        assert work is not None
        return _Sent(work, out)

    def all_to_all(
        self,
        x: Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        rows = x.shape[0] if receive is None else sum(receive)
        out = x.new_empty((rows, *x.shape[1:])) if out is None else out
        with _ranks_answer():
            work = dist.all_to_all_single(
                out,
                x.contiguous(),
                None if receive is None else list(receive),
                None if send is None else list(send),
                group=self.group,
                async_op=True,
            )
        assert work is not None
        return _Sent(work, out)


class _Sent:
    def __init__(self, work: dist.Work, rows: Tensor) -> None:
        self._work = work
        self._rows = rows

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> Tensor:
        with _ranks_answer():
            self._work.wait()
        return self._rows
