"""What a shared store must be able to do, and the one that a URL names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from katydid_cache.layout import BlockLayout
from katydid_runtime.errors import SettingsError

from katydid_kvcache.shared.manifest import Entry, Location

__all__ = ["OBJECT_SCHEMES", "REDIS_SCHEMES", "Backend", "Outgoing", "open_backend"]

OBJECT_SCHEMES = ("s3", "gs", "az", "file", "memory")
REDIS_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A block to be published. `payload` holds the whole object; `entry` has no location yet, only its checksums."""

    entry: Entry
    checksum: bytes
    linear: int
    payload: bytes


class Backend(Protocol):
    """One shared store. All calls raise OSError when it fails; who calls bounds their time and may cancel them."""

    async def publish(self, identity: bytes, layout: BlockLayout, blocks: Sequence[Outgoing]) -> list[Entry]:
        """Put blocks of one namespace where every instance finds them; the entries with their locations."""

    async def withdraw(self, identity: bytes, layout: BlockLayout, entries: Sequence[Entry]) -> None:
        """Tell every instance that these blocks are not to be used any longer."""

    async def news(self, identity: bytes, layout: BlockLayout) -> list[Entry]:
        """What is new in a namespace since the last call for it, in the order in which it happened.

        Everything at the first call. What was withdrawn has no location.
        """

    async def read(self, location: Location, into: memoryview) -> None:
        """Fill `into` with a block. Raises FileNotFoundError when it is gone, DataCorruptError when less is there."""

    async def renew(self, identity: bytes, name: bytes, expires_at: float) -> bool:
        """A block is to stay until `expires_at` (Unix seconds); False, and nothing asked, of a store without times."""

    async def clean(self, before: float) -> int:
        """Remove what ended before that time (Unix seconds), where the store doesn't by itself; how many objects."""

    async def close(self) -> None: ...


def open_backend(url: str, *, timeout_s: float) -> Backend:
    """The store at `url`. Raises SettingsError for a URL that names none."""
    scheme = url.partition("://")[0]
    if scheme in OBJECT_SCHEMES:
        from katydid_kvcache.shared.objects import Objects

        return Objects(url, timeout_s=timeout_s)
    if scheme in REDIS_SCHEMES:
        from katydid_kvcache.shared.redis_store import RedisStore

        return RedisStore(url, timeout_s=timeout_s)
    allowed = ", ".join(f"{name}://" for name in (*OBJECT_SCHEMES, *REDIS_SCHEMES))
    raise SettingsError(
        f"shared_url begins with {scheme!r}; allowed: {allowed}", field="shared_url", value=scheme, allowed=allowed
    )
