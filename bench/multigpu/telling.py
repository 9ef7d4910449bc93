"""Rows that the parts tell, and those of what failed."""

from __future__ import annotations

from typing import Any

__all__ = ["Rows", "missing", "row"]

Rows = list[dict[str, Any]]


def row(figure: str, value: float, unit: str, bar: float | None = None, *, most: bool = True) -> dict[str, Any]:
    met = None if bar is None else bool(value <= bar if most else value >= bar)
    return {"figure": figure, "value": round(value, 5), "unit": unit, "bar": bar, "met": met}


def missing(what: str, why: object, *, met: bool | None = False) -> dict[str, Any]:
    """Of a part without a figure; ``met`` is None where it was not tried."""
    told = why if isinstance(why, str) else f"{why!r:.300}"
    return {"figure": f"{what}: {told}", "value": None, "unit": "", "bar": None, "met": met}
