"""The shared store in an object store: packs of many blocks, each with its manifest in front.

A pack is one object, `<identity>/<time>-<writer>-<number>-<blocks>.pack`: it is there as a whole or not at all, so the
manifest never points at what is missing. Names sort by the time of writing, so what is new since the last look is
what a listing gives after a name; the listing begins some minutes before it, because clocks differ and uploads take
time. An instance reads the manifest of each new pack once and has the whole index in memory: a lookup never waits for
the store, and a block costs one ranged read.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import obstore
from katydid_cache.layout import BlockLayout
from katydid_runtime.errors import DataCorruptError, SettingsError
from obstore.exceptions import BaseError
from obstore.store import from_url

from katydid_kvcache.shared.backend import Outgoing
from katydid_kvcache.shared.manifest import Entry, Location, Manifest, manifest_bytes

__all__ = ["Objects"]

_OVERLAP_S = 600.0
_PART_BYTES = 8 << 20
_MANIFESTS_AT_A_TIME = 16


class Objects:
    """A `Backend` over obstore: S3 and what speaks like it, Google and Azure, a folder, or this process's memory.

    Credentials, region and endpoint come from the environment that their libraries use (`AWS_ACCESS_KEY_ID` and so on).
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        options: dict[str, Any] = {}
        if url.partition("://")[0] in ("s3", "gs", "az"):
            options = {
                "client_options": {"timeout": f"{timeout_s:g}s", "connect_timeout": "1s", "allow_http": True},
                "retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=timeout_s)},
            }
        elif url.startswith("file:"):
            options = {"mkdir": True}
        try:
            self._store: Any = from_url(url, **options)
        except (BaseError, ValueError, OSError) as error:
            raise SettingsError(f"shared_url can't be used: {str(error).splitlines()[0]}", field="shared_url") from None
        self._writer = secrets.token_hex(4)
        self._number = 0
        self._seen: dict[str, dict[str, None]] = {}
        self._listed: set[str] = set()
        self._ends: dict[str, float] = {}

    async def publish(self, identity: bytes, layout: BlockLayout, blocks: Sequence[Outgoing]) -> list[Entry]:
        name = self._new_name(identity, len(blocks), "pack")
        offset = manifest_bytes(len(blocks))
        entries = []
        for block in blocks:
            place = Location(name, offset, block.checksum, block.linear)
            entries.append(replace(block.entry, location=place))
            offset += len(block.payload)
        head = Manifest(identity, layout, entries).encode()
        await self._put(name, [head, *(block.payload for block in blocks)])
        self._remember(identity, name, entries)
        return entries

    async def withdraw(self, identity: bytes, layout: BlockLayout, entries: Sequence[Entry]) -> None:
        name = self._new_name(identity, len(entries), "gone")
        await self._put(name, [Manifest(identity, layout, entries).encode()])
        self._remember(identity, name, entries)

    async def news(self, identity: bytes, layout: BlockLayout) -> list[Entry]:
        prefix = identity.hex()
        seen = self._seen.setdefault(prefix, {})
        oldest = f"{prefix}/{_stamp(time.time() - _OVERLAP_S)}"
        after = oldest if prefix in self._listed else None
        news: list[Entry] = []
        try:
            listed = obstore.list(self._store, prefix, offset=after)
            # Not every store lists in the order of the names, which is that of what happened.
            names = sorted([meta["path"] async for batch in listed for meta in batch if meta["path"] not in seen])
            for name, manifest in zip(names, await self._manifests(names), strict=True):
                if manifest is None:
                    continue
                self._remember(identity, name, manifest.entries)
                if manifest.identity == identity and manifest.layout == layout:
                    news += manifest.entries
        except BaseError as error:
            raise OSError(str(error).splitlines()[0]) from None
        self._listed.add(prefix)
        # Older names are not listed again.
        self._seen[prefix] = {name: None for name in seen if name > oldest}
        return news

    async def read(self, location: Location, into: memoryview) -> None:
        try:
            data = await obstore.get_range_async(self._store, location.object, start=location.offset, length=len(into))
        except BaseError as error:
            await self._check_length(location, len(into))
            raise OSError(str(error).splitlines()[0]) from None
        view = memoryview(data)
        if len(view) != len(into):
            raise DataCorruptError(f"pack {location.object} ended at {len(view)} of {len(into)} bytes")
        into[:] = view

    async def renew(self, identity: bytes, name: bytes, expires_at: float) -> bool:  # noqa: ARG002
        """A pack can't be changed: its blocks end when they were to when it was written."""
        return False

    async def clean(self, before: float) -> int:
        ended = [name for name, end in self._ends.items() if end < before]
        if ended:
            try:
                await obstore.delete_async(self._store, ended)
            except FileNotFoundError:
                pass  # another instance was first
            except BaseError as error:
                raise OSError(str(error).splitlines()[0]) from None
            for name in ended:
                del self._ends[name]
        return len(ended)

    async def close(self) -> None:
        """Nothing is kept open."""

    async def _check_length(self, location: Location, size: int) -> None:
        """Raises DataCorruptError for a pack that ends within a block: stores refuse such a read as if they failed."""
        try:
            there = (await obstore.head_async(self._store, location.object))["size"]
        except (BaseError, FileNotFoundError):
            return
        if there < location.offset + size:
            raise DataCorruptError(f"pack {location.object} has {there} bytes, a block of it ends behind them")

    async def _put(self, name: str, parts: list[bytes]) -> None:
        try:
            await obstore.put_async(self._store, name, parts, chunk_size=_PART_BYTES)
        except BaseError as error:
            raise OSError(str(error).splitlines()[0]) from None

    async def _manifests(self, names: Sequence[str]) -> list[Manifest | None]:
        """The manifests of packs, several at a time."""
        turns = asyncio.Semaphore(_MANIFESTS_AT_A_TIME)

        async def one(name: str) -> Manifest | None:
            async with turns:
                return await self._manifest(name)

        return await asyncio.gather(*map(one, names))

    async def _manifest(self, name: str) -> Manifest | None:
        """The manifest of a pack; None for an object that is no pack, gone again, or damaged."""
        stem, _, ending = name.rpartition(".")
        count = stem.rpartition("-")[2]
        if ending not in ("pack", "gone") or not count.isdecimal():
            return None
        try:
            data = await obstore.get_range_async(self._store, name, start=0, length=manifest_bytes(int(count)))
            return Manifest.decode(bytes(data), name, withdrawn=ending == "gone")
        except (FileNotFoundError, DataCorruptError):
            return None

    def _new_name(self, identity: bytes, count: int, ending: str) -> str:
        self._number += 1
        return f"{identity.hex()}/{_stamp(time.time())}-{self._writer}-{self._number:06d}-{count}.{ending}"

    def _remember(self, identity: bytes, name: str, entries: Sequence[Entry]) -> None:
        """Note that an object is known, and when all of it has ended."""
        self._seen.setdefault(identity.hex(), {})[name] = None
        ends = [entry.expires_at for entry in entries]
        if ends and all(ends):
            self._ends[name] = max(ends)


def _stamp(unix_s: float) -> str:
    """A time as it stands in names: milliseconds, as many digits as sort until the year 2286."""
    return f"{int(unix_s * 1000):013d}"
