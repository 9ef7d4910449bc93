"""Minutes of disorder: two engines with small pools, a cache service that dies and hangs, streams that break, aborts.

Every answer that ends by itself equals the one an undisturbed engine gave, and when it is quiet nothing is left over.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from pathlib import Path

import grpc
import pytest
from katydid.engine.v1 import engine_pb2 as pb

from tests.engine.engine_process import Answer, Service, SessionClient, engine, session
from tests.engine.test_engine_kvcache import cache_options
from tests.engine.test_engine_process import prompt, run, until_idle
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

SECONDS = 60
LENGTHS = [1, 63, 64, 65, 128, 129, 200, 320, 500]


def job(number: int) -> tuple[list[int], dict[str, object]]:
    """One of a hundred fixed requests."""
    ids = prompt(LENGTHS[number % len(LENGTHS)], number % 5)
    fields: dict[str, object] = {"seed": number, "temperature": 1.0 * (number % 2), "max_tokens": 1 + number * 7 % 60}
    fields |= {"n": 1 + (number % 6 == 0), "priority": number % 3, "top_p": 0.9 if number % 4 == 1 else 1.0}
    return ids, fields


@pytest.mark.timeout(400)
def test_disorder_changes_no_answer(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", "hy_v3")
    expected: dict[int, dict[int, list[int]]] = {}
    chooser = random.Random(1)

    async def undisturbed(address: str) -> None:
        async with session(address) as client:
            for number in range(100):
                ids, fields = job(number)
                answer = await client.generate(ids, **fields)
                expected[number] = dict(answer.tokens)

    with engine(model, tmp_path) as calm:
        run(undisturbed(calm.address))

    log = tmp_path / "cache.log"
    cache = Service("katydid_kvcache", log, "--listen", "127.0.0.1:0", *cache_options(tmp_path))
    address = cache.address
    options = ("--kvcache-address", address, "--kv-pages", "20", "--max-model-tokens", "700", "--staging-mib", "1")
    options += ("--max-batch-tokens", "100", "--max-sequences", "12")

    async def cache_comes_and_goes(until: float) -> None:
        nonlocal cache
        while time.monotonic() < until:
            await asyncio.sleep(chooser.uniform(3, 8))
            if chooser.random() < 0.4:
                cache.process.send_signal(signal.SIGSTOP)
                try:
                    await asyncio.sleep(chooser.uniform(0, 4))
                finally:
                    cache.process.send_signal(signal.SIGCONT)
                continue
            cache.kill()
            await asyncio.sleep(chooser.uniform(0, 2))
            cache = Service("katydid_kvcache", log, "--listen", address, *cache_options(tmp_path))

    async def client_load(engine_address: str, until: float) -> int:
        compared = 0
        async with grpc.aio.insecure_channel(engine_address) as channel:
            while time.monotonic() < until:
                client = SessionClient(channel)
                await client.open()
                pending: dict[int, Answer] = {}
                for _ in range(chooser.randint(1, 24)):
                    number = chooser.randrange(100)
                    ids, fields = job(number)
                    pending[number] = client.submit(ids, **fields)
                    if chooser.random() < 0.2:
                        client.send(abort=pb.AbortRequest(request=chooser.choice(list(client.answers))))
                    await asyncio.sleep(chooser.uniform(0, 0.05))
                if chooser.random() < 0.3:
                    await client.break_off()
                    if chooser.random() < 0.5:
                        continue
                    for answer in pending.values():
                        if len(answer.ends) < answer.n:
                            answer.done.clear()
                    await client.open(client.opened.session_id, client.frames[-1].frame)
                    # What the engine does not run either ends in frames sent again, or was lost with the stream.
                    await asyncio.sleep(1)
                    running = [client.answers[request] for request in client.opened.running]
                    pending = {n: a for n, a in pending.items() if a in running or len(a.ends) == a.n}
                for number, answer in pending.items():
                    await asyncio.wait_for(answer.done.wait(), 120)
                    for choice, end in answer.ends.items():
                        assert end.reason != pb.FINISH_REASON_ERROR, end.error
                        if end.reason != pb.FINISH_REASON_ABORT:
                            assert answer.tokens[choice] == expected[number][choice], (number, choice)
                            compared += 1
                await client.break_off()
        return compared

    async def disorder(addresses: list[str]) -> None:
        until = time.monotonic() + SECONDS
        killer = asyncio.create_task(cache_comes_and_goes(until))
        compared = await asyncio.gather(*(client_load(address, until) for address in addresses for _ in range(2)))
        killer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await killer
        assert min(compared) > 20
        for address in addresses:
            async with session(address) as client:
                await asyncio.sleep(6)
                await until_idle(client)

    try:
        with engine(model, tmp_path, *options) as one, engine(model, tmp_path, *options, "--plan", "tp2") as two:
            asyncio.run(disorder([one.address, two.address]))
            for service in (one, two):
                assert not [line for line in service.lines() if line["level"] == "error"]
    finally:
        cache.stop()
