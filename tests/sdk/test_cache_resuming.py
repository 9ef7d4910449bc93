"""Which streams to the cache service are followed by another."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from katydid_cache import resuming
from katydid_cache.resuming import Resuming, failure_of
from katydid_runtime.errors import ConflictError, DataCorruptError, KatydidError, UnavailableError

BROKEN = UnavailableError("cut")
GONE = ConflictError("there is no such attachment", field="attachment")


def followed(*ends: tuple[KatydidError, bool]) -> list[bool]:
    async def again() -> int:
        return 7

    async def scenario() -> list[bool]:
        one = Resuming(again)
        return [await one.after(failure, moved=moved) == 7 for failure, moved in ends]

    return asyncio.run(scenario())


def test_what_moved_something_and_for_a_moment_what_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "RESUME_S", 20.0)
    assert followed((BROKEN, True), (BROKEN, False), (GONE, False), (BROKEN, True)) == [True] * 4
    monkeypatch.setattr(resuming, "RESUME_S", 0.0)
    assert followed((BROKEN, True)) == [False]


def test_nothing_that_never_moved_nor_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "RESUME_S", 20.0)
    assert followed((BROKEN, False), (GONE, False)) == [False, False]
    others = (DataCorruptError("odd"), ConflictError("busy", field="index"))
    assert followed((BROKEN, True), *((other, True) for other in others)) == [True, False, False]


def test_a_call_that_ended_under_its_write_has_lost_its_connection() -> None:
    metadata = grpc.aio.Metadata()
    for status, details in ((grpc.StatusCode.INTERNAL, "Internal error from Core"), (grpc.StatusCode.UNAVAILABLE, "x")):
        assert isinstance(failure_of(grpc.aio.AioRpcError(status, metadata, metadata, details)), UnavailableError)
    other = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, metadata, metadata, "a defect")
    assert not isinstance(failure_of(other), UnavailableError)
