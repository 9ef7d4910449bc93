"""Clients that leave, read slowly, or are there when the gateway stops: the engine hears of it, nothing hangs."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid.gateway.v1.gateway_pb2_grpc import InferenceServiceStub
from katydid_gateway.http import exchange
from katydid_runtime.errors import DrainingError, EngineLostError, KatydidError, SlowClientError
from katydid_runtime.rpc_errors import from_rpc_error

from tests.gateway.rig import Rig, rig, until

USER = [{"role": "user", "content": "hello there"}]


def run(folder: Path, scenario: Any, **options: Any) -> None:
    async def body() -> None:
        async with rig(folder, **options) as built:
            await scenario(built)

    asyncio.run(body())


async def send_raw(built: Rig, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    """A request on a socket that the test reads, or does not read, as it likes."""
    host, port = built.url.removeprefix("http://").split(":")
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    await asyncio.get_running_loop().sock_sendall(client, head + content)
    return client


async def failure_of(call: Any) -> KatydidError:
    """Read on until the call fails."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call ended well")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_engines_work(chatml: Path, stream: bool) -> None:
    async def scenario(built: Rig) -> None:
        engine = built.engines[0]
        engine.options.step_s = 0.02
        client = await send_raw(built, {"messages": USER, "stream": stream, "max_tokens": 5000, "ignore_eos": True})
        await until(lambda: engine.in_flight == 1)
        client.close()
        # Long before the 100 s that its work would take.
        await until(lambda: len(engine.aborted) == 1 and engine.in_flight == 0)
        await until(lambda: built.gateway.generator.idle.is_set())
        assert 'outcome="request_aborted"} 1.0' in (await built.http.get("/metrics")).text

    run(chatml, scenario)


def test_a_client_that_leaves_before_the_first_token(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.prefill_s = 30
        client = await send_raw(built, {"messages": USER, "stream": True})
        await until(lambda: built.engines[0].in_flight == 1)
        client.close()
        await until(lambda: built.engines[0].in_flight == 0)

    run(chatml, scenario)


def test_a_grpc_client_that_leaves(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.step_s = 0.02
        request = pb.GenerateRequest(prompt=pb.Prompt(text="hello"), sampling=pb.SamplingOptions(max_tokens=5000))
        call = built.stub.Generate(request)
        await call.read()
        call.cancel()
        await until(lambda: len(built.engines[0].aborted) == 1)

    run(chatml, scenario)


def test_a_slow_reader_is_cut_off_with_a_typed_error(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        engine = built.engines[0]
        engine.options.tokens_per_step = 5
        client = await send_raw(
            built,
            {"messages": USER, "stream": True, "max_tokens": 8000, "logprobs": True, "top_logprobs": 20},
            receive_buffer=4096,
        )
        await until(lambda: len(engine.aborted) == 1, 20)
        received = b""
        while chunk := await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1 << 20), 10):
            received += chunk
            if b"slow_client" in chunk:
                break
        client.close()
        last = received.decode().strip().rpartition("data: ")[2].partition("\n")[0]
        assert json.loads(last)["error"]["code"] == "slow_client"
        assert b"[DONE]" not in received

    run(chatml, scenario, client_buffer_bytes=100_000)


def test_a_complete_answer_is_not_kept_for_ever(chatml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(exchange, "SLOW_CLIENT_GRACE_S", 0.1)
    monkeypatch.setattr(exchange.Exchange, "write", stuck)

    async def scenario(built: Rig) -> None:
        client = await send_raw(built, {"messages": USER, "stream": True, "max_tokens": 8})
        await until(lambda: built.engines[0].finished == 1)
        # Its client stays and reads nothing; the deadline frees its place.
        await until(lambda: built.gateway.generator.idle.is_set(), 5)
        client.close()

    run(chatml, scenario, request_timeout_s=0.5)


def test_a_slow_grpc_reader_is_cut_off(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        engine = built.engines[0]
        engine.options.tokens_per_step = 5
        sampling = pb.SamplingOptions(max_tokens=8000, logprobs=20)
        # A window that does not grow: what is not read stays with the gateway.
        narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535))
        async with grpc.aio.insecure_channel(built.gateway.grpc_address, options=narrow) as channel:
            call = InferenceServiceStub(channel).Generate(
                pb.GenerateRequest(prompt=pb.Prompt(text="hello"), sampling=sampling)
            )
            await until(lambda: len(engine.aborted) == 1, 20)
            assert isinstance(await failure_of(call), SlowClientError)

    run(chatml, scenario, client_buffer_bytes=100_000)


def test_a_drain_lets_running_requests_end_and_refuses_new_ones(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        engine = built.engines[0]
        engine.options.step_s = 0.03
        running = asyncio.create_task(built.chat(max_tokens=1000))
        await until(lambda: engine.in_flight == 1)
        stopping = asyncio.create_task(built.gateway.stop())
        await until(lambda: built.gateway.generator.draining)
        refused = await built.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert (await built.http.get("/readyz")).status_code == 503
        assert (await built.http.get("/healthz")).status_code == 200
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await built.stub.ListModels(pb.ListModelsRequest())
        assert isinstance(from_rpc_error(caught.value), DrainingError)
        engine.options.step_s = 0.0
        response = await running
        assert response.status_code == 200
        assert response.json()["usage"]["completion_tokens"] == 1000
        await stopping

    run(chatml, scenario, drain_timeout_s=30.0)


def test_an_engine_that_dies_under_a_grpc_stream_is_an_error_of_its_own(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.step_s = 0.02
        call = built.stub.Chat(
            pb.ChatRequest(
                messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi")],
                sampling=pb.SamplingOptions(max_tokens=5000),
            )
        )
        await call.read()
        await built.engines[0].stop()
        assert isinstance(await failure_of(call), EngineLostError)

    run(chatml, scenario)


def test_when_the_drain_takes_too_long_streams_end_with_a_typed_error(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        engine = built.engines[0]
        engine.options.step_s = 0.02
        events = asyncio.create_task(built.events(messages=USER, max_tokens=5000))
        whole = asyncio.create_task(built.chat(max_tokens=5000))
        await until(lambda: engine.in_flight == 2)
        await asyncio.sleep(0.1)
        await built.gateway.stop()
        last = (await events)[-1]
        assert last["error"]["code"] == "draining"
        assert (await whole).json()["error"]["code"] == "draining"
        await until(lambda: engine.in_flight == 0)

    run(chatml, scenario, drain_timeout_s=1.3)
