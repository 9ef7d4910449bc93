"""Bad input through all three services: a 4xx in OpenAI's shape or a typed gRPC error, and everything goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import httpx
import pytest
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid.gateway.v1.gateway_pb2_grpc import InferenceServiceStub
from katydid_client import AsyncKatydid, InvalidRequestError, KatydidError, PromptTooLongError, UnknownModelError
from katydid_runtime.rpc_errors import from_rpc_error

from tests.e2e.fleet import Fleet
from tests.e2e.load import Answer, Ask, Load

pytestmark = pytest.mark.e2e

USER = [{"role": "user", "content": "hello"}]
TOO_LONG = "x" * 5000
CHAT, COMPLETIONS = "/chat/completions", "/completions"

OVER_HTTP: dict[str, tuple[str, Any, int, str | None]] = {
    "unknown model": (CHAT, {"model": "gpt-9", "messages": USER}, 404, "model"),
    "over-long prompt": (COMPLETIONS, {"prompt": TOO_LONG}, 400, "prompt"),
    "over-long answer": (COMPLETIONS, {"prompt": "x", "max_tokens": 4096}, 400, "max_tokens"),
    "no JSON": (CHAT, b'{"messages": [', 400, "body"),
    "no UTF-8": (CHAT, b"\xff", 400, "body"),
    "wrong type": (CHAT, {"messages": "hello"}, 400, "messages"),
    "number as text": (CHAT, {"messages": USER, "temperature": "0.5"}, 400, "temperature"),
    "n": (CHAT, {"messages": USER, "n": 0}, 400, "n"),
    "n beyond the engines'": (CHAT, {"messages": USER, "n": 17}, 400, "n"),
    "logprobs": (COMPLETIONS, {"prompt": "x", "logprobs": 21}, 400, "logprobs"),
    "temperature": (CHAT, {"messages": USER, "temperature": -0.1}, 400, "temperature"),
    "empty prompt": (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    "no message": (CHAT, {"messages": []}, 400, "messages"),
    "token id": (COMPLETIONS, {"prompt": [272]}, 400, "prompt"),
    "unknown sampling field": (CHAT, {"messages": USER, "temprature": 1}, 400, "temprature"),
    "wrong role": (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
    "oversize body": (COMPLETIONS, {"prompt": "x" * (8 * 2**20)}, 413, "body"),
}

OVER_GRPC: dict[str, tuple[type[KatydidError], dict[str, Any], str]] = {
    "unknown model": (UnknownModelError, {"model": "gpt-9"}, "model"),
    "over-long prompt": (PromptTooLongError, {"prompt": TOO_LONG}, "prompt"),
    "over-long answer": (PromptTooLongError, {"max_tokens": 4096}, "max_tokens"),
    "n": (InvalidRequestError, {"n": 17}, "n"),
    "logprobs": (InvalidRequestError, {"logprobs": 21}, "logprobs"),
    "temperature": (InvalidRequestError, {"temperature": 2.1}, "temperature"),
    "no number": (InvalidRequestError, {"temperature": float("nan")}, "temperature"),
    "empty prompt": (InvalidRequestError, {"prompt": ""}, "prompt"),
    "token id": (InvalidRequestError, {"prompt": [272]}, "prompt"),
    "oversize message": (InvalidRequestError, {"prompt": "x" * (8 * 2**20 + 1)}, "message"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_over_http(fleet: Fleet, stream: bool) -> None:
    with httpx.Client(base_url=fleet.base_url, timeout=30) as client:
        for name, (path, body, status, field) in OVER_HTTP.items():
            content = body if isinstance(body, bytes) else json.dumps({"stream": stream} | body).encode()
            response = client.post(path, content=content)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (status, field), (name, error)
            assert error.keys() >= {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert error["message"]
        assert client.get("/nothing").status_code == 404
        assert client.get(COMPLETIONS).status_code == 405


def test_over_grpc(fleet: Fleet) -> None:
    async def scenario() -> None:
        async with AsyncKatydid(fleet.gateway.address, timeout=30, max_retries=0) as client:
            for name, (kind, arguments, field) in OVER_GRPC.items():
                with pytest.raises(kind) as raised:
                    await client.generate(**{"prompt": "x", "max_tokens": 1} | arguments)
                assert raised.value.field == field, (name, raised.value)
            with pytest.raises(InvalidRequestError) as raised:
                await client.chat([])
            assert raised.value.field == "messages"
            with pytest.raises(KatydidError):
                await client.chat([{"role": "robot", "content": "x"}])
        async with grpc.aio.insecure_channel(fleet.gateway.address) as channel:
            stub = InferenceServiceStub(channel)
            message = pb.ChatRequest(messages=[pb.ChatMessage(role=pb.ChatRole.ValueType(99), content="x")])
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(stub.Chat(message, timeout=30)))
            assert from_rpc_error(refused.value).field == "messages[0].role"

    asyncio.run(scenario())


def test_a_stream_beside_bad_requests_goes_on(fleet: Fleet) -> None:
    ask = Ask("goes on", 200, sampling={"ignore_eos": True, "temperature": 0.9, "seed": 5})

    async def scenario() -> None:
        async with Load(fleet) as load:
            (alone,) = await load.one_at_a_time([ask])
            running = asyncio.create_task(load.over_http(ask))
            bad = [load.http.post(path, json=body) for path, body, *_ in OVER_HTTP.values() if isinstance(body, dict)]
            assert all(400 <= response.status_code < 500 for response in await asyncio.gather(*bad))
            assert await running == alone
            assert isinstance(alone, Answer)

    asyncio.run(scenario())
