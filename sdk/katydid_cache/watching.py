"""A Watch stream as records."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from katydid_runtime.rpc_errors import from_rpc_error

from katydid_cache.records import BlockChange, Snapshot, Tier, WatchEvent

__all__ = ["block_events"]


async def block_events(call: Any) -> AsyncIterator[WatchEvent]:
    """The events of a Watch call. Raises errors of `katydid_runtime.errors`."""
    try:
        async for event in call:
            at = (event.boot_epoch, event.sequence)
            if event.WhichOneof("event") == "snapshot":
                part = event.snapshot
                yield Snapshot(*at, Tier(part.tier), part.hashes, part.last)
            else:
                delta = event.delta
                yield BlockChange(*at, Tier(delta.tier), delta.stored, delta.removed)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
