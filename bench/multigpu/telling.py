"""Rows: how they look, and how processes of a run tell them, one by one, to the one that writes them down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["Rows", "Told", "missing", "row"]

Rows = list[dict[str, Any]]


def row(figure: str, value: float, unit: str, bar: float | None = None, *, most: bool = True) -> dict[str, Any]:
    """``most`` says whether the bar is the most or the least that meets it."""
    met = None if bar is None else bool(value <= bar if most else value >= bar)
    return {"figure": figure, "value": round(value, 5), "unit": unit, "bar": bar, "met": met}


def missing(what: str, why: object, *, met: bool | None = False) -> dict[str, Any]:
    """Of what has no figure; ``met`` is None where it was not tried."""
    told = why if isinstance(why, str) else f"{why!r:.300}"
    return {"figure": f"{what}: {told}", "value": None, "unit": "", "bar": None, "met": met}


class Told:
    """A file that one process writes and another reads: what is told is there however the writer ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.jobs_done = 0

    def tell(self, rows: Rows) -> None:
        self._write([json.dumps(each) for each in rows])

    def job_done(self) -> None:
        """Behind the rows of a job."""
        self._write(["null"])

    def new(self) -> Rows:
        """What was told since the last call; counts jobs that are done."""
        if not self._path.exists():
            return []
        lines = [line for line in self._path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found = [json.loads(line) for line in lines[self._read :]]
        self._read = len(lines)
        self.jobs_done += found.count(None)
        return [each for each in found if each is not None]

    def _write(self, lines: list[str]) -> None:
        with self._path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
