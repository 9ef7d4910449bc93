"""One fleet for all tests of this folder: starting it takes seconds, and every test must leave it whole and idle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fleet import MODEL, Fleet, running_fleet
from tests.tiny_model import write_tiny_model

# Small enough that sixty-four requests queue, are preempted, and evict each other's blocks.
SMALL = ("--kv-pages", "96", "--max-sequences", "16", "--stall-timeout-s", "3")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="session")
def _fleet(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tiny, tmp_path_factory.mktemp("fleet"), engine_options=SMALL) as fleet:
        yield fleet


@pytest.fixture
def fleet(_fleet: Fleet) -> Iterator[Fleet]:
    """Whole before the test; after it, whole and idle again, with no error logged that the test did not expect."""
    for process in _fleet.processes:
        process.revive()
    asyncio.run(_fleet.whole())
    before = [len(process.complaints()) for process in _fleet.processes]
    _fleet.expected_errors.clear()
    yield _fleet
    for process in _fleet.processes:
        process.thaw()

    async def settle() -> None:
        await _fleet.whole()
        await _fleet.idle()

    asyncio.run(settle())
    for process, known in zip(_fleet.processes, before, strict=True):
        errors = process.complaints()[known:]
        assert [error for error in errors if error["message"] not in _fleet.expected_errors] == []
