"""Puts figures of `katydid bench slice` beside their bars: bench/results/slice.json.

    PYTHONPATH=. python bench/slice_results.py FILE...        files of --json; of equal figures the last one's stays

Figures that compare two others (a plan with another, drafts with none, int4 with fp8) or count launches are made here.
The results themselves may be the first FILE: what no other file has stays, with the commit that it is of.
"""

from __future__ import annotations

import re
from typing import Any

from bench.beside_bars import NOTHING, Row, put_beside_bars

VLLM = "vLLM 0.26, fp8 weights and KV, the same slice"
SGLANG = "SGLang 0.5.16, the same slice"
TP8 = r"tp8 rank 0, fp8, fp8 KV: "

# Figures by their beginning: largest seconds, peer and what it takes (least and most, seconds).
BARS: tuple[tuple[str, float | None, str | None, tuple[float, ...] | None], ...] = (
    (TP8 + r"prefill of 8192 tokens in chunks of \d+$", None, VLLM, (0.19, 0.28)),
    (TP8 + r"prefill of 32768 tokens in chunks of \d+$", 0.55, VLLM, (0.94, 1.21)),
    (TP8 + r"prefill of 131072 tokens in chunks of \d+$", 5.0, VLLM, (6.8, 7.0)),
    (TP8 + r"prefill of 131072 tokens in chunks of \d+, 25% of its blocks$", 2.6, VLLM + " (dense)", (6.8, 7.0)),
    (TP8 + r"prefill of 196608 tokens in chunks of \d+, \d+% of its blocks", 3.6, None, None),
    (TP8 + r"all graphs of \d+ sequences", 20.0, None, None),
    (TP8 + r"decode of 1 at 8192$", 0.0030, VLLM, (0.0061, 0.0087)),
    (TP8 + r"decode of 16 at 4096$", 0.0072, SGLANG, (0.0112,)),
    (TP8 + r"decode of 64 at 4096$", 0.0125, SGLANG, (0.0137,)),
)
LAYER_PHASES = (
    "attention",
    "experts",
    "router",
    "norms",
    "qkv",
    "qkv post",
    "output projection",
    "shared expert",
    "dense layers",
)
# Idle time between steps that is allowed; and the share of a step below which it is no bubble.
IDLE_S, BUBBLE = 150e-6, 0.01
# Of the floor that a step must reach at least.
FLOORS = ((r"dp8,ep8 rank 0, fp8, fp8 KV: decode of (16 at 32768|32 at \d+)$", 0.70),)


def barred(row: Row) -> Row:
    """The row with its bar and peer, if it has any."""
    out = NOTHING | row
    for pattern, bar, peer, took in BARS:
        if re.match(pattern, row["figure"]):
            out |= {"bar": bar, "peer": peer, "peer_value": took, "met": None if bar is None else row["value"] <= bar}
    for pattern, share in FLOORS:
        if re.match(pattern, row["figure"]):
            out |= {"bar": f"{share:.0%} of the floor", "met": row["of_floor"] >= share}
    return out


def compared(rows: dict[str, Row]) -> list[Row]:
    """Figures made of two others."""
    made = []
    for tokens in (32768, 131072):
        base = _best(rows, TP8 + rf"prefill of {tokens} tokens in chunks of \d+$")
        for plan, most in (("tp8,sp,fp8", 0.45), ("tp8,sp,ep8,fp8", 0.40)):
            found = _best(rows, rf"{plan} rank 0, fp8, fp8 KV: prefill of {tokens} tokens in chunks of \d+$")
            if base is None or found is None:
                continue
            name = f"prefill of {tokens} tokens, {plan} against tp8"
            is_bar = tokens == 32768
            lower = 100 * (1 - found["value"] / base["value"])
            made.append(_row(f"{name}: computing is lower by", lower, "%", None, True))
            whole = found["value"] + found["links_modelled_s"]
            base_whole = base["value"] + base["links_modelled_s"]
            lower = 100 * (1 - whole / base_whole)
            told = "with transfers by the link model, none overlapped"
            made.append(_row(f"{name}: lower by, {told}", lower, "%", 24.5 if is_bar else None, lower >= 24.5))
            made.append(_row(f"{name}: {told}", whole, "s", most if is_bar else None, whole <= most, tp8=base_whole))
            if "phases" in found and "phases" in base:
                ratio = _row_time(found) / _row_time(base)
                bar_of = 1 / 6 if is_bar and plan == "tp8,sp,fp8" else None
                made.append(_row(f"{name}: norms and router", ratio, "x", bar_of, ratio <= 1 / 6))
    for batch, context in ((1, 8192), (16, 4096), (32, 4096), (64, 4096)):
        plain = rows.get(f"tp8 rank 0, fp8, fp8 KV: decode of {batch} at {context}")
        if plain is None:
            continue
        for drafts, told in ((1, "one draft"), (2, "two drafts"), (3, "three drafts")):
            drafted = rows.get(f"tp8 rank 0, fp8, fp8 KV: decode of {batch} at {context}, {drafts} drafts")
            if drafted is None:
                continue
            gain = drafted["tokens_per_s"] / plain["tokens_per_s"]
            bar = {1: 1.4, 32: 1.2}.get(batch) if drafts == 1 else None
            name = f"{told} of which 70 % count as right, batch {batch} at {context}: tokens a second over none"
            made.append(_row(name, gain, "x", bar, bar is None or gain >= bar))
        if "launches" in plain:
            made.append(_launches(plain, batch, context))
    made += _loops(rows)
    for name, plain in rows.items():
        case = re.match(TP8 + r"decode of (\d+ at \d+)(, \d+ layers)?$", name)
        int4 = rows.get(name.replace("rank 0, fp8", "rank 0, w4a8"))
        if case and int4 is not None:
            gain = 100 * (plain["value"] / int4["value"] - 1)
            figure = f"W4A8 over fp8, batch {case[1]}{case[2] or ''}: tokens a second"
            made.append(_row(figure, gain, "%", 28, gain >= 28))
    return made


def _loops(rows: dict[str, Row]) -> list[Row]:
    """What planning a step ahead wins, where the scheduler plans; and how long the device idles then."""
    made = []
    for name, ahead in rows.items():
        told = re.match(TP8 + r"(scheduler's loop, (batch \d+)(?:, (\d+) drafts)?), a step ahead$", name)
        synchronous = rows.get(name.replace("a step ahead", "synchronous"))
        if told is None or synchronous is None:
            continue
        gain = 100 * (ahead["tokens_per_s"] / synchronous["tokens_per_s"] - 1)
        idle = ahead["idle_s"]
        no_bubble = idle is not None and idle < BUBBLE * ahead["value"]
        bar = ">= 10 %, or no bubble left" if told[2] == "batch 32" and told[3] else None
        row = _row(f"{told[1]}: a step ahead over synchronous, tokens a second", gain, "%", None, True)
        made.append(row | {"bar": bar, "met": None if bar is None else gain >= 10 or no_bubble, "idle_s": idle})
        if idle is not None:
            bar_s = IDLE_S if told[2] == "batch 64" and not told[3] else None
            made.append(_row(f"{told[1]}, a step ahead: idle between steps", idle, "s", bar_s, idle < IDLE_S))
    return made


def _launches(row: Row, batch: int, context: int) -> Row:
    """Of one layer of Hy3's 80; the plan of attention and the final norm, once a step, are no layer's."""
    launches: dict[str, int] = row["launches"]
    each = (sum(launches[phase] for phase in LAYER_PHASES) - 2) // 80
    bar = 8 if batch > 1 else None
    return _row(f"launches of a layer of a decode step, batch {batch} at {context}", each, "", bar, each <= 8)


def _best(rows: dict[str, Row], pattern: str) -> Row | None:
    found = [row for figure, row in rows.items() if re.match(pattern, figure)]
    return min(found, key=lambda row: row["value"], default=None)


def _row_time(row: Row) -> float:
    phases: dict[str, float] = row["phases"]
    return phases["norms"] + phases["router"]


def _row(figure: str, value: float, unit: str, bar: float | None, met: bool, **more: Any) -> Row:
    return {
        "figure": figure,
        "value": round(value, 7),
        "unit": unit,
        **NOTHING,
        "bar": bar,
        "met": None if bar is None else met,
        "derived": True,
        **more,
    }


def main() -> None:
    put_beside_bars(
        __doc__ or "",
        "slice.json",
        "slice_results.py",
        lambda rows: [barred(row) for row in rows.values()] + compared(rows),
    )


if __name__ == "__main__":
    main()
