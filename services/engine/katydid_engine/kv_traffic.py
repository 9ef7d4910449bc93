"""Blocks on their way between pages and the cache service, as the scheduler sees them: tickets and slots, no bytes.

Reading: a sequence that was admitted with pages for its whole input asks for the blocks beyond the engine's own pages
under a ticket. The answer says how many there are, then they arrive in order in read slots, and the next step unpacks
them. Writing: finished blocks queue up; a step packs those that still bear their hash into free write slots. Nothing
here makes a step wait.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from katydid_runtime.block_hash import BLOCK_TOKENS, RUN_BLOCKS

from katydid_engine.messages import (
    KvAsk,
    KvCancel,
    KvCorrupt,
    KvGiveUp,
    KvGranted,
    KvLookup,
    KvReadSlotsFree,
    KvReserve,
    KvStore,
)
from katydid_engine.plan import Transfer
from katydid_engine.request import CachedTokens, Request, Sequence, Tier, fetch_span_id

__all__ = ["Arrival", "KvTraffic", "Ticket"]

_QUEUE_LIMIT = 65_536
_RESERVED_LEAST = 64


@dataclass(slots=True)
class Ticket:
    """One sequence's fetch: ``first_block`` is the index of the first block asked for, ``span_id`` its lookup's;
    ``taken`` blocks are being unpacked. ``stay`` tells whether the sequence still has the pages it waited with, and
    ``computing`` that it goes on already, behind the last of the blocks; ``wrong`` that one had another checksum."""

    number: int
    sequence: Sequence
    first_block: int
    span_id: bytes
    stay: int
    tiers: list[Tier] = field(default_factory=list)
    arrived: int = 0
    taken: int = 0
    computing: bool = False
    wrong: bool = False
    ended: bool = False

    @property
    def loaded_tokens(self) -> int:
        return (self.first_block + self.arrived) * BLOCK_TOKENS

    @property
    def taken_tokens(self) -> int:
        """With those that are being unpacked."""
        return (self.first_block + self.arrived + self.taken) * BLOCK_TOKENS

    @property
    def left(self) -> bool:
        """Whether the sequence has gone."""
        return self.sequence.stay != self.stay

    @property
    def next_tier(self) -> Tier | None:
        """Tier of the block that comes next; None when all have arrived."""
        return self.tiers[self.arrived] if self.arrived < len(self.tiers) else None

    @property
    def fetch_span_id(self) -> bytes:
        """Of a fetch that begins with the block that comes next."""
        return fetch_span_id(self.span_id, self.arrived)

    def cached(self, limit: int) -> CachedTokens:
        """Tokens by tier, ``limit`` in all at most: the first blocks are the engine's own."""
        counts = dict.fromkeys(Tier, 0)
        device = min(self.first_block * BLOCK_TOKENS, limit)
        left = limit - device
        for tier in self.tiers[: self.arrived]:
            counts[tier] += min(BLOCK_TOKENS, left)
            left -= min(BLOCK_TOKENS, left)
        return CachedTokens(device, counts[Tier.MEMORY], counts[Tier.DISK], counts[Tier.SHARED])


@dataclass(frozen=True, slots=True)
class Arrival:
    """Blocks of one ticket that the next step unpacks. ``checksums``: what each must have, 0 where it is known."""

    ticket: Ticket
    transfers: tuple[Transfer, ...]
    last: bool
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Finished:
    request: Request
    hash: bytes
    parent: bytes
    page: int
    run: bytes


class KvTraffic:
    """Tickets and slots of one scheduler. ``write_slots`` numbers the staging slots it may pack into.

    A service that shares its memory grants slots of it, block by block, and then those are packed into.
    """

    def __init__(self, write_slots: range) -> None:
        self.attached = False
        self._in_place = False
        # Blocks that wait for a slot or have been granted one, by hash; at most so many at a time.
        self._reserved: dict[bytes, _Finished] = {}
        self._granted: list[tuple[_Finished, int]] = []
        self._reserve_limit = max(_RESERVED_LEAST, len(write_slots))
        self._free_slots = list(write_slots)
        self._tickets: dict[int, Ticket] = {}
        self._arrivals: list[Arrival] = []
        self._finished: deque[_Finished] = deque(maxlen=_QUEUE_LIMIT)
        self._asks: list[KvAsk] = []
        self._last_ticket = 0

    def sequences(self) -> list[Sequence]:
        """Sequences that hold pages and wait for blocks."""
        return [ticket.sequence for ticket in self._tickets.values()]

    def coming_tokens(self) -> int:
        """Tokens that were found and have not been unpacked yet, of sequences that compute what is missing."""
        tickets = (ticket for ticket in self._tickets.values() if not ticket.sequence.request.fetch_only)
        return sum((len(ticket.tiers) - ticket.arrived) * BLOCK_TOKENS for ticket in tickets)

    def look_up(self, sequence: Sequence, first_block: int, now: float) -> Ticket:
        """Asks for the sequence's blocks from ``first_block`` on, under a new ticket. Those that another engine
        computes are waited for, but not one that ends with its newest token, which nobody has computed."""
        self._last_ticket += 1
        span_id = b"" if sequence.live.has_first_token else random.randbytes(8)
        ticket = Ticket(self._last_ticket, sequence, first_block, span_id, sequence.stay)
        self._tickets[ticket.number] = ticket
        hashes = sequence.hashes()
        before = b"".join(hashes[first_block - first_block % RUN_BLOCKS : first_block])
        request = sequence.request
        left_s = max(0.0, request.received_at + request.blocks_within_s - now)
        coming_s = 0.0 if sequence.live.has_first_token else left_s
        whole = sequence.num_tokens if request.fetch_only else sequence.num_tokens - 1
        coming = hashes[first_block : whole // BLOCK_TOKENS] if coming_s else []
        coming_s = coming_s if coming else 0.0
        wanted = b"".join(coming or hashes[first_block:])
        self._asks.append(KvLookup(ticket.number, request.handle, wanted, span_id, before, request.tenant, coming_s))
        return ticket

    def found(self, number: int, runs: tuple[tuple[Tier, int], ...], *, more: bool = False) -> Ticket | None:
        """Notes what was found, behind what was before; None when nobody waits for it any more."""
        ticket = self._tickets.get(number)
        if ticket is not None:
            ticket.tiers += [tier for tier, blocks in runs for _ in range(blocks)]
            if not ticket.tiers and not more:
                del self._tickets[number]
        return ticket

    def arrive(self, number: int, slots: tuple[int, ...], last: bool, checksums: tuple[int, ...] = ()) -> None:
        """Notes the ticket's next blocks, to be unpacked from ``slots``; freed at once where nobody waits any more."""
        ticket = self._tickets.get(number)
        if ticket is None:
            if slots:
                self._asks.append(KvReadSlotsFree(slots))
            return
        first = (
            ticket.first_block
            + ticket.arrived
            + ticket.taken
            + sum(len(arrival.transfers) for arrival in self._arrivals if arrival.ticket is ticket)
        )
        pages = ticket.sequence.pages[first : first + len(slots)]
        checksums = checksums or (0,) * len(slots)
        moves = zip(pages, slots, checksums, strict=True)
        transfers = tuple(Transfer(page, slot, summed=checksum != 0) for page, slot, checksum in moves)
        self._arrivals.append(Arrival(ticket, transfers, last, checksums))

    def take_arrivals(self) -> tuple[Arrival, ...]:
        """Arrivals for this step to unpack."""
        arrivals = tuple(self._arrivals)
        self._arrivals.clear()
        for arrival in arrivals:
            arrival.ticket.taken += len(arrival.transfers)
        return arrivals

    def go_on(self, ticket: Ticket) -> None:
        """The sequence computes behind the last of its blocks, which is being unpacked."""
        ticket.computing = True
        del self._tickets[ticket.number]

    def unpacked(self, arrival: Arrival, sums: tuple[int, ...]) -> bool:
        """``arrival`` has been unpacked, its blocks had these checksums; whether that matters to its sequence still.

        A block that is wrong is reported, and ends the ticket as if it had not been found.
        """
        if arrival.transfers:
            self._asks.append(KvReadSlotsFree(tuple(transfer.slot for transfer in arrival.transfers)))
        ticket = arrival.ticket
        ticket.taken -= len(arrival.transfers)
        if ticket.ended or ticket.left:
            return False
        checks = zip(arrival.checksums, sums, strict=True)
        wrong = next((place for place, (wanted, found) in enumerate(checks) if wanted not in (0, found)), None)
        if wrong is not None:
            ticket.wrong = True
            block = ticket.sequence.hashes()[ticket.first_block + ticket.arrived + wrong]
            self._asks.append(KvCorrupt(block, ticket.sequence.request.tenant))
            if not arrival.last:
                self._asks.append(KvCancel(ticket.number))
        ticket.arrived += len(arrival.transfers) if wrong is None else wrong
        if arrival.last or wrong is not None:
            ticket.ended = True
            self._tickets.pop(ticket.number, None)
            self._forget_arrivals(ticket)
        return True

    def cancel(self, sequence: Sequence) -> None:
        """Forgets a sequence's ticket; slots of blocks that arrived or still arrive are given back."""
        ticket = next(ticket for ticket in self._tickets.values() if ticket.sequence is sequence)
        del self._tickets[ticket.number]
        self._asks.append(KvCancel(ticket.number))
        self._forget_arrivals(ticket)

    def offer(self, request: Request, hashes: list[bytes], block: int, page: int) -> None:
        """Block number ``block`` of a chain was finished; when too many wait, the oldest is given up."""
        if self.attached:
            parent = hashes[block - 1] if block else b""
            run = hashes[block - block % RUN_BLOCKS]
            self._finished.append(_Finished(request, hashes[block], parent, page, run))

    def take_packs(self, hash_of: Callable[[int], bytes | None]) -> tuple[tuple[Transfer, KvStore], ...]:
        """Blocks for this step to pack: those whose page still bears their hash, as many as slots are free."""
        packs = []
        while not self._in_place and self._finished and self._free_slots:
            block = self._finished.popleft()
            if hash_of(block.page) == block.hash:
                packs.append(_pack(block, self._free_slots.pop(), granted=False))
        given_up = []
        for block, slot in self._granted:
            del self._reserved[block.hash]
            if hash_of(block.page) == block.hash:
                packs.append(_pack(block, slot, granted=True))
            else:
                given_up.append(slot)
        self._granted.clear()
        self._give_up(given_up)
        return tuple(packs)

    def granted(self, message: KvGranted) -> None:
        """Slots for blocks that waited for them."""
        for block_hash, slot in zip(message.hashes, message.slots, strict=True):
            if slot is None:
                del self._reserved[block_hash]
            else:
                self._granted.append((self._reserved[block_hash], slot))

    def packed(self, store: KvStore, checksum: int) -> None:
        """A step has packed a block; its linear checksum, 0 where none was made."""
        self._asks.append(replace(store, checksum=checksum))

    def free_write_slots(self, slots: tuple[int, ...]) -> None:
        self._free_slots.extend(slots)

    def set_attached(self, attached: bool, in_place: bool = False) -> None:
        """Whether the service can be asked, and grants slots; while it is away nothing is offered or waited for."""
        self.attached, self._in_place = attached, in_place
        if not attached:
            self._finished.clear()
            for block, _ in self._granted:
                del self._reserved[block.hash]
            self._give_up([slot for _, slot in self._granted])
            self._granted.clear()

    def take_asks(self) -> tuple[KvAsk, ...]:
        if self._in_place:
            self._reserve()
        asks = tuple(self._asks)
        self._asks.clear()
        return asks

    def _forget_arrivals(self, ticket: Ticket) -> None:
        slots = tuple(move.slot for arrival in self._arrivals if arrival.ticket is ticket for move in arrival.transfers)
        self._arrivals = [arrival for arrival in self._arrivals if arrival.ticket is not ticket]
        if slots:
            self._asks.append(KvReadSlotsFree(slots))

    def _reserve(self) -> None:
        while self._finished and len(self._reserved) < self._reserve_limit:
            block = self._finished.popleft()
            if block.hash not in self._reserved:
                self._reserved[block.hash] = block
                request = block.request
                self._asks.append(KvReserve(block.hash, block.parent, request.tenant, request.hold_s))

    def _give_up(self, slots: list[int]) -> None:
        if slots:
            self._asks.append(KvGiveUp(tuple(slots)))


def _pack(block: _Finished, slot: int, *, granted: bool) -> tuple[Transfer, KvStore]:
    request = block.request
    store = KvStore(slot, block.hash, block.parent, request.tenant, request.hold_s, block.run)
    return Transfer(block.page, slot, summed=granted), store
