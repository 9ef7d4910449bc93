"""Puts figures of `katydid bench workload` beside their bars: bench/results/workload.json.

    python bench/workload_results.py FILE...        files of --json; of equal figures the last one's stays

The largest load that holds, of each kind of simulated rows, is found here.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "workload.json"
SHARE = 0.95
GAP_S = 0.050

Row = dict[str, Any]


def barred(row: Row) -> Row:
    """The row with its bar, if it has any."""
    out: Row = {"floor": None, "peer": None, "peer_value": None, "bar": None, "met": None} | row
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
        made.append(
            barred({"figure": figure, "value": best_rate if held else 0.0, "unit": "requests/s"})
            | {"bar": f"{SHARE:.0%} at the load that is told", "met": bool(held), "share": best["value"], **more}
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT)
    record: dict[str, Any] = {
        "commit": options.commit or head.stdout.strip(),
        "command": "python bench/workload_results.py",
    }
    rows: dict[str, Row] = {}
    for path in options.files:
        told = json.loads(path.read_text())
        record |= {key: told[key] for key in ("gpu", "versions", "step_times") if key in told}
        rows |= {row["figure"]: row for row in told["rows"]}
    record["rows"] = [barred(row) for row in rows.values()] + sustained(list(rows.values()))
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    for row in record["rows"]:
        print(f"{row['figure']}: {row['value']} {row['unit']} (bar {row['bar']}, met {row['met']})")


if __name__ == "__main__":
    main()
