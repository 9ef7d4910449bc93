"""The wall clock is set while requests are answered: deadlines and times to first token do not notice."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.gateway.rig import Rig, rig, until

DAY_NS = 86_400 * 10**9
USER = [{"role": "user", "content": "hello there"}]


@pytest.mark.parametrize("jump_ns", [DAY_NS, -DAY_NS])
def test_an_answer_goes_on_after_the_clock_was_set(chatml: Path, monkeypatch: pytest.MonkeyPatch, jump_ns: int) -> None:
    """An engine is lost afterwards: the next one is given the time that is left, whatever the wall clock says."""
    jumped_ns = 0
    wall = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: wall() + jumped_ns)

    async def scenario(built: Rig) -> None:
        nonlocal jumped_ns
        for engine in built.engines:
            engine.options.step_s = 0.01
        running = asyncio.create_task(built.chat(max_tokens=60, ignore_eos=True))
        await until(lambda: any(answer.tokens > 5 for answer in built.gateway.generator._answers))
        jumped_ns = jump_ns
        victim = next(engine for engine in built.engines if engine.in_flight)
        await victim.stop()
        response = await running
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 60
        assert response.json()["timing"]["ttft_ms"] < 20_000
        (again,) = [engine for engine in built.engines if engine is not victim]
        left_s = again.submitted[-1].timeout.seconds
        assert 560 <= left_s <= 600, "of the ten minutes that a request may take"

    async def body() -> None:
        async with rig(chatml, engines=2, request_timeout_s=600.0) as built:
            await scenario(built)

    asyncio.run(body())


@pytest.mark.parametrize("jump_ns", [DAY_NS, -DAY_NS])
def test_a_body_that_was_on_its_way_when_the_clock_was_set(
    chatml: Path, monkeypatch: pytest.MonkeyPatch, jump_ns: int
) -> None:
    jumped_ns = 0
    wall = time.time_ns
    looks: list[int] = []

    def look() -> int:
        looks.append(wall() + jumped_ns)
        return looks[-1]

    monkeypatch.setattr(time, "time_ns", look)

    async def body() -> None:
        nonlocal jumped_ns
        async with rig(chatml, request_timeout_s=600.0) as built:
            text = b'{"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}'
            reader, writer = await asyncio.open_connection(*built.url.removeprefix("http://").split(":"))
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n")
            writer.write(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text))
            writer.write(text[:10])
            looks.clear()
            await until(lambda: bool(looks))
            jumped_ns = jump_ns
            writer.write(text[10:])
            answered = (await reader.read()).decode()
            writer.close()
            assert answered.startswith("HTTP/1.1 200"), answered
            (sent,) = built.engines[0].submitted
            assert 560 <= sent.timeout.seconds <= 600

    asyncio.run(body())
