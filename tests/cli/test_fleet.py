"""`katydid up` with small stand-in services: start in order, progress, restart, drain, and what is left behind."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from katydid_cli.fleet.child import Child, ChildExitError
from katydid_cli.fleet.plan import FleetOptions, ServicePlan, check_free, free_ports, plan_fleet
from katydid_cli.fleet.supervisor import Supervisor
from katydid_cli.fleet.up import check_options, connected_engines
from katydid_runtime.errors import AddressInUseError, SettingsError, UnavailableError

STAND_IN = '''
"""A service that is ready at once, or what its behaviour says."""
import asyncio, os, signal, sys
from katydid_runtime.process import run_service
from katydid_runtime.server import RpcServer
from katydid_runtime.settings import ServiceSettings
from pydantic_settings import SettingsConfigDict

class StandInSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="KATYDID_STANDIN_", extra="ignore")
    behaviour: str = "ready"

async def serve(settings, telemetry):
    async with RpcServer(settings.listen, services=[], drain_timeout_s=1) as server:
        if settings.behaviour == "crash":
            print("the weights are gone", file=sys.stderr)
            os._exit(3)
        await server.start()
        if settings.behaviour == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            await server.set_serving(True)
            await asyncio.sleep(600)
        if settings.behaviour == "slow":
            await asyncio.sleep(600)
        await server.run_until_signal()

run_service("standin", StandInSettings, serve)
'''


@pytest.fixture(autouse=True)
def _stand_in(tmp_path, monkeypatch):
    (tmp_path / "standin.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def plan(name: str, *, stage: int = 0, behaviour: str = "ready", port: int | None = None) -> ServicePlan:
    address = f"127.0.0.1:{port if port is not None else free_ports(1)[0]}"
    return ServicePlan(name, "standin", ("--listen", address, "--behaviour", behaviour), address, stage)


class Recorder:
    def __init__(self) -> None:
        self.states: list[tuple[str, str]] = []
        self.lines: list[tuple[str, str]] = []

    def state(self, name: str, state: str) -> None:
        self.states.append((name, state))

    def line(self, name: str, line: str) -> None:
        self.lines.append((name, line))


def supervisor(*plans: ServicePlan, start_timeout_s: float = 20) -> tuple[Supervisor, Recorder]:
    recorder = Recorder()
    return Supervisor(plans, recorder, drain_timeout_s=0.5, start_timeout_s=start_timeout_s), recorder


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # A process whose parent was killed is reaped by init, not by us.
    return " Z " in Path(f"/proc/{pid}/stat").read_text() if Path(f"/proc/{pid}/stat").exists() else True


def test_stages_start_in_order_and_stop_in_reverse():
    async def scenario():
        fleet, recorder = supervisor(plan("kvcache"), plan("engine-0", stage=1), plan("gateway", stage=1))
        await fleet.start()
        pids = fleet.pids
        await fleet.stop()
        states = recorder.states
        assert states.index(("kvcache", "ready")) < states.index(("engine-0", "starting"))
        stopped = [name for name, state in states if state == "stopped"]
        assert stopped == ["gateway", "engine-0", "kvcache"]
        assert all(gone(pid) for pid in pids.values())
        assert any('"message": "stopped"' in line for _, line in recorder.lines)

    asyncio.run(scenario())


def test_a_child_that_cannot_start_ends_the_fleet_with_its_last_words():
    async def scenario():
        fleet, _ = supervisor(plan("kvcache"), plan("engine-0", behaviour="crash"))
        with pytest.raises(ChildExitError, match="engine-0 ended with exit code 3: the weights are gone") as caught:
            await fleet.start()
        assert caught.value.code == 3
        await fleet.stop()

    asyncio.run(scenario())


def test_bad_settings_come_back_as_exit_code_2():
    async def scenario():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            fleet, _ = supervisor(plan("kvcache", port=taken.getsockname()[1]))
            with pytest.raises(ChildExitError, match=r"cannot listen on 127\.0\.0\.1") as caught:
                await fleet.start()
            assert caught.value.code == 2
            await fleet.stop()

    asyncio.run(scenario())


def test_a_child_that_never_gets_ready_is_given_up():
    async def scenario():
        fleet, _ = supervisor(plan("engine-0", behaviour="slow"), start_timeout_s=1.0)
        with pytest.raises(UnavailableError, match="engine-0 was not ready within 1 s"):
            await fleet.start()
        (pid,) = fleet.pids.values()
        await fleet.stop()
        assert gone(pid)

    asyncio.run(scenario())


def test_a_killed_child_is_started_again():
    async def scenario():
        fleet, recorder = supervisor(plan("engine-0"))
        await fleet.start()
        watching = asyncio.create_task(fleet.run())
        first = fleet.pids["engine-0"]
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(20):
            while recorder.states.count(("engine-0", "ready")) < 2:
                await asyncio.sleep(0.05)
        assert fleet.pids["engine-0"] != first
        assert ("engine-0", "engine-0 was killed by SIGKILL") in recorder.lines
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await fleet.stop()

    asyncio.run(scenario())


def test_a_child_that_keeps_dying_ends_the_fleet(monkeypatch):
    monkeypatch.setattr("katydid_cli.fleet.supervisor._RESTART_AFTER_S", 0.0)

    async def scenario():
        fleet, recorder = supervisor(plan("engine-0"))
        await fleet.start()
        os.environ["KATYDID_STANDIN_DRAIN_TIMEOUT_S"] = "wrong"
        try:
            watching = asyncio.create_task(fleet.run())
            os.kill(fleet.pids["engine-0"], signal.SIGKILL)
            with pytest.raises(ChildExitError):
                await asyncio.wait_for(watching, 30)
        finally:
            del os.environ["KATYDID_STANDIN_DRAIN_TIMEOUT_S"]
        assert recorder.states.count(("engine-0", "restarting")) == 3
        await fleet.stop()

    asyncio.run(scenario())


def test_a_child_that_does_not_listen_is_killed():
    async def scenario():
        recorder = Recorder()
        child = await Child.start(plan("engine-0", behaviour="deaf"), recorder.line)
        await asyncio.wait_for(child.wait_serving(), 20)
        await child.stop(0.3)
        assert gone(child.pid)
        assert ("engine-0", "did not stop within 0.3 s; killed") in recorder.lines

    asyncio.run(scenario())


def test_a_killed_parent_takes_its_children_with_it(tmp_path):
    code = """
import asyncio, sys
from katydid_cli.fleet.child import Child
from katydid_cli.fleet.plan import ServicePlan

async def main():
    address = sys.argv[1]
    child = await Child.start(ServicePlan("a", "standin", ("--listen", address), address, 0), lambda *_: None)
    await child.wait_serving()
    print(child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with subprocess.Popen([sys.executable, "-c", code, address], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pid)


def test_plan_names_addresses_and_options(tmp_path):
    options = FleetOptions(
        model=tmp_path,
        model_name="m",
        engines=2,
        device="cpu",
        port=8000,
        grpc_port=8001,
        kv_memory_mb=64,
        kv_disk_dir=tmp_path / "kv",
        trace_file=tmp_path / "t.jsonl",
        engine_arguments=("--dtype=float32",),
        kvcache_arguments=("--policy-file=p.yaml",),
    )
    plans = {p.name: p for p in plan_fleet(options, [1, 2, 3])}
    assert list(plans) == ["kvcache", "engine-0", "engine-1", "gateway"]
    assert (plans["kvcache"].stage, plans["engine-0"].stage, plans["gateway"].stage) == (0, 1, 1)
    assert plans["kvcache"].address.startswith("unix:/")
    assert all(plans["kvcache"].address in plan.arguments for plan in plans.values())
    words = " ".join(plans["gateway"].arguments)
    assert "--engines engine-0=127.0.0.1:2,engine-1=127.0.0.1:3" in words
    assert "--http-listen 127.0.0.1:8000" in words
    assert f"--memory-bytes {64 * 2**20}" in " ".join(plans["kvcache"].arguments)
    assert "--disk-bytes" not in plans["kvcache"].arguments, "what was not asked for is the policy file's to say"
    assert plans["kvcache"].arguments[-1] == "--policy-file=p.yaml"
    assert plans["engine-1"].arguments[-1] == "--dtype=float32"
    assert all(str(tmp_path / "t.jsonl") in p.arguments for p in plans.values())


@pytest.mark.parametrize(
    ("module", "settings_class"),
    [
        ("katydid_kvcache", "KvCacheSettings"),
        ("katydid_engine", "EngineSettings"),
        ("katydid_gateway", "GatewaySettings"),
    ],
)
def test_the_services_accept_what_the_plan_says(module, settings_class, tmp_path):
    """An option renamed there must be renamed here."""
    settings = getattr(importlib.import_module(f"{module}.settings"), settings_class)
    options = FleetOptions(tmp_path, "m", engines=2, kv_disk_dir=tmp_path, trace_file=tmp_path / "t", kv_memory_mb=64)
    planned = [p for p in plan_fleet(options, [1, 2, 3]) if p.module == module]
    assert planned
    for service in planned:
        assert settings.load(service.arguments).listen == service.address


def test_connected_engines_are_counted_in_the_metrics():
    text = """# TYPE katydid_gateway_connected_engines gauge
katydid_gateway_connected_engines{engine="engine-0"} 1.0
katydid_gateway_connected_engines{engine="engine-1"} 0.0
katydid_gateway_connected_engines{engine="engine-2"} 1.0
katydid_gateway_queued_requests{class="normal"} 3.0
"""
    assert connected_engines(text) == 2
    assert connected_engines("") == 0


def test_free_ports_are_distinct_and_free():
    ports = free_ports(8)
    assert len(set(ports)) == 8
    for port in ports:
        check_free("--port", port)


def test_options_that_cannot_work_are_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            AddressInUseError, match=f"port {port} cannot be used: Address already in use; --port chooses"
        ):
            check_options(FleetOptions(tmp_path, "m", port=port))
    a, b = free_ports(2)
    with pytest.raises(SettingsError, match="at least 1"):
        check_options(FleetOptions(tmp_path, "m", engines=0, port=a, grpc_port=b))
    with pytest.raises(SettingsError, match="are both"):
        check_options(FleetOptions(tmp_path, "m", port=a, grpc_port=a))
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"--kv-disk-dir: cannot write to .*file"):
        check_options(FleetOptions(tmp_path, "m", port=a, grpc_port=b, kv_disk_dir=tmp_path / "file"))
    check_options(FleetOptions(tmp_path, "m", port=a, grpc_port=b, kv_disk_dir=tmp_path / "new"))
