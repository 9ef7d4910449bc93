"""Engines that die, freeze, hang or are cut off, gateways that are killed: every stream goes on exactly, or ends with a
typed error or a broken connection, and soon; nothing is left behind (rig.check_books after each)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from katydid_gateway.engines import health, progress
from katydid_gateway.engines.progress import LEAST_S, MOST_S, ProgressWatch
from katydid_runtime.tokenizer_digest import tokenizer_digest

from tests.gateway.mock_engine import MockEngine, MockOptions
from tests.gateway.processes import Process, gateway, mock_engine
from tests.gateway.rig import Rig, rig, until

# What a stream may take to end once its engine is gone; double, for machines that are busy.
SOON_S = 10.0


def asked(number: int, tokens: int = 120) -> dict[str, Any]:
    message = {"role": "user", "content": f"question {number}"}
    return {"model": "mock", "stream": True, "messages": [message], "max_tokens": tokens, "ignore_eos": True}


async def ended(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str, float]:
    """How a stream ends (done, a code, or broken), its text, and when."""
    text, how = [], "broken"
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    how = "done"
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        how = event["error"]["code"]
                    text += [choice["delta"].get("content") or "" for choice in event.get("choices", [])]
    except httpx.HTTPError:
        how = "broken"
    return how, "".join(text), time.monotonic()


def run(folder: Path, scenario: Any, **options: Any) -> None:
    async def body() -> None:
        async with rig(folder, **options) as built:
            await scenario(built)

    asyncio.run(body())


@asynccontextmanager
async def wire_to(address: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A forwarder to `address`, and the event on which it swallows everything and closes nothing."""
    cut = asyncio.Event()
    host, _, port = address.rpartition(":")
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not cut.is_set():
                writer.write(data)
        if not cut.is_set():
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        writers.extend((writer, back))
        tasks.add(asyncio.create_task(pump(reader, back)))
        tasks.add(asyncio.create_task(pump(there, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", cut
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


def test_a_half_open_connection_to_an_engine(chatml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network swallows everything: what was under way goes on at the other engine within seconds."""
    monkeypatch.setattr(health, "PERIOD_S", 0.1)
    monkeypatch.setattr(health, "TIMEOUT_S", 0.5)
    monkeypatch.setitem(health.PATIENCE_S, health.SILENT, 0.5)

    async def body() -> None:
        mocks = [MockEngine(MockOptions(tokenizer_digest=tokenizer_digest(chatml), step_s=0.02)) for _ in range(2)]
        addresses = [await mock.start() for mock in mocks]
        async with AsyncExitStack() as stack:
            through, cut = await stack.enter_async_context(wire_to(addresses[0]))
            built = await stack.enter_async_context(rig(chatml, engines=0, elsewhere=[through, addresses[1]]))
            whole = await ended(built.http, asked(0, 60))
            running = [asyncio.create_task(ended(built.http, asked(0, 60))) for _ in range(6)]
            await until(lambda: mocks[0].in_flight > 0 and mocks[1].in_flight > 0)
            cut.set()
            since = time.monotonic()
            for how, text, at in await asyncio.gather(*running):
                assert (how, text) == ("done", whole[1])
                assert at - since < SOON_S
        await asyncio.gather(*(mock.stop() for mock in mocks))

    asyncio.run(body())


def test_a_wedged_engine_is_found_by_what_it_does_not_do(chatml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers every health check, and no token comes."""
    monkeypatch.setattr(progress, "LEAST_S", 0.4)
    monkeypatch.setattr(health, "PERIOD_S", 0.05)
    monkeypatch.setitem(health.PATIENCE_S, progress.WEDGED, 0.2)

    async def scenario(built: Rig) -> None:
        for engine in built.engines:
            engine.options.step_s = 0.01
        whole = await ended(built.http, asked(1))
        running = asyncio.create_task(ended(built.http, asked(1)))
        await until(lambda: any(engine.in_flight for engine in built.engines))
        wedged = next(engine for engine in built.engines if engine.in_flight)
        wedged.options.step_s = 3600
        assert wedged._loop_task is not None
        wedged._loop_task.cancel()
        how, text, _ = await running
        assert (how, text) == ("done", whole[1])
        for session in wedged._sessions.values():
            session.running.clear()

    run(chatml, scenario, engines=2)


def test_an_engine_that_compiles_a_grammar_is_not_wedged(chatml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing meanwhile, and others' requests are still sent to it."""
    monkeypatch.setattr(progress, "LEAST_S", 0.2)
    monkeypatch.setattr(health, "PERIOD_S", 0.05)

    async def scenario(built: Rig) -> None:
        (engine,) = built.engines
        engine.options.prefill_s = 1.0
        running = asyncio.create_task(built.chat(response_format={"type": "regex", "pattern": ".*"}))
        await until(lambda: engine.in_flight > 0)
        await asyncio.sleep(0.6)
        assert built.gateway.fleet.healthy == 1
        engine.options.prefill_s = 0.0
        assert (await built.chat()).status_code == 200
        assert (await running).status_code == 200

    run(chatml, scenario, options=MockOptions(grammar_kinds=("regex",)))


def test_progress_is_scaled_to_what_was_predicted() -> None:
    watch = ProgressWatch()
    assert not watch.wedged(1e6)
    watch.sent(1, 10.0, 0.0)
    assert not watch.wedged(LEAST_S + 20.0)
    assert watch.wedged(LEAST_S + 20.1)
    watch.reported(100_000, 1.0)
    watch.reported(90_000, 20.0)
    assert not watch.wedged(LEAST_S + 39.9)
    watch.sent(2, 1e6, 21.0)
    assert not watch.wedged(20.0 + MOST_S)
    assert watch.wedged(20.1 + MOST_S)
    watch.ended(2, 200.0)
    watch.moved(200.0)
    assert watch.wedged(200.1 + LEAST_S + 20.0)
    watch.ended(1, 300.0)
    assert not watch.wedged(1e6)


@pytest.mark.soak
def test_a_frozen_engine_and_a_killed_one(chatml: Path) -> None:
    """SIGSTOP, then SIGKILL, under load: nothing is lost, nothing is said twice, and what is frozen rejoins."""
    engines = [mock_engine(chatml, "--step-ms", "20") for _ in range(3)]
    try:
        with gateway(chatml, [address for _, address in engines]) as (_, http, _rpc):

            async def load(fault: Any) -> list[tuple[str, str, float]]:
                async with httpx.AsyncClient(base_url=f"http://{http}", timeout=60) as client:
                    running = [asyncio.create_task(ended(client, asked(number, 100))) for number in range(18)]
                    await asyncio.sleep(0.5)
                    fault()
                    return await asyncio.gather(*running)

            whole = asyncio.run(load(lambda: None))
            assert {how for how, _, _ in whole} == {"done"}
            frozen = engines[0][0].process
            began = time.monotonic()
            stopped = asyncio.run(load(lambda: os.kill(frozen.pid, signal.SIGSTOP)))
            assert [(how, text) for how, text, _ in stopped] == [(how, text) for how, text, _ in whole]
            assert max(at for _, _, at in stopped) - began < SOON_S + 5
            os.kill(frozen.pid, signal.SIGCONT)
            killed = asyncio.run(load(engines[1][0].kill))
            assert [(how, text) for how, text, _ in killed] == [(how, text) for how, text, _ in whole]
            with httpx.Client(base_url=f"http://{http}", timeout=20) as plain:
                wait_for(lambda: "katydid_gateway_in_flight_requests 0.0" in plain.get("/metrics").text)
                rejoined = 'katydid_gateway_connected_engines{engine="' + engines[0][1] + '"} 1.0'
                wait_for(lambda: rejoined in plain.get("/metrics").text)
    finally:
        for process, _ in engines:
            process.stop()


@pytest.mark.soak
def test_a_gateway_that_is_killed_under_100_streams(chatml: Path) -> None:
    """Clients see a broken connection and never a clean end; the engine lets go; the next gateway serves."""

    async def body() -> None:
        mock = MockEngine(MockOptions(tokenizer_digest=tokenizer_digest(chatml), step_s=0.02, reattach_window_s=0.5))
        address = await mock.start()
        try:
            process, http = await asyncio.to_thread(started, chatml, address)
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=f"http://{http}", timeout=60, limits=limits) as client:
                running = [asyncio.create_task(ended(client, asked(number, 5000))) for number in range(100)]
                await until(lambda: mock.in_flight == 100)
                since = time.monotonic()
                await asyncio.to_thread(process.kill)
                outcomes = await asyncio.gather(*running)
            assert {how for how, _, _ in outcomes} == {"broken"}
            assert max(at for _, _, at in outcomes) - since < SOON_S
            process.stop()
            await until(lambda: mock.in_flight == 0)
            process, http = await asyncio.to_thread(started, chatml, address)
            async with httpx.AsyncClient(base_url=f"http://{http}", timeout=60) as client:
                assert (await ended(client, asked(0, 5)))[0] == "done"
                running = [asyncio.create_task(ended(client, asked(number, 5000))) for number in range(50)]
                await until(lambda: mock.in_flight == 50)
                since = time.monotonic()
                code = await asyncio.to_thread(process.stop)
                outcomes = await asyncio.gather(*running)
            assert code == 0
            assert {how for how, _, _ in outcomes} == {"draining"}
            assert max(at for _, _, at in outcomes) - since < SOON_S
            await until(lambda: mock.in_flight == 0)
        finally:
            await mock.stop()

    asyncio.run(body())


def started(folder: Path, engine: str) -> tuple[Process, str]:
    """A gateway that is connected to one engine, and its HTTP address."""
    process = Process(
        *("-m", "katydid_gateway", "--model", str(folder), "--engines", engine, "--drain-timeout-s", "2"),
        *("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"),
    )
    http: str = json.loads(process.expect('"http_address"'))["http_address"]
    process.expect("engine connected")
    return process, http


def wait_for(condition: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)
