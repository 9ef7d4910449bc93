"""Transfers of one direction between a rank's pages and slots: on a GPU beside its steps, elsewhere at once.

On a GPU they have a stream of their own. A transfer begins when the work that was queued before it is done, so that it
packs what has been written, and unpacks over what is read no more. Then nothing waits for it but a step whose runs read
what it brings, and that layer by layer: a large unpack is a few launches, each of some layers of all its blocks. The
end of a transfer is an event, before which its checksums are copied to pinned memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from katydid_kernels import published_checksum
from torch import Tensor

from katydid_engine.collectives import Collectives
from katydid_engine.kv_cache import KvCache
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.plan import Moved, Transfer
from katydid_engine.slot_memory import SlotMemory

__all__ = ["TransferQueue"]

# A launch of so much takes longer on the link than the host takes to make it.
_LAUNCH_BYTES = 16 * 1024 * 1024
_MOST_LAUNCHES = 10


@dataclass(slots=True)
class _UnderWay:
    """``sums`` are the checksums that this rank contributes, of ``transfers`` in the order of ``places``."""

    step: int
    transfers: Sequence[Transfer]
    places: list[int]
    sums: Tensor
    host: Tensor | None = None
    over: torch.cuda.Event | None = None
    joined: bool = False
    layers: dict[int, torch.cuda.Event] = field(default_factory=dict)


class TransferQueue:
    """``move`` is ``kv_pack`` or ``kv_unpack``; ``slots`` is None without a cache service.

    ``by_layers``: steps may wait for what comes.
    """

    def __init__(
        self,
        move: Callable[..., None],
        model: DecoderLM,
        kv_cache: KvCache,
        collectives: Collectives,
        slots: SlotMemory | None,
        *,
        by_layers: bool,
    ) -> None:
        self._move = move
        self._model = model
        self._kv_cache = kv_cache
        self._collectives = collectives
        self._slots = slots
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._by_layers = by_layers and self._stream is not None
        self._under_way: deque[_UnderWay] = deque()

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def start(self, step: int, transfers: Sequence[Transfer]) -> None:
        """Begins the transfers of a step."""
        if not transfers:
            return
        if self._stream is None:
            self._under_way.append(self._begin(step, transfers))
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            begun = self._begin(step, transfers)
            self._end(begun, begun.sums)
        self._under_way.append(begun)

    def coming(self) -> dict[int, torch.cuda.Event]:
        """By layer, the event after which all that has been started can be read."""
        return self._under_way[-1].layers if self._under_way else {}

    def join(self) -> None:
        """Where several ranks move parts of each block: behind a step's own work they wait for each other, on the
        device, and add up their sums. That of all ranks is the object's; and rank 0 tells the face that slots are full
        or free, so every rank must be done with its heads by then."""
        if self._collectives.size == 1:
            return
        for begun in self._under_way:
            if begun.joined:
                continue
            if begun.over is not None:
                torch.cuda.current_stream().wait_event(begun.over)
            if not self._model.sums_kv_heads:
                begun.sums.zero_()
            self._end(begun, self._collectives.all_reduce(begun.sums))
            begun.joined = True

    def over(self, step: int, *, wait: bool) -> tuple[Moved, ...]:
        """What has ended and was not told yet; with ``wait``, and where ranks have joined, all up to ``step``."""
        ended = []
        while self._under_way:
            first = self._under_way[0]
            if first.over is not None:
                if (wait or first.joined) and first.step <= step:
                    first.over.synchronize()
                elif first.joined or not first.over.query():  # type: ignore[no-untyped-call]
                    break
            ended.append(_moved(self._under_way.popleft()))
        return tuple(ended)

    def drain(self) -> None:
        """Waits until no transfer is under way on the device."""
        if self._stream is not None:
            self._stream.synchronize()

    def _begin(self, step: int, transfers: Sequence[Transfer]) -> _UnderWay:
        assert self._slots is not None
        device, layers = self._model.device, self._kv_cache.num_layers
        groups = list(self._slots.groups(transfers))
        places = [place for _, some in groups for place in some]
        begun = _UnderWay(step, transfers, places, torch.zeros(len(places), dtype=torch.int64, device=device))
        pages = _on(device, [transfers[place].page for place in places])
        rows = _on(device, [self._slots.row(transfers[place].slot) for place in places])
        launches = 1
        if self._by_layers:
            launches = max(1, min(len(transfers) * self._kv_cache.bytes_per_page // _LAUNCH_BYTES, _MOST_LAUNCHES))
        for first in range(0, layers, -(-layers // launches)):
            last = min(first + -(-layers // launches), layers)
            start = 0
            for objects, some in groups:
                end = start + len(some)
                summed = any(transfers[place].summed for place in some)
                self._move(
                    self._kv_cache.k_pages[first:last],
                    self._kv_cache.v_pages[first:last],
                    pages[start:end],
                    objects,
                    rows[start:end],
                    object_kv_heads=self._model.config.num_kv_heads,
                    first_head=self._model.first_kv_head,
                    first_layer=first,
                    checksums=begun.sums[start:end] if summed else None,
                )
                start = end
            if self._by_layers:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                begun.layers.update(dict.fromkeys(range(first, last), event))
        return begun

    def _end(self, begun: _UnderWay, sums: Tensor) -> None:
        """On a GPU the sums are on their way to the host with the end of the transfer."""
        begun.sums = sums
        if self._stream is None:
            return
        if self._collectives.size == 1 or begun.over is not None:
            begun.host = torch.empty(sums.shape, dtype=torch.int64, pin_memory=True)
            begun.host.copy_(sums, non_blocking=True)
        begun.over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        begun.over.record()


def _moved(ended: _UnderWay) -> Moved:
    sums = ended.sums if ended.host is None else ended.host
    checksums = [0] * len(ended.transfers)
    for place, total in zip(ended.places, sums.tolist(), strict=True):
        checksums[place] = published_checksum(total) * ended.transfers[place].summed
    return Moved(ended.step, tuple(checksums))


def _on(device: torch.device, numbers: list[int]) -> Tensor:
    """int32 ``[numbers]``, without waiting for the device."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int32)
    return torch.tensor(numbers, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)
