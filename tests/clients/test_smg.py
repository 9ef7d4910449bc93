"""Shepherd Model Gateway, unchanged, in front of our engine: it speaks vllm.grpc.engine.VllmEngine to it.

`make clients` runs it; the gateway is installed into a temporary folder."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.engine_process import Service, engine

pytestmark = pytest.mark.clients

MODEL = Path(__file__).resolve().parents[2] / "models" / "hy3-tiny"
ASKED = {
    "model": "hy3-tiny",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 30,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with engine(MODEL, tmp_path_factory.mktemp("engine"), "--vllm-protocol") as running:
        assert running.address
        yield running


@pytest.fixture(scope="module")
def smg(served: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("smg")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    subprocess.run([str(folder / "bin/pip"), "install", "-q", "smg==1.13.0"], check=True, timeout=600)
    port, figures = free_port(), free_port()
    command = [str(folder / "bin/smg"), "launch", "--port", str(port), "--prometheus-port", str(figures)]
    command += ["--model-path", str(MODEL), "--worker-urls", f"grpc://{served.address}"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([*command, "--host", "127.0.0.1"], stdout=quiet, stderr=quiet)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_model(url)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def wait_for_model(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if "hy3-tiny" in httpx.get(f"{url}/v1/models", timeout=2).text:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError("SMG has not found the engine's model")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def streamed(url: str, **fields: Any) -> list[Any]:
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=ASKED | {"stream": True} | fields, timeout=30) as got:
        assert got.status_code == 200
        lines = [line.removeprefix("data: ") for line in got.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_an_answer_whole_and_streamed(smg: str) -> None:
    whole = httpx.post(f"{smg}/v1/chat/completions", json=ASKED, timeout=30).json()
    choice = whole["choices"][0]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    events = streamed(smg)
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    assert text == choice["message"]["content"]


def test_a_stop_string_is_found_by_the_gateway(smg: str) -> None:
    stopped = httpx.post(f"{smg}/v1/chat/completions", json=ASKED | {"stop": ["Paris"]}, timeout=30).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert "Paris" not in stopped["choices"][0]["message"]["content"]


def test_a_second_turn_finds_its_prefix(smg: str) -> None:
    talk = [{"role": "user", "content": "Tell me about Paris. " * 30}]
    fields = {"messages": talk, "max_tokens": 4}
    httpx.post(f"{smg}/v1/chat/completions", json=ASKED | fields, timeout=30)
    again = httpx.post(f"{smg}/v1/chat/completions", json=ASKED | fields, timeout=30).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
