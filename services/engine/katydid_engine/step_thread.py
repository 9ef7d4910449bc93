"""Where steps run: on a thread of their own while the next one is planned, or where they were planned."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

__all__ = ["Inline", "OwnThread", "StepThread"]

P = ParamSpec("P")
T = TypeVar("T")


class StepThread(Protocol):
    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Carries out ``work`` after what was submitted before."""
        ...


class Inline:
    """Carries out work as it is submitted."""

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class OwnThread:
    """One thread; ``prepare`` runs on it first. On a GPU a stream's order takes its place."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._thread = ThreadPoolExecutor(1, "steps", initializer=prepare)

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._thread.submit(work, *args, **kwargs)
