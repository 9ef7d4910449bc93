"""The main job on this machine, start to end: three services, a real model, a two-turn chat, curl, and one trace."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from katydid_cli.fleet.plan import free_ports
from katydid_client import Completion, Katydid

MODEL = "SmolLM2-135M-Instruct"
BIN = Path(sys.executable).parent
SYSTEM = (
    "You are a patient geography teacher. You answer in one or two short, complete sentences, in plain English, "
    "without lists and without headings. You name places exactly, you never invent facts, and when you are asked "
    "about a place that you named before you stay with that place. Your pupils are twelve years old and curious; "
    "they like to hear one surprising detail, but only when you are sure that it is true."
)
QUESTIONS = ("What is the capital of France?", "Which river flows through that city?")


def show_start(fleet: subprocess.Popen[str]) -> None:
    """Shows what `katydid up` says until its last line about where it listens: then it has met every engine.

    Raises:
        SystemExit: the fleet ended before.
    """
    assert fleet.stdout is not None
    for line in fleet.stdout:
        print(line, end="", flush=True)
        if line.startswith("  try "):
            return
    raise SystemExit(f"katydid up ended with {fleet.wait()}")


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def show(answer: Completion) -> None:
    timing, usage = answer.timing, answer.usage
    print(f"  {answer.text.strip()}")
    print(
        f"  TTFT {timing.ttft_s * 1e3:.0f} ms, TPOT {timing.tpot_s * 1e3:.0f} ms, "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached, on {timing.engine}",
        flush=True,
    )


def chat(grpc_port: int) -> None:
    """Two turns through the SDK; the second finds the first one's blocks in the cache."""
    messages = [{"role": "system", "content": SYSTEM}]
    with Katydid(f"127.0.0.1:{grpc_port}") as client:
        for turn, question in enumerate(QUESTIONS, 1):
            heading(f"SDK, turn {turn}: {question}")
            messages.append({"role": "user", "content": question})
            answer = client.chat(messages, max_tokens=48, temperature=0)
            messages.append({"role": "assistant", "content": answer.text})
            show(answer)


def curl(http_port: int) -> None:
    url = f"http://127.0.0.1:{http_port}/v1/chat/completions"
    question = "Name three primary colours."
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 48, "temperature": 0}
    command = ["curl", "-s", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    heading(f"curl: {question}")
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    print(" ", answer["choices"][0]["message"]["content"].strip())
    print(f"  usage {json.dumps(answer['usage'])}", flush=True)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    http_port, grpc_port = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="katydid-demo-") as folder:
        trace = Path(folder) / "trace.jsonl"
        up = ["up", "--model", MODEL, "--engine-option=--dtype=bfloat16"]
        heading(" ".join(["katydid", *up]))
        command = [str(BIN / "katydid"), *up, "--trace-file", str(trace)]
        command += ["--port", str(http_port), "--grpc-port", str(grpc_port), "--kv-disk-dir", str(Path(folder) / "kv")]
        fleet = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            show_start(fleet)
            chat(grpc_port)
            curl(http_port)
        finally:
            fleet.send_signal(signal.SIGINT)
            heading("Ctrl-C")
            print(fleet.communicate(timeout=60)[0], end="", flush=True)
        heading("katydid trace: the second turn, across three services")
        second = _trace_of_turn_two(trace)
        subprocess.run([str(BIN / "katydid"), "trace", str(trace), "--id", second], check=True)
    return fleet.returncode


def _trace_of_turn_two(trace: Path) -> str:
    """Trace id of the second request that reached the gateway."""
    spans = [json.loads(line) for line in trace.read_text().splitlines()]
    requests = sorted((s for s in spans if s["name"] == "gateway.request"), key=lambda s: s["start_ns"])
    return str(requests[1]["trace_id"])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
