"""The run over several GPUs: which jobs there are, what becomes of one that fails, and rates between measured steps."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from katydid_engine.parallel import ParallelPlan

FOLDER = Path(__file__).parents[2] / "bench" / "multigpu"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)

    def loaded(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield loaded
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_every_part_has_jobs(load: Any) -> None:
    run, rank, part = load("run"), load("rank"), load("part")
    made = run.jobs(8, list(run.LIMITS_S), [8192], [64], dry=False)
    assert {job["part"] for job in made} == set(rank.PARTS)
    assert set(run.LIMITS_S) == set(rank.PARTS) | set(part.PARTS)
    assert {"tp8", "tp8,sp,fp8", "dp8,ep8", "dp8,ep8+8"} <= {job["plan"] for job in made}


RANK = """
import json, subprocess, sys, time
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from telling import Told
told = Told(Path(sys.argv[2]))
for job in json.loads(sys.argv[1]):
    told.tell([{"figure": job["part"] + " begins", "value": 1}])
    if job["part"] == "bad":
        sys.exit(3)
    if job["part"] == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        told.tell([{"figure": "child", "value": child.pid}])
        time.sleep(600)
    told.tell([{"figure": job["part"], "value": 2}])
    told.job_done()
"""


def test_a_job_that_fails_or_hangs_is_a_row_and_others_go_on(load: Any, tmp_path: Path) -> None:
    """What it told before stays, and nothing that it started does."""
    carrying, telling = load("carrying"), load("telling")
    starts: list[list[str]] = []

    def start(todo: list[dict[str, Any]], folder: Path) -> Any:
        starts.append([job["part"] for job in todo])
        command = [sys.executable, "-c", RANK, json.dumps(todo), str(folder / "rows"), str(FOLDER)]
        return carrying.Processes([command], telling.Told(folder / "rows"))

    todo = [{"part": part, "plan": "tp2"} for part in ("good", "bad", "hangs", "last")]
    limits = {"hangs": 1.0}
    told = carrying.carry_out(start, todo, lambda job: limits.get(job["part"], 60.0), time.monotonic() + 60)
    rows = [row for some in told for row in some]
    found = {row["figure"]: row["value"] for row in rows}
    child = found.pop("child")
    assert found == {
        "good begins": 1,
        "good": 2,
        "bad begins": 1,
        "bad, tp2: ended with [3]": None,
        "hangs begins": 1,
        "hangs, tp2: no end within 1 s": None,
        "last begins": 1,
        "last": 2,
    }
    assert starts == [["good", "bad", "hangs", "last"], ["hangs", "last"], ["last"]]
    status = Path(f"/proc/{child}/status")
    assert not status.exists() or "zombie" in status.read_text()
    late = list(carrying.carry_out(start, todo[:1], lambda _: 60.0, time.monotonic()))
    assert [row["met"] for row in late[0]] == [None]


def test_rows_of_a_part_replace_those_that_were(load: Any, tmp_path: Path) -> None:
    run, results = load("run"), tmp_path / "rows.json"
    run.write(results, [{"figure": "serve 1", "value": 1}, {"figure": "lost, tp2", "value": 2}], {"gpu": "none"})
    run.write(results, [{"figure": "serve 2", "value": 3}], {"gpu": "none"})
    assert [row["figure"] for row in json.loads(results.read_text())["rows"]] == ["lost, tp2", "serve 2"]


def test_a_dry_run_of_real_ranks_and_of_the_comparison() -> None:
    command = [sys.executable, str(FOLDER / "run.py"), "--gpus", "2", "--dry", "--parts", "exchange", "vllm"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    told = [line.split(":")[0] for line in run.stdout.splitlines()]
    assert [line for line in told if line.startswith("exchange, dp2,ep2")] == [
        "exchange, dp2,ep2, 4 tokens a rank, room for 4",
        "exchange, dp2,ep2, 600 tokens a rank, counted",
    ]
    assert "vllm none, 16 layers" in told
    alone = subprocess.run([*command[:2], "--gpus", "1"], capture_output=True, text=True, timeout=60, check=False)
    assert alone.returncode == 2
    assert "expected --parts hand-off" in alone.stderr


def test_the_rate_lies_between_measured_batches(load: Any) -> None:
    rate = load("serving")._rate
    took = {8: 0.004, 16: 0.008, 32: 0.012}
    assert rate(took, 0.010) == pytest.approx(24 / 0.010)
    assert rate(took, 0.1) == pytest.approx(32 / 0.012)
    assert rate(took, 0.001) == 0.0


def test_a_plan_is_compared_with_tp_that_computes_as_many_tokens_at_once(load: Any) -> None:
    serving, told = load("serving"), []
    own = SimpleNamespace(of_tp={}, note=lambda figure, value, *_, **__: told.append((figure, value)))
    tp, split = ParallelPlan(tp=2), ParallelPlan(tp=2, sp=True)
    for plan, chunk, took in ((tp, 8, 0.5), (tp, 32, 0.4), (split, 8, 0.4), (split, 32, 0.36)):
        serving._against_tp(own, f"{plan} {chunk}", plan, f"chunks of {chunk}", 64, took)
    assert told == [("tp2,sp 8", pytest.approx(20)), ("tp2,sp 32", pytest.approx(10))]
    longer = [job["plan"] for job in load("run").jobs(8, ["serve"], [32768], [64], dry=False) if "chunk" in job]
    assert longer == ["tp8", "tp8,sp,fp8", "tp8,sp,ep8,fp8"]


def test_vllms_times_stand_beside_ours(load: Any, tmp_path: Path) -> None:
    beside = load("beside")
    told = {"version": "0.26.0", "how": "so", "layers": 16, "ttft_ms": {"8192": 90.0}, "step_ms": {"8": 4.0}}
    (tmp_path / "vllm.json").write_text(json.dumps(told))
    rows = [
        {"figure": "serve 8192, tp2: TTFT, 16 layers", "value": 60.0, "unit": "ms"},
        {"figure": "serve 8 x 4096, dp2,ep2: a step, 16 layers", "value": 3.2, "unit": "ms"},
        {"figure": "serve 8 x 4096, tp2, 2 drafts: a step, 16 layers", "value": 3.2, "unit": "ms"},
        {"figure": "serve 8192, tp2: TTFT, 64 layers", "value": 240.0, "unit": "ms"},
    ]
    found = beside.beside_vllm(rows, tmp_path / "vllm.json")
    assert [row.get("peer_value") for row in found] == [90.0, 4.0, None, None, 90.0, 4.0]
    assert [(row["figure"], row["value"], row["met"]) for row in found[4:]] == [
        ("serve 8192, tp2: TTFT: times faster than vLLM, 16 layers", 1.5, True),
        ("serve 8 x 4096, dp2,ep2: a step: times faster than vLLM, 16 layers", 1.25, False),
    ]
    assert beside.beside_vllm(rows, tmp_path / "none.json") == rows
    assert list(beside.complete(rows[0])) == ["figure", "value", "unit", "floor", "peer", "peer_value", "bar", "met"]


def test_vllm_computes_prompts_at_once_that_are_as_long(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is begun that has nothing to measure: it would end without a result."""
    peer, asked = load("vllm_peer"), []

    def run(command: list[str], *, check: bool) -> None:
        assert check
        told = command[command.index("--chunks") :]
        asked.append(told[: told.index("--out")] + told[told.index("--out") + 2 :])
        Path(told[told.index("--out") + 1], "multigpu_2_vllm.json").write_text('{"ttft_ms": {}, "step_ms": {}}')

    monkeypatch.setattr(peer.subprocess, "run", run)
    for lengths in ([4096], [4096, 32768]):
        peer.apart(argparse.Namespace(gpus=2, chunks=[8192, 32768], lengths=lengths))
    assert asked == [
        ["--chunks", "8192", "--lengths", "4096"],
        ["--chunks", "8192", "--lengths", "4096", "32768"],
        ["--chunks", "32768", "--lengths", "32768", "--batches"],
    ]


def test_a_step_with_moves_is_compared_with_those_around_it(load: Any) -> None:
    """The load evens out as experts move: against steps behind alone the way there would look longer than it is."""
    took = [("still", 12.0)] * 9 + [("planning", 12.0), ("moving", 11.5), ("moving", 12.5)] + [("still", 10.0)] * 5
    more = load("moving").beyond_the_usual([*took, ("still", 13.0)])
    assert more["planning"] == [1.0]
    assert more["moving"] == [0.5, 1.5]
    assert sorted(more["still"]) == [0.0] * 14 + [3.0]
