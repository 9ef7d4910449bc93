"""Plans on several GPUs: first that they are right, then how fast.

    python bench/multigpu/run.py --gpus 8                    writes bench/results/multigpu_8.json
    python bench/multigpu/run.py --gpus 2 --dry              the same over gloo on CPUs, tiny and not kept
    python bench/multigpu/run.py --gpus 1 --parts hand-off   two engines that share a GPU

Parts (``--parts`` for some of them):

    correct    every plan's logits, draft logits and likeliest tokens against one rank's, hy3-tiny
    serve      layers of Hy3 at full width behind the engine's runner: prompts of TP, TP+SP and TP+SP+EP; decode steps
               of TP and of DP+EP by batch, as graphs, with sampling and drafts
    halves     a chunk of TP+SP in two parts that take turns: against one rank's logits, and against one part's time
    exchange   rows to experts and back, alone, by tokens a rank
    overlap    what they add to a pass of DP+EP in one part, and in two
    rebalance  steps of DP+EP decodes, as graphs, while redundant experts move, and while they do not
    reduce     sums over GPUs with add and norm, and e4m3 exchanges, against NCCL (``bench/kernels/allreduce.py``)
    agree      engines of TP and DP+EP, with drafts and graphs, against one rank's: the tokens of requests
    hand-off   prompts that one engine computes and another continues, through the cache service and a gateway
    lost       engines whose rank is killed or stopped while requests are open, and their next start
    vllm       vLLM on the same layers, in an interpreter of its own (``--vllm PYTHON``)

Every row is written as it comes. A job that fails or takes longer than it may is told in a row of its own, and what is
left begins anew. Where vLLM has been measured, also before, its times stand beside those of ``serve``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from beside import beside_vllm, complete
from carrying import Job, Processes, carry_out
from telling import Rows, Told

ROOT = Path(__file__).parents[2]
# Parts, and seconds that one of their jobs may take; the first of ranks starts them, too.
LIMITS_S = {
    "correct": 300,
    "serve": 900,
    "halves": 600,
    "exchange": 300,
    "overlap": 300,
    "rebalance": 300,
    "reduce": 600,
    "agree": 600,
    "hand-off": 300,
    "lost": 300,
    "vllm": 3600,
}
# Most stages of hy3-tiny, which has six layers.
TINY_STAGES = 4
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def jobs(gpus: int, parts: list[str], lengths: list[int], batches: list[int], *, dry: bool) -> list[Job]:
    """What the ranks do, in order; each job is one plan."""
    sp = [f"tp{gpus}", f"tp{gpus},sp", f"tp{gpus},sp,fp8", f"tp{gpus},sp,ep{gpus}", f"tp{gpus},sp,ep{gpus},fp8"]
    dp = f"dp{gpus},ep{gpus}"
    stages = f"pp{gpus}" if gpus <= TINY_STAGES else f"tp{gpus // TINY_STAGES},pp{TINY_STAGES}"
    made: list[Job] = []
    if "correct" in parts:
        made += [{"part": "correct", "plan": plan} for plan in (*sp, dp, f"{dp}+{gpus}", stages)]
    if "serve" in parts:
        common = {"part": "serve", "lengths": lengths, "batches": batches, "context": 64 if dry else 4096}
        chunk = 256 if dry else 32_768
        long = {"chunk": chunk, "lengths": [length for length in lengths if length >= chunk]}
        made += [
            {**common, "plan": f"tp{gpus}"},
            {**common, "plan": f"tp{gpus},sp,ep{gpus},fp8", "batches": []},
            {**common, "plan": f"tp{gpus},sp,fp8", "batches": []},
            {**common, "plan": f"tp{gpus},sp,ep{gpus}", "batches": []},
            *({**common, **long, "plan": plan, "batches": []} for plan in (sp[0], sp[2], sp[4]) if long["lengths"]),
            {**common, "plan": dp, "ahead": True},
            {**common, "plan": f"tp{gpus}", "lengths": [], "drafts": 2},
            {**common, "plan": dp, "drafts": 2, "ahead": True},
            {**common, "plan": dp},
            {**common, "plan": dp, "drafts": 2},
            {**common, "plan": f"tp{gpus}", "peers": False},
            {**common, "plan": dp, "ahead": True, "peers": False},
        ]
    if "halves" in parts:
        made += [{"part": "halves", "plan": plan, "tokens": 64 if dry else 32_768} for plan in (sp[4], sp[2])]
    if "exchange" in parts:
        sizes = [4, 600] if dry else [1, 8, 32, 64, 128, 256, 512, 1024, 2048, 8192]
        made.append({"part": "exchange", "plan": dp, "sizes": sizes})
    if "overlap" in parts:
        made += [{"part": "overlap", "plan": dp, "tokens": tokens} for tokens in ([64] if dry else [8192, 2048])]
    if "rebalance" in parts:
        traffic = {"batch": 4, "context": 64, "steps": 120} if dry else {"batch": 64, "context": 4096, "steps": 800}
        made.append({"part": "rebalance", "plan": f"{dp}+{gpus}", **traffic})
    return made


def alone(options: argparse.Namespace) -> list[Job]:
    """Parts that start processes themselves; vLLM is asked where an interpreter has it, or in a dry run."""
    made: list[Job] = [{"part": name} for name in ("reduce", "agree", "hand-off", "lost") if name in options.parts]
    if "vllm" in options.parts:
        peer = {"python": options.vllm, "layers": options.layers, "tuned": options.tuned, "out": str(options.out)}
        made.append({"part": "vllm", **peer})
    return made


def ranks(gpus: int, work: dict[str, Any], todo: list[Job], folder: Path) -> Processes:
    """One process a rank, for all these jobs."""
    script, told = str(Path(__file__).with_name("rank.py")), folder / "rows"
    arguments = [str(gpus), f"file://{folder}/meet", json.dumps({**work, "jobs": todo}), str(told)]
    return Processes([[sys.executable, script, str(rank), *arguments] for rank in range(gpus)], Told(told))


def part(gpus: int, todo: list[Job], folder: Path, *, dry: bool) -> Processes:
    """A process for the first of these jobs alone."""
    script, told = str(Path(__file__).with_name("part.py")), folder / "rows"
    command = [sys.executable, script, json.dumps(todo[0]), str(gpus), str(told), *(["dry"] if dry else [])]
    return Processes([command], Told(told))


def write(path: Path, rows: Rows, origin: dict[str, Any]) -> None:
    """Rows of the same parts are replaced, others' stay."""
    parts = {row["figure"].split()[0].rstrip(",") for row in rows}
    others = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in others if row["figure"].split()[0].rstrip(",") not in parts]
    rows = beside_vllm(rows, path.with_name(f"{path.stem}_vllm.json"))
    path.write_text(json.dumps({**origin, "rows": kept + [complete(row) for row in rows]}, indent=1) + "\n")


@functools.cache
def _devices() -> tuple[str, dict[str, str]]:
    import torch

    if not torch.cuda.is_available():
        return "CPU", {"torch": torch.__version__}
    versions = {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}  # type: ignore[no-untyped-call]
    return torch.cuda.get_device_name(), versions


def origin(options: argparse.Namespace) -> dict[str, Any]:
    name, versions = _devices()
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "gpu": f"{options.gpus} x {name}",
        "versions": versions,
        "commit": os.environ.get("KATYDID_COMMIT") or head.stdout.strip(),
        "command": " ".join(sys.argv),
        "layers": options.layers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True, choices=(1, 2, 4, 8), help="1: hand-off alone, on one GPU")
    parser.add_argument("--parts", nargs="+", choices=LIMITS_S)
    parser.add_argument("--plans", nargs="+", help="of ranks' jobs, those of these plans alone, as in dp8,ep8")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768, 131072], help="of prompts, tokens")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--layers", type=int, default=16, help="of Hy3 that are built at full width")
    parser.add_argument("--patience", type=float, default=1.0, help="times the usual limits of jobs")
    parser.add_argument("--limit", type=float, default=7200, help="seconds for all of them")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM 0.26")
    parser.add_argument("--tuned", help="folder of configurations that vLLM's tuning script has found")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if options.dry:
        options.lengths, options.batches = [128, 256], [2, 4, 8]
    options.parts = options.parts or [name for name in LIMITS_S if name != "vllm" or options.vllm or options.dry]
    if options.gpus == 1 and options.parts != ["hand-off"]:
        parser.error("--gpus 1: expected --parts hand-off, all others need more")
    if "vllm" in options.parts and not (options.vllm or options.dry):
        parser.error("--parts vllm: expected --vllm PYTHON as well")
    os.environ |= MULTICAST_OFF
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    with tempfile.TemporaryDirectory() as nowhere:
        if options.dry:
            options.out, options.vllm = Path(nowhere), sys.executable
        failed = carry_all_out(options)
    if failed:
        sys.exit(f"without a figure: {failed}")


def carry_all_out(options: argparse.Namespace) -> list[str]:
    """Writes rows as they come; returns the figures that are missing."""
    gpus, until, rows = options.gpus, time.monotonic() + options.limit, []
    work = {"layers": options.layers, "dry": options.dry}
    of_ranks = jobs(gpus, options.parts, options.lengths, options.batches, dry=options.dry)
    of_ranks = [job for job in of_ranks if not options.plans or job["plan"] in options.plans]
    begun = [(functools.partial(ranks, gpus, work), of_ranks)] if of_ranks else []
    begun += [(functools.partial(part, gpus, dry=options.dry), [job]) for job in alone(options)]
    for start, todo in begun:
        since = time.monotonic()
        for told in carry_out(start, todo, lambda job: options.patience * LIMITS_S[job["part"]], until):
            rows += told
            for row in told:
                print(f"{row['figure']}: {row['value']} {row['unit']} (bar {row['bar']}, met {row['met']})", flush=True)
            if told:
                write(options.out / f"multigpu_{gpus}.json", rows, origin(options))
        print(
            f"{', '.join(dict.fromkeys(job['part'] for job in todo))}: over after {time.monotonic() - since:.0f} s",
            flush=True,
        )
    return [row["figure"] for row in rows if row["value"] is None]


if __name__ == "__main__":
    main()
