"""Every kind of bad input over HTTP: a 4xx in OpenAI's shape that names the field, and the gateway goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid_gateway.http import exchange
from katydid_runtime.errors import InvalidRequestError
from katydid_runtime.rpc_errors import from_rpc_error

from tests.gateway.rig import Rig, rig

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def run(folder: Path, scenario: Any, **options: Any) -> None:
    async def body() -> None:
        async with rig(folder, **options) as built:
            await scenario(built)

    asyncio.run(body())


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()


def message(**fields: Any) -> bytes:
    return json.dumps({"messages": [fields]}).encode()


def complete(prompt: Any, **fields: Any) -> bytes:
    return json.dumps({"prompt": prompt, **fields}).encode()


BAD: list[tuple[str, bytes, int, str | None]] = [
    (CHAT, b"{", 400, "body"),
    (CHAT, b"", 400, "body"),
    (CHAT, b"[]", 400, None),
    (CHAT, b"\xff\xfe", 400, "body"),
    (CHAT, b"{}", 400, "messages"),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "body"),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "metadata": {"a": "\\u00zz"}}', 400, "body"),
    (COMPLETIONS, b'{"prompt": ' + b"[" * 100_000, 400, "body"),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(model="gpt-9"), 404, "model"),
    (CHAT, message(role="robot", content="x"), 400, "messages[0].role"),
    (CHAT, message(role="user", content=5), 400, "messages[0].content"),
    (CHAT, message(role="user"), 400, "messages[0].content"),
    (CHAT, message(role="user", content=[{"type": "image_url"}]), 400, "messages[0].content[0].type"),
    (CHAT, message(role="tool", content="x"), 400, "messages[0].tool_call_id"),
    (CHAT, chat(temperatur=1), 400, "temperatur"),
    (CHAT, chat(temperature="hot"), 400, "temperature"),
    (CHAT, chat(temperature=2.5), 400, "temperature"),
    (CHAT, chat(n=99), 400, "n"),
    (CHAT, chat(n=1.5), 400, "n"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat(max_tokens=999_999), 400, "max_tokens"),
    (CHAT, chat(max_tokens=5, max_completion_tokens=6), 400, "max_completion_tokens"),
    (CHAT, chat(stop=[1]), 400, "stop[0]"),
    (CHAT, chat(logit_bias={"x": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"1" * 5000: 1}), 400, "logit_bias"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools[0].function"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools"),
    (CHAT, chat(tool_choice="auto"), 400, "tool_choice"),
    (CHAT, chat(stream_options={}), 400, "stream_options"),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format"),
    (CHAT, chat(response_format={"type": "json_schema"}), 400, "response_format.json_schema"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs.messages"),
    (CHAT, chat(priority=5000), 400, "priority"),
    (CHAT, message(role="user", content="word " * 9000), 400, "messages"),
    (COMPLETIONS, complete(""), 400, "prompt"),
    (COMPLETIONS, complete([]), 400, "prompt"),
    (COMPLETIONS, complete([1, "x"]), 400, "prompt"),
    (COMPLETIONS, complete([-1]), 400, "prompt"),
    (COMPLETIONS, complete([100_000]), 400, "prompt"),
    (COMPLETIONS, complete([[1], [True]]), 400, "prompt[1]"),
    (COMPLETIONS, complete(["x"] * 65), 400, "prompt"),
    (COMPLETIONS, complete("x", logprobs=6), 400, "logprobs"),
    (COMPLETIONS, complete("x", best_of=3), 400, "best_of"),
    (COMPLETIONS, complete("x", suffix="y"), 400, "suffix"),
    (RESPONSES, b'{"input": [{"role": "user", "content": "x"}, 5]}', 400, "input[1]"),
    (RESPONSES, b'{"input": [{"type": "item_reference"}]}', 400, "input[0].type"),
    (RESPONSES, b'{"input": []}', 400, "input"),
    (RESPONSES, b'{"input": "x", "max_output_tokens": 0}', 400, "max_output_tokens"),
    (CHAT, chat(max_completion_tokens=0), 400, "max_completion_tokens"),
    (CHAT, chat(max_completion_tokens=10**9), 400, "max_completion_tokens"),
    ("/detokenize", b'{"tokens": [100000]}', 400, "tokens"),
]


def test_bad_input_gets_an_error_that_names_the_field_and_harms_nobody(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        for path, body, status, field in BAD:
            response = await built.http.post(path, content=body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (status, field), (body[:100], response.text)
            assert error["message"]
            assert field not in {"max_output_tokens", "max_completion_tokens"} or field in error["message"]
            assert error["type"] == "invalid_request_error"
        body = json.loads(chat(max_tokens=1, stop_sequences=[""]))
        refused = (await built.http.post("/v1/messages", json=body)).json()["error"]
        assert refused["message"].startswith("stop_sequences[0] is 0 characters long")
        codes = {
            "model_not_found": await built.chat(model="gpt-9"),
            "context_length_exceeded": await built.chat("word " * 9000),
        }
        assert {code: response.json()["error"]["code"] for code, response in codes.items()} == {c: c for c in codes}
        assert (await built.http.post("/v1/nothing", json={})).status_code == 404
        wrong_method = await built.http.get(CHAT)
        assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
        assert wrong_method.json()["error"]["allowed"] == "POST"
        assert (await built.http.get("/v1/models/none")).status_code == 404
        assert built.engines[0].submitted == []
        assert (await built.chat()).status_code == 200

    run(chatml, scenario)


def test_half_a_surrogate_pair_in_a_schema_is_no_text(hy3: Path) -> None:
    async def scenario(built: Rig) -> None:
        for fields, field in (
            ({"tools": [pb.Tool(name="f", parameters='{"a": "\\ud800"}')]}, "tools[0].parameters"),
            ({"template_options": '{"a": "\\ud800"}'}, "template_options"),
        ):
            asked = pb.ChatRequest(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="x")], **fields)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(built.stub.Chat(asked)))
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidRequestError)
            assert error.field == field

    run(hy3, scenario)


def test_an_oversize_body_is_refused_before_it_is_read(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        response = await built.chat("x" * 5000)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "payload_too_large"

        async def endless() -> Any:
            for _ in range(100):
                yield b"x" * 100

        assert (await built.http.post(CHAT, content=endless())).status_code == 413
        assert (await built.chat()).status_code == 200

    run(chatml, scenario, max_body_bytes=2000)


@pytest.mark.parametrize("name", ["\0", "a\r\nset-cookie: b", "ü", "x" * 70_000])
def test_an_id_that_cannot_stand_in_a_header_is_refused_under_another(chatml: Path, name: str) -> None:
    async def scenario(built: Rig) -> None:
        for path, body in ((CHAT, chat(request_id=name)), (COMPLETIONS, complete("x", request_id=name))):
            response = await built.http.post(path, content=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")
            assert response.headers["x-request-id"].startswith("req-")
        by_header = {"x-request-id": "ü".encode("latin-1")}
        conversation = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        for path, fields in (("/v1/messages", conversation), (RESPONSES, {"input": "x"})):
            assert (await built.http.post(path, json=fields, headers=by_header)).status_code == 400

    run(chatml, scenario)


def test_errors_do_not_give_back_what_was_sent(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        response = await built.http.post(CHAT, content=chat(model="x" * 70_000))
        assert response.status_code == 404
        assert len(response.content) < 2000

    run(chatml, scenario)


def test_a_body_that_does_not_arrive_is_not_waited_for(chatml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 0.2)

    async def scenario(built: Rig) -> None:
        host, port = built.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert b" 400 " in head.partition(b"\r\n")[0]
        writer.close()
        await writer.wait_closed()

    run(chatml, scenario)
