"""Blocks whose Put broke in mid-object: kept for two seconds, for whoever goes on with them.

What may be gone on with says the block itself (its name, heads and checksum), so it does not matter over which
connection its rest comes; the checksum is made of all of it in the end. A writer that begins the block anew takes
precedence, and only so many are kept that dead clients cannot fill the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from katydid_cache.layout import Span

from katydid_kvcache.blocks import Namespace
from katydid_kvcache.changes import Write

__all__ = ["HalfWrite", "HalfWrites"]

_KEEP_S = 2.0
_LIMIT = 64


@dataclass(frozen=True, slots=True)
class HalfWrite:
    """The first `received` bytes of a payload whose xxh3-128 is to be `checksum` are in place."""

    write: Write
    checksum: bytes
    received: int
    expiry: asyncio.TimerHandle


class HalfWrites:
    """At most 64, by name; `abort` gives one up."""

    def __init__(self, abort: Callable[[Write], None]) -> None:
        self._abort = abort
        self._kept: dict[tuple[bytes, bytes], HalfWrite] = {}

    def keep(self, write: Write, checksum: bytes, received: int) -> None:
        """A write broke off after so many bytes."""
        key = write.block.namespace.identity, write.block.hash
        self._drop(key)
        if len(self._kept) >= _LIMIT:
            self._drop(next(iter(self._kept)))
        expiry = asyncio.get_running_loop().call_later(_KEEP_S, self._drop, key)
        self._kept[key] = HalfWrite(write, checksum, received, expiry)

    def take(self, namespace: Namespace, name: bytes, heads: Span, checksum: bytes) -> HalfWrite | None:
        """The write to go on with, the caller's from now on; None when there is none of these heads and checksum."""
        key = namespace.identity, name
        half = self._kept.get(key)
        if half is None or half.write.heads != heads or half.checksum != checksum or half.write.block.memory is None:
            return None
        half.expiry.cancel()
        return self._kept.pop(key)

    def yield_to_another(self, namespace: Namespace, name: bytes) -> None:
        """Somebody begins to write the block anew."""
        self._drop((namespace.identity, name))

    def close(self) -> None:
        """Give all up."""
        for key in [*self._kept]:
            self._drop(key)

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        if (half := self._kept.pop(key, None)) is not None:
            half.expiry.cancel()
            self._abort(half.write)

    def __len__(self) -> int:
        return len(self._kept)
