"""Fits the planner's speeds to the measured slice, and holds its predictions against what was left out of the fit.

    python bench/fit_planner.py            reads bench/results/slice.json, rewrites what it fits in planning/h200.json

Every figure is that of one phase: a constant from the step of one request, a rate from the largest step. What is not in
the slice (links, other degrees of TP) stays as it is.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from katydid_engine.parallel import ParallelPlan
from katydid_engine.planning.known_models import KNOWN_MODELS
from katydid_engine.planning.measured import Measured, measured
from katydid_engine.planning.phases import Phases

__all__ = ["fitted", "held_out"]

ROOT = Path(__file__).parents[1]
SLICE = ROOT / "bench" / "results" / "slice.json"
SPEEDS = ROOT / "services" / "engine" / "katydid_engine" / "planning" / "h200.json"
HY3 = KNOWN_MODELS["hy3"]
SPARSE = sum(HY3.sparse_layers)
LAYERS = HY3.num_layers
SOURCE = "bench/results/slice.json: "
DECODE = r"tp8 rank 0, fp8, fp8 KV: decode of {} at {}"
DISPATCHED = r"dp8,ep8 rank 0, fp8, fp8 KV: decode of {} at {}"
FITTED_ROWS = ((16, 32768), (64, 4096))
# Rows and context of the steps that are taken apart.
STEPS = ((1, 8192), (4, 4096), (8, 4096), (16, 4096), (64, 4096))
PROMPT = r"tp8 rank 0, fp8, fp8 KV: prefill of {} tokens in chunks of 32768"
_FEW = 4096
_NAME = re.compile(r"(\S+) rank 0, fp8, fp8 KV: (?:decode of (\d+) at (\d+)|prefill of (\d+) tokens in chunks of \d+)$")

Rows = dict[str, dict[str, Any]]
Points = dict[str, dict[int, float]]


def fitted(rows: Rows) -> tuple[dict[str, tuple[float, str]], Points]:
    """Values with their sources; and by rows the seconds of experts cut eight ways, of a linear beyond its weights, and
    of what is element-wise."""
    one, few, many = (rows[DECODE.format(*case)] for case in ((1, 8192), (16, 4096), (64, 4096)))
    prompt, long = rows[PROMPT.format(32768)], rows[PROMPT.format(131072)]
    wide = rows[DISPATCHED.format(16, 32768)]
    copy = json.loads(SPEEDS.read_text())["speeds"]["copy_bytes_per_s"]["value"]

    def layer(row: dict[str, Any], *phases: str, layers: int = LAYERS) -> float:
        seconds: dict[str, float] = row["phases"]
        return sum(seconds[phase] for phase in phases) / layers

    values: dict[str, tuple[float, str]] = {}
    # K and V of 64 requests at 4K, against those of 16: what a byte takes, and what is left of a launch.
    read_s = (layer(many, "attention") - layer(few, "attention")) / (48 * 4096 * 256)
    attention_s = layer(few, "attention") - read_s * 16 * 4096 * 256
    whole_read_s = (layer(wide, "attention") - attention_s) / (16 * 32768 * 2048)
    values["attention_s"] = attention_s, "attention of 16 and 64 requests at 4K, less what they read"
    values["attention_share_of_copy"] = 1 / (whole_read_s * copy), "attention of dp8,ep8, 16 requests at 32K"
    flop = 4 * HY3.num_heads // 8 * HY3.head_dim * 131072**2 / 2
    values["attention_flop_per_s"] = flop / (layer(long, "attention") - attention_s), "attention of a prompt of 128K"
    products = 4096 * 1280 + 1024 * 4096
    linear_s = (layer(one, "qkv", "output projection") - products / copy) / 2
    rate = 2 * 32768 * products / (layer(prompt, "qkv", "output projection") - 2 * linear_s)
    values["linear_flop_per_s"] = rate, "QKV and output projection of a prompt of 32K"
    values["qkv_post_s"] = layer(one, "qkv post"), "qkv_post of one request"
    values["norm_s"] = layer(few, "norms") / 2, "a norm with quantisation of 16 requests"
    router = layer(few, "router", layers=SPARSE)
    values["norm_router_s"] = router + layer(few, "norms") / 2, "norm, quantisation and router of 16 requests"
    token_s = (layer(prompt, "router", layers=SPARSE) - router) / 32768
    values["router_s_per_token"] = token_s, "router of a prompt of 32K"
    moved = 2 * 32768 * HY3.hidden_size * 7
    through = moved / (layer(prompt, "norms") - layer(few, "norms"))
    values["rows_share_of_copy"] = through / copy, "norms of a prompt of 32K"
    split = rows["tp8,sp,fp8 rank 0, fp8, fp8 KV: prefill of 32768 tokens in chunks of 32768"]
    exchanged = 2 * 32768 * HY3.hidden_size * 5 / layer(split, "exchange")
    values["exchange_share_of_copy"] = exchanged / copy, "sums and norms of a split residual, a prompt of 32K"
    weights = 3 * HY3.hidden_size * 1536
    hit = 24 * (1 - (1 - 8 / 192) ** 128)
    share = json.loads(SPEEDS.read_text())["speeds"]["weights_share_of_copy"]["value"]
    experts_s = layer(wide, "experts", layers=SPARSE) - hit * weights / (copy * share)
    values["experts_s"] = experts_s, "experts of dp8,ep8, 16 requests, less their weights"
    head_bytes = 2 * HY3.vocab_size * HY3.hidden_size / 8
    rest = sum(many["phases"][phase] for phase in ("lm head", "sampling", "other", "gaps", "dense layers"))
    values["head_s"] = max(0.0, rest - head_bytes / copy), "head, sampling, copies and gaps of 64 requests"
    short = rows[PROMPT.format(8192).replace("32768", "8192")]
    steps = {
        batch: rows[DECODE.format(batch, context)] for batch, context in STEPS if DECODE.format(batch, context) in rows
    }
    cases = {**steps, 8192: short, 32768: prompt}
    points = {
        "experts": {tokens: layer(row, "experts", layers=SPARSE) for tokens, row in cases.items()},
        "linear": {n: (layer(row, "qkv", "output projection") - products / copy) / 2 for n, row in steps.items()},
        "element_wise": {n: layer(row, "norms", "router", "qkv post") for n, row in steps.items()},
    }
    return values | _dispatch(rows, values, points), points


def _dispatch(rows: Rows, values: dict[str, tuple[float, str]], points: Points) -> dict[str, tuple[float, str]]:
    """What a layer of two steps that send rows to their experts takes beyond its other parts, and each row of it."""
    known = measured("h200")
    figures = dict(known.figures) | {name: value for name, (value, _) in values.items()}
    speeds = replace(
        known,
        figures=figures | {"dispatch_s": 0.0, "dispatch_s_per_row": 0.0},
        linear=sorted(points["linear"].items()),
        element_wise=sorted(points["element_wise"].items()),
    )
    phases = Phases(HY3, ParallelPlan.parse("dp8,ep8"), speeds)
    (few, few_s), (many, many_s) = (
        (case[0], (rows[DISPATCHED.format(*case)]["value"] - phases.decode(*case).computing) / LAYERS)
        for case in FITTED_ROWS
    )
    row_s = (many_s - few_s) / (many - few)
    told = "steps of dp8,ep8 with 16 and 64 requests, less their other parts"
    return {"dispatch_s": (few_s - few * row_s, told), "dispatch_s_per_row": (row_s, told)}


def held_out(rows: Rows, speeds: Measured) -> list[dict[str, Any]]:
    """Predictions over measured times; ``fitted`` tells rows that the fit has seen."""
    seen = {DECODE.format(*case) for case in STEPS}
    seen |= {PROMPT.format(tokens) for tokens in (32768, 131072)} | {PROMPT.format(8192).replace("32768", "8192")}
    seen |= {DISPATCHED.format(*case) for case in FITTED_ROWS}
    found = []
    for figure, row in rows.items():
        told = _NAME.match(figure)
        if told is None:
            continue
        phases = Phases(HY3, ParallelPlan.parse(told[1]), speeds)
        time = phases.prefill(int(told[4])) if told[4] else phases.decode(int(told[2]), int(told[3]))
        ratio = time.computing / row["value"]
        found.append(
            {
                "figure": f"planner over the slice, {told[0].replace(' rank 0, fp8, fp8 KV', '')}",
                "value": round(ratio, 4),
                "unit": "x",
                "fitted": figure in seen,
                "bar": None if figure in seen else "within 10 %",
                "met": None if figure in seen else abs(ratio - 1) <= 0.1,
            }
        )
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows: Rows = {row["figure"]: row for row in json.loads(SLICE.read_text())["rows"]}
    data = json.loads(SPEEDS.read_text())
    values, points = fitted(rows)
    for name, (value, source) in values.items():
        kind = next(kind for kind in ("speeds", "constants") if name in data[kind])
        data[kind][name] = {"value": float(f"{value:.3g}"), "source": SOURCE + source}
    # Where the slice has no step of a size, the kernel's own benchmark stays; beyond, only what was measured here.
    kept = {tokens: seconds for tokens, seconds in data["sliced_experts"]["8"] if STEPS[-1][0] < tokens <= _FEW}
    data["sliced_experts"]["8"] = _points({**kept, **points["experts"]})
    data["sliced_experts"]["source"] = (
        "by TP degree; tokens against seconds of a layer of Hy3 in fp8. 8: bench/results/slice.json, with the shared "
        "expert among them, but 256 to 4096 tokens; these and others: bench/results/moe.json"
    )
    data["few_rows"] = {
        "source": f"{SOURCE}steps of few rows; rows against seconds of a layer: of a linear, less its weights at copy "
        "speed; of norms, router and qkv_post",
        **{name: _points(points[name]) for name in ("linear", "element_wise")},
    }
    SPEEDS.write_text(_written(data))
    for row in held_out(rows, measured("h200")):
        print(row)


def _points(values: dict[int, float]) -> list[list[float]]:
    return [[rows, float(f"{values[rows]:.4g}")] for rows in sorted(values)]


def _written(data: dict[str, Any]) -> str:
    """A line a figure."""
    text = json.dumps(data, indent=2)
    text = re.sub(r"(?<=[\s\[])\d+\.\d+(?=[,\s\]])", lambda m: _number(float(m[0])), text)
    text = re.sub(r"\{\s+\"value\": (\S+),\s+\"source\": (\".*?\")\s+\}", r'{"value": \1, "source": \2}', text)
    text = re.sub(r"\[\s+([\d.e+-]+),\s+([\d.e+-]+)\s+\]", r"[\1, \2]", text)
    return re.sub(r"\[\s+(\[.*?\])\s+\]", lambda m: "[" + re.sub(r"\s*\n\s*", " ", m[1]) + "]", text, flags=re.S) + "\n"


def _number(value: float) -> str:
    return f"{value:.4g}".replace("e+", "e").replace("e-0", "e-")


if __name__ == "__main__":
    main()
