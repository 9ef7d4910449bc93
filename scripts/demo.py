"""`make demo`: three services, a real model, one conversation through the SDK, one question through curl, one trace.

Exit code 0 only when everything happened: sensible answers, a second turn that found its prefix in a cache, and one
trace with spans of gateway and engine that adds up to the time to first token.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from katydid_cli.chat import cost_line
from katydid_cli.fleet.plan import free_ports
from katydid_cli.tracing.spans import read_spans
from katydid_cli.tracing.view import trace
from katydid_client import AsyncKatydid, Completion, Message, UnavailableError

MODEL = "SmolLM2-135M-Instruct"
SYSTEM = (
    "You are a helpful assistant. Answer in one short sentence, in plain English, and stop. Do not repeat a question, "
    "do not apologise, do not add explanations that nobody asked for, do not use lists, headings or any other markup, "
    "and never write more than twenty words. When you do not know an answer, say so in four words."
)
QUESTIONS = ("What is the capital of France?", "And what is the capital of Italy?")
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0


def main() -> int:
    http_port, grpc_port = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="katydid-demo-") as folder:
        trace_file = Path(folder) / "trace.jsonl"
        command = (
            *(sys.executable, "-m", "katydid_cli", "up", "--model", MODEL, "--engines", "1", "--kv-memory-mb", "256"),
            *("--port", str(http_port), "--grpc-port", str(grpc_port), "--trace-file", str(trace_file)),
        )
        say("katydid " + " ".join(command[3:]))
        with subprocess.Popen(command) as fleet:
            try:
                second = asyncio.run(converse(fleet, f"127.0.0.1:{grpc_port}"))
                curl(f"http://127.0.0.1:{http_port}/v1/chat/completions")
                show_trace(trace_file, second.timing.trace_id)
            finally:
                fleet.send_signal(signal.SIGINT)
                code = fleet.wait(STOP_TIMEOUT_S)
    if code != 0:
        raise SystemExit(f"katydid up ended with exit code {code}")
    say("done")
    return 0


async def converse(fleet: subprocess.Popen[bytes], address: str) -> Completion:
    """Two turns through the SDK; returns the second."""
    async with AsyncKatydid(address) as client:
        await ready(fleet, client)
        say("two turns through the SDK")
        conversation = [Message("system", SYSTEM)]
        for question in QUESTIONS:
            print(f"> {question}")
            conversation.append(Message("user", question))
            async with client.chat_stream(conversation, max_tokens=60, temperature=0) as stream:
                async for event in stream:
                    print(event.text, end="", flush=True)
                completion = await stream.get_final()
            print(f"\n  [{cost_line(completion)}]")
            conversation.append(completion.message())
        if not completion.usage.cached_tokens:
            raise SystemExit("the second turn found nothing of the first in any cache")
        return completion


async def ready(fleet: subprocess.Popen[bytes], client: AsyncKatydid) -> None:
    """Wait for the gateway to have an engine."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if fleet.poll() is not None:
            raise SystemExit(f"katydid up ended with exit code {fleet.returncode}")
        try:
            if any(model.engines for model in await client.models()):
                return
        except UnavailableError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit(f"nothing was ready within {START_TIMEOUT_S:g} s")


def curl(url: str) -> None:
    """One question in OpenAI's form, without any SDK."""
    say("the same model through curl")
    body = json.dumps({"messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 40, "temperature": 0})
    command = ("curl", "--silent", "--show-error", "--fail-with-body", url, "-H", "content-type: application/json")
    print(" ".join(command), "-d", f"'{body}'")
    done = subprocess.run((*command, "-d", body), check=True, capture_output=True, text=True, timeout=120)
    answer = json.loads(done.stdout)
    print(answer["choices"][0]["message"]["content"])
    print(f"  [{answer['usage']}]")


def show_trace(trace_file: Path, trace_id: str) -> None:
    """The spans of turn two, once all processes have written theirs."""
    say(f"where turn two spent its time: katydid trace {trace_file.name}")
    deadline = time.monotonic() + 10
    names: set[str] = set()
    while not {"gateway.request", "ttft", "engine.prefill", "engine.decode"} <= names:
        if time.monotonic() > deadline:
            raise SystemExit(f"the trace is incomplete: {sorted(names)}")
        time.sleep(0.2)
        names = {span.name for span in read_spans([trace_file])[0] if span.trace_id == trace_id}
    trace([trace_file], trace_id)


def say(what: str) -> None:
    print(f"\n== {what}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
