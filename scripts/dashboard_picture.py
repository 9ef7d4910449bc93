"""A Grafana dashboard as a picture: its panels on its grid, drawn with matplotlib from what Prometheus answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["draw_dashboard"]

COLOURS = ("#2e9e5b", "#2b8fb3", "#d98e32", "#7a5fb0", "#c65a4b", "#6f7fbf", "#5b7f2a", "#b0548f", "#8a938d", "#c9a227")
_CELL_INCHES = 0.62, 0.36
_SCALES = {
    "s": (("s", 1.0), ("ms", 1e3)),
    "percentunit": (("%", 100.0),),
    "bytes": (("MB", 1e-6),),
    "Bps": (("MB/s", 1e-6),),
}

Query = Callable[[str], list[dict[str, Any]]]


def draw_dashboard(board: dict[str, Any], query: Query, path: Path) -> None:
    """`query` gives the series of an expression, as Prometheus' query_range does."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    width, height = 24 * _CELL_INCHES[0], rows * _CELL_INCHES[1] + 0.5
    figure = plt.figure(figsize=(width, height), dpi=80)
    figure.suptitle(board["title"], x=0.01, y=1 - 0.12 / height, ha="left", va="top", fontsize=13, fontweight="bold")
    for panel in board["panels"]:
        place = panel["gridPos"]
        inner = (place["x"] + 1.6, rows - place["y"] - place["h"] + 1.3, place["w"] - 2.2, place["h"] - 2.6)
        box = (inner[0] / 24, inner[1] * _CELL_INCHES[1] / height, inner[2] / 24, inner[3] * _CELL_INCHES[1] / height)
        axes = figure.add_axes(box)
        axes.set_title(panel["title"], fontsize=9, loc="left")
        series = [
            (_legend(target["legendFormat"], one["metric"]), one["values"])
            for target in panel["targets"]
            for one in query(target["expr"])
        ]
        lines = [(name, *_numbers(values)) for name, values in series]
        lines = [line for line in lines if line[2]]
        unit, scale = _unit(panel, [value for _, _, values in lines for value in values])
        if panel["type"] == "timeseries":
            _draw_lines(axes, panel, lines, unit, scale)
        else:
            _draw_values(axes, panel, lines, unit, scale)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _draw_lines(
    axes: Any, panel: dict[str, Any], lines: list[tuple[str, list[float], list[float]]], unit: str, scale: float
) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    start = min((times[0] for _, times, _ in lines), default=0.0)
    base: dict[float, float] = {}
    for (name, times, values), colour in zip(lines, COLOURS * 9, strict=False):
        minutes = [(at - start) / 60 for at in times]
        lower = [base.get(at, 0.0) for at in times]
        upper = [value * scale + (low if stacked else 0.0) for value, low in zip(values, lower, strict=True)]
        if stacked:
            axes.fill_between(minutes, lower, upper, color=colour, alpha=0.7, label=name, linewidth=0)
            base.update(zip(times, upper, strict=True))
        else:
            axes.plot(minutes, upper, color=colour, label=name, linewidth=1.2)
    if lines:
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=6, loc="upper left", ncols=2, framealpha=0.6)
    else:
        axes.text(0.5, 0.5, "no data", ha="center", va="center", transform=axes.transAxes, color="#8a938d")
    axes.set_ylabel(unit, fontsize=7)
    axes.set_xlabel("minutes", fontsize=6, loc="right", labelpad=0)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)


def _draw_values(
    axes: Any, panel: dict[str, Any], lines: list[tuple[str, list[float], list[float]]], unit: str, scale: float
) -> None:
    latest = [(name, values[-1] * scale) for name, _, values in lines]
    if panel["type"] == "stat":
        axes.axis("off")
        text = f"{latest[0][1]:.4g} {unit}" if latest else "no data"
        axes.text(
            0.0,
            0.5,
            text,
            fontsize=18,
            va="center",
            color=COLOURS[0] if latest else "#8a938d",
            transform=axes.transAxes,
        )
        return
    names = [name for name, _ in latest][-14:]
    axes.barh(names, [value for _, value in latest][-14:], color=COLOURS[0])
    axes.set_xlabel(unit, fontsize=7)
    axes.tick_params(labelsize=6)


def _numbers(values: list[list[Any]]) -> tuple[list[float], list[float]]:
    """Times and values without what is no number."""
    known = [(float(at), float(text)) for at, text in values if text not in ("NaN", "+Inf", "-Inf")]
    return [at for at, _ in known], [value for _, value in known]


def _unit(panel: dict[str, Any], values: list[float]) -> tuple[str, float]:
    """What to write on the axis, and the factor to it."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    choices = _SCALES.get(unit, (({"reqps": "/s", "celsius": "C"}.get(unit, ""), 1.0),))
    return choices[-1] if values and max(values) < 1 else choices[0]


def _legend(template: str, labels: dict[str, str]) -> str:
    """Grafana's legend: {{label}} is replaced."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template) or "value"
