"""`katydid up` as a user runs it: one command, a small model, real processes, Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from katydid_cli.fleet.plan import free_ports, free_run
from katydid_cli.tracing.attribution import attribute
from katydid_cli.tracing.spans import Span, choose_trace, read_spans
from katydid_client import AsyncKatydid, Completion, KatydidError

from tests.observability.expressions import ELSEWHERE, metrics_named, metrics_shown
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).resolve().parents[2] / "sdk" / "examples"
START_TIMEOUT_S = 90
_SERVED = "kvcache.service.lookup"
TEXT = "a prefix of more than two blocks of sixty-four bytes, so that there is something to find again: " * 2


@dataclass(frozen=True)
class Fleet:
    process: subprocess.Popen[str]
    http_address: str
    address: str
    trace_file: Path
    log: Path
    metrics_port: int

    def children(self) -> dict[int, str]:
        """Process ids of the services, with their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if self.trace_file.name.encode() in b" ".join(words):
                    found[int(entry.name)] = b" ".join(words).decode()
        found.pop(self.process.pid, None)
        return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("up")
    model = write_tiny_model(folder / "tiny")
    http_port, grpc_port = free_ports(2)
    metrics_port = free_run(3)
    trace_file = folder / f"trace-{grpc_port}.jsonl"
    log = folder / "log"
    command = (
        *(sys.executable, "-m", "katydid_cli", "up", "--model", str(model), "--engines", "2", "--device", "cpu"),
        *("--port", str(http_port), "--grpc-port", str(grpc_port), "--trace-file", str(trace_file)),
        *("--kv-memory-mb", "128", "--drain-timeout-s", "5", "--log-level", "info"),
        *("--engine-option=--kv-memory-mib=64", "--metrics-port", str(metrics_port)),
    )
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, text=True) as process:
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while "is up on 2 engines" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield Fleet(process, f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", trace_file, log, metrics_port)
        finally:
            process.terminate()
            process.wait(30)


def ask(fleet: Fleet, text: str, **arguments) -> Completion:
    async def body() -> Completion:
        async with AsyncKatydid(fleet.address, timeout=30) as client:
            return await client.generate(text, **({"max_tokens": 8, "temperature": 0, "ignore_eos": True} | arguments))

    return asyncio.run(body())


def spans_of(fleet: Fleet, trace_id: str, names: set[str]) -> list[Span]:
    """The trace's spans, once `names` are among them: processes write within 0.2 s."""
    deadline = time.monotonic() + 10
    spans: list[Span] = []
    while time.monotonic() < deadline:
        spans = [span for span in read_spans([fleet.trace_file])[0] if span.trace_id == trace_id]
        if names <= {span.name for span in spans}:
            return choose_trace(spans, trace_id)
        time.sleep(0.1)
    raise AssertionError(f"{names - {span.name for span in spans}} missing of trace {trace_id}")


def test_every_metric_of_dashboards_and_alerts_is_in_a_live_scrape(fleet):
    ask(fleet, "figures: " + TEXT)
    ports = range(fleet.metrics_port, fleet.metrics_port + 3)
    addresses = [fleet.http_address, *(f"127.0.0.1:{port}" for port in ports)]
    texts = [httpx.get(f"http://{address}/metrics", timeout=10).text for address in addresses]
    assert metrics_named() <= metrics_shown(texts) | ELSEWHERE


def test_one_request_is_one_trace_over_three_services(fleet):
    completion = ask(fleet, TEXT)
    assert completion.usage.completion_tokens == 8
    spans = spans_of(fleet, completion.timing.trace_id, {"gateway.request", "ttft", "tpot", "kvcache.lookup", _SERVED})
    assert {span.service for span in spans} == {"gateway", "engine", "kvcache"}
    attribution = attribute(spans)
    assert sum(attribution.phases_s.values()) == pytest.approx(attribution.ttft_s)
    assert {"engine.prefill"} <= {span.name for span in attribution.waited_for}


def test_the_same_prompt_again_is_found_in_a_cache(fleet):
    first = ask(fleet, TEXT + "again")
    second = ask(fleet, TEXT + "again")
    assert second.usage.cached_tokens >= 128
    assert second.choices[0].token_ids == first.choices[0].token_ids


def test_openai_http(fleet):
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    answer = httpx.post(f"http://{fleet.http_address}/v1/chat/completions", json=body, timeout=30).json()
    assert answer["usage"]["completion_tokens"] <= 4
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_chat_in_the_terminal(fleet):
    command = (sys.executable, "-m", "katydid_cli", "chat", "--address", fleet.address, "--max-tokens", "4")
    done = subprocess.run(command, input="Hi\nAnd again\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("TTFT") == 2
    assert len(re.findall(r"\d+ prompt\s+tokens", done.stdout)) == 2


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_of_the_client_run(fleet, example):
    done = subprocess.run((sys.executable, str(example), fleet.address), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_bench_reports_what_it_sent(fleet, tmp_path):
    output = tmp_path / "report.json"
    command = (
        *(sys.executable, "-m", "katydid_cli", "bench", "--address", fleet.address, "--requests", "12", "--rate", "20"),
        *("--input-tokens", "200", "--shared-tokens", "128", "--output-tokens", "6", "--output", str(output)),
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "12 of 12 requests" in done.stdout
    assert "goodput" in done.stdout
    assert '"output_tokens": 72' in output.read_text()


def test_a_killed_engine_rejoins(fleet):
    (pid,) = [
        pid for pid, words in fleet.children().items() if "katydid_engine --" in words and "engine-1" not in words
    ][:1]
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (
            fleet.log.read_text().count("was killed by SIGKILL")
            and _engines(fleet) == 2
            and pid not in fleet.children()
        ):
            break
        time.sleep(0.2)
    assert _engines(fleet) == 2, fleet.log.read_text()
    assert ask(fleet, TEXT).usage.completion_tokens == 8


def _engines(fleet: Fleet) -> int:
    async def body() -> int:
        async with AsyncKatydid(fleet.address, timeout=5) as client:
            return max(model.engines for model in await client.models())

    try:
        return asyncio.run(body())
    except KatydidError:
        return 0


def test_ctrl_c_leaves_nothing_behind(fleet):
    """The last test of the module: it ends the fleet."""
    before = fleet.children()
    assert len(before) >= 4
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.process.wait(30) == 0, fleet.log.read_text()
    assert fleet.children() == {}
    stopped = re.findall(r"^ *(\S+) │ stopped$", fleet.log.read_text(), re.M)
    assert stopped[0] == "gateway"
    assert stopped[-1] == "kvcache"
    assert set(stopped[1:-1]) == {"engine-0", "engine-1"}


def test_a_reader_that_leaves_stops_the_fleet(tmp_path):
    http, grpc = free_ports(2)
    words = ("up", "--model", str(write_tiny_model(tmp_path / "tiny")), "--port", str(http), "--grpc-port", str(grpc))
    command = (sys.executable, "-m", "katydid_cli", *words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as fleet:
        fleet.stdout.readline()
        fleet.stdout.close()
        assert fleet.wait(60) == 0
        assert fleet.stderr.read() == ""


def test_a_port_in_use_is_one_line_and_exit_code_2(tmp_path):
    model = write_tiny_model(tmp_path / "tiny")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            (sys.executable, "-m", "katydid_cli", "up", "--model", str(model), "--port", str(port)),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert done.stderr == f"katydid: port {port} cannot be used: Address already in use; --port chooses another\n"
    assert done.stdout == ""


def test_a_broken_model_is_one_line_and_exit_code_2(tmp_path):
    model = write_tiny_model(tmp_path / "tiny")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    a, b = free_ports(2)
    done = subprocess.run(
        (sys.executable, "-m", "katydid_cli", "up", "--model", str(model), "--port", str(a), "--grpc-port", str(b)),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    line = done.stderr
    assert line.startswith("katydid: engine-0 ended with exit code 2")
    assert "model.safetensors" in line
