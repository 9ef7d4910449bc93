"""The OpenAI API over HTTP against a gateway with a mock engine: answers, streams, and every kind of bad input."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.mock_engine import MockOptions
from tests.gateway.rig import Rig, rig, until

ANSWER = "hi, how can I help? 🦗🦗 Köln"
USER = [{"role": "user", "content": "hello there"}]


def run(folder: Path, scenario: Any, **options: Any) -> None:
    async def body() -> None:
        async with rig(folder, **options) as built:
            await scenario(built)

    asyncio.run(body())


def test_a_chat_whole_and_streamed_says_the_same(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.script = built.says(ANSWER)
        answer = (await built.chat(max_tokens=64)).json()
        choice = answer["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
        assert (choice["finish_reason"], choice["index"], answer["object"]) == ("stop", 0, "chat.completion")
        tokens = len(built.tokenizer.encode(ANSWER, add_special_tokens=False).ids) + 1
        assert answer["usage"]["completion_tokens"] == tokens
        assert answer["usage"]["prompt_tokens"] == len(built.engines[0].submitted[0].prompt_ids) // 4
        events = await built.events(messages=USER, max_tokens=64, stream_options={"include_usage": True})
        assert events.pop() == "[DONE]"
        usage = events.pop()
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == tokens
        assert all(event["usage"] is None for event in events)
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == ANSWER
        assert [event["choices"][0]["finish_reason"] for event in events][-1] == "stop"
        assert {event["id"] for event in events} == {usage["id"]}

    run(chatml, scenario)


def test_usage_counts_along_where_it_is_asked_to(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        for path, body in (("chat/completions", {"messages": USER}), ("completions", {"prompt": ["a b", "c"]})):
            events = await built.events(f"/v1/{path}", max_tokens=8, stream_options=options, **body)
            counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
            assert counts == sorted(counts)
            assert len(set(counts)) > 2
            assert {event["usage"]["prompt_tokens"] for event in events[:-1]} == {events[-2]["usage"]["prompt_tokens"]}

    run(chatml, scenario)


def test_without_include_usage_no_chunk_has_it(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        events = await built.events(messages=USER, max_tokens=3)
        assert events[-1] == "[DONE]"
        assert not any("usage" in event for event in events[:-1])
        assert all(event["choices"] for event in events[:-1])

    run(chatml, scenario)


def test_the_engine_gets_what_was_asked_for(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        fields: dict[str, Any] = {
            "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 7, "presence_penalty": 0.1, "frequency_penalty": -0.1,
            "logit_bias": {"5": -100}, "top_k": 9, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 2,
            "ignore_eos": True, "priority": 3, "stop_token_ids": [77], "max_completion_tokens": 8, "user": "someone",
        }  # fmt: skip
        assert (await built.chat(**fields)).status_code == 200
        message = built.engines[0].submitted[0]
        sampling = message.sampling
        assert message.priority == 3
        assert (sampling.seed, sampling.n, sampling.top_k, sampling.min_tokens, sampling.max_tokens) == (7, 2, 9, 2, 8)
        assert dict(sampling.logit_bias) == {5: -100.0}
        assert list(sampling.stop_token_ids) == [77]
        assert sampling.ignore_eos
        floats = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
        assert floats == pytest.approx((0.5, 0.9, 0.05, 1.1))
        assert (sampling.presence_penalty, sampling.frequency_penalty) == pytest.approx((0.1, -0.1))
        prompt = built.tokenizer.decode(list(memoryview(message.prompt_ids).cast("I")), skip_special_tokens=False)
        assert prompt == "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"

    run(chatml, scenario)


def test_a_stop_string_trims_text_and_ends_the_engine_at_once(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.script = built.says("one two three four five six seven eight", eos=False)
        answer = (await built.chat(stop=["three", "zzz"], max_tokens=100)).json()
        assert answer["choices"][0]["message"]["content"] == "one two "
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] < 20
        built.engines[0].options.step_s = 0.02
        events = await built.events(messages=USER, stop="three", max_tokens=100)
        content = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
        assert content == "one two "
        await until(lambda: len(built.engines[0].aborted) >= 1)
        kept = await built.chat(stop="three", include_stop_str_in_output=True, max_tokens=100)
        assert kept.json()["choices"][0]["message"]["content"] == "one two three"

    run(chatml, scenario)


def test_logprobs_come_with_bytes_and_alternatives(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.script = built.says("hé")
        answer = (await built.chat(logprobs=True, top_logprobs=2, max_tokens=9)).json()
        entries = answer["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "hé"
        assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)
        assert entries[0]["top_logprobs"][0] == {
            "token": "<|im_start|>",
            "logprob": -1.0,
            "bytes": list(b"<|im_start|>"),
        }
        plain = (await built.chat(logprobs=True, max_tokens=9)).json()
        assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
        events = await built.events(messages=USER, logprobs=True, max_tokens=9)
        streamed = [e for ev in events[:-1] for e in (ev["choices"][0].get("logprobs") or {"content": []})["content"]]
        assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]

    run(chatml, scenario)


def test_several_choices_keep_their_index(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        ids = [built.tokenizer.token_to_id(letter) for letter in "abc"]
        built.engines[0].options.script = lambda _p, _s, choice: [ids[choice]] * (choice + 1)
        answer = (await built.chat(n=3)).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["a", "bb", "ccc"]
        assert answer["usage"]["completion_tokens"] == 6
        events = await built.events(messages=USER, n=3, max_tokens=8)
        texts = {0: "", 1: "", 2: ""}
        finished = []
        for event in events[:-1]:
            choice = event["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content", "")
            finished += [choice["index"]] * (choice["finish_reason"] is not None)
        assert texts == {0: "a", 1: "bb", 2: "ccc"}
        assert sorted(finished) == [0, 1, 2]

    run(chatml, scenario)


def test_cached_tokens_are_reported(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        text = "the quick brown fox " * 40
        first = (await built.chat(text)).json()["usage"]
        second = (await built.chat(text)).json()["usage"]
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        blocks = second["prompt_tokens"] // 64
        assert second["prompt_tokens_details"]["cached_tokens"] == blocks * 64
        assert second["prompt_tokens_details"]["cached_tokens_by_tier"]["device"] == blocks * 64

    run(chatml, scenario)


def test_reasoning_and_tool_calls_in_hy3s_format(hy3: Path) -> None:
    text = (
        "<think>look it up</think>Wait.<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n"
        "<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n</tool_calls>"
    )
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]

    async def scenario(built: Rig) -> None:
        built.engines[0].options.script = built.says(text)
        answer = (await built.chat(tools=tools, max_tokens=400)).json()
        message = answer["choices"][0]["message"]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert (message["content"], message["reasoning_content"]) == ("Wait.", "look it up")
        call = message["tool_calls"][0]
        assert (call["type"], call["function"]["name"]) == ("function", "weather")
        assert json.loads(call["function"]["arguments"]) == {"city": "Köln", "days": 3}
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        events = await built.events(messages=USER, tools=tools, max_tokens=400)
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
        assert parts[0]["function"]["name"] == "weather"
        assert all("name" not in part["function"] and "id" not in part for part in parts[1:])
        assert json.loads("".join(part["function"]["arguments"] for part in parts)) == {"city": "Köln", "days": 3}
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "look it up"
        turn = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]},
            {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
        ]
        built.engines[0].options.script = built.says("It rains.")
        second = await built.http.post("/v1/chat/completions", json={"messages": turn, "tools": tools})
        assert second.json()["choices"][0]["message"]["content"] == "It rains."

    run(hy3, scenario)


def test_completions_echo_logprobs_ids_and_several_prompts(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.script = built.says("yes")
        ids = built.tokenizer.encode("hello", add_special_tokens=False).ids

        async def complete(**body: Any) -> dict[str, Any]:
            response = await built.http.post("/v1/completions", json={"max_tokens": 9, **body})
            assert response.status_code == 200, response.text
            return response.json()  # type: ignore[no-any-return]

        assert (await complete(prompt="hello"))["choices"][0]["text"] == "yes"
        assert built.engines[0].submitted[0].sampling.max_tokens == 9
        await complete(prompt="hello", max_tokens=None)
        assert built.engines[0].submitted[1].sampling.max_tokens == 16, "OpenAI's default"
        assert (await complete(prompt=ids, echo=True))["choices"][0]["text"] == "helloyes"
        assert list(memoryview(built.engines[0].submitted[2].prompt_ids).cast("I")) == ids
        several = await complete(prompt=["a", "b"], n=2)
        assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
        assert several["usage"]["completion_tokens"] == 4 * (len(built.tokenizer.encode("yes").ids))
        lists = await complete(prompt=[ids, ids])
        assert len(lists["choices"]) == 2
        scored = (await complete(prompt="hello", echo=True, logprobs=1, max_tokens=0))["choices"][0]
        assert scored["text"] == "hello"
        assert scored["logprobs"]["token_logprobs"][0] is None
        assert len(scored["logprobs"]["tokens"]) == len(ids) + 1
        assert scored["logprobs"]["text_offset"][-1] + len(scored["logprobs"]["tokens"][-1]) == len("hello")
        events = await built.events("/v1/completions", prompt=["a", "b"], max_tokens=9)
        texts = {0: "", 1: ""}
        for event in events[:-1]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == {0: "yes", 1: "yes"}

    run(chatml, scenario)


def test_a_prompts_log_probabilities_come_in_parts(chatml: Path) -> None:
    """A long prompt is computed in chunks, and an engine that dies within it begins anew on another one."""
    prompt = list(range(3, 203))

    async def scenario(built: Rig) -> None:
        for engine in built.engines:
            engine.options.prompt_part, engine.options.prefill_s = 64, 0.2
        body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0, "n": 2}
        running = asyncio.create_task(built.http.post("/v1/completions", json=body))
        await until(lambda: any(answer.prompt_logprobs for answer in built.gateway.generator._answers))
        await next(engine for engine in built.engines if engine.in_flight).stop()
        response = await running
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert choice["logprobs"]["token_logprobs"][1:200] == pytest.approx([-id / 1000 for id in prompt[1:]])

    run(chatml, scenario, engines=2)


def test_a_prompt_whose_log_probabilities_are_asked_for_is_expected_in_no_cache(chatml: Path, tmp_path: Path) -> None:
    """Engines compute all of it: what routing promised itself of caches would look like caches that lie."""
    trace = tmp_path / "trace.jsonl"

    async def scenario(built: Rig) -> None:
        body = {"prompt": list(range(3, 203)), "max_tokens": 1}
        for more in ({}, {}, {"echo": True, "logprobs": 0}):
            assert (await built.http.post("/v1/completions", json={**body, **more})).status_code == 200

    run(chatml, scenario, trace_file=str(trace))
    spans = [json.loads(line) for line in trace.read_text().splitlines()]
    found = [span["attributes"]["route.device_blocks"] for span in spans if span["name"] == "gateway.route"]
    assert found == [0, 3, 0]


CHAT = "/v1/chat/completions"


def test_models_probes_and_metrics(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        models = (await built.http.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["mock"]
        assert (await built.http.get("/v1/models/mock")).json()["max_model_len"] == 8192
        assert (await built.http.get("/healthz")).status_code == 200
        assert (await built.http.get("/readyz")).status_code == 200
        head = await built.http.head("/healthz", timeout=30)
        assert (head.status_code, head.text) == (200, "")
        response = await built.chat()
        assert response.headers["x-request-id"].startswith("req-")
        metrics = (await built.http.get("/metrics")).text
        assert 'katydid_gateway_finished_requests_total{api="chat",outcome="ok"} 1.0' in metrics
        assert 'katydid_gateway_ttft_seconds_bucket{le="4.0"} 1.0' in metrics
        assert 'katydid_gateway_tpot_seconds_bucket{le="0.05"} 1.0' in metrics
        assert "katydid_gateway_in_flight_requests 0.0" in metrics
        await built.engines[0].stop()
        await until(lambda: not built.gateway.fleet.ready)
        assert (await built.http.get("/readyz")).status_code == 503
        assert (await built.http.get("/healthz")).status_code == 200
        refused = await built.chat()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")

    run(chatml, scenario)


def test_the_callers_request_id_is_kept(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        body = {"messages": USER, "max_tokens": 1}
        response = await built.http.post(CHAT, json=body, headers={"x-request-id": "turn-7"})
        assert response.headers["x-request-id"] == "turn-7"
        assert built.engines[0].submitted[0].request_id == "turn-7"
        for path, fields in ((CHAT, body), ("/v1/completions", {"prompt": "x", "max_tokens": 1})):
            named = await built.http.post(path, json={**fields, "request_id": "turn-8"})
            assert named.headers["x-request-id"] == built.engines[0].submitted[-1].request_id == "turn-8"
            assert named.json()["id"].endswith("-turn-8")
        for bad in (
            await built.http.post(CHAT, json=body, headers={"x-request-id": "x" * 200}),
            await built.http.post(CHAT, json={**body, "request_id": "x" * 200}),
        ):
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "request_id")

    run(chatml, scenario)


def test_api_keys(chatml: Path, tmp_path: Path) -> None:
    from hashlib import sha256

    keys = tmp_path / "keys"
    keys.write_text(f"# ours\nteam-a {sha256(b'secret-a').hexdigest()}\n")

    async def scenario(built: Rig) -> None:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret-a"}):
            response = await built.http.post(CHAT, json={"messages": USER}, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await built.http.get("/v1/models")).status_code == 401
        assert (await built.http.get("/healthz")).status_code == 200
        built.http.headers["authorization"] = "Bearer secret-a"
        assert (await built.chat()).status_code == 200
        message = built.engines[0].submitted[0]
        assert len(message.tenant) == 16
        assert len(message.cache_salt) == 32

    run(chatml, scenario, api_keys_file=str(keys), cache_salt_secret="pepper")


def test_an_engines_refusal_reaches_the_caller_with_its_status(chatml: Path) -> None:
    from katydid.engine.v1 import engine_pb2 as pb

    refusal = pb.RequestError(reason="INVALID_REQUEST", message="no such grammar", field="sampling.grammar.regex")
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}

    async def scenario(built: Rig) -> None:
        response = await built.chat()
        assert (response.status_code, response.json()["error"]["message"]) == (400, "no such grammar")
        for fields, param in (({"guided_regex": "a"}, "guided_regex"), (schema, "response_format.json_schema.schema")):
            streamed = await built.chat(stream=True, **fields)
            assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, param)

    run(chatml, scenario, options=MockOptions(refusal=refusal, grammar_kinds=("regex", "json_schema")))


def test_a_request_beyond_the_limit_is_told_to_come_back(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.step_s = 0.05
        running = asyncio.create_task(built.chat(max_tokens=1000))
        await until(lambda: built.engines[0].in_flight == 1)
        second = await built.chat()
        assert (second.status_code, second.json()["error"]["code"]) == (503, "overloaded")
        assert "retry-after" in second.headers
        built.engines[0].options.step_s = 0.0
        assert (await running).status_code == 200

    run(chatml, scenario, max_requests=1)


def test_a_deadline_ends_the_request_and_the_engines_work(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.prefill_s = 30
        response = await built.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        await until(lambda: len(built.engines[0].aborted) == 1)

    run(chatml, scenario, request_timeout_s=1.0)


def test_a_silent_stream_is_kept_alive(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.prefill_s = 0.3
        async with built.http.stream(
            "POST", CHAT, json={"messages": USER, "stream": True, "max_tokens": 2}
        ) as response:
            text = (await response.aread()).decode()
        assert text.startswith(": keep-alive\n\n")
        assert text.endswith("data: [DONE]\n\n")

    run(chatml, scenario, sse_keepalive_s=0.1)
