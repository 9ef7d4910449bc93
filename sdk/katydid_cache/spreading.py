"""Copies runs from instance to instance beside everything else: hot ones to a second home, stray ones to their own.

The instances move the bytes (a pull); here is only who asks whom, a few at a time. What does not fit is dropped: a run
that matters is asked for again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from katydid_cache.client import CacheClient

__all__ = ["Spreading"]

_WAITING = 16
_AT_A_TIME = 2
_DEADLINE_S = 10.0

logger = logging.getLogger(__name__)


class Spreading:
    """At most `_AT_A_TIME` pulls at a time, `_WAITING` beside."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(_AT_A_TIME)
        self._tasks: dict[tuple[bytes, str], asyncio.Task[None]] = {}

    def copy(
        self,
        run: bytes,
        hashes: bytes,
        parents: bytes,
        *,
        source: str,
        target: str,
        client: CacheClient,
        done: Callable[[], None],
    ) -> None:
        """Have `client`, that of `target`, pull the blocks of `run` from `source`; `done` is called if it has them."""
        key = (run, target)
        if key in self._tasks or len(self._tasks) >= _WAITING:
            return
        task = asyncio.create_task(self._pull(hashes, parents, source, target, client, done))
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pull(
        self, hashes: bytes, parents: bytes, source: str, target: str, client: CacheClient, done: Callable[[], None]
    ) -> None:
        async with self._turns:
            result = await client.pulls.pull(source, hashes, parents=parents, deadline_s=_DEADLINE_S)
            if result.pulled or result.present:
                done()
            logger.info(
                "run copied to another instance",
                extra={"source": source, "target": target, "pulled": result.pulled, "missed": result.missed},
            )
