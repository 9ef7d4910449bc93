"""What a calibrated run tells about itself: JSON beside the weights, and a page to look at.

For every layer: the relative error of each product on the calibration rows, rounded to nearest and by the recipe, what
smoothing chose, the calibration tokens of each expert, and the spread of K and V; for the distillation its loss.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from katydid_engine.quantize.walk import LayerResult

__all__ = ["LayerReport", "as_html", "as_json", "layer_report"]


@dataclass(frozen=True)
class LayerReport:
    """One layer's figures; ``errors`` are (recipe, round-to-nearest) by kind of matrix: the rms over experts."""

    layer: int
    errors: dict[str, tuple[float, float]]
    worst: tuple[str, float]
    alphas: dict[str, float]
    expert_tokens: list[int]
    largest_key: float
    largest_value: float
    outliers: dict[str, float]


def layer_report(layer: int, result: LayerResult) -> LayerReport:
    kinds: dict[str, list[tuple[float, float]]] = {}
    for name, pair in result.errors.items():
        kinds.setdefault(_kind(name), []).append(pair)
    errors = {kind: (_rms([a for a, _ in pairs]), _rms([b for _, b in pairs])) for kind, pairs in kinds.items()}
    worst = max(((name, pair[0]) for name, pair in result.errors.items()), key=lambda item: item[1], default=("", 0.0))
    assert result.largest_key is not None
    assert result.largest_value is not None
    return LayerReport(
        layer,
        errors,
        worst,
        {name: round(alpha, 2) for name, alpha in result.alphas.items()},
        list(result.tokens.values()),
        float(result.largest_key.max()),
        float(result.largest_value.max()),
        result.outliers,
    )


def as_json(recipe: Mapping[str, Any], layers: Sequence[LayerReport], losses: Sequence[float]) -> str:
    body = {
        "format": "katydid.quantization-report/1",
        "recipe": recipe,
        "layers": [
            {
                "layer": one.layer,
                "relative_error": {kind: {"recipe": a, "nearest": b} for kind, (a, b) in one.errors.items()},
                "worst_matrix": {"name": one.worst[0], "relative_error": one.worst[1]},
                "smoothing_alpha": one.alphas,
                "expert_tokens": one.expert_tokens,
                "largest_key": one.largest_key,
                "largest_value": one.largest_value,
                "outliers": one.outliers,
            }
            for one in layers
        ],
        "distillation_loss": list(losses),
    }
    return json.dumps(body, indent=1) + "\n"


def as_html(recipe: Mapping[str, Any], layers: Sequence[LayerReport], losses: Sequence[float]) -> str:
    """One page, nothing loaded from elsewhere."""
    kinds = list(dict.fromkeys(kind for one in layers for kind in one.errors))
    seams = list(dict.fromkeys(seam for one in layers for seam in one.outliers))
    parts = [
        _STYLE,
        "<h1>Quantisation report</h1>",
        f"<pre>{html.escape(json.dumps(recipe, indent=1))}</pre>",
        "<h2>Error of each product on the calibration rows</h2>",
        "<p>Relative to its size; dashed: rounded to nearest.</p>" if kinds else "",
    ]
    for kind in kinds:
        pairs = [one.errors.get(kind, (0.0, 0.0)) for one in layers]
        parts.append(_chart(kind, [[a for a, _ in pairs], [b for _, b in pairs]]))
    parts.append("<h2>Outliers: largest channel over the median channel of the rows</h2>")
    parts += [_chart(seam, [[one.outliers.get(seam, 0.0) for one in layers]]) for seam in seams]
    parts.append("<h2>Largest K and V</h2>")
    parts.append(_chart("K", [[one.largest_key for one in layers]]))
    parts.append(_chart("V", [[one.largest_value for one in layers]]))
    if losses:
        parts.append("<h2>Distillation: KL(original || quantised) by step</h2>" + _chart("loss", [list(losses)]))
    return "\n".join(parts) + "\n"


_STYLE = (
    '<!doctype html><meta charset="utf-8"><title>Quantisation report</title><style>'
    "body{font:14px system-ui;max-width:60em;margin:2em auto;color-scheme:light dark}"
    "figure{display:inline-block;margin:.5em}"
    "svg{width:18em;height:9em;border:1px solid #8888}path{fill:none;stroke:#27c;stroke-width:1.5}"
    "path+path{stroke-dasharray:4 3;stroke:#999}</style>"
)


def _chart(title: str, lines: Sequence[Sequence[float]]) -> str:
    """A line a series over layers or steps; from zero."""
    top = max((value for line in lines for value in line if math.isfinite(value)), default=0.0) or 1.0
    paths = []
    for line in lines:
        width = max(1, len(line) - 1)
        points = [f"{100 * index / width:.2f},{50 - 48 * value / top:.2f}" for index, value in enumerate(line)]
        paths.append(f'<path vector-effect="non-scaling-stroke" d="M{" L".join(points)}"/>')
    drawing = f'<svg viewBox="0 0 100 50" preserveAspectRatio="none">{"".join(paths)}</svg>'
    return f"<figure><figcaption>{html.escape(title)} (0 to {top:.4g})</figcaption>{drawing}</figure>"


def _kind(name: str) -> str:
    words = name.split(".")
    expert = "experts" in words
    return f"expert {words[-1]}" if expert else f"shared {words[-1]}" if "shared" in name else words[-1]


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))
