"""One contract for all shared stores: a folder, S3 (moto's server), Redis (a real server), each with real clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from katydid_kvcache.shared.backend import Backend, Outgoing, open_backend
from katydid_kvcache.shared.manifest import Entry, Location
from katydid_kvcache.shared.redis_store import RedisStore
from katydid_runtime.errors import SettingsError
from redis.asyncio import Redis
from xxhash import xxh3_128_digest

from tests.kvcache.inside import key, payload
from tests.kvcache.running import IDENTITY, LAYOUT, run
from tests.kvcache.stores import redis_server, s3_server

pytestmark = pytest.mark.e2e


@pytest.fixture(params=["file", "s3", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ExitStack() as stack:
        if request.param == "s3":
            yield stack.enter_context(s3_server(tmp_path, monkeypatch))[0]
        elif request.param == "redis":
            yield stack.enter_context(redis_server())[0]
        else:
            yield f"file://{tmp_path}/store"


def outgoing(name: int, *, expires_at: float = 0.0, tenant: bytes = b"") -> Outgoing:
    data = payload(name)
    entry = Entry(key(name), key(name - 1) if name > 1 else b"", tenant, expires_at, 7.0, None)
    return Outgoing(entry, xxh3_128_digest(data), name, data)


async def read(store: Backend, entry: Entry) -> bytes:
    into = memoryview(bytearray(LAYOUT.block_bytes))
    assert entry.location is not None
    await store.read(entry.location, into)
    assert xxh3_128_digest(into) == entry.location.checksum
    return bytes(into)


def test_what_one_instance_publishes_another_finds_and_reads(url: str) -> None:
    async def scenario() -> None:
        one, other = open_backend(url, timeout_s=5), open_backend(url, timeout_s=5)
        try:
            assert await other.news(IDENTITY, LAYOUT) == []
            sent = [outgoing(name, tenant=b"t" * 16) for name in (1, 2, 3)]
            entries = await one.publish(IDENTITY, LAYOUT, sent)
            assert await other.news(IDENTITY, LAYOUT) == entries
            for entry, block in zip(entries, sent, strict=True):
                assert (entry.name, entry.parent, entry.tenant) == (block.entry.name, block.entry.parent, b"t" * 16)
                assert await read(other, entry) == block.payload
            assert await other.news(IDENTITY, LAYOUT) == [], "nothing is told twice"
            (late,) = await one.publish(IDENTITY, LAYOUT, [outgoing(4)])
            assert await other.news(IDENTITY, LAYOUT) == [late]
            assert await other.news(b"x" * 32, LAYOUT) == [], "another identity"

            await one.withdraw(IDENTITY, LAYOUT, entries[:2])
            gone = [replace(entry, location=None) for entry in entries[:2]]
            assert await other.news(IDENTITY, LAYOUT) == gone
            await asyncio.sleep(0.005)  # within a millisecond nobody can tell what came first
            (again,) = await other.publish(IDENTITY, LAYOUT, sent[:1])
            fresh = open_backend(url, timeout_s=5)
            told = await fresh.news(IDENTITY, LAYOUT)
            await fresh.close()
            last = {entry.name: entry for entry in told}
            assert [last[entry.name] for entry in entries] == [again, gone[1], entries[2]]
            assert last[late.name] == late
        finally:
            await one.close()
            await other.close()

    run(scenario)


def test_blocks_end_in_the_store_and_are_missed(url: str) -> None:
    async def scenario() -> None:
        store = open_backend(url, timeout_s=5)
        try:
            soon = time.time() + 0.3
            short, long = await store.publish(IDENTITY, LAYOUT, [outgoing(1, expires_at=soon)]), None
            (long,) = await store.publish(IDENTITY, LAYOUT, [outgoing(2)])
            await store.renew(IDENTITY, long.name, time.time() + 60)
            await asyncio.sleep(0.4)
            await store.clean(time.time())
            with pytest.raises(FileNotFoundError):
                await read(store, short[0])
            assert await read(store, long) == payload(2)
        finally:
            await store.close()

    run(scenario)


def test_redis_does_not_tell_of_keys_that_it_evicted() -> None:
    async def scenario() -> None:
        with redis_server() as (url, _):
            one, other = open_backend(url, timeout_s=5), open_backend(url, timeout_s=5)
            entries = await one.publish(IDENTITY, LAYOUT, [outgoing(1), outgoing(2)])
            assert entries[0].location is not None
            async with Redis.from_url(url) as direct:
                await direct.delete(bytes.fromhex(entries[0].location.object))
            assert await other.news(IDENTITY, LAYOUT) == entries[1:]
            await one.close()
            await other.close()

    run(scenario)


def test_a_store_that_is_not_there_is_an_oserror(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")

    async def scenario() -> None:
        for url in ("redis://127.0.0.1:9/0", "s3://bucket/cache"):
            store = open_backend(url, timeout_s=1)
            for call in (
                store.publish(IDENTITY, LAYOUT, [outgoing(1)]),
                store.news(IDENTITY, LAYOUT),
                store.read(Location("00", 0, b"", 0), memoryview(bytearray(8))),
            ):
                with pytest.raises(OSError):
                    await call
            await store.close()

    run(scenario)


@pytest.mark.parametrize("url", ["ftp://somewhere", "bucket", "s3://", "redis://host:port/0"])
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        open_backend(url, timeout_s=1)
    assert caught.value.field == "shared_url"


def test_redis_tells_again_what_a_failure_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        with redis_server() as (url, _):
            one, other = RedisStore(url, timeout_s=5), RedisStore(url, timeout_s=5)
            entries = await one.publish(IDENTITY, LAYOUT, [outgoing(1), outgoing(2)])
            with monkeypatch.context() as broken:

                async def fail(_entries: list[Entry]) -> list[Entry]:
                    raise OSError("the connection broke between the two questions")

                broken.setattr(other, "_still_there", fail)
                with pytest.raises(OSError, match="broke"):
                    await other.news(IDENTITY, LAYOUT)
            assert await other.news(IDENTITY, LAYOUT) == entries
            assert await other.news(IDENTITY, LAYOUT) == [], "and once is enough"
            await one.close()
            await other.close()

    run(scenario)
