"""The gateway's side of docs/security.md: scopes on every API, places before bodies, admin, and nothing said that was
asked."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from katydid.gateway.v1 import admin_pb2, gateway_pb2
from katydid.gateway.v1.admin_pb2_grpc import AdminServiceStub
from katydid_gateway.posture import posture
from katydid_gateway.settings import GatewaySettings
from katydid_runtime import log
from katydid_runtime.errors import KatydidError, SettingsError
from katydid_runtime.rpc_errors import from_rpc_error

from tests.gateway.mock_engine import MockEngine, MockOptions
from tests.gateway.rig import Rig, rig, until

USER = [{"role": "user", "content": "hello there"}]
KEYS = {
    "chat": "scopes=inference concurrency=1",
    "count": "scopes=tokenize",
    "watch": "scopes=metrics",
    "ops": "scopes=admin,explain",
}


def key_file(folder: Path) -> str:
    path = folder / "keys"
    path.write_text("".join(f"{name} {sha256(name.encode()).hexdigest()} {rest}\n" for name, rest in KEYS.items()))
    return str(path)


def shown(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def refusal(call: Any) -> KatydidError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (anext(aiter(call)) if hasattr(call, "__aiter__") else call)
    return from_rpc_error(caught.value)


def test_each_api_asks_for_its_scope(chatml: Path, tmp_path: Path) -> None:
    requests = [
        ("POST", "/v1/chat/completions", {"messages": USER, "max_tokens": 1}, {"chat"}),
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, {"chat"}),
        ("POST", "/v1/responses", {"input": "x", "max_output_tokens": 1}, {"chat"}),
        ("POST", "/v1/messages", {"messages": USER, "max_tokens": 1}, {"chat"}),
        ("POST", "/v1/messages/count_tokens", {"messages": USER}, {"count"}),
        ("POST", "/tokenize", {"prompt": "x"}, {"count"}),
        ("POST", "/detokenize", {"tokens": [5]}, {"count"}),
        ("GET", "/v1/models", None, set(KEYS)),
        ("GET", "/metrics", None, {"watch"}),
        ("GET", "/console/api/requests", None, {"chat"}),
        ("GET", "/console/api/fleet", None, {"ops"}),
        ("POST", "/console/api/explain", {"messages": USER}, {"ops"}),
    ]

    async def scenario() -> None:
        async with rig(chatml, api_keys_file=key_file(tmp_path), metrics_need_scope=True) as built:
            for method, path, body, allowed in requests:
                for key in KEYS:
                    answer = await built.http.request(method, path, json=body, headers=shown(key))
                    assert answer.status_code == (200 if key in allowed else 403), (path, key, answer.text)
                    if key not in allowed:
                        assert answer.json()["error"]["type"] == "permission_error"
                assert (await built.http.request(method, path, json=body)).status_code == 401
            talk = [gateway_pb2.ChatMessage(role=gateway_pb2.CHAT_ROLE_USER, content="x")]
            calls = [
                ("chat", built.stub.Chat, gateway_pb2.ChatRequest(messages=talk)),
                ("count", built.stub.Tokenize, gateway_pb2.TokenizeRequest(text="x")),
                ("ops", built.stub.ExplainRoute, gateway_pb2.ExplainRouteRequest(messages=talk)),
            ]
            for needed, method, message in calls:
                for key in KEYS.keys() - {needed}:
                    call = method(message, metadata=tuple(shown(key).items()))
                    assert (await refusal(call)).reason == "PERMISSION_DENIED", (needed, key)
            for path in ("/healthz", "/readyz"):
                assert (await built.http.get(path)).status_code == 200
            figures = (await built.http.get("/metrics", headers=shown("watch"))).text
            for reason in ("unauthenticated", "permission_denied"):
                assert f'katydid_gateway_turned_away_requests_total{{reason="{reason}"}}' in figures

    asyncio.run(scenario())


def test_tokens_of_an_identity_provider_are_taken_beside_keys(chatml: Path, tmp_path: Path) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(private.public_key())) | {"kid": "1"}
    (tmp_path / "jwks").write_text(json.dumps({"keys": [public]}))
    claims = {"iss": "https://id", "aud": "katydid", "sub": "team", "exp": time.time() + 60}

    def token(**more: object) -> dict[str, str]:
        return shown(jwt.encode(claims | more, private, "ES256", {"kid": "1"}))

    async def scenario() -> None:
        provider = {"jwt_keys": str(tmp_path / "jwks"), "jwt_issuer": "https://id", "jwt_audience": "katydid"}
        async with rig(chatml, api_keys_file=key_file(tmp_path), **provider) as built:
            body = {"prompt": "x", "max_tokens": 1}
            for headers, status in (
                (token(), 200),
                (shown("chat"), 200),
                (token(scope="katydid:tokenize"), 403),
                (token(aud="other"), 401),
                (shown("a.b.c"), 401),
            ):
                assert (await built.http.post("/v1/completions", json=body, headers=headers)).status_code == status
            prompt = gateway_pb2.GenerateRequest(prompt=gateway_pb2.Prompt(text="x"))
            prompt.sampling.max_tokens = 1
            answer = built.stub.Generate(prompt, metadata=tuple(token().items()))
            assert [event async for event in answer]
            tenants = {sha256(name.encode()).digest()[:16] for name in ("team", "chat")}
            assert {request.tenant for request in built.engines[0].submitted} == tenants

    asyncio.run(scenario())


def test_a_tenant_has_its_places_before_a_body_is_read(chatml: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(chatml, api_keys_file=key_file(tmp_path), options=MockOptions(deaf=True)) as built:
            door = built.gateway.door
            waiting = asyncio.create_task(
                built.http.post("/v1/completions", json={"prompt": "x"}, headers=shown("chat"))
            )
            await until(lambda: door._places.of("chat") == 1)
            # The body is never sent: who has no place hears so at once.
            reader, writer = await asyncio.open_connection(*built.gateway.http_address.split(":"))
            head = (
                "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer chat\r\ncontent-length: 9999\r\n\r\n"
            )
            writer.write(head.encode())
            async with asyncio.timeout(5):
                status = await reader.readline()
            assert b" 429 " in status
            writer.close()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await until(lambda: door._places.of("chat") == 0)

    asyncio.run(scenario())


SECRET = "xyzzy-plugh-42"


@pytest.mark.parametrize("level", ["info", "debug"])
def test_prompts_and_answers_are_in_no_log_and_no_trace(
    hy3: Path, tmp_path: Path, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    capture = tmp_path / "capture.jsonl"
    tools = [{"type": "function", "function": {"name": SECRET, "parameters": {"type": "object"}}}]

    async def scenario() -> None:
        async with rig(hy3, trace_file=str(trace), capture_file=str(capture)) as built:
            built.engines[0].options.script = built.says(f"I say {SECRET}")
            talk = [{"role": "system", "content": SECRET}, {"role": "user", "content": f"say {SECRET}"}]
            assert SECRET in (await built.http.post("/v1/chat/completions", json={"messages": talk})).text
            await built.events(messages=talk, tools=tools, stop=[SECRET + "?"])
            await built.http.post("/v1/completions", json={"prompt": SECRET})
            await built.http.post("/v1/responses", json={"input": SECRET})
            await built.http.post("/v1/messages", json={"messages": talk[1:], "max_tokens": 9})
            await built.http.post("/tokenize", json={"prompt": SECRET})
            for bad in ({"messages": SECRET}, {"messages": talk, SECRET: 1}, {"messages": talk, "stop": [SECRET] * 17}):
                assert (await built.http.post("/v1/chat/completions", json=bad)).status_code == 400
            call = {"id": "c", "function": {"name": "f", "arguments": json.dumps([SECRET])}}
            said = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
            assert SECRET in (await built.http.post("/v1/chat/completions", json=said)).text
            assert (await built.http.post("/v1/chat/completions", content=SECRET)).status_code == 400
            built.engines[0].options.script = lambda *_: 1 / 0  # type: ignore[return-value]

    before = logging.getLogger().level
    log.configure("gateway", level)
    try:
        asyncio.run(scenario())
    finally:
        logging.getLogger().setLevel(before)
    written = "".join(capsys.readouterr()) + trace.read_text() + capture.read_text()
    assert "request finished" in written
    assert SECRET not in written


def test_admin_changes_a_gateway_while_it_runs(chatml: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        second = MockEngine(MockOptions())
        settings = {
            "api_keys_file": key_file(tmp_path),
            "admin_listen": "127.0.0.1:0",
            "engine_networks": "127.0.0.0/8",
        }
        async with rig(chatml, **settings) as built:
            second.options.tokenizer_digest = built.engines[0].options.tokenizer_digest
            second.options.golden_digest = built.engines[0].options.golden_digest
            address = await second.start()
            async with grpc.aio.insecure_channel(built.gateway.admin_address) as channel:
                admin = AdminServiceStub(channel)
                ops = tuple(shown("ops").items())
                for key, reason in (("chat", "PERMISSION_DENIED"), ("nobody", "UNAUTHENTICATED")):
                    call = admin.GetPosture(admin_pb2.GetPostureRequest(), metadata=tuple(shown(key).items()))
                    assert (await refusal(call)).reason == reason
                found = (await admin.GetPosture(admin_pb2.GetPostureRequest(), metadata=ops)).findings
                assert {"prefix caches"} == {each.subject for each in found if each.open}

                added = admin_pb2.AddEngineRequest(name="late", address=address)
                assert (await admin.AddEngine(added, metadata=ops)).address == address
                assert (await refusal(admin.AddEngine(added, metadata=ops))).reason == "CONFLICT"
                for wrong in ("169.254.169.254:9000", "10.0.0.1:9000", "nonsense"):
                    bad = admin_pb2.AddEngineRequest(name="bad", address=wrong)
                    assert (await refusal(admin.AddEngine(bad, metadata=ops))).field == "address"
                for wrong in ("<script>alert(1)</script>", " ", "a b", "e" * 129, "\u00e4"):
                    bad = admin_pb2.AddEngineRequest(name=wrong, address=address)
                    assert (await refusal(admin.AddEngine(bad, metadata=ops))).field == "name"
                await until(lambda: built.gateway.fleet.healthy == 2)
                listed = (await admin.ListEngines(admin_pb2.ListEnginesRequest(), metadata=ops)).engines
                assert [(each.name, each.excluded) for each in listed] == [("engine-0", ""), ("late", "")]

                gone = admin_pb2.RemoveEngineRequest(name="engine-0")
                await admin.RemoveEngine(gone, metadata=ops)
                assert (await refusal(admin.RemoveEngine(gone, metadata=ops))).reason == "NOT_FOUND"
                body = {"prompt": "x", "max_tokens": 2}
                assert (await built.http.post("/v1/completions", json=body, headers=shown("chat"))).status_code == 200
                assert (len(built.engines[0].submitted), len(second.submitted)) == (0, 1)

                await admin.SetDraining(admin_pb2.SetDrainingRequest(draining=True), metadata=ops)
                assert (await built.http.get("/readyz")).status_code == 503
                assert (await built.http.post("/v1/completions", json=body, headers=shown("chat"))).status_code == 503
                await admin.SetDraining(admin_pb2.SetDrainingRequest(), metadata=ops)
                assert (await built.http.post("/v1/completions", json=body, headers=shown("chat"))).status_code == 200

                level = logging.getLogger().level
                quiet = await admin.SetLogLevel(admin_pb2.SetLogLevelRequest(level="error"), metadata=ops)
                assert logging.getLogger().level == logging.ERROR
                logging.getLogger().setLevel(level)
                assert quiet.previous == logging.getLevelName(level).lower()
                loud = admin.SetLogLevel(admin_pb2.SetLogLevelRequest(level="loud"), metadata=ops)
                assert (await refusal(loud)).field == "level"
        await second.stop()

    asyncio.run(scenario())


def settings(**given: Any) -> GatewaySettings:
    return GatewaySettings(**{"model": "m", "engines": "127.0.0.1:1", **given})


@pytest.mark.parametrize(
    ("given", "open_ones"),
    [
        ({}, set()),
        ({"http_listen": "0.0.0.0:80"}, {"http", "callers", "metrics"}),
        ({"listen": "10.0.0.1:80", "jwt_keys": "k", "cache_salt_secret": "s"}, {"grpc"}),
        ({"http_listen": "0.0.0.0:80", "tls_cert_file": "c", "api_keys_file": "k"}, {"metrics", "prefix caches"}),
        ({"engines": "e1:9000,127.0.0.1:9", "kvcache_address": "kv:1"}, {"engines", "cache service"}),
        ({"engines": "e1:9000", "tls_ca_file": "ca"}, set()),
        ({"admin_listen": "127.0.0.1:1"}, {"admin callers"}),
        ({"probe_listen": "0.0.0.0:9"}, {"probes"}),
    ],
)
def test_the_posture_names_what_is_open_and_how_to_close_it(given: dict[str, Any], open_ones: set[str]) -> None:
    found = posture(settings(**given))
    assert {each.subject for each in found if each.open} == open_ones
    assert all(bool(each.remedy) == each.open for each in found)
    assert json.dumps([each.state for each in found])


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"admin_listen": "0.0.0.0:1"}, "admin_listen"),
    ],
)
def test_what_would_be_open_to_all_does_not_start(given: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings(**given).check()
    assert caught.value.field == field


def test_tokens_need_an_issuer_and_an_audience() -> None:
    with pytest.raises(SettingsError, match="jwt_audience"):
        settings(jwt_keys="k", jwt_issuer="i").token_terms()
    with pytest.raises(SettingsError, match="without jwt_keys"):
        settings(jwt_issuer="i").token_terms()
    assert settings().token_terms() is None


def test_a_message_too_large_is_not_parsed(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        for size, reason in ((300_000, "PAYLOAD_TOO_LARGE"), (2_000_000, None)):
            text = gateway_pb2.Prompt(text="x" * size)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [event async for event in built.stub.Generate(gateway_pb2.GenerateRequest(prompt=text))]
            if reason:
                assert from_rpc_error(caught.value).reason == reason
            else:
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    async def body() -> None:
        async with rig(chatml, max_body_bytes=200_000) as built:
            await scenario(built)

    asyncio.run(body())
