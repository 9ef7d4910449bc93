"""Carries out jobs in processes of their own: rows as they come, whatever hangs or fails is ended and told, and what
is left begins anew."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from telling import Rows, Told, missing

__all__ = ["Job", "Processes", "Running", "carry_out"]

Job = dict[str, Any]
"""Of a part, of a plan where it is of one, with what its function takes."""

_LAST_WORDS_S = 2.0


class Running(Protocol):
    """Processes that do some jobs one after another."""

    told: Told

    @property
    def failed(self) -> list[int]:
        """Codes of those that ended in failure."""
        ...

    @property
    def running(self) -> bool: ...

    def end(self) -> None: ...


class Processes:
    """``commands`` side by side, which tell ``told``."""

    def __init__(self, commands: list[list[str]], told: Told, environment: dict[str, str] | None = None) -> None:
        self.told = told
        self._processes = [subprocess.Popen(command, env=environment) for command in commands]

    @property
    def failed(self) -> list[int]:
        return [process.returncode for process in self._processes if process.poll()]

    @property
    def running(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def end(self) -> None:
        """With all that they have started, in sessions of its own as well."""
        found = [pid for process in self._processes if process.poll() is None for pid in _descendants(process.pid)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.kill()
            process.wait()


def carry_out(
    start: Callable[[list[Job], Path], Running],
    todo: list[Job],
    limit_s: Callable[[Job], float],
    until: float,
) -> Iterator[Rows]:
    """Rows of each job; one that fails, or takes longer than its limit, is left out of the next start.

    Args:
        start: processes that do these jobs, with a folder that is theirs.
        until: when all must be over, of the monotonic clock.
    """
    while todo and time.monotonic() < until:
        with tempfile.TemporaryDirectory(prefix="katydid-multigpu-") as folder:
            processes = start(todo, Path(folder))
            told, done, since, why = processes.told, 0, time.monotonic(), ""
            try:
                while not why and processes.running:
                    time.sleep(0.1)
                    if processes.failed:
                        time.sleep(_LAST_WORDS_S)  # the others' tracebacks
                        why = f"ended with {processes.failed}"
                    elif time.monotonic() > min(until, since + limit_s(todo[min(done, len(todo) - 1)])):
                        why = f"no end within {time.monotonic() - since:.0f} s"
                    yield told.new()
                    if told.jobs_done > done:
                        done, since = told.jobs_done, time.monotonic()
            finally:
                processes.end()
            yield told.new()
            if (done := told.jobs_done) < len(todo):
                yield [missing(_name(todo[done]), why or "ended without a word")]
            todo = todo[done + 1 :]
    yield [missing(_name(job), "no time left", met=None) for job in todo]


def _name(job: Job) -> str:
    return ", ".join([job["part"], job["plan"]] if "plan" in job else [job["part"]])


def _descendants(pid: int) -> list[int]:
    """Of a process, itself among them; parents first."""
    found = [pid]
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _descendants(int(child))
    return found
