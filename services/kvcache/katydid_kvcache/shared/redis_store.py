"""The shared store in Valkey or Redis: a key a block, and a stream a namespace that tells what came and went.

Blocks end by the server's own expiry and eviction; a block that has gone is found out at its read, as a miss. The
stream holds the same rows as a pack's manifest, so every instance has the index in memory and a lookup never waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from katydid_cache.layout import BlockLayout
from katydid_runtime.errors import DataCorruptError, SettingsError
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from katydid_kvcache.shared.backend import Outgoing
from katydid_kvcache.shared.manifest import Entry, Location, Manifest

__all__ = ["RedisStore"]

_STREAM_ENTRIES = 100_000
_READ_ENTRIES = 1000
_PUBLISHED, _WITHDRAWN = b"+", b"-"


class RedisStore:
    """A `Backend` over redis-py; `valkey://` is `redis://`. A password may stand in the URL."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        try:
            self._redis: Any = Redis.from_url(
                url.replace("valkey", "redis", 1) if url.startswith("valkey") else url,
                socket_timeout=timeout_s,
                socket_connect_timeout=min(1.0, timeout_s),
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise SettingsError(f"shared_url can't be used: {error}", field="shared_url") from None
        self._read_up_to: dict[bytes, bytes] = {}

    async def publish(self, identity: bytes, layout: BlockLayout, blocks: Sequence[Outgoing]) -> list[Entry]:
        entries = []
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for block in blocks:
                    entry = block.entry
                    key = _key(identity, entry.name)
                    ttl_ms = max(1, int((entry.expires_at - time.time()) * 1000)) if entry.expires_at else None
                    pipe.set(key, block.payload, px=ttl_ms)
                    entries.append(replace(entry, location=Location(key.hex(), 0, block.checksum, block.linear)))
                await pipe.execute()
            # Told only when it is there.
            await self._tell(identity, _PUBLISHED, Manifest(identity, layout, entries))
        except RedisError as error:
            raise OSError(str(error)) from None
        return entries

    async def withdraw(self, identity: bytes, layout: BlockLayout, entries: Sequence[Entry]) -> None:
        try:
            await self._redis.delete(*(_key(identity, entry.name) for entry in entries))
            await self._tell(identity, _WITHDRAWN, Manifest(identity, layout, entries))
        except RedisError as error:
            raise OSError(str(error)) from None

    async def news(self, identity: bytes, layout: BlockLayout) -> list[Entry]:
        news: list[Entry] = []
        after = self._read_up_to.get(identity, b"-")
        while True:
            try:
                rows = await self._redis.xrange(_stream(identity), min=after, count=_READ_ENTRIES)
            except RedisError as error:
                raise OSError(str(error)) from None
            batch: list[Entry] = []
            for number, fields in rows:
                after = b"(" + number
                try:
                    withdrawn = fields.get(b"k") == _WITHDRAWN
                    manifest = Manifest.decode(fields.get(b"m", b""), "in the stream", withdrawn=withdrawn)
                except DataCorruptError:
                    continue
                if manifest.identity == identity and manifest.layout == layout:
                    batch += [_placed(identity, entry) for entry in manifest.entries]
            news += await self._still_there(batch)
            if len(rows) < _READ_ENTRIES:
                # Not before: what a failure keeps back is to be told again.
                self._read_up_to[identity] = after
                return news

    async def read(self, location: Location, into: memoryview) -> None:
        try:
            data = await self._redis.get(bytes.fromhex(location.object))
        except RedisError as error:
            raise OSError(str(error)) from None
        if data is None:
            raise FileNotFoundError("the block has gone from the store")
        if len(data) != len(into):
            raise DataCorruptError(f"the store gave {len(data)} of {len(into)} bytes")
        into[:] = data

    async def renew(self, identity: bytes, name: bytes, expires_at: float) -> bool:
        try:
            await self._redis.pexpireat(_key(identity, name), int(expires_at * 1000))
        except RedisError as error:
            raise OSError(str(error)) from None
        return True

    async def clean(self, before: float) -> int:  # noqa: ARG002
        """The server ends blocks by itself."""
        return 0

    async def close(self) -> None:
        await self._redis.aclose()

    async def _still_there(self, entries: list[Entry]) -> list[Entry]:
        """The entries without those whose keys have been evicted or have ended since they were told."""
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for entry in entries:
                    pipe.exists(b"" if entry.location is None else bytes.fromhex(entry.location.object))
                there = await pipe.execute()
        except RedisError as error:
            raise OSError(str(error)) from None
        return [entry for entry, found in zip(entries, there, strict=True) if found or entry.location is None]

    async def _tell(self, identity: bytes, kind: bytes, manifest: Manifest) -> None:
        fields = {b"k": kind, b"m": manifest.encode()}
        await self._redis.xadd(_stream(identity), fields, maxlen=_STREAM_ENTRIES, approximate=True)


def _key(identity: bytes, name: bytes) -> bytes:
    return b"katydid:" + identity + name


def _stream(identity: bytes) -> bytes:
    return b"katydid:" + identity + b":news"


def _placed(identity: bytes, entry: Entry) -> Entry:
    """The entry with its key for a location, unless it was withdrawn."""
    at = entry.location
    if at is None:
        return entry
    return replace(entry, location=Location(_key(identity, entry.name).hex(), 0, at.checksum, at.linear))
