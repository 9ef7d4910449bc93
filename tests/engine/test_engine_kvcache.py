"""Engines beside a cache service: blocks move between them, and what happens to the service reaches no answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import mmap
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from katydid.engine.v1 import engine_pb2 as pb
from katydid.engine.v1.engine_pb2_grpc import AdminServiceStub
from katydid.kvcache.v1 import kvcache_pb2
from katydid.kvcache.v1.kvcache_pb2_grpc import AdminServiceStub as CacheAdminStub
from katydid.kvcache.v1.kvcache_pb2_grpc import KvCacheServiceStub

from tests.engine.engine_process import Answer, Service, SessionClient, engine, service, session
from tests.engine.test_engine_process import prompt, run
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.e2e

PARENT_SPAN = "cd" * 8


def cache_options(folder: Path) -> tuple[str, ...]:
    return ("--disk-path", str(folder / "disk"), "--disk-bytes", str(64 << 20), "--memory-bytes", str(64 << 20))


async def blocks_stored(address: str, blocks: int) -> None:
    """Waits until the service holds so many blocks, on disk."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(20):
        stats = KvCacheServiceStub(channel).Stats
        while max((tier.blocks for tier in (await stats(kvcache_pb2.StatsRequest())).tiers), default=0) < blocks:
            await asyncio.sleep(0.02)
        await CacheAdminStub(channel).Flush(kvcache_pb2.FlushRequest())


def spoil_memory(cache: Service) -> None:
    """Flips a bit in every page of the service's memory, where its clients have it mapped."""
    folder = Path(f"/proc/{cache.process.pid}/fd")
    memory = next(path for path in folder.iterdir() if "katydid-kvcache" in os.readlink(path))
    with memory.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapping:
        for page in range(0, len(mapping), mmap.PAGESIZE):
            if mapping[page + 9] or mapping[page + 8]:
                mapping[page + 9] ^= 4


async def corrupt_blocks(address: str) -> int:
    """Waits until the service has found a corrupt block."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(20):
        while True:
            tiers = (await KvCacheServiceStub(channel).Stats(kvcache_pb2.StatsRequest())).tiers
            if corrupt := sum(tier.corrupt for tier in tiers):
                return corrupt
            await asyncio.sleep(0.02)


async def blocks_held(addresses: Sequence[str], blocks: int) -> None:
    """Waits until the services together hold so many blocks."""
    async with asyncio.timeout(20), contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(address)) for address in addresses]
        while True:
            stats = [await KvCacheServiceStub(channel).Stats(kvcache_pb2.StatsRequest()) for channel in channels]
            if sum(answer.tiers[0].blocks for answer in stats) >= blocks:
                return
            await asyncio.sleep(0.02)


async def flush(engine_address: str) -> None:
    async with grpc.aio.insecure_channel(engine_address) as channel:
        await AdminServiceStub(channel).Flush(pb.FlushRequest())


async def attached(client: SessionClient, wanted: bool) -> None:
    async with asyncio.timeout(20):
        while (await client.stub.Describe(pb.DescribeRequest())).kv_cache_attached is not wanted:
            await asyncio.sleep(0.05)


def test_blocks_move_between_engines_and_survive_the_service(tmp_path: Path) -> None:
    """Over a Unix socket, so in the service's own memory; the restarted service has another. Whatever is found is
    fetched: on a busy machine the engine would rather compute what a slow disk has."""
    model = write_tiny_model(tmp_path / "tiny")
    fields = {"max_tokens": 6, "temperature": 0.7, "seed": 3, "ignore_eos": True}
    address = f"unix:{tmp_path}/cache.sock"
    caching = ("--kvcache-address", address, "--kvcache-fetch", "always")
    cache = Service("katydid_kvcache", tmp_path / "cache.log", "--listen", address, *cache_options(tmp_path))
    try:
        with (
            engine(model, tmp_path, *caching, "--kv-pages", "64") as a,
            engine(model, tmp_path, *caching, "--kv-pages", "64", "--plan", "tp2") as b,
        ):

            async def scenario() -> None:
                nonlocal cache
                async with session(a.address) as on_a, session(b.address) as on_b:
                    await attached(on_a, True)
                    await attached(on_b, True)
                    made = await on_a.generate(prompt(128), **fields)
                    assert made.phases() == ["engine.queue", "kvcache.lookup", "engine.prefill"]
                    await blocks_stored(address, 2)
                    served = await on_b.generate(prompt(128), **fields)
                    assert served.cached() == (0, 127, 0, 0), "the last token is computed for its logits"
                    assert served.output == made.output
                    spoil_memory(cache)
                    await flush(b.address)
                    unharmed = await on_b.generate(prompt(128), **fields)
                    assert unharmed.cached() == (0, 0, 0, 0), "wrong bytes are a miss"
                    assert unharmed.output == made.output
                    assert await corrupt_blocks(address) >= 1, "and reported"

                    cache.kill()
                    without = await asyncio.gather(
                        *(client.generate(prompt(300, 9), **fields) for client in (on_a, on_b))
                    )
                    assert without[0].output == without[1].output
                    await attached(on_a, False)

                    cache = Service(
                        "katydid_kvcache", tmp_path / "cache-again.log", "--listen", address, *cache_options(tmp_path)
                    )
                    await attached(on_a, True)
                    await flush(a.address)
                    back = await on_a.generate(prompt(128), **fields)
                    assert back.cached() == (0, 0, 127, 0), "from disk"
                    assert back.output == made.output

            run(scenario())
    finally:
        cache.stop()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_evicted_blocks_come_back_and_small_pools_stay_right(tiny: Path, tmp_path: Path) -> None:
    """More prompts than pages: every answer equals the first, whichever tier its prefix came from."""
    with service("katydid_kvcache", tmp_path, *cache_options(tmp_path)) as cache:
        options = ("--kvcache-address", cache.address, "--kv-pages", "16", "--max-model-tokens", "700")
        with engine(tiny, tmp_path, *options, "--staging-mib", "1", "--max-batch-tokens", "96") as one:

            async def scenario() -> None:
                async with session(one.address) as client:
                    await attached(client, True)
                    prompts = [prompt(260, salt) for salt in range(6)]

                    async def ask_all() -> list[Answer]:
                        sent = [client.submit(ids, max_tokens=5, ignore_eos=True) for ids in prompts]
                        await asyncio.gather(*(answer.done.wait() for answer in sent))
                        return sent

                    first = await ask_all()
                    await blocks_stored(cache.address, 24)
                    for _ in range(3):
                        again = await ask_all()
                        assert [answer.output for answer in again] == [answer.output for answer in first]
                    assert sum(sum(answer.cached()[1:]) for answer in again) > 256

            run(scenario())


def test_an_engine_over_two_instances_outlives_one(tiny: Path, tmp_path: Path) -> None:
    """Addresses in a list: blocks are placed, looked up and read by run, and what a dead one had is computed again."""
    fields = {"max_tokens": 5, "temperature": 0.7, "seed": 3, "ignore_eos": True}
    one, two = (Service("katydid_kvcache", tmp_path / f"cache{n}.log", "--listen", "127.0.0.1:0") for n in range(2))
    try:
        source = f"{one.address},{two.address}"
        with engine(tiny, tmp_path, "--kvcache-address", source, "--kv-pages", "64") as served:

            async def scenario() -> None:
                async with session(served.address) as client:
                    await attached(client, True)
                    made = [await client.generate(prompt(130, salt), **fields) for salt in range(2)]
                    await blocks_held((one.address, two.address), 4)
                    await flush(served.address)
                    again = [await client.generate(prompt(130, salt), **fields) for salt in range(2)]
                    assert [answer.output for answer in again] == [answer.output for answer in made]
                    assert [answer.cached()[1] for answer in again] == [128] * 2
                    two.kill()
                    await flush(served.address)
                    last = [await client.generate(prompt(130, salt), **fields) for salt in range(2)]
                    assert [answer.output for answer in last] == [answer.output for answer in made]

            run(scenario())
    finally:
        one.stop()
        two.stop()


# In the order of a request; every sum of some of them differs from every one of them by at least the smallest.
DELAYS_MS = {
    "engine.queue": 300,
    "kvcache.lookup": 150,
    "kvcache.fetch": 450,
    "engine.prefill": 600,
    "engine.decode": 750,
}


def test_delays_show_each_in_its_phase_alone(tiny: Path, tmp_path: Path) -> None:
    """Five delays at once, all different: every phase takes its own and nothing of another's.

    Another's would add at least the smallest delay, every time; a busy machine adds as much in some tries alone.
    """
    delays = ",".join(f"{name.split('.')[1]}:{ms}" for name, ms in DELAYS_MS.items())
    trace_file = tmp_path / "trace.jsonl"
    with service("katydid_kvcache", tmp_path, *cache_options(tmp_path)) as cache:
        options = ("--kvcache-address", cache.address, "--trace-file", str(trace_file), "--fault-delays", delays)
        with engine(tiny, tmp_path, *options) as one:

            async def scenario() -> None:
                async with session(one.address) as client:
                    await attached(client, True)
                    await client.generate(prompt(200), max_tokens=1)
                    await blocks_stored(cache.address, 3)
                    least_over_ms = dict.fromkeys(DELAYS_MS, math.inf)
                    for attempt in range(1, 6):
                        await flush(one.address)
                        trace_id = f"{attempt:032x}"
                        answer = await client.generate(
                            prompt(200), max_tokens=2, traceparent=f"00-{trace_id}-{PARENT_SPAN}-01"
                        )
                        phases = phases_of(answer)
                        for phase in phases:
                            over_ms = phase.duration.ToNanoseconds() / 1e6 - DELAYS_MS[phase.name]
                            assert over_ms > -5, phase
                            least_over_ms[phase.name] = min(over_ms, least_over_ms[phase.name])
                        if max(least_over_ms.values()) < min(DELAYS_MS.values()):
                            break
                    assert max(least_over_ms.values()) < min(DELAYS_MS.values()), least_over_ms
                    expected = {phase.name: [(phase.span_id.hex(), PARENT_SPAN)] for phase in phases}
                    async with asyncio.timeout(20):
                        while (exported := spans(trace_file, trace_id)) != expected:
                            assert exported.keys() <= expected.keys(), exported
                            await asyncio.sleep(0.05)

            run(scenario())


def phases_of(answer: Answer) -> list[pb.TracePhase]:
    """The phases of an answer whose prompt came from the cache service's memory; they leave nothing unexplained."""
    assert answer.first is not None
    assert answer.cached() == (0, 192, 0, 0)
    summary = answer.first.trace
    known = sum(phase.duration.ToNanoseconds() for phase in summary.phases)
    handover = summary.handover.ToNanoseconds()
    assert handover > 0
    assert summary.residence.ToNanoseconds() == pytest.approx(known + handover, abs=1e3)
    phases = [*summary.phases, *answer.end.trace.phases]
    assert [phase.name for phase in phases] == list(DELAYS_MS)
    assert [phase.tier for phase in phases] == ["", "", "memory", "", ""]
    return phases


def spans(trace_file: Path, trace_id: str) -> dict[str, list[tuple[str, str]]]:
    """Ids and parents of a trace's exported spans, by name."""
    found = defaultdict(list)
    for line in trace_file.read_text().splitlines():
        span = json.loads(line)
        if span["trace_id"] == trace_id:
            found[span["name"]].append((span["span_id"], span["parent"]))
    return dict(found)
