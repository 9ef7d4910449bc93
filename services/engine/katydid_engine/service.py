"""EngineService over gRPC: translates between the protocol and the face, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc
from katydid.engine.v1 import engine_pb2 as pb
from katydid.engine.v1 import engine_pb2_grpc
from katydid_runtime.duration import to_seconds
from katydid_runtime.errors import InvalidRequestError, UnavailableError

from katydid_engine.block_watch import BlockWatch
from katydid_engine.face import Face
from katydid_engine.session import Session

__all__ = ["EngineService", "ready"]

T = TypeVar("T")

_OPEN_TIMEOUT_S = 10.0


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """Answers UNAVAILABLE until ``open`` is called, which the engine does once its workers have their model."""

    def __init__(self) -> None:
        self._face: Face | None = None
        self._blocks: BlockWatch | None = None
        self._describe: Callable[[], pb.DescribeResponse] | None = None
        self._drain: Callable[[float | None], Awaitable[int]] | None = None

    def open(
        self,
        face: Face,
        blocks: BlockWatch,
        describe: Callable[[], pb.DescribeResponse],
        drain: Callable[[float | None], Awaitable[int]],
    ) -> None:
        self._face, self._blocks, self._describe, self._drain = face, blocks, describe, drain

    async def Describe(
        self,
        request: pb.DescribeRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[pb.DescribeRequest, pb.DescribeResponse],  # noqa: ARG002
    ) -> pb.DescribeResponse:
        return ready(self._describe)()

    async def Session(
        self,
        request_iterator: AsyncIterator[pb.SessionRequest],
        context: grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse],  # noqa: ARG002
    ) -> AsyncIterator[pb.SessionResponse]:
        face = ready(self._face)
        requests = aiter(request_iterator)
        session, stream, opened = face.open_session(await _opening(requests))
        reader = asyncio.create_task(_read(requests, face, session))

        def gateway_ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                task.exception()  # raised below, unless the stream was cut first
            face.close_stream(session, stream)

        reader.add_done_callback(gateway_ended)
        try:
            async for frame in session.frames(stream, opened):
                yield frame
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            face.close_stream(session, stream)

    async def Watch(
        self,
        request: pb.WatchRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[pb.WatchRequest, pb.WatchResponse],  # noqa: ARG002
    ) -> AsyncIterator[pb.WatchResponse]:
        async for event in ready(self._blocks).stream():
            yield event

    async def Drain(
        self,
        request: pb.DrainRequest,
        context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainResponse],  # noqa: ARG002
    ) -> pb.DrainResponse:
        timeout_s = to_seconds(request.timeout) if request.HasField("timeout") else None
        return pb.DrainResponse(aborted=await ready(self._drain)(timeout_s))


def ready(value: T | None) -> T:
    """What the engine has only once its model is loaded; raises UnavailableError before."""
    if value is None:
        raise UnavailableError("the engine is loading its model", retry_after_s=1.0)
    return value


async def _opening(requests: AsyncIterator[pb.SessionRequest]) -> pb.SessionOpen:
    try:
        async with asyncio.timeout(_OPEN_TIMEOUT_S):
            message = await anext(requests, None)
    except TimeoutError:
        message = None
    if message is None or message.WhichOneof("message") != "open":
        raise InvalidRequestError("a session begins with open", field="message", allowed="open")
    return message.open


async def _read(requests: AsyncIterator[pb.SessionRequest], face: Face, session: Session) -> None:
    """What the gateway says, until it ends its side."""
    async for message in requests:
        match message.WhichOneof("message"):
            case "submit":
                face.submit(session, message.submit)
            case "abort":
                face.abort(session, message.abort.request)
            case "ack":
                session.acknowledge(message.ack.frame)
            case kind:
                raise InvalidRequestError(
                    f"a session message holds {kind or 'nothing'}", field="message", allowed="submit, abort or ack"
                )
