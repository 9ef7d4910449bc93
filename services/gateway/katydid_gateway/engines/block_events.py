"""Follows event streams of block caches: engines' Watch into the prefix index, cache instances' into the tier index.

A stream begins with a snapshot; a gap in its sequence, or its end, means starting over with a new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

import grpc
from katydid.engine.v1 import engine_pb2
from katydid.engine.v1.engine_pb2_grpc import EngineServiceStub
from katydid.kvcache.v1 import kvcache_pb2
from katydid.kvcache.v1.kvcache_pb2_grpc import KvCacheServiceStub
from katydid_runtime.block_hash import split_hashes
from katydid_runtime.errors import KatydidError, UnsupportedError
from katydid_runtime.rpc_errors import from_rpc_error

from katydid_gateway.routing.prefix_index import Holder, PrefixIndex
from katydid_gateway.routing.tier_index import CacheTier, TierIndex

__all__ = ["follow_cache", "follow_engine"]

RETRY_S = 1.0

_TIERS = {
    kvcache_pb2.TIER_MEMORY: CacheTier.MEMORY,
    kvcache_pb2.TIER_DISK: CacheTier.DISK,
    kvcache_pb2.TIER_SHARED: CacheTier.SHARED,
}

logger = logging.getLogger(__name__)


async def follow_engine(engine: str, ranks: int, channel: grpc.aio.Channel, index: PrefixIndex) -> None:
    """Keep `index` in step with the engine until cancelled, or until the engine says it has no such stream."""
    stub = EngineServiceStub(channel)
    holders = [Holder(engine, rank) for rank in range(ranks)]

    async def one_stream() -> None:
        expected = 1
        async for event in stub.Watch(engine_pb2.WatchRequest()):
            if event.sequence != expected:
                logger.info("gap in block events", extra={"engine": engine, "sequence": event.sequence})
                return
            if expected == 1:
                for holder in holders:
                    index.cleared(holder)
            expected += 1
            _apply_engine(event, engine, index)

    await _again_and_again(one_stream, f"engine {engine}")


async def follow_cache(identity: bytes, instance: str, channel: grpc.aio.Channel, tiers: TierIndex) -> None:
    """Keep `tiers` in step with one namespace of an instance of the cache service, until cancelled; what it had is
    forgotten while it is away."""
    stub = KvCacheServiceStub(channel)

    async def one_stream() -> None:
        expected = 1
        try:
            async for event in stub.Watch(kvcache_pb2.WatchRequest(identity=identity)):
                if event.sequence != expected:
                    logger.info("gap in block events", extra={"instance": instance, "sequence": event.sequence})
                    return
                expected += 1
                _apply_cache(event, instance, tiers)
        finally:
            tiers.cleared(instance)

    await _again_and_again(one_stream, f"the cache service at {instance}")


def _apply_engine(event: engine_pb2.WatchResponse, engine: str, index: PrefixIndex) -> None:
    if event.HasField("snapshot"):
        index.stored(Holder(engine, event.snapshot.dp_rank), split_hashes(event.snapshot.hashes))
        return
    holder = Holder(engine, event.delta.dp_rank)
    index.removed(holder, split_hashes(event.delta.removed))
    index.stored(holder, split_hashes(event.delta.stored))


def _apply_cache(event: kvcache_pb2.WatchResponse, instance: str, tiers: TierIndex) -> None:
    if event.HasField("snapshot"):
        if tier := _TIERS.get(event.snapshot.tier):
            tiers.stored(instance, tier, split_hashes(event.snapshot.hashes))
    elif tier := _TIERS.get(event.delta.tier):
        tiers.removed(instance, tier, split_hashes(event.delta.removed))
        tiers.stored(instance, tier, split_hashes(event.delta.stored))


async def _again_and_again(one_stream: Callable[[], Coroutine[None, None, None]], source: str) -> None:
    said = ""
    while True:
        try:
            await one_stream()
        except grpc.RpcError as error:
            failure: KatydidError = from_rpc_error(error)
            if isinstance(failure, UnsupportedError):
                logger.warning("%s has no block events; routing goes by prediction alone", source)
                return
            if str(failure) != said:
                said = str(failure)
                logger.info("block events broke", extra={"source": source, "error": said})
        except Exception:
            # A defect met in one event must not cost routing its picture of that cache for good.
            logger.exception("block events failed", extra={"source": source})
        await asyncio.sleep(RETRY_S)
