"""The client over a real loopback connection: errors, cancellation, deadlines, TLS off."""

from __future__ import annotations

import asyncio

import pytest
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid.gateway.v1 import gateway_pb2_grpc as pb_grpc
from katydid_client import AsyncKatydid, DeadlineExceededError, EngineLostError, PromptTooLongError, UnavailableError
from katydid_runtime.server import RpcServer

HELLO = [{"role": "user", "content": "Hello"}]


class Gateway(pb_grpc.InferenceServiceServicer):
    """Chat says "a" until it is left, or fails as its first message's content asks."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.metadata: dict[str, str] = {}

    async def Chat(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        what = request.messages[0].content
        try:
            if what == "too long":
                raise PromptTooLongError("too long", field="messages", value=9, allowed="at most 8 tokens")
            yield pb.ChatResponse(content="a")
            if what == "die":
                raise EngineLostError("engine e0 was lost")
            while True:
                await asyncio.sleep(0.01)
                yield pb.ChatResponse(content="a")
        finally:
            self.left.set()


def run(scenario, **options) -> None:
    async def body() -> None:
        gateway = Gateway()
        server = RpcServer("127.0.0.1:0", services=[])
        pb_grpc.add_InferenceServiceServicer_to_server(gateway, server.grpc)
        async with server:
            address = await server.start()
            async with AsyncKatydid(address, **options) as client:
                await asyncio.wait_for(scenario(client, gateway), 10)

    asyncio.run(body())


def test_errors_keep_their_class_and_details():
    async def scenario(client, gateway):
        with pytest.raises(PromptTooLongError) as caught:
            await client.chat([{"role": "user", "content": "too long"}])
        assert (caught.value.field, caught.value.value, caught.value.allowed) == ("messages", "9", "at most 8 tokens")
        assert gateway.metadata["authorization"] == "Bearer sk-1"

    run(scenario, api_key="sk-1")


def test_an_error_in_mid_stream_comes_after_the_text():
    async def scenario(client, gateway):
        async with client.chat_stream([{"role": "user", "content": "die"}]) as stream:
            assert (await anext(stream)).text == "a"
            with pytest.raises(EngineLostError):
                await stream.get_final()

    run(scenario)


def test_leaving_the_stream_reaches_the_server():
    async def scenario(client, gateway):
        async with client.chat_stream(HELLO) as stream:
            await anext(stream)
        await gateway.left.wait()

    run(scenario)


def test_cancelling_the_task_reaches_the_server():
    async def scenario(client, gateway):
        task = asyncio.create_task(client.chat(HELLO))
        while not gateway.metadata:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gateway.left.wait()

    run(scenario)


def test_the_deadline_reaches_the_server():
    async def scenario(client, gateway):
        with pytest.raises(DeadlineExceededError):
            await client.chat(HELLO)
        await gateway.left.wait()

    run(scenario, timeout=0.5)


def test_no_gateway():
    async def scenario():
        async with AsyncKatydid("127.0.0.1:1", max_retries=0) as client:
            with pytest.raises(UnavailableError):
                await client.models()

    asyncio.run(scenario())


def test_a_port_that_speaks_http_is_called_so():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(64)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async def body() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            async with AsyncKatydid(f"{host}:{port}", max_retries=0, timeout=30) as client:
                with pytest.raises(UnavailableError, match=r"it speaks HTTP/1\.1, not gRPC"):
                    await client.models()

    asyncio.run(asyncio.wait_for(body(), 60))
