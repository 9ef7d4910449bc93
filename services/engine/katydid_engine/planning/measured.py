"""Speeds of one kind of GPU and its links, as measured; every figure has its source beside it in the data file."""

from __future__ import annotations

import importlib.resources
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from katydid_runtime.errors import SettingsError

__all__ = ["GPUS", "Measured", "measured"]

GPUS = ("h200",)
# Of Hy3, whose experts were measured.
_EXPERTS, _CHOSEN = 192, 8


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of GPU.

    Attributes:
        figures: by name, in bytes, FLOP and seconds.
        assumed: names of those that nobody measured.
        sliced_experts: by TP degree, points of (tokens, seconds) of one layer's experts.
        linear, element_wise: points of (rows, seconds): what a linear takes beyond reading its weights, and what norms,
            router and qkv_post of a layer take, in steps of few rows.
    """

    gpu: str
    memory_bytes: int
    figures: Mapping[str, float]
    assumed: tuple[str, ...]
    sliced_experts: Mapping[int, Sequence[tuple[float, float]]]
    linear: Sequence[tuple[float, float]]
    element_wise: Sequence[tuple[float, float]]

    def __getitem__(self, name: str) -> float:
        return self.figures[name]

    def sliced_experts_s(self, tp: int, tokens: float) -> float:
        """Of a layer of Hy3 cut by column over ``tp`` ranks: between points by how many experts are read, or by powers
        of tokens where all are; beyond the last in proportion."""
        return _between(self.sliced_experts[tp], tokens)

    def linear_s(self, rows: float) -> float:
        """Between points, and beyond them, along a line: other kernels take other numbers of rows."""
        return _along(self.linear, rows)

    def element_wise_s(self, rows: float) -> float:
        """Likewise."""
        return _along(self.element_wise, rows)


def measured(gpu: str) -> Measured:
    """Raises SettingsError for a GPU that was not measured."""
    if gpu not in GPUS:
        raise SettingsError(
            f"gpu={gpu!r}: there are speeds of {', '.join(GPUS)}", field="gpu", value=gpu, allowed=", ".join(GPUS)
        )
    text = importlib.resources.files("katydid_engine.planning").joinpath(f"{gpu}.json").read_text()
    data: dict[str, Any] = json.loads(text)
    entries = {**data["speeds"], **data["constants"], **data["links"]}
    return Measured(
        data["gpu"],
        data["memory_bytes"],
        {name: float(entry["value"]) for name, entry in entries.items()},
        tuple(name for name, entry in entries.items() if entry["source"].startswith("ASSUMED")),
        {int(tp): points for tp, points in data["sliced_experts"].items() if tp != "source"},
        data["few_rows"]["linear"],
        data["few_rows"]["element_wise"],
    )


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    x = max(x, points[0][0])
    if x >= points[-1][0]:
        return points[-1][1] * x / points[-1][0]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            first, here, last = map(_read, (x0, x, x1))
            if last - first > 1:
                return y0 + (y1 - y0) * (here - first) / (last - first)
            return y0 * math.exp(math.log(y1 / y0) * math.log(x / x0) / math.log(x1 / x0))
    raise AssertionError


def _along(points: Sequence[tuple[float, float]], x: float) -> float:
    x = max(x, points[0][0])
    pairs = list(itertools.pairwise(points))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if x <= pair[1][0]), pairs[-1])
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _read(tokens: float) -> float:
    """Distinct experts that so many tokens choose evenly."""
    unread: float = (1 - _CHOSEN / _EXPERTS) ** tokens
    return _EXPERTS * (1 - unread)
