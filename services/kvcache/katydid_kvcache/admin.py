"""AdminService over gRPC: what operators do to a cache."""

from __future__ import annotations

import heapq
from typing import Any, TypeAlias

import grpc
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from katydid_cache.layout import BlockLayout
from katydid_runtime.block_hash import HASH_BYTES

from katydid_kvcache import requests
from katydid_kvcache.blocks import Block
from katydid_kvcache.cache import Cache

__all__ = ["ADMIN_SERVICE", "AdminService"]

ADMIN_SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
_IDENTITY_BYTES = 32
_LIST_BLOCKS = 1000
_PIN_LIMIT_S = 365 * 86_400.0

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class AdminService(pb_grpc.AdminServiceServicer):
    """The RPCs of AdminService; see the protocol for what each one means."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    async def Evict(self, request: pb.EvictRequest, _context: Context) -> pb.EvictResponse:
        identity = requests.exact_bytes(request.identity, (_IDENTITY_BYTES,), "identity")
        return pb.EvictResponse(blocks=await self._cache.evict(identity, requests.hash_list(request.hashes)))

    async def Flush(self, _request: pb.FlushRequest, _context: Context) -> pb.FlushResponse:
        return pb.FlushResponse(blocks=await self._cache.flush())

    async def Verify(self, _request: pb.VerifyRequest, _context: Context) -> pb.VerifyResponse:
        verified = await self._cache.scrubber.verify()
        return pb.VerifyResponse(**verified._asdict())

    async def List(self, _request: pb.ListRequest, _context: Context) -> pb.ListResponse:
        return pb.ListResponse(
            namespaces=[
                pb.Namespace(
                    identity=namespace.identity,
                    layout=_layout(namespace.layout),
                    blocks=sum(block.complete for block in namespace.blocks.values()),
                    attachments=self._cache.attachments.count(namespace),
                )
                for namespace in self._cache.store.namespaces.values()
            ]
        )

    async def ListBlocks(self, request: pb.ListBlocksRequest, _context: Context) -> pb.ListBlocksResponse:
        identity = requests.exact_bytes(request.identity, (_IDENTITY_BYTES,), "identity")
        after = requests.exact_bytes(request.after, (0, HASH_BYTES), "after")
        limit = min(request.limit or _LIST_BLOCKS, _LIST_BLOCKS)
        blocks = self._cache.namespace(identity).blocks
        following = heapq.nsmallest(limit, (block_hash for block_hash in blocks if block_hash > after))
        return pb.ListBlocksResponse(blocks=[_info(blocks[block_hash]) for block_hash in following])

    async def Pin(self, request: pb.PinRequest, _context: Context) -> pb.PinResponse:
        identity = requests.exact_bytes(request.identity, (_IDENTITY_BYTES,), "identity")
        hold_s = requests.seconds(request.hold, "hold", limit=_PIN_LIMIT_S)
        blocks = self._cache.pins.keep(self._cache.namespace(identity), requests.hash_list(request.hashes), hold_s)
        return pb.PinResponse(blocks=blocks)


def _info(block: Block) -> pb.BlockInfo:
    held = ((pb.TIER_MEMORY, block.memory), (pb.TIER_DISK, block.disk), (pb.TIER_SHARED, block.shared))
    return pb.BlockInfo(
        hash=block.hash,
        parent=block.parent,
        tiers=[tier for tier, place in held if place is not None],
        bytes=block.namespace.layout.block_bytes,
        pins=block.pins,
        expires_at=block.expires_at,
    )


def _layout(layout: BlockLayout) -> pb.BlockLayout:
    return pb.BlockLayout(
        version=layout.version,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
        dtype=layout.dtype,
        block_bytes=layout.block_bytes,
    )
