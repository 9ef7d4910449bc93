"""What happens to requests when streams break, engines die, restart, or turn out to be of another kind."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from katydid.engine.v1 import engine_pb2 as pb
from katydid_gateway.engines import connection, health
from katydid_gateway.engines.parity import check_parity
from katydid_runtime.block_hash import fingerprint
from katydid_runtime.errors import IdentityMismatchError

from tests.gateway.mock_engine import MockEngine, MockOptions
from tests.gateway.rig import Rig, rig, until

USER = [{"role": "user", "content": "hello there"}]


def run(folder: Path, scenario: Any, **options: Any) -> None:
    async def body() -> None:
        async with rig(folder, **options) as built:
            await scenario(built)

    asyncio.run(body())


def serving(built: Rig) -> MockEngine:
    return next(engine for engine in built.engines if engine.in_flight)


async def revive(built: Rig, engine: MockEngine) -> MockEngine:
    """Another process at the same address."""
    successor = MockEngine(engine.options)
    await successor.start(engine.address)
    built.engines[built.engines.index(engine)] = successor
    return successor


def test_before_the_first_token_another_engine_takes_over(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        for engine in built.engines:
            engine.options.prefill_s = 0.5
        running = asyncio.create_task(built.chat(max_tokens=4))
        await until(lambda: any(engine.in_flight for engine in built.engines))
        await serving(built).stop()
        response = await running
        assert response.status_code == 200
        assert response.json()["timing"]["phases_ms"]["retry"] > 0
        metrics = (await built.http.get("/metrics")).text
        assert "katydid_gateway_failed_requests_total" in metrics
        assert built.gateway.fleet.healthy == 1

    run(chatml, scenario, engines=2)


def test_without_resume_the_client_gets_a_typed_error_at_once(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        for engine in built.engines:
            engine.options.step_s = 0.02
        lines: list[str] = []
        async with built.http.stream(
            "POST", "/v1/chat/completions", json={"messages": USER, "stream": True, "max_tokens": 500}
        ) as response:
            async for line in response.aiter_lines():
                if not line:
                    continue
                lines.append(line)
                if len(lines) == 5:
                    await asyncio.wait_for(serving(built).stop(), 5)
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert error["code"] == "engine_lost"
        assert "data: [DONE]" not in lines
        assert (await built.chat()).status_code == 200, "the other engine"

    run(chatml, scenario, engines=2, resume=False)


def test_when_every_engine_is_gone_the_answer_is_503_and_a_restart_rejoins(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        engine = built.engines[0]
        await engine.stop()
        await until(lambda: not built.gateway.fleet.ready)
        response = await built.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        successor = await revive(built, engine)
        await until(lambda: built.gateway.fleet.ready)
        assert (await built.chat()).status_code == 200
        assert len(successor.submitted) == 1

    run(chatml, scenario)


def test_a_lost_stream_is_taken_up_again_without_a_gap(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        engine = built.engines[0]
        ids = built.tokenizer.encode("abcdefghijklmnopqrstuvwxyz" * 4, add_special_tokens=False).ids
        engine.options.script = lambda _p, _s, _c: ids
        engine.options.step_s = 0.005
        running = asyncio.create_task(built.chat(max_tokens=200))
        await until(lambda: engine.in_flight == 1)
        for _ in range(3):
            await asyncio.sleep(0.05)
            engine.drop_streams()
        response = await running
        assert response.json()["choices"][0]["message"]["content"] == built.tokenizer.decode(ids)
        assert response.json()["usage"]["completion_tokens"] == len(ids)
        assert len(engine.submitted) == 1

    run(chatml, scenario)


def test_a_request_lost_with_its_stream_is_sent_again(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        engine = built.engines[0]
        engine.options.deaf = True
        running = asyncio.create_task(built.chat(max_tokens=4))
        await until(lambda: len(engine.submitted) == 1)
        engine.options.deaf = False
        engine.drop_streams()
        assert (await running).status_code == 200
        assert [message.request for message in engine.submitted] == [1, 2]

    run(chatml, scenario)


def test_a_stream_that_ends_leaves_no_task_behind(chatml: Path) -> None:
    def writers() -> list[object]:
        return [task for task in asyncio.all_tasks() if "_consume_request_iterator" in repr(task)]

    async def scenario(built: Rig) -> None:
        assert len(writers()) == 1
        await built.engines[0].stop()
        await until(lambda: not writers())

    run(chatml, scenario)


def test_numbers_start_again_after_the_largest_and_skip_what_runs(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        engine = built.engines[0]
        engine.options.step_s = 0.02
        running = asyncio.create_task(built.chat(max_tokens=5000))
        await until(lambda: engine.in_flight == 1)
        built.gateway.fleet.session("engine-0")._last_request = 2**32 - 2
        for _ in range(3):
            assert (await built.chat(max_tokens=1)).status_code == 200
        assert [request.request for request in engine.submitted] == [1, 2**32 - 1, 2, 3]
        running.cancel()
        await until(lambda: engine.in_flight == 0)

    run(chatml, scenario)


def test_an_abort_lost_with_its_stream_is_made_up_for(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        engine = built.engines[0]
        engine.options.step_s = 0.02
        running = asyncio.create_task(built.chat(max_tokens=5000))
        await until(lambda: engine.in_flight == 1)
        session = built.gateway.fleet.session("engine-0")
        engine.drop_streams()
        await until(lambda: session._outbound is None)
        running.cancel()
        await until(lambda: session.in_flight == 0)
        await until(lambda: engine.in_flight == 0)
        assert engine.aborted == [1]

    run(chatml, scenario)


def test_an_engine_that_neither_answers_nor_refuses_is_given_up_after_its_window(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        engine = built.engines[0]
        engine.options.step_s = 0.02
        running = asyncio.create_task(built.events(messages=USER, max_tokens=5000))
        await until(lambda: any(answer.tokens for answer in built.gateway.generator._answers))
        host, port = engine.address.split(":")
        await engine.stop()
        with socket.socket() as silent:  # the kernel takes connections, nobody ever answers
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            silent.bind((host, int(port)))
            silent.listen()
            events = await asyncio.wait_for(running, 20)
        assert events[-1]["error"]["code"] == "engine_lost"

    run(chatml, scenario, options=MockOptions(reattach_window_s=0.5))


def test_a_request_every_engine_loses_is_given_up(chatml: Path) -> None:
    refusal = pb.RequestError(reason="OVERLOADED", message="the engine is full", retryable=True)

    async def scenario(built: Rig) -> None:
        response = await built.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
        assert sum(len(engine.submitted) for engine in built.engines) == 3

    run(chatml, scenario, engines=2, options=MockOptions(refusal=refusal))


def test_block_events_make_warm_prompts_stick_and_restarts_forget_them(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        text = "the quick brown fox jumps over the lazy dog " * 60
        await built.chat(text)
        first = next(engine for engine in built.engines if engine.submitted)
        for _ in range(3):
            assert (await built.chat(text)).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert len(first.submitted) == 4
        index = built.gateway.fleet.router.index
        holder = next(h for h in index._bits if h.engine == f"engine-{built.engines.index(first)}")
        await until(lambda: index.blocks(holder) > 3)
        await first.stop()
        await revive(built, first)
        await until(lambda: built.gateway.fleet.healthy == 2 and index.blocks(holder) == 0)
        index.check_integrity()

    run(chatml, scenario, engines=2)


def test_a_draining_engine_gets_no_new_requests(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        await built.engines[0].Drain(pb.DrainRequest(), None)
        await until(lambda: built.gateway.fleet.healthy == 1)
        for number in range(4):
            assert (await built.chat(f"hello {number}")).status_code == 200
        assert not built.engines[0].submitted

    run(chatml, scenario, engines=2)


def test_an_engine_finds_its_cache_service_later(chatml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CACHE_LOOK_S", 0.05)

    async def scenario(built: Rig) -> None:
        state = built.gateway.fleet.router.engines["engine-0"]
        assert (state.kv_cache_attached, state.near) == (False, "")
        built.engines[0].options.kvcache_instance = "host-a:7301"
        built.engines[0].options.kv_cache_attached = True
        await until(lambda: (state.kv_cache_attached, state.near) == (True, "host-a:7301"))

    run(chatml, scenario)


def test_roles_are_heard_of_and_the_last_engine_takes_whole_requests(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        engine, state = built.engines[0], built.gateway.fleet.router.engines["engine-0"]
        engine.change_role(pb.ROLE_DECODE)
        await until(lambda: state.role == "decode")
        assert (await built.chat()).status_code == 200
        assert not engine.submitted
        await built.engines[1].stop()
        await until(lambda: built.gateway.fleet.healthy == 1)
        assert (await built.chat()).status_code == 200
        await engine.stop()
        engine.options.role = pb.ROLE_PREFILL
        await revive(built, engine)
        await until(lambda: state.role == "prefill")

    run(chatml, scenario, engines=2)


def test_an_engine_that_says_it_is_stuck_loses_its_requests(chatml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PERIOD_S", 0.05)
    monkeypatch.setitem(health.PATIENCE_S, health.STUCK, 0.2)

    async def scenario(built: Rig) -> None:
        engine = built.engines[0]
        engine.options.prefill_s = 60
        running = asyncio.create_task(built.chat())
        await until(lambda: engine.in_flight == 1)
        assert engine._server is not None
        await engine._server.set_serving(False)
        response = await asyncio.wait_for(running, 20)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        assert not built.gateway.fleet.ready
        engine.options.prefill_s = 0
        await engine._server.set_serving(True)
        await until(lambda: built.gateway.fleet.ready)
        assert (await built.chat()).status_code == 200
        assert engine.in_flight == 0, "it was told that nobody waits for the answer any more"

    run(chatml, scenario, options=MockOptions(reattach_window_s=600.0))


def test_an_engine_that_is_connected_again_is_routed_to_at_once(chatml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was wrong with it ended with its last session: it does not wait for the next look at its health."""
    monkeypatch.setattr(health, "PERIOD_S", 0.05)
    monkeypatch.setitem(health.PATIENCE_S, health.STUCK, 0.2)

    async def scenario(built: Rig) -> None:
        engine, connection = built.engines[0], built.gateway.fleet.connections["engine-0"]
        assert engine._server is not None
        await engine._server.set_serving(False)
        await until(lambda: connection.session is None)
        looks = asyncio.Event()

        async def no_look(self: health.HealthWatch) -> None:
            await looks.wait()

        monkeypatch.setattr(health.HealthWatch, "run", no_look)
        await engine._server.set_serving(True)
        up = 'katydid_gateway_connected_engines{engine="engine-0"} 1.0'
        async with asyncio.timeout(20):
            while up not in (await built.http.get("/metrics")).text:
                await asyncio.sleep(0.005)
        assert connection.ready
        assert (await built.chat()).status_code == 200
        looks.set()

    run(chatml, scenario)


DESCRIPTION = pb.DescribeResponse(
    identity=b"i" * 32, hash_fingerprint=fingerprint(b"i" * 32), block_tokens=64, tokenizer_digest=b"t"
)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({}, None),
        ({"block_tokens": 32}, "block_tokens"),
        ({"hash_fingerprint": b"x" * 32}, "hash_fingerprint"),
        ({"identity": b"j" * 32}, "hash_fingerprint"),
        ({"tokenizer_digest": b"u"}, "tokenizer_digest"),
        ({"tokenizer_digest": b""}, "tokenizer_digest"),
        ({"golden_digest": b"other ids"}, "golden_digest"),
    ],
)
def test_parity(change: dict[str, Any], field: str | None) -> None:
    description = pb.DescribeResponse()
    description.CopyFrom(DESCRIPTION)
    for name, value in change.items():
        setattr(description, name, value)
    if field is None:
        check_parity("e", description, b"t", b"g")
        return
    with pytest.raises(IdentityMismatchError) as caught:
        check_parity("e", description, b"t", b"g")
    assert caught.value.field == field


def test_an_engine_of_another_kind_is_refused_and_the_others_serve(
    chatml: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REFUSED_RETRY_S", 0.05)

    async def scenario(built: Rig) -> None:
        stranger = MockEngine(MockOptions(tokenizer_digest=b"other"))
        address = await stranger.start()
        await built.engines[0].stop()
        await stranger.stop()
        impostor = MockEngine(MockOptions(tokenizer_digest=b"other"))
        await impostor.start(built.engines[0].address)
        built.engines[0] = impostor
        del address
        state = built.gateway.fleet.router.engines["engine-0"]
        await until(lambda: state.excluded.startswith("refused"))
        assert (await built.chat()).status_code == 200, "the others serve"
        assert not impostor.submitted
        refused = 'katydid_gateway_refused_engines_total{engine="engine-0",field="tokenizer_digest"} '
        while True:
            metrics = (await built.http.get("/metrics")).text
            if float(metrics.partition(refused)[2].partition("\n")[0]) >= 3:
                break
            await asyncio.sleep(0.02)
        assert caplog.text.count("engine refused") == 1, "it is asked again and again, and told of once"

    run(chatml, scenario, engines=2)


def test_64_streams_of_mixed_lengths_end_as_they_do_alone(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        for engine in built.engines:
            engine.options.step_s = 0.002

        async def ask(number: int) -> tuple[str, int]:
            events = await built.events(
                messages=[{"role": "user", "content": f"question {number} " * (1 + number % 7)}],
                max_tokens=3 + number % 40,
                stream_options={"include_usage": True},
            )
            assert events[-1] == "[DONE]"
            text = "".join(c["delta"].get("content", "") for event in events[:-1] for c in event["choices"])
            return text, events[-2]["usage"]["completion_tokens"]

        together = await asyncio.gather(*(ask(number) for number in range(64)))
        alone = [await ask(number) for number in (0, 7, 33, 63)]
        assert [together[number] for number in (0, 7, 33, 63)] == alone
        assert [tokens for _, tokens in together] == [3 + number % 40 for number in range(64)]
        assert all(len(engine.submitted) > 10 for engine in built.engines)
        assert "katydid_gateway_in_flight_requests 0.0" in (await built.http.get("/metrics")).text

    run(chatml, scenario, engines=2)
