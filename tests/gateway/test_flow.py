"""Flow control of a whole gateway: budgets, lateness, fair turns, and books that are empty afterwards."""

from __future__ import annotations

import asyncio
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.gateway.mock_engine import MockOptions
from tests.gateway.rig import Rig, rig, until


def keys(folder: Path, *lines: str) -> str:
    """A key file; the key of tenant `a` is `key-a`."""
    path = folder / "keys"
    written = []
    for line in lines:
        name, _, terms = line.partition(" ")
        written.append(f"{name} {sha256(f'key-{name}'.encode()).hexdigest()} {terms}")
    path.write_text("\n".join(written) + "\n")
    return str(path)


async def ask(built: Rig, tenant: str, text: str, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
    return await built.http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer key-{tenant}"})


def run(folder: Path, scenario: Any, **options: Any) -> None:
    async def body() -> None:
        async with rig(folder, **options) as built:
            await scenario(built)
            assert built.gateway.generator.flow.budgets.reserved == 0
            assert len(built.gateway.generator.flow.gate.queue) == 0

    asyncio.run(body())


def test_a_tenant_that_used_up_its_tokens_is_told_when_to_come_again(chatml: Path, tmp_path: Path) -> None:
    async def scenario(built: Rig) -> None:
        text = "word " * 60
        assert (await ask(built, "a", text)).status_code == 200
        await until(lambda: built.gateway.generator.idle.is_set())
        refused = await ask(built, "a", "another " * 60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await ask(built, "b", text)).status_code == 200
        assert 'shed_requests_total{reason="quota"} 1.0' in (await built.http.get("/metrics")).text

    run(chatml, scenario, api_keys_file=keys(tmp_path, "a tokens_per_minute=100", "b weight=2"))


def test_who_would_be_late_is_refused_at_once(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        refused = await built.chat("word " * 5000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert "first token would come in" in refused.json()["error"]["message"]
        assert built.engines[0].submitted == []
        assert (await built.chat("short")).status_code == 200

    run(chatml, scenario, ttft_limit_s=0.2, options=MockOptions(max_model_tokens=100_000))


def test_one_first_token_that_does_not_come_keeps_nobody_out(chatml: Path) -> None:
    """What an engine owes is a reason to go to another one; where it answers others at once it refuses none of them."""

    async def scenario(built: Rig) -> None:
        engine, (state,) = built.engines[0], built.gateway.fleet.router.engines.values()
        engine.options.prefill_s = 60.0
        stuck = asyncio.create_task(built.chat("a first one"))
        await until(lambda: engine.in_flight == 1)
        engine.options.prefill_s = 0.0
        (rank,) = state.ranks
        rank.due = dict.fromkeys(rank.due, time.monotonic() - 100.0)
        assert rank.late_s(time.monotonic()) >= 100.0
        assert (await built.chat("short")).status_code == 200
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)

    run(chatml, scenario, ttft_limit_s=1.0)


def test_a_flood_of_one_tenant_delays_itself(chatml: Path, tmp_path: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.prefill_s = 0.1
        order: list[str] = []

        async def one(tenant: str, number: int) -> None:
            response = await ask(built, tenant, f"{tenant} {number} " * 40)
            assert response.status_code == 200
            order.append(tenant)

        flood = [asyncio.create_task(one("a", number)) for number in range(12)]
        await until(lambda: len(built.gateway.generator.flow.gate.queue) > 6)
        other = asyncio.create_task(one("b", 0))
        await asyncio.gather(*flood, other)
        assert order.index("b") < 6, order
        text = (await built.http.get("/metrics")).text
        assert 'katydid_gateway_queued_requests{priority="normal"} 0.0' in text
        assert 'ttft_phase_seconds_count{phase="admission"}' in text

    run(chatml, scenario, engine_queue_s=0.01, api_keys_file=keys(tmp_path, "a", "b"))


def test_who_leaves_the_line_is_forgotten(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.prefill_s = 0.3
        tasks = [asyncio.create_task(built.chat(f"number {number} " * 40)) for number in range(8)]
        await until(lambda: len(built.gateway.generator.flow.gate.queue) >= 4)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(response.status_code == 200 for response in results if not isinstance(response, BaseException))
        assert sum(isinstance(response, BaseException) for response in results) == 4

    run(chatml, scenario, engine_queue_s=0.01)


def test_a_closed_connection_and_a_deadline_end_the_wait(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        gate = built.gateway.generator.flow.gate
        gate._room = lambda: False
        left = asyncio.create_task(built.chat("one who leaves", stream=True))
        await until(lambda: len(gate.queue) == 1)
        left.cancel()
        await until(lambda: len(gate.queue) == 0)
        late = await built.chat("one who waits")
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert built.engines[0].submitted == []

    run(chatml, scenario, request_timeout_s=1.0)


def test_a_prompt_that_waits_does_not_keep_its_siblings_output(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        session = built.gateway.fleet.session("engine-0")
        built.gateway.generator.flow.gate._room = lambda: session.in_flight == 0
        events = await built.events(
            "/v1/completions", prompt=["hello there", "hello you"], max_tokens=200, ignore_eos=True, logprobs=5
        )
        assert events[-1] == "[DONE]"
        assert {choice["index"] for event in events[:-1] for choice in event["choices"]} == {0, 1}

    run(chatml, scenario, client_buffer_bytes=50_000, options=MockOptions(step_s=0.001))


def test_keys_are_read_again_when_their_file_changes(chatml: Path, tmp_path: Path) -> None:
    async def scenario(built: Rig) -> None:
        assert (await ask(built, "b", "hello")).status_code == 401
        keys(tmp_path, "a", "b")
        async with asyncio.timeout(30):
            while (await ask(built, "b", "hello")).status_code != 200:
                await asyncio.sleep(0.1)
        (tmp_path / "keys").write_text("not a key\n")
        await asyncio.sleep(1.1)
        assert (await ask(built, "a", "hello")).status_code == 200, "a broken file changes nothing"

    run(chatml, scenario, api_keys_file=keys(tmp_path, "a"))
