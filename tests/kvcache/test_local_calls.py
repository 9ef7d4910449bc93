"""Calls over the arena's socket: answers, errors, deadlines and cancellation as over gRPC; nothing breaks a server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_cache.local_calls import REQUEST, LocalCalls, NearCalls, pack_head, unpack_head
from katydid_kvcache.local_calls import CallContext, Handler, LocalConnection
from katydid_runtime.errors import (
    ConflictError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
)

TEXT = st.text(st.characters(min_codepoint=1, max_codepoint=255), max_size=20)


class Service:
    """Answers by the lease of the request, and remembers what was cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []
        self.metadata: list[object] = []

    async def answer(self, request: pb.ReleaseRequest, context: CallContext) -> pb.LookupResponse:
        self.metadata.append(context.invocation_metadata())
        if request.lease == 1:
            raise ConflictError("no such thing", field="lease", value=1, allowed="another")
        if request.lease == 2:
            raise RuntimeError("a defect")
        if request.lease == 3:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled.append(request.lease)
                raise
        return pb.LookupResponse(lease=request.lease)


def admit(method: str, metadata: Any) -> None:
    if ("authorization", "no") in metadata:
        raise PermissionDeniedError("not you", field="authorization")


def over_a_socket(scenario: Callable[[LocalCalls, Service, socket.socket], Awaitable[None]]) -> None:
    async def body() -> None:
        service = Service()
        ours, theirs = socket.socketpair()
        handlers = {"Do": Handler("/pkg.Service/Do", pb.ReleaseRequest, service.answer)}
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        served, _ = await loop.connect_accepted_socket(lambda: LocalConnection(handlers, admit), theirs)
        calls = await LocalCalls.over(ours)
        try:
            await asyncio.wait_for(scenario(calls, service, ours), 20)
        finally:
            calls.close()
            served.close()
            await asyncio.sleep(0)

    asyncio.run(body())


async def do(calls: LocalCalls, lease: int, timeout_s: float = 5.0, **metadata: str) -> int:
    body = await calls.call("Do", pb.ReleaseRequest(lease=lease), timeout_s, tuple(metadata.items()))
    return pb.LookupResponse.FromString(body).lease


@given(TEXT.filter(bool), st.lists(st.tuples(TEXT, TEXT), max_size=3))
def test_heads_come_back(method: str, metadata: list[tuple[str, str]]) -> None:
    assert unpack_head(pack_head(method, metadata)) == (method, tuple(metadata))


def test_answers_errors_and_metadata() -> None:
    async def scenario(calls: LocalCalls, service: Service, _: socket.socket) -> None:
        assert await asyncio.gather(*(do(calls, lease) for lease in range(10, 40))) == [*range(10, 40)]
        await do(calls, 9, traceparent="00-1-2-01")
        assert service.metadata[-1] == (("traceparent", "00-1-2-01"),)
        with pytest.raises(ConflictError) as caught:
            await do(calls, 1)
        assert (caught.value.field, caught.value.allowed) == ("lease", "another")
        with pytest.raises(InternalError):
            await do(calls, 2)
        with pytest.raises(PermissionDeniedError):
            await do(calls, 9, authorization="no")
        with pytest.raises(UnsupportedError):
            await calls.call("Undo", pb.ReleaseRequest(), 5.0, ())
        assert await do(calls, 9) == 9

    over_a_socket(scenario)


def test_a_late_or_cancelled_call_ends_on_the_other_side_too() -> None:
    async def scenario(calls: LocalCalls, service: Service, _: socket.socket) -> None:
        with pytest.raises(DeadlineExceededError):
            await do(calls, 3, timeout_s=0.05)
        waiting = asyncio.create_task(do(calls, 3, timeout_s=60))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while len(service.cancelled) < 2:
            await asyncio.sleep(0.005)
        assert await do(calls, 9) == 9

    over_a_socket(scenario)


def test_a_lost_connection_ends_calls_and_is_known() -> None:
    async def scenario(calls: LocalCalls, service: Service, ours: socket.socket) -> None:
        waiting = asyncio.create_task(do(calls, 3, timeout_s=60))
        await asyncio.sleep(0.05)
        ours.shutdown(socket.SHUT_RDWR)
        with pytest.raises(UnavailableError):
            await waiting
        assert calls.closed
        while not service.cancelled:
            await asyncio.sleep(0.005)
        with pytest.raises(UnavailableError):
            await do(calls, 9)

    over_a_socket(scenario)


def test_calls_go_over_grpc_while_there_is_no_socket() -> None:
    class Stub:
        async def Release(self, request: pb.ReleaseRequest, **_: object) -> pb.ReleaseResponse:
            released.append(request.lease)
            return pb.ReleaseResponse()

    released: list[int] = []
    closed = LocalCalls()
    closed.closed = True

    async def body() -> None:
        for local in (None, closed):
            await NearCalls(Stub(), lambda local=local: local, ()).Release(pb.ReleaseRequest(lease=7), timeout=1.0)

    asyncio.run(body())
    assert released == [7, 7]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.builds(
                lambda size, number, head, body: REQUEST.pack(size, number, 1000, head) + body,
                st.integers(0, 2**32 - 1),
                st.integers(0, 3),
                st.integers(0, 2**16 - 1),
                st.binary(max_size=40),
            ),
            st.builds(
                lambda number, body: REQUEST.pack(2 + len(body), number, 1000, 2) + b"Do" + body,
                st.integers(0, 3),
                st.binary(max_size=40),
            ),
        ),
        max_size=8,
    )
)
def test_no_bytes_break_the_server(pieces: list[bytes]) -> None:
    """Frames cut, doubled, of wrong sizes, and noise: a typed error or a closed connection, and the loop goes on."""

    async def body() -> None:
        service = Service()
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        failures: list[object] = []
        loop.set_exception_handler(lambda _, context: failures.append(context))
        handlers = {"Do": Handler("/pkg.Service/Do", pb.ReleaseRequest, service.answer)}
        served, _ = await loop.connect_accepted_socket(lambda: LocalConnection(handlers, admit), theirs)
        with ours:
            for piece in pieces:
                try:
                    await loop.sock_sendall(ours, piece)
                except OSError:
                    break
                await asyncio.sleep(0)
        await asyncio.sleep(0.002)
        served.close()
        await asyncio.sleep(0)
        assert failures == []

    asyncio.run(body())


def test_a_request_that_is_no_message_is_named() -> None:
    async def scenario(calls: LocalCalls, service: Service, _: socket.socket) -> None:
        with pytest.raises(InvalidRequestError):
            await calls.call("Do", _Raw(b"\xff\xff"), 5.0, ())  # type: ignore[arg-type]

    over_a_socket(scenario)


class _Raw:
    """A message that serialises to anything."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def SerializeToString(self) -> bytes:
        return self._content
