"""Measures the GEMM kernels and routed experts against their bars on one Hopper GPU, beside cuBLAS in the same run.

    PYTHONPATH=kernels:bench/kernels python bench/kernels/gemm.py --out bench/results

Each part is a process of its own, so a part that hangs or fails takes nothing else with it. Parts compile and check
side by side, then take turns at the GPU; one whose kernels do not match float64 reports no speed. A row a bar goes to
``gemm.json`` and ``moe.json``; errors, times of single launches and tiles beside each other to ``gemm_parts.json``.

With ``--peers DIR``, which holds vLLM and FlashInfer in ``vllm`` and ``fi`` and DeepGEMM in ``dg``, they are timed in
the same run; ``--search`` looks for the configurations of vLLM's Triton experts first and keeps them. With
``--earlier FILE``, a ``gemm_parts.json``, the peers of that run stand in for those that are not there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from results_file import write_rows

Found = dict[str, dict[str, Any]]
SHARD_NAMES = (
    "TP8", "EP8", "bf16 TP8", "TP4", "TP2", "TP1", "Qwen3-30B-A3B", "Qwen3-235B-A22B TP2", "blocks EP8",
    "blocks Qwen3-30B-A3B",
)  # fmt: skip
GROUPS = {
    "gemm": ("bf16", "fp8 promoted", "fp8", "fp8 blocks", "few rows"),
    "moe": (*(f"experts {shard}" for shard in SHARD_NAMES), "layer", "rows", "tiles TP8", "tiles EP8", "odd shapes"),
}
PEER_PARTS = ("triton TP8", "triton EP8", "cutlass TP8", "cutlass EP8", "deepgemm")


def part(name: str) -> dict[str, Any]:
    """Run one part in this process."""
    kind, _, rest = name.partition(" ")
    if name in PEER_PARTS or kind == "search":
        import moe_peers

        return moe_peers.deepgemm() if kind == "deepgemm" else getattr(moe_peers, kind)(rest)
    from gemm_cases import dense, few_rows
    from layer_cases import layer
    from moe_cases import experts, odd_shapes, tiles
    from row_cases import rows

    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "few rows": few_rows, "odd shapes": odd_shapes, "rows": rows, "layer": layer,
    }  # fmt: skip
    runs |= {kind: partial(dense, kind) for kind in GROUPS["gemm"][:4]}
    runs |= {f"experts {shard}": partial(experts, shard) for shard in SHARD_NAMES}
    runs |= {f"tiles {shard}": partial(tiles, shard) for shard in ("TP8", "EP8")}
    return runs[name]()


def peer_environment(peers: Path) -> dict[str, str]:
    paths = [str(peers / name) for name in ("vllm", "fi", "dg")] + os.environ.get("PYTHONPATH", "").split(":")
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": ":".join(paths)}


def run_parts(names: list[str], limit_s: float, out: Path, peers: Path | None, found: Found) -> None:
    """Run the parts side by side; `found` holds those of an earlier run that count."""
    start = time.monotonic()
    os.environ.setdefault("GEMM_BENCH_LOCK", tempfile.mkstemp()[1])
    running = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--part", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=peer_environment(peers) if peers and name in PEER_PARTS else None,
        )
        for name in names
    }
    while running:
        for name, process in list(running.items()):
            if process.poll() is None and time.monotonic() - start < limit_s:
                continue
            process.kill()
            output, _ = process.communicate()
            results = [line[7:] for line in output.splitlines() if line.startswith("RESULT ")]
            found[name] = json.loads(results[-1]) if results else {"failed": output[-1500:], "rows": []}
            del running[name]
            rest = {key: value for key, value in found[name].items() if key != "rows"}
            print(f"{time.monotonic() - start:4.0f} s  {name}: {json.dumps(rest)}", flush=True)
            for row in found[name]["rows"]:
                print("   ", json.dumps(row), flush=True)
            write(out, found)
        time.sleep(0.05)


def write(out: Path, found: Found) -> None:
    """Write what there is so far: a run cut short keeps its rows."""
    from moe_rows import moe_rows

    for group, names in GROUPS.items():
        rows = moe_rows(found) if group == "moe" else []
        rows += [row for name in names for row in found.get(name, {}).get("rows", [])]
        write_rows(out / f"{group}.json", rows, "gemm.py")
    (out / "gemm_parts.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--limit-s", type=float, default=180.0)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--earlier", type=Path, help="gemm_parts.json of an earlier run, for its peers")
    parser.add_argument("--only", nargs="*", help="these parts alone")
    parser.add_argument("--part")
    arguments = parser.parse_args()
    if arguments.part:
        print("\nRESULT " + json.dumps(part(arguments.part)), flush=True)
        return
    if arguments.search:
        from moe_peers import CONFIGS

        configs = {}
        for shard in ("TP8", "EP8"):
            command = [sys.executable, __file__, "--part", f"search {shard}"]
            environment = peer_environment(arguments.peers)
            environment.setdefault("GEMM_BENCH_LOCK", tempfile.mkstemp()[1])
            output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            configs[shard] = json.loads(next(line[7:] for line in output.splitlines() if line.startswith("RESULT ")))
        CONFIGS.write_text(json.dumps(configs, indent=1) + "\n")
    names = [name for group in GROUPS.values() for name in group] + (list(PEER_PARTS) if arguments.peers else [])
    earlier = json.loads(arguments.earlier.read_text()) if arguments.earlier else {}
    found = {name: part for name, part in earlier.items() if name in PEER_PARTS}
    run_parts(arguments.only or names, arguments.limit_s, arguments.out, arguments.peers, found)


if __name__ == "__main__":
    main()
