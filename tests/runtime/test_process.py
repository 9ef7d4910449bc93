"""A whole process: exit codes, the READY line, and what importing the runtime must not drag in."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

SERVICE = """
import asyncio
from katydid_runtime.process import run_service
from katydid_runtime.server import RpcServer
from katydid_runtime.settings import ServiceSettings
from pydantic_settings import SettingsConfigDict

class SampleSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="KATYDID_SAMPLE_")

async def serve(settings, telemetry):
    async with RpcServer(settings.listen, services=[], drain_timeout_s=settings.drain_timeout_s) as server:
        with telemetry.start("start"):
            await server.start()
        if settings.log_level == "warning":
            try:
                print("loading", flush=True)
                await asyncio.sleep(60)
            finally:
                print("cleaned up", flush=True)
        await server.run_until_signal()

run_service("sample", SampleSettings, serve)
"""


def start(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVICE, *argv], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ready_then_stopped_by_a_signal(number, tmp_path):
    trace = tmp_path / "trace.jsonl"
    with start("--trace-file", str(trace)) as process:
        messages = []
        for line in process.stderr:
            record = json.loads(line)
            messages.append(record["message"])
            if record["message"].startswith("READY "):
                assert record["address"] == record["message"].removeprefix("READY ")
                process.send_signal(number)
        assert process.wait(10) == 0
        assert process.stdout.read() == ""
    assert messages[0] == "settings"
    assert messages[-1] == "stopped"
    assert [json.loads(line)["name"] for line in trace.read_text().splitlines()] == ["start"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_loading_still_cleans_up(number, code):
    with start("--log-level", "warning") as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(number)
        output, errors = process.communicate(timeout=10)
    assert (process.returncode, output, errors) == (code, "cleaned up\n", "")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--drain-timeout-s", "-1"], "sample: --drain-timeout-s=-1: Input should be greater than or equal to 0"),
        (["--listen", "nowhere"], "sample: nowhere is no address"),
        (["--trace-file", "/no/such/folder/t"], "sample: cannot write trace file /no/such/folder/t: No such file"),
    ],
)
def test_a_bad_configuration_is_exit_code_2_and_one_line(argv, complaint):
    with start(*argv) as process:
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    (line,) = [line for line in errors.splitlines() if not line.startswith("{")]
    assert line.startswith(complaint)


@pytest.mark.parametrize("module", ["errors", "block_hash", "trace_context", "log", "telemetry", "metrics"])
def test_light_modules_need_no_third_party_package(module):
    code = f"""
import sys
for name in ("grpc", "google.protobuf", "opentelemetry", "pydantic", "prometheus_client", "torch", "numpy"):
    sys.modules[name] = None
import katydid_runtime.{module}
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_runtime_never_imports_torch():
    code = """
import pkgutil, sys, importlib, katydid_runtime
sys.modules["torch"] = None
for module in pkgutil.iter_modules(katydid_runtime.__path__):
    importlib.import_module("katydid_runtime." + module.name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
