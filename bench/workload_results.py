"""Puts figures of `katydid bench workload` beside their bars: bench/results/workload.json.

    PYTHONPATH=. python bench/workload_results.py FILE...        files of --json; of equal figures the last one's stays

The largest load that holds, of each kind of simulated rows, is found here.
"""

from __future__ import annotations

import re

from bench.beside_bars import NOTHING, Row, put_beside_bars

SHARE = 0.95
GAP_S = 0.050


def barred(row: Row) -> Row:
    """The row with its bar, if it has any."""
    out = NOTHING | row
    if re.match(r"p99 between tokens of 32 streams", row["figure"]):
        out |= {"bar": GAP_S, "met": row["value"] is not None and row["value"] <= GAP_S}
    return out


def sustained(rows: list[Row]) -> list[Row]:
    """The largest load of each kind at which enough requests meet their targets."""
    kinds: dict[tuple[str, str], list[tuple[float, Row]]] = {}
    for row in rows:
        if told := re.match(r"simulated, ([\d.]+) requests a second offered(.*?): (TTFT .*)", row["figure"]):
            kinds.setdefault((told[2], told[3]), []).append((float(told[1]), row))
    made = []
    for (kind, targets), loads in kinds.items():
        held = [(rate, row) for rate, row in loads if row["value"] >= SHARE]
        if len(loads) == 1 and not held:
            continue  # less was not tried
        best_rate, best = max(held or loads, key=lambda load: load[0] if held else load[1]["value"])
        figure = f"most requests a second offered of which {SHARE:.0%} hold {targets}{kind}"
        more = {key: best[key] for key in ("requests_per_s", "ttft_s", "tpot_s", "prompt_mean", "cached_share")}
        best_row = barred({"figure": figure, "value": best_rate if held else 0.0, "unit": "requests/s"})
        bar = {"bar": f"{SHARE:.0%} at the load that is told", "met": bool(held), "share": best["value"]}
        made.append(best_row | bar | {"derived": True} | more)
    return made


def main() -> None:
    put_beside_bars(
        __doc__ or "",
        "workload.json",
        "workload_results.py",
        lambda rows: [barred(row) for row in rows.values()] + sustained(list(rows.values())),
    )


if __name__ == "__main__":
    main()
