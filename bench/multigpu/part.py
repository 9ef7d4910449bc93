"""One part of ``run.py`` whose engines, or whatever it measures, are processes of their own: arguments job, ranks,
where it tells its rows, and "dry" or nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from telling import Rows, Told, missing, row

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # engines as processes are started as tests start them


def reduce(gpus: int, *, dry: bool) -> Iterator[Rows]:
    """Of the benchmark that measures the kernels alone."""
    script = ROOT / "bench" / "kernels" / "allreduce.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(gpus), str(script)]
    command += ["--dry"] if dry else ["--out", str(ROOT / "bench" / "results")]
    paths = [str(ROOT / "kernels"), str(script.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as ranks:
        assert ranks.stdout is not None
        for line in ranks.stdout:
            if line.startswith("{"):
                yield [json.loads(line)]
    if ranks.returncode:
        yield [missing("reduce", f"ended with {ranks.returncode}")]


def engines(gpus: int, *, name: str, dry: bool) -> Iterator[Rows]:
    """Each of what ``engines.py`` and ``handing.py`` have."""
    import engines
    import handing

    return {"agree": engines.agree, "lost": engines.lost, "hand-off": handing.hand_off}[name](gpus, dry=dry)


def vllm(gpus: int, *, dry: bool, python: str, layers: int, tuned: str | None, out: str) -> Iterator[Rows]:
    """Its times stand in a file of their own, and beside ours in the rows of ``serve``; here how many there are."""
    command = [python, str(Path(__file__).with_name("vllm_peer.py")), "--gpus", str(gpus), "--layers", str(layers)]
    command += ["--out", out, *(["--tuned", tuned] if tuned else []), *(["--dry"] if dry else [])]
    code = subprocess.run(command, check=False).returncode
    path = Path(out) / f"multigpu_{gpus}_vllm.json"
    if code or not path.exists():
        yield [missing("vllm", f"ended with {code}")]
        return
    found = json.loads(path.read_text())
    sizes = len(found["ttft_ms"]) + len(found["step_ms"])
    yield [row(f"vllm {found['version']}, {layers} layers: sizes measured", sizes, "")]


PARTS: dict[str, Callable[..., Iterator[Rows]]] = {
    "reduce": reduce,
    **{name: partial(engines, name=name) for name in ("agree", "hand-off", "lost")},
    "vllm": vllm,
}


def main() -> None:
    job, gpus, told = json.loads(sys.argv[1]), int(sys.argv[2]), Told(Path(sys.argv[3]))
    for rows in PARTS[job.pop("part")](gpus, dry=sys.argv[4:] == ["dry"], **job):
        told.tell(rows)
    told.job_done()


if __name__ == "__main__":
    main()
