"""Who holds which KV page: reference counts, the prefix cache over them, and the order in which cached pages go.

A page is free (holds nothing), cached (holds a published block nobody uses now) or referenced. Only full blocks are
published, under their SHA-256 chain hash, and a published page's content never changes while it bears its hash. Pages
released together enter the eviction order last block first, so a suffix always goes before the prefix it needs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["BlockEvents", "BlockPool", "IntegrityError", "OutOfPages"]


class OutOfPages(Exception):  # noqa: N818 - a condition the scheduler acts on, not a failure
    """Fewer pages can be given out than were asked for; nothing was allocated."""


class IntegrityError(AssertionError):
    """The pool or the scheduler contradicts itself: a defect."""


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """What entered and left the prefix cache since the last call. Removals apply before additions.

    Attributes:
        stored: hashes now held that were not before, 32 bytes each.
        removed: hashes held before and no longer.
    """

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed)


class BlockPool:
    """``num_pages`` pages, numbered from 0. All operations are O(pages named)."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages}: expected at least 1")
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._hashes: list[bytes | None] = [None] * num_pages
        self._pages: dict[bytes, int] = {}
        self._free = list(range(num_pages - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._gains = 0

    @property
    def gains(self) -> int:
        """How many pages were released by their last holder or published, ever. What is available, plus the pages in
        use that a chain matches, grows by no more than this does: whoever is short of k pages can wait for k gains."""
        return self._gains

    @property
    def num_available(self) -> int:
        """Pages that ``allocate`` can give out, cached ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix cache, in use or not."""
        return len(self._pages)

    def cached_hashes(self) -> Iterable[bytes]:
        return self._pages.keys()

    def hash_of(self, page: int) -> bytes | None:
        """The hash under which the page is published."""
        return self._hashes[page]

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages of the longest prefix of ``hashes`` that is cached. Safe to use only once acquired."""
        pages = []
        for block_hash in hashes:
            page = self._pages.get(block_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def count_unreferenced(self, pages: Iterable[int]) -> int:
        """How many of ``pages`` would leave ``num_available`` by being acquired."""
        return sum(self._references[page] == 0 for page in pages)

    def count_sole(self, pages: Iterable[int]) -> int:
        """How many of ``pages`` have one reference alone: what their holder's leaving would make available."""
        return sum(self._references[page] == 1 for page in pages)

    def acquire(self, pages: Iterable[int]) -> None:
        """Takes one more reference on each page, which must be referenced or cached."""
        for page in pages:
            if self._references[page] == 0:
                del self._evictable[page]
            self._references[page] += 1

    def allocate(self, count: int) -> list[int]:
        """``count`` pages with one reference each and no content; evicts the least recently released blocks.

        Raises:
            OutOfPages: ``count`` exceeds ``num_available``.
        """
        if count > self.num_available:
            raise OutOfPages(f"{count} pages asked for, {self.num_available} of {self.num_pages} available")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._evictable.popitem(last=False)
                self._forget(page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Gives back one reference on each of a sequence's pages, given in block order."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] < 0:
                raise IntegrityError(f"page {page} released more often than acquired")
            if self._references[page] == 0:
                self._gains += 1
                if self._hashes[page] is None:
                    self._free.append(page)
                else:
                    self._evictable[page] = None

    def publish(self, page: int, block_hash: bytes) -> int:
        """Offers a referenced page's content under its hash; returns the page that bears the hash.

        When another page bears it already, the caller should swap its page for that one.
        """
        holder = self._pages.get(block_hash)
        if holder is not None:
            return holder
        if self._references[page] == 0 or self._hashes[page] is not None:
            raise IntegrityError(f"page {page} cannot be published: {self._references[page]} references")
        self._gains += 1
        self._pages[block_hash] = page
        self._hashes[page] = block_hash
        if self._removed.pop(block_hash, block_hash) is not None:
            self._stored[block_hash] = None
        return page

    def withdraw(self, pages: Iterable[int]) -> None:
        """Takes referenced pages out of the prefix cache: their content is wrong."""
        for page in pages:
            if self._hashes[page] is not None:
                self._forget(page)

    def flush(self) -> int:
        """Drops every cached block that nobody uses; returns how many."""
        count = len(self._evictable)
        while self._evictable:
            page, _ = self._evictable.popitem()
            self._forget(page)
            self._free.append(page)
        return count

    def take_events(self) -> BlockEvents:
        events = BlockEvents(tuple(self._stored), tuple(self._removed))
        self._stored.clear()
        self._removed.clear()
        return events

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page is in exactly one state and the index agrees with the pages."""
        free, evictable = set(self._free), set(self._evictable)
        if len(free) != len(self._free):
            raise IntegrityError("a page is in the free list twice")
        for page, (references, block_hash) in enumerate(zip(self._references, self._hashes, strict=True)):
            states = (page in free) + (page in evictable) + (references > 0)
            if states != 1:
                raise IntegrityError(f"page {page} is in {states} states at once ({references} references)")
            if page in free and block_hash is not None:
                raise IntegrityError(f"free page {page} still bears a hash")
            if page in evictable and block_hash is None:
                raise IntegrityError(f"cached page {page} bears no hash")
            if block_hash is not None and self._pages.get(block_hash) != page:
                raise IntegrityError(f"page {page} bears a hash that the index gives to another page")
        if len(self._pages) != sum(block_hash is not None for block_hash in self._hashes):
            raise IntegrityError("the index names hashes that no page bears")

    def check_references(self, held: Iterable[int]) -> None:
        """Raises IntegrityError unless the reference counts are exactly those of the pages in ``held``."""
        counts = [0] * self.num_pages
        for page in held:
            counts[page] += 1
        for page, (counted, expected) in enumerate(zip(self._references, counts, strict=True)):
            if counted != expected:
                raise IntegrityError(f"page {page} counts {counted} references, {expected} are held")

    def _forget(self, page: int) -> None:
        block_hash = self._hashes[page]
        assert block_hash is not None
        self._hashes[page] = None
        del self._pages[block_hash]
        if self._stored.pop(block_hash, block_hash) is not None:
            self._removed[block_hash] = None
