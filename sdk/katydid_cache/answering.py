"""How a client's calls end: with an answer, with an error, or, where it degrades, as if nothing were there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
from katydid_runtime.errors import (
    ConflictError,
    DeadlineExceededError,
    InvalidRequestError,
    KatydidError,
    UnavailableError,
)
from katydid_runtime.rpc_errors import from_rpc_error

from katydid_cache.attachment import Attachment

__all__ = ["Answering", "unanswered"]

T = TypeVar("T")


def unanswered(error: grpc.RpcError, address: str, timeout_s: float) -> KatydidError:
    """Why a call that needs no attachment failed, in words for who reads them."""
    failure = from_rpc_error(error, address)
    if isinstance(failure, DeadlineExceededError):
        return DeadlineExceededError(f"the cache service at {address} did not answer within {timeout_s:g} s")
    return failure


class Answering:
    """Makes calls under the attachment that the client has now, to the service at `address`."""

    def __init__(self, address: str, attachment: Callable[[], Attachment | None], *, degrade: bool) -> None:
        self._address = address
        self._attachment = attachment
        self._degrade = degrade

    async def answer(self, call: Callable[[int], Awaitable[T]], missed: Callable[[], T]) -> T:
        """What `call` returns; with `degrade`, what `missed` returns where the service is the reason of failure."""
        try:
            return await self.call(call)
        except InvalidRequestError:
            raise
        except KatydidError:
            if not self._degrade:
                raise
            return missed()

    async def call(self, call: Callable[[int], Awaitable[T]]) -> T:
        """What `call` returns. Raises KatydidError."""
        attachment = self._attachment()
        if attachment is None:
            raise ConflictError("attach first: this client has joined no namespace")
        try:
            result = await call(attachment.require())
        except asyncio.CancelledError as error:
            # A closed channel cancels its calls, which must not look as if the caller's own task had been cancelled.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise UnavailableError("the client was closed during the call") from error
        except (grpc.RpcError, KatydidError) as error:
            failure = from_rpc_error(error) if isinstance(error, grpc.RpcError) else error
            if isinstance(failure, DeadlineExceededError):
                attachment.timed_out()
            if isinstance(failure, ConflictError) and failure.field == "attachment":
                failure = UnavailableError(f"the cache service at {self._address} is not attached")
            raise failure from error
        attachment.succeeded()
        return result
