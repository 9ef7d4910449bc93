"""Several gateway processes on one port: work is spread, figures add up, the dead come back, SIGTERM drains all."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from katydid.gateway.v1 import admin_pb2 as pb
from katydid.gateway.v1.admin_pb2_grpc import AdminServiceStub
from katydid_runtime.errors import NotFoundError
from katydid_runtime.rpc_errors import from_rpc_error

from tests.gateway.processes import Process, mock_engine

pytestmark = pytest.mark.e2e

LONG = 120
BODY = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4}


class Gateways:
    """Two processes before one engine."""

    def __init__(self, process: Process, http: str, admin: str) -> None:
        self.process, self.http, self.admin = process, http, admin

    def chat(self, **fields: object) -> httpx.Response:
        # A connection of its own: another process may get it. No certificates are read for plain text.
        return httpx.post(f"http://{self.http}/v1/chat/completions", json=BODY | fields, timeout=30, verify=False)

    def figure(self, name: str) -> float:
        text = httpx.get(f"http://{self.http}/metrics", timeout=20, verify=False).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.process.pid}/task/{self.process.process.pid}/children")
        return [pid for pid in map(int, path.read_text().split()) if _is_gateway(pid)]


def _is_gateway(pid: int) -> bool:
    try:
        return b"--process-pipe" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def gateways(chatml: Path) -> Iterator[Gateways]:
    engine, address = mock_engine(chatml, "--step-ms", "20")
    process = Process(
        *("-m", "katydid_gateway", "--model", str(chatml), "--engines", address, "--processes", "2"),
        *("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--log-level", "info"),
        *("--admin-listen", "127.0.0.1:0", "--engine-networks", "127.0.0.0/8"),
    )
    try:
        process.expect("all 2 processes are ready")
        http = next(json.loads(line)["http_address"] for line in process.lines if '"http_address"' in line)
        admin = next(json.loads(line)["admin_address"] for line in process.lines if "AdminService of all" in line)
        for _ in range(2):
            if sum("engine connected" in line for line in process.lines) < 2:
                process.expect("engine connected")
        yield Gateways(process, http, admin)
    finally:
        process.stop()
        engine.stop()


def test_requests_are_spread_and_figures_add_up(gateways: Gateways) -> None:
    before = gateways.figure("katydid_gateway_finished_requests_total")
    for _ in range(30):
        assert gateways.chat(max_tokens=1).status_code == 200
    until(lambda: gateways.figure("katydid_gateway_finished_requests_total") == before + 30)
    assert gateways.figure("katydid_gateway_in_flight_requests") == 0
    assert gateways.figure("katydid_gateway_connected_engines") == 1
    assert len(gateways.children()) == 2


def test_who_dies_comes_back_and_who_lives_goes_on(gateways: Gateways) -> None:
    answers: list[httpx.Response | Exception] = []

    def ask() -> None:
        try:
            answers.append(gateways.chat(max_tokens=LONG, ignore_eos=True))
        except httpx.TransportError as error:
            answers.append(error)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    # On a busy machine some may have ended before others begin.
    until(lambda: gateways.figure("katydid_gateway_in_flight_requests") >= 4)
    victim = gateways.children()[0]
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join(30)
    whole = [answer for answer in answers if isinstance(answer, httpx.Response)]
    assert len(answers) == 12
    assert len(whole) >= 1
    assert all(answer.json()["usage"]["completion_tokens"] == LONG for answer in whole)
    until(lambda: len(gateways.children()) == 2 and victim not in gateways.children())
    until(lambda: gateways.figure("katydid_gateway_in_flight_requests") == 0)


def test_an_operator_speaks_to_all_of_them(gateways: Gateways, chatml: Path) -> None:
    """And those that are started later know what was changed."""
    late, address = mock_engine(chatml, "--step-ms", "20")
    with grpc.insecure_channel(gateways.admin) as channel:
        admin = AdminServiceStub(channel)

        def engines() -> dict[str, str]:
            listed = admin.ListEngines(pb.ListEnginesRequest(), timeout=30).engines
            return {each.name: each.excluded for each in listed}

        (first,) = engines()
        for wrong in (address.replace("127.0.0.1", "10.0.0.1"), "nonsense"):
            with pytest.raises(grpc.RpcError) as caught:
                admin.AddEngine(pb.AddEngineRequest(name="late", address=wrong), timeout=30)
            assert from_rpc_error(caught.value).field == "address"
        admin.AddEngine(pb.AddEngineRequest(name="late", address=address), timeout=30)
        until(lambda: engines() == {first: "", "late": ""})
        admin.RemoveEngine(pb.RemoveEngineRequest(name=first), timeout=30)
        assert engines() == {"late": ""}
        with pytest.raises(grpc.RpcError) as caught:
            admin.RemoveEngine(pb.RemoveEngineRequest(name=first), timeout=30)
        assert isinstance(from_rpc_error(caught.value), NotFoundError)
        assert admin.SetLogLevel(pb.SetLogLevelRequest(level="info"), timeout=30).previous == "info"
        assert admin.GetPosture(pb.GetPostureRequest(), timeout=30).findings

        admin.SetDraining(pb.SetDrainingRequest(draining=True), timeout=30)
        assert {gateways.chat().status_code for _ in range(8)} == {503}
        victim = gateways.children()[0]
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(gateways.children()) == 1)
        time.sleep(0.3)  # longer than a process that died waits to be started
        assert len(gateways.children()) == 1
        admin.SetDraining(pb.SetDrainingRequest(), timeout=30)
        until(lambda: len(gateways.children()) == 2)
        until(lambda: engines() == {"late": ""})
        admin.AddEngine(pb.AddEngineRequest(address=first), timeout=30)
        admin.RemoveEngine(pb.RemoveEngineRequest(name="late"), timeout=30)
        until(lambda: engines() == {first: ""})
        assert {gateways.chat().status_code for _ in range(8)} == {200}
    late.stop()


def test_sigterm_drains_all(gateways: Gateways) -> None:
    answers: list[int] = []

    def ask() -> None:
        answers.append(gateways.chat(max_tokens=LONG, ignore_eos=True).json()["usage"]["completion_tokens"])

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    until(lambda: gateways.figure("katydid_gateway_in_flight_requests") == 6)
    children = gateways.children()
    assert gateways.process.stop() == 0
    for thread in threads:
        thread.join(20)
    assert answers == [LONG] * 6
    assert not any(_is_gateway(pid) for pid in children)


def test_a_taken_port_is_named(chatml: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = Process(
            *("-m", "katydid_gateway", "--model", str(chatml), "--engines", "127.0.0.1:1", "--processes", "2"),
            *("--listen", "127.0.0.1:0", "--http-listen", f"127.0.0.1:{port}"),
        )
        assert process.process.wait(30) == 2
        process.stop()
        assert str(port) in process.lines[-1]
