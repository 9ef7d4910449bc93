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

import pytest

from tests.engine.disorder import Disorder
from tests.engine.engine_process import Service, engine, session
from tests.engine.test_engine_kvcache import cache_options
from tests.engine.test_engine_process import run, until_idle
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

SECONDS = 60


@pytest.mark.timeout(400)
def test_disorder_changes_no_answer(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", "hy_v3")
    chooser, clients = random.Random(1), Disorder(1)
    with engine(model, tmp_path) as calm:
        run(clients.learn(calm.address))

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

    async def disorder(addresses: list[str]) -> None:
        until = time.monotonic() + SECONDS
        killer = asyncio.create_task(cache_comes_and_goes(until))
        compared = await asyncio.gather(*(clients.client(address, until) for address in addresses for _ in range(2)))
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
