"""Where every sequence is (waiting, loading, running) and which pages it holds: the moves, without the policy.

A waiting sequence holds no pages; every other holds pages for all its tokens but the newest. What is given back while
steps are in flight is free when the last of them is done, because they may still read and write it.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator

from katydid_runtime.block_hash import BLOCK_TOKENS

from katydid_engine.block_pool import BlockPool, IntegrityError, OutOfPages
from katydid_engine.kv_traffic import KvTraffic
from katydid_engine.moves import Moves
from katydid_engine.plan import PageCopy
from katydid_engine.request import Sequence, State, pages_for

__all__ = ["Residency"]


def _order(sequence: Sequence) -> tuple[int, int, int, int]:
    return sequence.order


class Residency:
    """The queues over one block pool. ``waiting`` and ``running`` are kept in order: fetches alone last,
    then priority, then arrival."""

    def __init__(self, pool: BlockPool, kv: KvTraffic) -> None:
        self.pool = pool
        self.kv = kv
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._planned = 0
        self._done = 0
        self.moves = Moves(pool)
        self._copies: list[PageCopy] = []
        self._started: dict[int, Sequence] = {}
        self._ended_ids: list[int] = []
        self._released_later: deque[tuple[int, list[int]]] = deque()

    def holders(self) -> Iterator[Sequence]:
        """Every sequence that holds pages."""
        yield from self.running
        yield from self.kv.sequences()

    def last_holder(self) -> Sequence:
        """The first to be preempted."""
        return max(self.holders(), key=_order)

    def started(self, sequence_id: int) -> Sequence | None:
        """The sequence, if the runner knows it and it has not left since."""
        return self._started.get(sequence_id)

    def start(self, sequence: Sequence) -> bool:
        """Notes that the runner gets to know the sequence; False when it does already."""
        fresh = sequence.id not in self._started
        self._started[sequence.id] = sequence
        return fresh

    @property
    def pages_return(self) -> bool:
        """Whether steps in flight, or transfers, hold pages back that will be free when they are done."""
        return bool(self._released_later) or self.pool.count_sole(self.moves.pages()) > 0

    def take_ended_ids(self) -> tuple[int, ...]:
        """Sequences that the runner may forget."""
        ended = tuple(self._ended_ids)
        self._ended_ids.clear()
        return ended

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Copies due at the head of the next step."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def enqueue(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        if sequence.reads_cache:
            sequence.likely_cached = len(self.pool.match(sequence.hashes())) * BLOCK_TOKENS
        bisect.insort(self.waiting, sequence, key=_order)

    def run(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        bisect.insort(self.running, sequence, key=_order)

    def take_pages(self, sequence: Sequence, spare: int) -> bool:
        """Gives a waiting sequence pages for all its tokens, cached ones where there are, leaving ``spare`` pages; or
        gives nothing and returns False. To match a chain of thousands of blocks takes long: one that did not fit is
        matched again only when enough pages have come free. (After a withdrawal a published block may join more than
        itself to a chain, which then waits for longer than it must.)"""
        if self.pool.gains < sequence.fits_from + spare:
            return False
        matched = self.pool.match(sequence.hashes()) if sequence.reads_cache else []
        missing = pages_for(sequence.num_tokens) - len(matched)
        available = self.pool.num_available - self.pool.count_unreferenced(matched)
        if available < missing + spare:
            sequence.fits_from = self.pool.gains + missing - available
            return False
        self.pool.acquire(matched)
        sequence.pages = matched + self.pool.allocate(missing)
        sequence.num_published = len(matched)
        sequence.num_computed = sequence.num_scheduled = len(matched) * BLOCK_TOKENS
        self.waiting.remove(sequence)
        return True

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Gives a running sequence the pages that so many tokens need; False when there are too few."""
        missing = pages_for(tokens) - len(sequence.pages)
        if missing > 0:
            try:
                sequence.pages += self.pool.allocate(missing)
            except OutOfPages:
                return False
        return True

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of its queue and takes back its pages."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.RUNNING:
            self.running.remove(sequence)
        else:
            self.kv.cancel(sequence)
        if self._started.pop(sequence.id, None) is not None:
            self._ended_ids.append(sequence.id)
        self._release(sequence.pages)
        sequence.pages = []
        sequence.pages_sent = 0
        sequence.num_computed = 0
        sequence.num_scheduled = 0
        sequence.num_coming = 0
        sequence.num_published = 0
        sequence.stay += 1

    def step_planned(self, number: int) -> None:
        """A step is in flight; it may use every page that is held now."""
        self._planned = number

    def step_done(self, number: int) -> None:
        """A step is over: what no later one may use is given back."""
        self._done = number
        while self._released_later and self._released_later[0][0] <= number:
            self.pool.release(self._released_later.popleft()[1])

    def publish(self, sequence: Sequence, tokens: int, *, computed: bool) -> None:
        """Publishes the complete blocks of the first ``tokens``; one that another page holds already is shared from
        there."""
        complete = tokens // BLOCK_TOKENS
        hashes = sequence.hashes()
        for block in range(sequence.num_published, complete):
            page = sequence.pages[block]
            holder = self.pool.publish(page, hashes[block])
            if holder != page:
                self.pool.acquire([holder])
                self._release([page])
                sequence.pages[block] = holder
                sequence.pages_sent = min(sequence.pages_sent, block)
            elif computed:
                self.kv.offer(sequence.request, hashes, block, page)
        sequence.num_published = max(sequence.num_published, complete)

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        """Lets ``twin`` run on ``sequence``'s full pages and a copy of its partial one; without a page for the copy it
        waits and is computed from its tokens."""
        full, partial = divmod(sequence.num_computed, BLOCK_TOKENS)
        try:
            own = self.pool.allocate(1 if partial else 0)
        except OutOfPages:
            self.enqueue(twin)
            return
        self._copies += [PageCopy(sequence.pages[full], page) for page in own]
        self.pool.acquire(sequence.pages[:full])
        twin.pages = sequence.pages[:full] + own
        twin.num_computed = twin.num_scheduled = sequence.num_computed
        twin.num_published = sequence.num_published
        self.run(twin)

    def _release(self, pages: list[int]) -> None:
        if self._planned > self._done:
            self._released_later.append((self._planned, pages))
        else:
            self.pool.release(pages)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless queues, states and pages agree."""
        self.pool.check_integrity()
        holders = list(self.holders())
        held = [page for sequence in holders for page in sequence.pages]
        released_later = (page for _, pages in self._released_later for page in pages)
        self.pool.check_references([*held, *released_later, *self.moves.pages()])
        for sequence in self.waiting:
            if sequence.pages or sequence.num_computed or sequence.state is not State.WAITING:
                raise IntegrityError(f"waiting sequence {sequence.id} is {sequence.state} with pages {sequence.pages}")
        for sequence in holders:
            if len(sequence.pages) * BLOCK_TOKENS < sequence.num_tokens - 1:
                raise IntegrityError(f"sequence {sequence.id} has {sequence.num_tokens} tokens but {sequence.pages}")
            for page, own in zip(sequence.pages[: sequence.num_published], sequence.hashes(), strict=False):
                if self.pool.hash_of(page) not in (own, None):
                    raise IntegrityError(f"sequence {sequence.id} reads page {page} of another chain")
        for queue in (self.waiting, self.running):
            if queue != sorted(queue, key=_order):
                raise IntegrityError("a queue is out of order")
