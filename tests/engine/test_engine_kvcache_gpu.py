"""An engine on a GPU beside a cache service: prompts come back from its memory, whatever happens on the way."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
import torch

from tests.engine import engine_process
from tests.engine.engine_process import Answer, Service, SessionClient, engine, session
from tests.engine.test_engine_kvcache import attached, blocks_held, corrupt_blocks, flush, spoil_memory

MODEL = Path(__file__).parents[2] / "models" / "hy3-tiny"
PROMPT, CACHED = 8010, 8000
OPTIONS = ("--max-batch-tokens", "4096", "--max-sequences", "4", "--cuda-graphs", "off", "--mtp", "0")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def prompt(length: int, salt: int) -> list[int]:
    """A text that repeats itself, so that what follows is sure."""
    chooser = random.Random(salt)
    words = [chooser.randrange(3, 4000) for _ in range(37)]
    return [words[place % 37] for place in range(length)]


async def timed(client: SessionClient, ids: list[int]) -> tuple[Answer, float]:
    """The answer, and seconds to its first token."""
    answer = client.submit(ids, max_tokens=8, ignore_eos=True)
    started = time.perf_counter()
    while answer.first is None:
        await asyncio.sleep(0.0005)
    first_s = time.perf_counter() - started
    await asyncio.wait_for(answer.done.wait(), 60)
    return answer, first_s


@pytest.mark.timeout(400)
def test_a_prompt_comes_back_from_the_services_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through aborts in mid-fetch, flipped bits, and a service that is killed and comes back with other memory."""
    monkeypatch.setattr(engine_process, "START_TIMEOUT_S", 300.0)  # kernels are compiled
    address = f"unix:{tmp_path}/cache.sock"
    options = ("--listen", address, "--memory-bytes", str(512 << 20))
    cache = Service("katydid_kvcache", tmp_path / "cache.log", *options)
    caching = ("--kvcache-address", address, "--kvcache-fetch", "always", "--kv-pages", "600")
    try:
        assert cache.address
        with engine(MODEL, tmp_path, "--device", "cuda", *OPTIONS, *caching) as served:
            assert served.address

            async def fetched(client: SessionClient, salt: int, wanted: list[int]) -> float:
                await flush(served.address)
                answer, first_s = await timed(client, prompt(PROMPT, salt))
                assert answer.cached()[1] == CACHED, "from the service's memory"
                assert answer.output == wanted
                return first_s

            async def scenario() -> None:
                nonlocal cache
                async with session(served.address) as client:
                    await attached(client, True)
                    await timed(client, prompt(PROMPT, 99))
                    made, cold_s = await timed(client, prompt(PROMPT, 1))
                    await blocks_held([address], 2 * PROMPT // 64)
                    times = [await fetched(client, 1, made.output) for _ in range(5)]
                    print(f"TTFT of {PROMPT} tokens: computed {cold_s * 1e3:.1f} ms, fetched {min(times) * 1e3:.1f} ms")

                    chooser = random.Random(2)
                    for _ in range(60):
                        await flush(served.address)
                        sent = [client.submit(prompt(chooser.randrange(500, PROMPT), 1)) for _ in range(3)]
                        await asyncio.sleep(chooser.random() * 0.01)
                        for answer in sent[1:]:
                            number = next(n for n, other in client.answers.items() if other is answer)
                            client.send(abort={"request": number})
                        await asyncio.gather(*(answer.done.wait() for answer in sent))
                    await fetched(client, 1, made.output)

                    spoil_memory(cache)
                    await flush(served.address)
                    unharmed, _ = await timed(client, prompt(PROMPT, 1))
                    assert unharmed.output == made.output
                    assert unharmed.cached()[1] < CACHED, "wrong bytes are a miss"
                    assert await corrupt_blocks(address) >= 1

                    cache.kill()
                    await attached(client, False)
                    cache = Service("katydid_kvcache", tmp_path / "again.log", *options)
                    await attached(client, True)
                    await flush(served.address)
                    await timed(client, prompt(PROMPT, 1))
                    await blocks_held([address], PROMPT // 64)
                    await fetched(client, 1, made.output)

            asyncio.run(asyncio.wait_for(scenario(), 300))
    finally:
        cache.stop()
