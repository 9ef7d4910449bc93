"""Plans on several GPUs: first that they are right, then how fast.

    python bench/multigpu/run.py --gpus 8                    writes bench/results/multigpu_8.json
    python bench/multigpu/run.py --gpus 2 --dry              the same over gloo on CPUs, tiny and not written

Parts (``--parts`` for some of them):

    correct    every plan's greedy tokens and logits against one rank's, hy3-tiny
    prefill    TTFT of TP, TP+SP and TP+SP+EP, layers of Hy3 at full width
    decode     a step of TP and of DP+EP, by batch
    rebalance  step times of DP+EP while redundant experts move, and while they do not

Reductions and exchanges alone: ``bench/kernels/allreduce.py``. Lost ranks and hand-off: ``pytest -m soak
tests/engine/test_engine_ranks.py`` and ``tests/engine/test_hand_off.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PARTS = ("correct", "prefill", "decode", "rebalance")
PATIENCE_S = 3600


def jobs(gpus: int, parts: list[str], *, dry: bool) -> list[dict[str, Any]]:
    """What the ranks do, in order; each job is one plan."""
    sp = [f"tp{gpus}", f"tp{gpus},sp", f"tp{gpus},sp,fp8", f"tp{gpus},sp,ep{gpus}", f"tp{gpus},sp,ep{gpus},fp8"]
    dp = f"dp{gpus},ep{gpus}"
    made: list[dict[str, Any]] = []
    if "correct" in parts:
        made += [{"part": "correct", "plan": plan} for plan in (*sp, dp, f"{dp}+{gpus}")]
    if "prefill" in parts:
        lengths = [128, 256] if dry else [8192, 32768, 131072]
        made += [{"part": "prefill", "plan": plan, "tokens": n} for n in lengths for plan in sp]
    if "decode" in parts:
        batches, context = ([2, 4], 64) if dry else ([1, 8, 32, 64, 128, 256], 4096)
        made += [
            {"part": "decode", "plan": plan, "batch": batch, "context": context}
            for batch in batches
            for plan in (f"tp{gpus}", dp)
        ]
    if "rebalance" in parts:
        made.append({"part": "rebalance", "plan": f"{dp}+{gpus}", "batch": 2 if dry else 64, "context": 64})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True, choices=(2, 4, 8))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--layers", type=int, default=8, help="of Hy3 that are built at full width")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    work = {"jobs": jobs(options.gpus, options.parts, dry=options.dry), "layers": options.layers, "dry": options.dry}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        script = str(Path(__file__).with_name("rank.py"))
        arguments = [str(options.gpus), f"file://{folder}/meet", json.dumps(work), str(output)]
        ranks = [subprocess.Popen([sys.executable, script, str(rank), *arguments]) for rank in range(options.gpus)]
        try:
            codes = [rank.wait(PATIENCE_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            sys.exit(f"ranks ended with {codes}")
        rows = json.loads(output.read_text())
    for row in rows:
        print(f"{row['figure']}: {row['value']} {row['unit']} (bar {row['bar']}, met {row['met']})")
    if not options.dry:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        record = {"command": " ".join(sys.argv), "commit": head.stdout.strip(), "layers": options.layers, "rows": rows}
        path = ROOT / "bench" / "results" / f"multigpu_{options.gpus}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
