"""How long a service that does not answer is left alone, and what is said of one that cannot be joined."""

from __future__ import annotations

import errno
import socket
from hashlib import sha256
from pathlib import Path

import pytest
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_cache import CacheClient, attachment
from katydid_cache.attachment import Attachment
from katydid_cache.local_calls import LocalCalls
from katydid_runtime.errors import UnauthenticatedError, UnavailableError

from tests.kvcache.running import IDENTITY, LAYOUT, ServiceProcess, run


def test_calls_that_time_out_together_count_as_the_three_that_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(attachment.time, "monotonic", lambda: now[0])
    joined = Attachment(None, pb.AttachRequest(), "host:1")
    joined._id = 7
    for _ in range(20):
        joined.timed_out()
    assert not joined.usable
    now[0] += 1.0
    assert joined.usable, "twenty calls under way when it hung are no reason to leave it alone for eight times as long"
    joined.timed_out()
    now[0] += 1.9
    assert not joined.usable
    now[0] += 0.1
    assert joined.require() == 7


@pytest.mark.e2e
def test_a_token_that_is_refused_is_no_service_that_does_not_answer(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"engine read,write {sha256(b'right').hexdigest()}\n")

    async def scenario() -> None:
        with ServiceProcess(tokens_file=tokens) as service:
            async with CacheClient(service.address, token="wrong") as cache:
                with pytest.raises(UnauthenticatedError, match="not known here"):
                    await cache.attach(IDENTITY, LAYOUT, timeout_s=20)
            async with CacheClient(service.address, degrade=True) as cache:
                assert not await cache.attach(IDENTITY, LAYOUT, timeout_s=0.5)
            async with CacheClient("127.0.0.1:1") as cache:
                with pytest.raises(UnavailableError, match="Connection refused"):
                    await cache.attach(IDENTITY, LAYOUT, timeout_s=0.5)

    run(scenario)


@pytest.mark.e2e
def test_a_client_goes_on_trying_when_its_own_process_has_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter([True])
    original = LocalCalls.over

    async def over(connected: socket.socket) -> LocalCalls:
        if next(calls, False):
            connected.close()
            raise OSError(errno.EMFILE, "Too many open files")
        return await original(connected)

    monkeypatch.setattr(LocalCalls, "over", over)

    async def scenario() -> None:
        with ServiceProcess(listen=f"unix:{tmp_path}/cache.sock") as service:
            async with CacheClient(service.address) as cache:
                assert await cache.attach(IDENTITY, LAYOUT, arena=True, timeout_s=10)
                assert cache.arena is not None

    run(scenario)
