"""An engine of several ranks behind a gateway loses one: its answers are errors of a kind, it ends, is started again at
its address, and the gateway has it back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from katydid_cli.fleet.plan import HOST, free_ports
from katydid_client import AsyncKatydid, EngineLostError, UnavailableError

from tests.e2e.fleet import Process
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

PROMPT = "A rank that is lost takes its group along. " * 6


@pytest.mark.parametrize("plan", ["tp2", "tp2,sp,ep2", "dp2,ep2"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_that_lost_a_rank_comes_back(plan: str, rank: int, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", "hy_v3", num_nextn_predict_layers=1)
    ports = [f"{HOST}:{port}" for port in free_ports(4)]
    options = ("--model", str(model), "--plan", plan, "--rank-timeout-s", "5", "--kv-pages", "64", "--threads", "1")
    engine = Process(
        "katydid_engine", tmp_path, "--listen", ports[0], "--http-listen", ports[1], *options, http=ports[1]
    )
    where = ("--model", str(model), "--engines", f"only={ports[0]}", "--engine-queue-s", "0.5")
    gateway = Process(
        "katydid_gateway", tmp_path, "--listen", ports[2], "--http-listen", ports[3], *where, http=ports[3]
    )

    async def scenario() -> None:
        async with AsyncKatydid(gateway.address, timeout=60, max_retries=0) as client:

            async def ask(tokens: int = 24) -> tuple[int, ...]:
                answer = await client.generate(PROMPT, max_tokens=tokens, temperature=0.8, seed=5, ignore_eos=True)
                return answer.choices[0].token_ids

            async def connected() -> None:
                async with asyncio.timeout(30):
                    while not gateway.metric("katydid_gateway_connected_engines", engine="only"):
                        await asyncio.sleep(0.05)

            await connected()
            before = await ask()
            open_one = asyncio.create_task(ask(3000))
            while not gateway.metric("katydid_gateway_in_flight_requests"):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            os.kill(engine.ranks[rank], signal.SIGKILL)
            with pytest.raises((EngineLostError, UnavailableError)):
                await asyncio.wait_for(open_one, 20)
            assert await asyncio.to_thread(engine.exit_code) not in (0, 2)
            await asyncio.to_thread(engine.start)
            await connected()
            assert await ask() == before

    try:
        engine.start(wait=False)
        gateway.start()
        engine.ready()
        asyncio.run(scenario())
    finally:
        gateway.stop()
        engine.stop()
