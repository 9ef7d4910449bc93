"""Engines beside a cache service: blocks move between them, and what happens to the service reaches no answer."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
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

TRACEPARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


def cache_options(folder: Path) -> tuple[str, ...]:
    return ("--disk-path", str(folder / "disk"), "--disk-bytes", str(64 << 20), "--memory-bytes", str(64 << 20))


async def blocks_stored(address: str, blocks: int) -> None:
    """Waits until the service holds so many blocks, on disk."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(20):
        stats = KvCacheServiceStub(channel).Stats
        while max((tier.blocks for tier in (await stats(kvcache_pb2.StatsRequest())).tiers), default=0) < blocks:
            await asyncio.sleep(0.02)
        await CacheAdminStub(channel).Flush(kvcache_pb2.FlushRequest())


async def flush(engine_address: str) -> None:
    async with grpc.aio.insecure_channel(engine_address) as channel:
        await AdminServiceStub(channel).Flush(pb.FlushRequest())


async def attached(client: SessionClient, wanted: bool) -> None:
    async with asyncio.timeout(20):
        while (await client.stub.Describe(pb.DescribeRequest())).kv_cache_attached is not wanted:
            await asyncio.sleep(0.05)


def test_blocks_move_between_engines_and_survive_the_service(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    fields = {"max_tokens": 6, "temperature": 0.7, "seed": 3, "ignore_eos": True}
    cache = Service("katydid_kvcache", tmp_path / "cache.log", "--listen", "127.0.0.1:0", *cache_options(tmp_path))
    address = cache.address
    try:
        with (
            engine(model, tmp_path, "--kvcache-address", address, "--kv-pages", "64") as a,
            engine(model, tmp_path, "--kvcache-address", address, "--kv-pages", "64", "--tp", "2") as b,
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


DELAYS_MS = {
    "engine.queue": 300,
    "kvcache.lookup": 150,
    "kvcache.fetch": 450,
    "engine.prefill": 600,
    "engine.decode": 750,
}


def test_delays_show_each_in_its_phase_alone(tiny: Path, tmp_path: Path) -> None:
    """Five delays at once, all different: every phase takes its own and nothing of another's."""
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
                    await flush(one.address)
                    answer = await client.generate(prompt(200), max_tokens=2, traceparent=TRACEPARENT)
                    assert answer.first is not None
                    assert answer.cached() == (0, 192, 0, 0)
                    phases = [*answer.first.trace.phases, *answer.end.trace.phases]
                    assert [phase.name for phase in phases] == list(DELAYS_MS)
                    for phase in phases:
                        over_ms = phase.duration.ToNanoseconds() / 1e6 - DELAYS_MS[phase.name]
                        assert -5 < over_ms < 100, (phase.name, over_ms)
                    assert [phase.tier for phase in phases] == ["", "", "memory", "", ""]
                    summary = answer.first.trace
                    known = sum(phase.duration.ToNanoseconds() for phase in summary.phases)
                    handover = summary.handover.ToNanoseconds()
                    assert 0 < handover < 100e6
                    assert summary.residence.ToNanoseconds() == pytest.approx(known + handover, abs=1e3)
                    await asyncio.sleep(0.6)
                    check_spans(trace_file, {phase.name: phase.span_id.hex() for phase in phases})

            run(scenario())


def check_spans(trace_file: Path, expected: dict[str, str]) -> None:
    exported = defaultdict(list)
    for line in trace_file.read_text().splitlines():
        span = json.loads(line)
        if span["trace_id"] == TRACEPARENT.split("-")[1]:
            exported[span["name"]].append((span["span_id"], span["parent"]))
    assert exported == {name: [(span_id, TRACEPARENT.split("-")[2])] for name, span_id in expected.items()}
