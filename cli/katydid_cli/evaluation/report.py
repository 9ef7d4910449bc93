"""Results of several configurations as one JSON document and as a table that puts them side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from katydid_cli.evaluation.figures import Figure, Loss, loss

FORMAT = "katydid.eval/1"


@dataclass(frozen=True)
class Result:
    """The figures of one named configuration."""

    configuration: str
    options: list[str]
    figures: list[Figure]


def as_json(model: str, results: Sequence[Result]) -> str:
    """The JSON document of `katydid eval`: format, model, and per configuration its engine options and figures."""
    body: dict[str, Any] = {"format": FORMAT, "model": model, "results": [asdict(r) for r in results]}
    return json.dumps(body, indent=1) + "\n"


def rows(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table, a column for each configuration.

    A cell is the value and half of its 95 % interval, or what is lost against the first configuration, in per cent,
    with the 95 % interval of that.
    """
    names = list(dict.fromkeys(f.name for r in results for f in r.figures))
    by_name = [{f.name: f for f in r.figures} for r in results]
    table = []
    for name in names:
        first = by_name[0].get(name)
        unit = next(f[name].unit for f in by_name if name in f)
        cells = []
        for figures in by_name:
            f = figures.get(name)
            if f is None:
                cells.append("-")
                continue
            lost = None if first is None or f is first else loss(first, f)
            noise = f"±{(f.high - f.low) / 2:.4f}"
            cells.append(f"{f.value:.4f} " + (noise if lost is None else _lost(lost)))
        table.append([name, unit, *cells])
    return ["figure", "unit", *(r.configuration for r in results)], table


def _lost(lost: Loss) -> str:
    percent, low, high = (round(value, 2) + 0.0 for value in (lost.percent, lost.low, lost.high))  # no minus before 0
    return f"({percent:+.2f} % [{low:+.2f}, {high:+.2f}])"


def as_table(results: Sequence[Result]) -> str:
    """The table in Markdown."""
    header, body = rows(results)
    widths = [max(len(row[i]) for row in [header, *body]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    legend = ["", f"In brackets: % lost against {results[0].configuration}, with its 95 % interval; a minus is a gain."]
    lines = [line(header), line(["-" * w for w in widths]), *map(line, body), *(legend if len(results) > 1 else [])]
    return "\n".join(lines) + "\n"
