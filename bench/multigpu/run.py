"""Plans on several GPUs: first that they are right, then how fast.

    python bench/multigpu/run.py --gpus 8                    writes bench/results/multigpu_8.json
    python bench/multigpu/run.py --gpus 2 --dry              the same over gloo on CPUs, tiny and not written

Parts (``--parts`` for some of them):

    reduce     sums over GPUs with add and norm, and e4m3 exchanges, against NCCL (``bench/kernels/allreduce.py``)
    correct    every plan's logits, draft logits and likeliest tokens against one rank's, hy3-tiny
    serve      layers of Hy3 at full width behind the engine's runner: prompts of TP, TP+SP and TP+SP+EP; decode steps
               of TP and of DP+EP by batch, as graphs, with sampling and drafts
    halves     a chunk of TP+SP in two parts that take turns: against one rank's logits, and against one part's time
    exchange   rows to experts and back, alone, by tokens a rank
    overlap    what they add to a pass of DP+EP in one part, and in two
    rebalance  steps of DP+EP decodes, as graphs, while redundant experts move, and while they do not
    agree      engines of TP and DP+EP, with drafts and graphs, against one rank's: the tokens of requests
    hand-off   prompts that an engine on one GPU computes and one on another continues, through the cache service
    lost       engines whose rank is killed or stopped while requests are open, and their next start

A job that fails or makes no progress is told in a row of its own, and the ranks start anew with the next. Where
``vllm_peer.py`` has been run before, its times stand beside those of ``serve``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from beside import beside_vllm, complete

ROOT = Path(__file__).parents[2]
PARTS = ("reduce", "correct", "serve", "halves", "exchange", "overlap", "rebalance", "agree", "hand-off", "lost")
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
Job = dict[str, Any]
Rows = list[dict[str, Any]]


def jobs(gpus: int, parts: list[str], lengths: list[int], batches: list[int], *, dry: bool) -> list[Job]:
    """What the ranks do, in order; each job is one plan."""
    sp = [f"tp{gpus}", f"tp{gpus},sp", f"tp{gpus},sp,fp8", f"tp{gpus},sp,ep{gpus}", f"tp{gpus},sp,ep{gpus},fp8"]
    dp = f"dp{gpus},ep{gpus}"
    made: list[Job] = []
    if "correct" in parts:
        made += [{"part": "correct", "plan": plan} for plan in (*sp, dp, f"{dp}+{gpus}", f"pp{gpus}")]
    if "serve" in parts:
        common = {"part": "serve", "lengths": lengths, "batches": batches, "context": 64 if dry else 4096}
        made += [
            {**common, "plan": f"tp{gpus}"},
            {**common, "plan": f"tp{gpus},sp,ep{gpus},fp8", "batches": []},
            {**common, "plan": f"tp{gpus},sp,fp8", "batches": []},
            {**common, "plan": f"tp{gpus},sp,ep{gpus}", "batches": []},
            {**common, "plan": dp},
            {**common, "plan": dp, "ahead": True},
            {**common, "plan": f"tp{gpus}", "lengths": [], "drafts": 2},
            {**common, "plan": dp, "drafts": 2},
            {**common, "plan": dp, "drafts": 2, "ahead": True},
            {**common, "plan": f"tp{gpus}", "peers": False},
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


class Ranks:
    """Processes that do the jobs from ``first`` on."""

    def __init__(self, gpus: int, work: dict[str, Any], folder: Path) -> None:
        script = str(Path(__file__).with_name("rank.py"))
        self._told = folder / "rows.jsonl"
        self._told.touch()
        arguments = [str(gpus), f"file://{folder}/meet", json.dumps(work), str(self._told)]
        self._processes = [subprocess.Popen([sys.executable, script, str(rank), *arguments]) for rank in range(gpus)]

    def told(self) -> list[Rows]:
        """What rank 0 has told so far of each job that is done."""
        return [json.loads(line) for line in self._told.read_text().splitlines(keepends=True) if line.endswith("\n")]

    @property
    def failed(self) -> list[int]:
        return [process.returncode for process in self._processes if process.poll()]

    @property
    def running(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def carry_out(gpus: int, options: dict[str, Any], todo: list[Job], patience_s: float, until: float) -> Iterator[Rows]:
    """Rows of each job; one that fails, or takes longer than its patience, is left out of the ranks' next start."""
    while todo and time.monotonic() < until:
        with tempfile.TemporaryDirectory() as folder:
            ranks = Ranks(gpus, {**options, "jobs": todo}, Path(folder))
            done, since, why = 0, time.monotonic(), ""
            try:
                while not why and ranks.running:
                    time.sleep(0.1)
                    if ranks.failed:
                        time.sleep(2)  # the others' tracebacks
                        why = f"ranks ended with {ranks.failed}"
                    elif time.monotonic() > min(until, since + patience_s):
                        why = f"no end within {time.monotonic() - since:.0f} s"
                    for rows in ranks.told()[done:]:
                        yield rows
                        done, since = done + 1, time.monotonic()
            finally:
                ranks.end()
            yield from ranks.told()[done:]
            done = len(ranks.told())
            if done < len(todo):
                yield [_missing(todo[done], why, met=False)]
            todo = todo[done + 1 :]
    yield [_missing(job, "no time left", met=None) for job in todo]


def _missing(job: Job, why: str, *, met: bool | None) -> dict[str, Any]:
    figure = f"{job['part']}, {job['plan']}: {why}"
    return {"figure": figure, "value": None, "unit": "", "bar": None, "met": met}


def reductions(gpus: int) -> Rows:
    """Rows of the benchmark that measures the kernels alone."""
    script, results = ROOT / "bench" / "kernels" / "allreduce.py", ROOT / "bench" / "results"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(gpus), str(script)]
    paths = [str(ROOT / "kernels"), str(script.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run(
        [*command, "--out", str(results)], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode:
        rows.append(
            {"figure": f"reduce: ended with {run.returncode}", "value": None, "unit": "", "bar": None, "met": False}
        )
    return rows


def engines(gpus: int, parts: list[str], *, dry: bool) -> Iterator[Rows]:
    """Rows of the parts whose engines are processes, with a cache service beside them."""
    if not {"agree", "hand-off", "lost"} & set(parts):
        return
    sys.path.insert(0, str(ROOT))
    from engines import agree, lost
    from handing import hand_off

    for part, rows_of in (("agree", agree), ("hand-off", hand_off), ("lost", lost)):
        if part in parts:
            yield from rows_of(gpus, dry=dry)


def write(path: Path, rows: Rows, origin: dict[str, Any]) -> None:
    """Rows of the same parts are replaced, others' stay."""
    parts = {row["figure"].split()[0].rstrip(",") for row in rows}
    others = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in others if row["figure"].split()[0].rstrip(",") not in parts]
    rows = beside_vllm(rows, path.with_name(f"{path.stem}_vllm.json"))
    path.write_text(json.dumps({**origin, "rows": kept + [complete(row) for row in rows]}, indent=1) + "\n")


@functools.cache
def _gpu() -> tuple[str, dict[str, str]]:
    import torch

    versions = {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return torch.cuda.get_device_name(), versions


def origin(options: argparse.Namespace) -> dict[str, Any]:
    name, versions = _gpu()
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
    parser.add_argument("--gpus", type=int, required=True, choices=(2, 4, 8))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768, 131072], help="of prompts, tokens")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--layers", type=int, default=16, help="of Hy3 that are built at full width")
    parser.add_argument("--patience", type=float, default=600, help="seconds that one job may take")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all of them")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if options.dry:
        options.lengths, options.batches = [128, 256], [2, 4]
    os.environ |= MULTICAST_OFF
    until = time.monotonic() + options.limit
    todo = jobs(options.gpus, options.parts, options.lengths, options.batches, dry=options.dry)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    rows: Rows = []
    work = {"layers": options.layers, "dry": options.dry}
    ranks = carry_out(options.gpus, work, todo, options.patience, until)
    alone = [reductions(options.gpus)] if "reduce" in options.parts and not options.dry else []
    for told in itertools.chain(alone, ranks, engines(options.gpus, options.parts, dry=options.dry)):
        rows += told
        for row in told:
            print(f"{row['figure']}: {row['value']} {row['unit']} (bar {row['bar']}, met {row['met']})", flush=True)
        if not options.dry:
            write(options.out / f"multigpu_{options.gpus}.json", rows, origin(options))
    if any(row["value"] is None for row in rows):
        sys.exit("some jobs failed")


if __name__ == "__main__":
    main()
