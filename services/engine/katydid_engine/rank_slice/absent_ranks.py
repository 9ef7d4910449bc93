"""Stands in for the other ranks of a group: results have the right shape and plausible values, and nothing is sent.

What would be sent is counted. What would arrive is made once for each shape and lies in the same memory from then on,
so that a step pays for computing alone and a captured graph reads addresses that stay.

Two ranks send each other alike, so what this rank would send to rank r stands for what rank r would send to it. Rows on
their way to experts carry their experts' ids, which are renumbered to the same places among this rank's experts. Rows
that are all alike, as those are that a graph is captured with before any step, stand for rows that are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from katydid_engine.collectives import Pending, Settled
from katydid_engine.rank_slice.emulated_link import EmulatedLink

__all__ = ["AbsentRanks", "ExpertMessages", "Traffic"]

# What another rank's logits, and the best of them, are here: below any of this rank's, which has the embeddings of its
# own tokens alone.
_NEVER_CHOSEN = -1e4


@dataclass(slots=True)
class Traffic:
    """What one kind of collective has carried: calls, and bytes that this rank sends to others."""

    calls: int = 0
    sent_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertMessages:
    """Where ids stand in rows on their way to experts, to tell them from rows on their way back.

    Attributes:
        row_bytes: of such a row.
        first_byte: of its ``top_k`` ids, int32.
        slots: experts of each rank.
    """

    row_bytes: int
    first_byte: int
    top_k: int
    slots: int


class AbsentRanks:
    """A group of ``size`` ranks of which ``rank`` alone is there.

    Attributes:
        traffic: by name of the collective, since it was last cleared.
        messages: set for the group that holds the experts.
        link: what rows that are under way go over; None: they take no time.
    """

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank}: expected 0 <= rank < size={size}")
        self.rank = rank
        self.size = size
        self.traffic: dict[str, Traffic] = {}
        self.messages: ExpertMessages | None = None
        self.link: EmulatedLink | None = None
        self._arrived: dict[tuple[object, ...], Tensor] = {}

    def all_reduce(self, x: Tensor) -> Tensor:
        """``x`` as it is; a ring sends 2 (n - 1) / n of it."""
        self.count("all_reduce", 2 * x.nbytes * (self.size - 1) / self.size)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self.count("all_gather", x.nbytes * (self.size - 1))
        if self.size == 1:
            return x
        key = ("gather", dim, x.dtype, *x.shape)
        if key not in self._arrived:
            whole = torch.cat([x] * self.size, dim=dim)
            if dim == 1 and x.element_size() == 4:
                whole.view(torch.float32).fill_(_NEVER_CHOSEN)
            self._arrived[key] = whole
        whole = self._arrived[key]
        whole.narrow(dim, self.rank * x.shape[dim], x.shape[dim]).copy_(x)
        return whole

    def gather(self, x: Tensor) -> Pending:
        return Settled(self.all_gather(x, 0))

    def all_to_all(
        self,
        x: Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Rows for each rank come back as rows from each."""
        each = [len(x) // self.size] * self.size if send is None else list(send)
        row = x.nbytes / max(1, len(x))
        self.count("all_to_all", row * (sum(each) - each[self.rank]))
        if out is not None:
            return Settled(out.copy_(x))
        arrived, messages = x, self.messages
        if messages is not None and x.ndim > 1 and x.shape[1] == messages.row_bytes and len(x):
            arrived = self._addressed_here(x, each, messages, counted=receive is not None)
        if self.link is None:
            return Settled(arrived)
        return _Carried(self.link, round(row * (sum(each) - each[self.rank])), arrived)

    def _addressed_here(self, x: Tensor, each: list[int], messages: ExpertMessages, *, counted: bool) -> Tensor:
        """``len(x)`` rows with experts of this rank. Counted rows all have some, so that any number of them is taken
        from the most there were; in the fixed form it matters which rows only fill up."""
        key = ("messages", x.shape[1], None if counted else len(x))
        made = self._arrived.get(key)
        if made is None or len(made) < len(x):
            made = x.clone()
            ids = _ids(made, messages)
            owner = torch.repeat_interleave(
                torch.arange(self.size, device=x.device), torch.tensor(each, device=x.device), output_size=len(x)
            ).unsqueeze(1)
            here = ids // messages.slots == owner
            places = _spread(ids % messages.slots, here, messages)
            moved = torch.where(here, places + self.rank * messages.slots, self.size * messages.slots)
            made[:, messages.first_byte : messages.first_byte + 4 * messages.top_k] = moved.int().view(torch.uint8)
            self._arrived[key] = made
        return made[: len(x)]

    def count(self, name: str, sent_bytes: float) -> None:
        """A call by which this rank sends others so much."""
        traffic = self.traffic.setdefault(name, Traffic())
        traffic.calls += 1
        traffic.sent_bytes += sent_bytes


class _Carried:
    """Rows that have come when as many bytes have gone over a link."""

    def __init__(self, link: EmulatedLink, nbytes: int, rows: Tensor) -> None:
        self._rows, self._over = rows, torch.cuda.Event()  # type: ignore[no-untyped-call]
        link.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(link.stream):
            link.carry(nbytes)
            self._over.record()

    def done(self) -> bool:
        return bool(self._over.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        torch.cuda.current_stream().wait_event(self._over)
        return self._rows


def _spread(places: Tensor, here: Tensor, messages: ExpertMessages) -> Tensor:
    """Places as they are; shifted by their rows' numbers where many rows have no more of them than one would."""
    chosen = torch.zeros(messages.slots + 1, dtype=torch.int32, device=places.device)
    chosen[torch.where(here, places, messages.slots).flatten().long()] = 1
    alike = (chosen[:-1].sum() <= messages.top_k) & (here.sum() > 4 * messages.top_k)
    shift = torch.arange(len(places), dtype=places.dtype, device=places.device).unsqueeze(1)
    return (places + shift * alike) % messages.slots


def _ids(rows: Tensor, messages: ExpertMessages) -> Tensor:
    places = slice(messages.first_byte, messages.first_byte + 4 * messages.top_k)
    return rows[:, places].contiguous().view(torch.int32)
