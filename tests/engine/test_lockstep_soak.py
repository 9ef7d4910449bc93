"""Minutes of disorder for ranks that pass together: DP groups which share experts that move meanwhile, draft, and plan
a step ahead or not. Every answer equals a single rank's, and when it is quiet nothing is left over."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from tests.engine.disorder import Disorder
from tests.engine.engine_process import engine, service, session
from tests.engine.test_engine_kvcache import cache_options
from tests.engine.test_engine_process import run, until_idle
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

SECONDS = float(os.environ.get("KATYDID_SOAK_S", "60"))
SEED = int(os.environ.get("KATYDID_SOAK_SEED", "3"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ahead", ["on", "off"])
@pytest.mark.parametrize("plan", ["dp2,ep2+2", "tp2,sp,dp2,ep4", "dp3,ep3"])
def test_disorder_changes_no_answer(plan: str, ahead: str, tmp_path: Path) -> None:
    shape = {"num_experts": 12 if "3" in plan else 8, "num_nextn_predict_layers": 1}
    model = write_tiny_model(tmp_path / "tiny", "hy_v3", **shape)
    clients = Disorder(SEED, pauses=True)
    with engine(model, tmp_path, "--mtp", "0") as calm:
        run(clients.learn(calm.address))

    ranks = 3 if "dp3" in plan else 2
    options = ["--plan", plan, "--async-scheduling", ahead, "--rank-timeout-s", "60", "--stall-timeout-s", "60"]
    options += ["--kv-pages", "20", "--max-model-tokens", "700", "--max-batch-tokens", "100", "--max-sequences", "12"]
    options += ["--staging-mib", "1", "--rebalance-passes", "50", "--http-listen", "127.0.0.1:0"]

    async def disorder(address: str) -> None:
        until = time.monotonic() + SECONDS
        compared = await asyncio.gather(*(clients.client(address, until, dp_ranks=ranks) for _ in range(3)))
        assert min(compared) > SECONDS / 20
        async with session(address) as client:
            await asyncio.sleep(2)
            await until_idle(client)

    with (
        service("katydid_kvcache", tmp_path, "--listen", "127.0.0.1:0", *cache_options(tmp_path)) as cache,
        engine(model, tmp_path, *options, "--kvcache-address", cache.address) as served,
    ):
        run(disorder(served.address))
        metrics = served.metrics()
        drafted = [value for name, value in metrics.items() if name.startswith("katydid_engine_draft_tokens_total")]
        assert sum(drafted) > 0
        assert not [line for line in served.lines() if line["level"] == "error"]
    print(f"{plan}, ahead {ahead}: {clients.compared} answers, {sum(drafted):.0f} drafts")
