"""What is counted of a request: what was delivered, and nothing of one that was refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.gateway.mock_engine import MockOptions
from tests.gateway.rig import Rig, rig, until


def run(folder: Path, scenario: Callable[[Rig], Any], **options: Any) -> None:
    async def body() -> None:
        async with rig(folder, **options) as built:
            await scenario(built)

    asyncio.run(body())


async def figures(built: Rig) -> dict[str, float]:
    """All samples of /metrics without the common prefix, once nothing is in flight."""
    await until(built.gateway.generator.idle.is_set)
    lines = (await built.http.get("/metrics", headers={"accept": "text/plain"})).text.splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name.removeprefix("katydid_gateway_"): float(value) for name, _, value in samples}


def test_the_prompt_of_a_request_that_was_refused_was_not_computed(chatml: Path, tmp_path: Path) -> None:
    """It would look as if nothing were found in caches, and its tenant as if it had used what it was refused."""
    keys = tmp_path / "keys"
    keys.write_text(f"a {sha256(b'key').hexdigest()}\n")

    async def scenario(built: Rig) -> None:
        built.http.headers["authorization"] = "Bearer key"
        assert (await built.chat("word " * 5000)).status_code == 503
        seen = await figures(built)
        assert seen['finished_requests_total{api="chat",outcome="overloaded"}'] == 1
        assert seen['tenant_requests_total{outcome="overloaded",tenant="a"}'] == 1
        assert seen["computed_tokens_total"] == seen["prompt_tokens_count"] == 0
        assert not any(value for name, value in seen.items() if name.startswith("tenant_tokens_total"))
        answer = (await built.chat("short")).json()
        seen = await figures(built)
        assert seen["computed_tokens_total"] == answer["usage"]["prompt_tokens"]
        assert seen['tenant_tokens_total{kind="computed",tenant="a"}'] == answer["usage"]["prompt_tokens"]

    many = MockOptions(max_model_tokens=100_000)
    run(chatml, scenario, ttft_limit_s=0.2, options=many, api_keys_file=str(keys), metrics_need_scope=False)


def test_an_answer_that_failed_is_no_good_one(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        assert (await built.chat()).status_code == 200
        assert (await figures(built))["goodput_requests_total"] == 1
        built.engines[0].options.step_s = 0.01
        running = asyncio.create_task(built.chat(max_tokens=1000))
        await until(lambda: any(answer.tokens > 2 for answer in built.gateway.generator._answers))
        built.engines[0].lose_worker()
        assert (await running).status_code == 502
        seen = await figures(built)
        assert (seen["ttft_seconds_count"], seen["goodput_requests_total"]) == (2, 1)
        built.engines[0].options.refusal = None
        running = asyncio.create_task(built.chat(max_tokens=1000))
        await until(lambda: any(answer.tokens > 2 for answer in built.gateway.generator._answers))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: not built.engines[0].in_flight)
        seen = await figures(built)
        assert (seen["ttft_seconds_count"], seen["goodput_requests_total"]) == (3, 2), "who leaves may have read enough"

    run(chatml, scenario)
