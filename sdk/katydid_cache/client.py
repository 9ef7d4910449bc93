"""The cache client: one channel, one attachment, and a call for every verb of the service.

Every call has a deadline and raises errors of `katydid_runtime.errors`. Built with `degrade=True`, a service that is
dead, slow or draining costs its bounded time once and then looks like an empty cache: lookups and reads miss, writes
are refused with reason "store_unavailable", nothing raises but wrong arguments.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from katydid_cache.layout import BlockLayout, Span
from katydid_cache.records import (
    CacheStats,
    Durability,
    GetResult,
    LookupResult,
    PrefetchResult,
    PutBlock,
    PutOutcome,
    WatchEvent,
)

__all__ = ["CacheClient"]


class CacheClient:
    """Talks to the cache service at `address` (`host:port` or `unix:/path`); belongs to one event loop."""

    def __init__(self, address: str, *, name: str = "", degrade: bool = False) -> None: ...

    @property
    def attached(self) -> bool:
        """Whether calls have a chance now; False while the service is away and re-attachment is tried."""
        raise NotImplementedError

    @property
    def boot_epoch(self) -> int:
        """Epoch of the service last attached to; leases do not survive a change. 0 before the first attachment."""
        raise NotImplementedError

    async def attach(self, identity: bytes, layout: BlockLayout, *, timeout_s: float = 5.0) -> bool:
        """Join the namespace of `identity` (32 bytes) and stay joined, re-attaching after the service's death.

        Returns whether the service answered within `timeout_s`; without `degrade` raises UnavailableError instead, and
        in both cases goes on trying. Raises IdentityMismatchError when the identity is known with another layout.
        """
        raise NotImplementedError

    async def lookup(
        self,
        hashes: bytes,
        *,
        lease: bool = True,
        lease_ttl_s: float | None = None,
        heads: Span = Span(),
        timeout_s: float = 1.0,
    ) -> LookupResult:
        """The longest prefix of the chain `hashes` (packed, 32 bytes a hash, 4,096 hashes at most) that is present."""
        raise NotImplementedError

    async def get(
        self,
        lease: int,
        hashes: bytes,
        *,
        into: Sequence[memoryview],
        heads: Span = Span(),
        layers: Span = Span(),
        timeout_s: float = 30.0,
    ) -> GetResult:
        """Read blocks into the caller's buffers, one of `layout.payload_bytes(heads, layers)` bytes for each hash.

        Buffers may be written partly even when the block ends as a miss. `lease` 0 reads without one.
        """
        raise NotImplementedError

    async def put(
        self,
        blocks: Sequence[PutBlock],
        *,
        durability: Durability = Durability.MEMORY,
        heads: Span = Span(),
        tenant: bytes = b"",
        ttl_s: float | None = None,
        hold_s: float | None = None,
        timeout_s: float = 30.0,
    ) -> list[PutOutcome]:
        """Write blocks; one outcome each, in order. A payload holds the runs of `heads` in layout order."""
        raise NotImplementedError

    async def release(self, lease: int, *, timeout_s: float = 1.0) -> None:
        """Give a lease back. A lease that ran out, or died with the service, is no error."""
        raise NotImplementedError

    async def prefetch(self, hashes: bytes, *, deadline_s: float = 1.0, timeout_s: float = 1.0) -> PrefetchResult:
        """Ask for blocks to be moved up into memory; not worth anything after `deadline_s`."""
        raise NotImplementedError

    async def stats(self, *, timeout_s: float = 1.0) -> CacheStats:
        raise NotImplementedError

    def watch(self, identity: bytes) -> AsyncIterator[WatchEvent]:
        """Block events of a namespace: a snapshot in parts, then changes. A lost stream ends it with an error."""
        raise NotImplementedError

    async def close(self) -> None:
        """Leave the namespace; the service drops the leases. Calls in flight end with UnavailableError."""
        raise NotImplementedError
