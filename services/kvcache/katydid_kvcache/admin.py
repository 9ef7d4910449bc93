"""AdminService over gRPC: what operators do to a cache."""

from __future__ import annotations

from typing import Any, TypeAlias

import grpc
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from katydid_cache.layout import BlockLayout

from katydid_kvcache import requests
from katydid_kvcache.cache import Cache

__all__ = ["ADMIN_SERVICE", "AdminService"]

ADMIN_SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
_IDENTITY_BYTES = 32

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class AdminService(pb_grpc.AdminServiceServicer):
    """The RPCs of AdminService; see the protocol for what each one means."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    async def Evict(self, request: pb.EvictRequest, _context: Context) -> pb.EvictResponse:
        identity = requests.exact_bytes(request.identity, (_IDENTITY_BYTES,), "identity")
        return pb.EvictResponse(blocks=self._cache.evict(identity, requests.hash_list(request.hashes)))

    async def Flush(self, _request: pb.FlushRequest, _context: Context) -> pb.FlushResponse:
        return pb.FlushResponse(blocks=await self._cache.flush())

    async def Verify(self, _request: pb.VerifyRequest, _context: Context) -> pb.VerifyResponse:
        verified = await self._cache.verify()
        return pb.VerifyResponse(blocks=verified.blocks, corrupt=verified.corrupt)

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
