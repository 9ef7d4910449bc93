"""Whether a stream that broke is followed by another: while bytes move, and for a moment after the last that did.

The first try after a break may still go to the connection that broke, or name the attachment that went with it: both
are noticed a little later. So one stream that moved nothing does not end a read or a write.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc
from katydid_runtime.errors import ConflictError, KatydidError, UnavailableError
from katydid_runtime.rpc_errors import from_rpc_error

__all__ = ["RESUME_S", "Again", "Resuming", "failure_of"]

RESUME_S = 1.0

_BROKEN_WRITE = "Internal error from Core"
"""What the gRPC library says of a call that ended under its write, before it knows how it ended."""

Again: TypeAlias = Callable[[], Awaitable[int]]
"""Waits for the attachment to go on with; 0: none."""


def failure_of(error: grpc.RpcError) -> KatydidError:
    """What a call to the cache service ended in."""
    failure = from_rpc_error(error)
    if str(failure) == _BROKEN_WRITE:
        return UnavailableError("the connection to the cache service broke")
    return failure


class Resuming:
    """Of one read or write."""

    def __init__(self, again: Again) -> None:
        self._again = again
        self._until = 0.0

    async def after(self, failure: KatydidError, *, moved: bool) -> int:
        """The attachment for the stream that follows one which ended in `failure`; 0: none is to follow."""
        unattached = isinstance(failure, ConflictError) and failure.field == "attachment"
        if not isinstance(failure, UnavailableError) and not unattached:
            return 0
        if moved:
            self._until = time.monotonic() + RESUME_S
        return await self._again() if time.monotonic() < self._until else 0
