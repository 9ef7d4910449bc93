"""A gateway as a real process: OpenAI's own SDK unchanged, kill -9 of an engine, bad starts, SIGTERM."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from tests.gateway.processes import gateway, mock_engine

pytestmark = pytest.mark.e2e

USER = [{"role": "user", "content": "hello there, how are you"}]


@pytest.fixture(scope="module")
def fleet(chatml: Path) -> Iterator[str]:
    """Address of a gateway in front of one engine."""
    engine, address = mock_engine(chatml)
    try:
        with gateway(chatml, [address]) as (_, http, _rpc):
            yield http
    finally:
        engine.stop()


@pytest.fixture
def client(fleet: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{fleet}/v1", api_key="none", max_retries=0, timeout=30) as built:
        yield built


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="mock", messages=USER, max_tokens=12, seed=1)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.usage.prompt_tokens_details is not None
    with client.chat.completions.create(
        model="mock", messages=USER, max_tokens=12, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[0].choices[0].delta.role == "assistant"


def test_the_sdks_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="mock", messages=USER, max_tokens=60, stop="there", logprobs=True, top_logprobs=2
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events
    assert final.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content is not None
    assert len(final.choices[0].logprobs.content[0].top_logprobs) == 2


def test_completions_and_models(client: openai.OpenAI, chatml: Path) -> None:
    answer = client.completions.create(model="mock", prompt=["hello", "there"], max_tokens=4, echo=True, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("hello")
    ids = Tokenizer.from_file(str(chatml / "tokenizer.json")).encode("abc", add_special_tokens=False).ids
    with client.completions.create(model="mock", prompt=ids, max_tokens=4, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream)
    assert [model.id for model in client.models.list()] == ["mock"]
    assert client.models.retrieve("mock").id == "mock"


def test_errors_are_the_sdks_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=USER)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(model="mock", messages=USER, temperature=9)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="mock", messages=USER, extra_body={"temperatur": 1})
    assert client.chat.completions.create(model="mock", messages=USER, extra_body={"top_k": 5}, max_tokens=1)


def test_kill_9_of_an_engine_in_mid_load(chatml: Path) -> None:
    engines = [mock_engine(chatml, "--step-ms", "10", "--prefill-ms", "60") for _ in range(2)]
    outcomes: list[str] = []
    try:
        with gateway(chatml, [address for _, address in engines]) as (_, http, _rpc):

            def ask(number: int) -> None:
                content = f"question {number}"
                with openai.OpenAI(base_url=f"http://{http}/v1", api_key="x", max_retries=0, timeout=20) as sdk:
                    try:
                        with sdk.chat.completions.create(
                            model="mock",
                            messages=[{"role": "user", "content": content}],
                            max_tokens=60,
                            stream=True,
                            stream_options={"include_usage": True},
                        ) as stream:
                            usage = [chunk.usage for chunk in stream][-1]
                        outcomes.append("ok" if usage is not None and usage.completion_tokens == 60 else "cut")
                    except openai.APIError as error:
                        outcomes.append(str(error.code))

            threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
            for place, thread in enumerate(threads):
                thread.start()
                time.sleep(0.03)
                if place == 12:
                    engines[0][0].kill()
            for thread in threads:
                thread.join(30)
            assert len(outcomes) == 24, "nothing hangs"
            assert set(outcomes) == {"ok"}, "those in mid-answer went on elsewhere"
            port = engines[0][1]
            engines.append(mock_engine(chatml, "--listen", port))
            deadline = time.monotonic() + 30
            with httpx.Client(base_url=f"http://{http}", timeout=20) as plain:
                while 'connected_engines{engine="' + port + '"} 1.0' not in plain.get("/metrics").text:
                    assert time.monotonic() < deadline, "the restarted engine rejoins"
                    time.sleep(0.05)
                assert "katydid_gateway_in_flight_requests 0.0" in plain.get("/metrics").text
    finally:
        for process, _ in engines:
            process.stop()


def refused(*options: str) -> str:
    """The one line a gateway ends with when it cannot start."""
    done = subprocess.run(
        [sys.executable, "-m", "katydid_gateway", *options], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("gateway: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_bad_starts_end_with_code_2_and_one_line(chatml: Path, tmp_path: Path) -> None:
    model, engines = ("--model", str(chatml)), ("--engines", "127.0.0.1:1")
    assert "--model" in refused(*engines)
    assert "tokenizer.json" in refused("--model", str(tmp_path), *engines)
    assert "NAME SHA256" in refused(*model, *engines, "--api-keys-file", str(write(tmp_path / "keys", "a b c")))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert address in refused(*model, *engines, "--http-listen", address)
        assert address in refused(*model, *engines, "--http-listen", "127.0.0.1:0", "--listen", address)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_sigterm_finishes_what_runs(chatml: Path) -> None:
    engine, address = mock_engine(chatml, "--step-ms", "20")
    answers: list[httpx.Response] = []
    try:
        probes = f"127.0.0.1:{_free_port()}"
        with gateway(chatml, [address], "--probe-listen", probes) as (process, http, _rpc):
            body = {"messages": USER, "max_tokens": 150}
            assert httpx.get(f"http://{probes}/readyz").status_code == 200
            assert httpx.get(f"http://{probes}/v1/models").status_code == 404

            def ask() -> None:
                answers.append(httpx.post(f"http://{http}/v1/chat/completions", json=body, timeout=20))

            thread = threading.Thread(target=ask)
            thread.start()
            with httpx.Client(base_url=f"http://{http}", timeout=20) as plain:
                while "katydid_gateway_in_flight_requests 1.0" not in plain.get("/metrics").text:
                    time.sleep(0.01)
            process.process.send_signal(signal.SIGTERM)
            while httpx.get(f"http://{probes}/readyz").status_code == 200:
                time.sleep(0.01)
            assert httpx.get(f"http://{probes}/healthz").status_code == 200
            thread.join(20)
            assert process.process.wait(20) == 0
        assert answers[0].json()["usage"]["completion_tokens"] == 150
        assert not any('"level": "error"' in line for line in process.lines)
    finally:
        engine.stop()


def test_logs_are_json_with_ids_and_without_prompts(chatml: Path, tmp_path: Path) -> None:
    import json

    engine, address = mock_engine(chatml)
    try:
        with gateway(chatml, [address], "--trace-file", str(tmp_path / "trace")) as (process, http, _rpc):
            headers = {"x-request-id": "turn-1"}
            httpx.post(
                f"http://{http}/v1/chat/completions", json={"messages": USER, "max_tokens": 3}, headers=headers
            ).raise_for_status()
            line = json.loads(process.expect("request finished"))
        assert line["request_id"] == "turn-1"
        assert len(line["trace_id"]) == 32
        assert (line["outcome"], line["output_tokens"]) == ("ok", 3)
        assert not any("how are you" in text for text in process.lines)
    finally:
        engine.stop()
