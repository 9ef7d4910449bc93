"""Counts what the cache costs the worker of an engine: CPU time of its step loop, in all and for the cache.

Python loads this by its name in every process that finds it on its path; `bench/kvcache_reuse.py` puts it on an
engine's. In a worker it wraps what exists for the cache alone (tickets and slots, packing with checksums, messages
that carry any of it, steps that compute nothing) and writes both totals, in seconds of CPU time of that thread, into
the file that KVCACHE_CLOCK names. Where a call is only partly for the cache, all of it counts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

_WRITE_S = 0.1
_Function = Callable[..., Any]


class _Clock:
    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._cache_s = 0.0
        self._written_at = 0.0

    def counted(
        self, function: _Function, is_for_cache: Callable[[Any, Any], bool] = lambda _args, _result: True
    ) -> _Function:
        """`function`, whose time counts where `is_for_cache` says so of its arguments and its result."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before, started = self._cache_s, time.thread_time()
            result = function(*args, **kwargs)
            if is_for_cache(args, result):
                # In place of what was counted inside, which is part of it.
                self._cache_s = before + time.thread_time() - started
            return result

        return call

    def passed(self, function: _Function) -> _Function:
        """`function`, within which others are counted; afterwards the totals are written."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if time.monotonic() - self._written_at > _WRITE_S:
                self._written_at = time.monotonic()
                temporary = self._path.with_suffix(".new")
                temporary.write_text(json.dumps({"cache_s": self._cache_s, "all_s": time.thread_time()}))
                temporary.replace(self._path)
            return result

        return call


def _install(clock: _Clock) -> None:
    from katydid_engine.channel import BlockingChannel
    from katydid_engine.kv_traffic import KvTraffic
    from katydid_engine.messages import KvArrived, KvFound, KvGranted, KvWriteSlotsFree, SetKv
    from katydid_engine.page_mover import PageMover
    from katydid_engine.step_loop import StepLoop

    of_cache = (KvArrived, KvFound, KvGranted, KvWriteSlotsFree, SetKv)
    for whole in (KvTraffic, PageMover):
        for name, method in vars(whole).items():
            if callable(method) and not name.startswith("_"):
                setattr(whole, name, clock.counted(method))

    def count(owner: type, name: str, is_for_cache: Callable[[Any, Any], bool]) -> None:
        setattr(owner, name, clock.counted(getattr(owner, name), is_for_cache))

    count(StepLoop, "_take", lambda args, _: isinstance(args[1], of_cache))
    count(StepLoop, "_carry_out", lambda args, _: not args[1].runs)
    count(BlockingChannel, "receive", lambda _, got: any(isinstance(message, of_cache) for message in got or ()))
    count(BlockingChannel, "send", lambda args, _: bool(getattr(args[1], "kv", ())))
    StepLoop._report = clock.passed(StepLoop._report)  # type: ignore[method-assign]


if "katydid_engine.worker" in sys.orig_argv and (path := os.environ.get("KVCACHE_CLOCK")):
    _install(_Clock(path))
