"""Client of the cache's AdminService: what operators' scripts and tests ask of a running service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from katydid_runtime.bearer import interceptors
from katydid_runtime.channel import open_channel
from katydid_runtime.duration import to_duration
from katydid_runtime.tls import Tls

from katydid_cache.answering import unanswered
from katydid_cache.client import CHANNEL
from katydid_cache.layout import BlockLayout
from katydid_cache.records import Tier

__all__ = ["BlockInfo", "CacheAdmin", "NamespaceInfo", "Verification"]


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """A model identity, its block layout, and what is kept of it."""

    identity: bytes
    layout: BlockLayout
    blocks: int
    attachments: int


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What is known of one block; `expires_at` in Unix seconds, 0: never."""

    hash: bytes
    parent: bytes
    tiers: tuple[Tier, ...]
    bytes: int
    pins: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class Verification:
    """`blocks` were looked at, `corrupt` of them quarantined; a copy of `unreadable` could not be read."""

    blocks: int
    corrupt: int
    unreadable: int


class CacheAdmin:
    """Talks to the AdminService at `address`. Every call raises errors of `katydid_runtime.errors`."""

    def __init__(self, address: str, *, tls: Tls | None = None, token: str | None = None) -> None:
        self._address = address
        self._channel = open_channel(address, tls, CHANNEL, interceptors(token))
        self._stub: Any = pb_grpc.AdminServiceStub(self._channel)

    async def evict(self, identity: bytes, hashes: bytes = b"", *, timeout_s: float = 10.0) -> int:
        """Drop blocks (all of the namespace when none is named); how many went. Leased ones stay."""
        response = await self._call(self._stub.Evict, pb.EvictRequest(identity=identity, hashes=hashes), timeout_s)
        return int(response.blocks)

    async def flush(self, *, timeout_s: float = 300.0) -> int:
        """Wait until everything in memory is on disk; how many blocks had to be written."""
        return int((await self._call(self._stub.Flush, pb.FlushRequest(), timeout_s)).blocks)

    async def verify(self, *, timeout_s: float = 3600.0) -> Verification:
        """Have every copy of every block read and checked."""
        response = await self._call(self._stub.Verify, pb.VerifyRequest(), timeout_s)
        return Verification(response.blocks, response.corrupt, response.unreadable)

    async def namespaces(self, *, timeout_s: float = 10.0) -> list[NamespaceInfo]:
        response = await self._call(self._stub.List, pb.ListRequest(), timeout_s)
        return [
            NamespaceInfo(
                namespace.identity,
                BlockLayout(
                    layers=namespace.layout.layers,
                    kv_heads=namespace.layout.kv_heads,
                    head_dim=namespace.layout.head_dim,
                    dtype=namespace.layout.dtype,
                ),
                namespace.blocks,
                namespace.attachments,
            )
            for namespace in response.namespaces
        ]

    async def blocks(self, identity: bytes, *, timeout_s: float = 10.0) -> AsyncIterator[BlockInfo]:
        """The blocks of a namespace in the order of their hashes."""
        after = b""
        while True:
            request = pb.ListBlocksRequest(identity=identity, after=after)
            response = await self._call(self._stub.ListBlocks, request, timeout_s)
            for block in response.blocks:
                tiers = tuple(Tier(tier) for tier in block.tiers)
                yield BlockInfo(block.hash, block.parent, tiers, block.bytes, block.pins, block.expires_at)
            if not response.blocks:
                return
            after = response.blocks[-1].hash

    async def pin(self, identity: bytes, hashes: bytes, hold_s: float, *, timeout_s: float = 10.0) -> int:
        """Keep blocks from being evicted for `hold_s` from now, 0: no longer; how many of them there are."""
        request = pb.PinRequest(identity=identity, hashes=hashes, hold=to_duration(hold_s))
        return int((await self._call(self._stub.Pin, request, timeout_s)).blocks)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> CacheAdmin:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise unanswered(error, self._address, timeout_s) from error
