"""What an engine process does when something ends, hangs, or was wrong from the start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from katydid.engine.v1 import engine_pb2 as pb

from tests.engine.engine_process import engine, session
from tests.engine.test_engine_process import prompt, run
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


async def wait_for_health(address: str, status: int) -> float:
    """Seconds until the health service says ``status``."""
    started = time.monotonic()
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(20):
        stub = health_pb2_grpc.HealthStub(channel)
        while (await stub.Check(health_pb2.HealthCheckRequest())).status != status:
            await asyncio.sleep(0.02)
    return time.monotonic() - started


def test_a_dead_worker_ends_requests_with_a_typed_error(model: Path, tmp_path: Path) -> None:
    """At once: long before the engine would call it silent."""
    options = ("--fault-delays", "prefill:1500,decode:5", "--stall-timeout-s", "60")
    with engine(model, tmp_path, *options) as service:

        async def scenario() -> None:
            async with session(service.address) as client:
                delivered = client.submit(prompt(20), max_tokens=3000, ignore_eos=True)
                while not delivered.output:
                    await asyncio.sleep(0.01)
                fresh = client.submit(prompt(600), max_tokens=5)
                await asyncio.sleep(0.1)
                (worker,) = service.children()
                os.kill(worker, signal.SIGKILL)
                async with asyncio.timeout(20):
                    await asyncio.gather(delivered.done.wait(), fresh.done.wait())
                assert delivered.end.error.reason == "ENGINE_LOST"
                assert not delivered.end.error.retryable
                assert delivered.end.output_tokens == len(delivered.output) > 0
                assert fresh.end.error.reason == "UNAVAILABLE"
                assert fresh.end.error.retryable

        run(scenario())
        assert service.process.wait(10) not in (0, 2)


def test_health_follows_the_step_loop_and_a_stop_lets_work_finish(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path, "--stall-timeout-s", "2", "--fault-delays", "decode:5") as service:

        async def scenario() -> None:
            await wait_for_health(service.address, health_pb2.HealthCheckResponse.SERVING)
            (worker,) = service.children()
            os.kill(worker, signal.SIGSTOP)
            assert await wait_for_health(service.address, health_pb2.HealthCheckResponse.NOT_SERVING) > 0.3
            os.kill(worker, signal.SIGCONT)
            await wait_for_health(service.address, health_pb2.HealthCheckResponse.SERVING)
            async with session(service.address) as client:
                answer = client.submit(prompt(20), max_tokens=400, ignore_eos=True)
                while not answer.output:
                    await asyncio.sleep(0.01)
                service.process.send_signal(signal.SIGTERM)
                while not client.frames[-1].draining:
                    await asyncio.sleep(0.01)
                refused = await client.generate(prompt(5))
                assert (refused.end.error.reason, refused.end.error.retryable) == ("DRAINING", True)
                await asyncio.wait_for(answer.done.wait(), 20)
                assert len(answer.output) == 400

        run(scenario())
        assert service.process.wait(10) == 0


def test_a_session_that_was_given_up_takes_no_places(model: Path, tmp_path: Path) -> None:
    """A gateway that was told nothing for too long comes back with a new session, and names the old one."""
    options = ("--reattach-window-s", "600", "--fault-delays", "decode:5")
    with engine(model, tmp_path, *options, "--http-listen", "127.0.0.1:0") as service:

        async def scenario() -> None:
            async with session(service.address) as client, session(service.address) as other:
                lost = [client.submit(prompt(20, number), max_tokens=3000, ignore_eos=True) for number in range(3)]
                kept = other.submit(prompt(20, 9), max_tokens=400, ignore_eos=True)
                while not (kept.output and all(answer.output for answer in lost)):
                    await asyncio.sleep(0.01)
                old = client.opened.session_id
                await client.break_off()
                client.frames.clear()
                await client.open(abandoned=old)
                assert (await client.generate(prompt(5), max_tokens=3)).end.reason == pb.FINISH_REASON_LENGTH
                await asyncio.wait_for(kept.done.wait(), 60)
                assert len(kept.output) == 400, "another gateway's"
                while (load := other.frames[-1].loads[0]).running or load.free_pages != load.total_pages:
                    await asyncio.sleep(0.01)

        run(scenario())
        assert service.metrics()['katydid_engine_finished_choices_total{reason="abort"}'] == 3


def test_drain_aborts_after_its_timeout_and_no_worker_outlives_its_face(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path, "--fault-delays", "decode:20") as service:

        async def scenario() -> None:
            async with session(service.address) as client:
                answer = client.submit(prompt(20), max_tokens=3000, ignore_eos=True)
                request = pb.DrainRequest()
                request.timeout.FromMilliseconds(300)
                assert (await client.stub.Drain(request)).aborted == 1
                await asyncio.wait_for(answer.done.wait(), 20)
                assert answer.end.reason == pb.FINISH_REASON_ABORT
                await wait_for_health(service.address, health_pb2.HealthCheckResponse.NOT_SERVING)

        run(scenario())
        (worker,) = service.children()
        service.kill()
        given_up = time.monotonic() + 20
        while Path(f"/proc/{worker}").exists() and time.monotonic() < given_up:
            time.sleep(0.02)
        assert not Path(f"/proc/{worker}").exists()


def test_what_cannot_start_says_why_in_one_line(model: Path, tmp_path: Path) -> None:
    broken = write_tiny_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\xff" * 64)
    shallow = write_tiny_model(tmp_path / "shallow")
    config = json.loads((shallow / "config.json").read_text())
    (shallow / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for options, said in [
            (("--model", str(tmp_path / "none")), "config.json"),
            (("--model", str(broken)), "model.safetensors"),
            (("--model", str(shallow)), "model.layers.2"),
            (("--model", str(model), "--listen", address), address),
        ]:
            command = [sys.executable, "-m", "katydid_engine", *options]
            done = subprocess.run(command, capture_output=True, timeout=60)
            last = done.stderr.decode().splitlines()[-1]
            assert (done.returncode, said in last) == (2, True), last
