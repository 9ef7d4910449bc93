"""The run over several GPUs: which jobs there are, what becomes of one that fails, and rates between measured steps."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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


def test_every_part_has_jobs_or_engines(load: Any) -> None:
    run, rank = load("run"), load("rank")
    made = run.jobs(8, list(run.PARTS), [8192], [64], dry=False)
    assert {job["part"] for job in made} == set(rank.PARTS)
    assert set(run.PARTS) - set(rank.PARTS) == {"reduce", "agree", "hand-off", "lost"}
    assert {"tp8", "tp8,sp,fp8", "dp8,ep8", "dp8,ep8+8"} <= {job["plan"] for job in made}


def test_a_job_that_fails_is_a_row_and_others_go_on(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = load("run")

    class Ranks:
        """Job 0 is done, job 1 fails; whoever starts anew with job 2 does it."""

        def __init__(self, _gpus: int, work: dict[str, Any], _folder: Path) -> None:
            names = [job["part"] for job in work["jobs"]]
            self.failed = [1] if "bad" in names else []
            self.running = bool(self.failed)
            self._done = [[{"figure": name, "value": 1}] for name in names[: names.index("bad")]] if self.failed else [
                [{"figure": name, "value": 1}] for name in names
            ]  # fmt: skip

        def told(self) -> list[list[dict[str, Any]]]:
            return self._done

        def end(self) -> None:
            pass

    monkeypatch.setattr(run, "Ranks", Ranks)
    monkeypatch.setattr(run.time, "sleep", lambda _: None)
    todo = [{"part": part, "plan": "tp2"} for part in ("good", "bad", "last")]
    rows = [row for told in run.carry_out(2, {}, todo, 60.0, time.monotonic() + 60) for row in told]
    assert [(row["figure"], row["value"]) for row in rows] == [
        ("good", 1),
        ("bad, tp2: ranks ended with [1]", None),
        ("last", 1),
    ]
    results = tmp_path / "rows.json"
    run.write(results, [{"figure": "serve 1", "value": 1}, {"figure": "lost, tp2", "value": 2}], {"gpu": "none"})
    run.write(results, [{"figure": "serve 2", "value": 3}], {"gpu": "none"})
    assert [row["figure"] for row in json.loads(results.read_text())["rows"]] == ["lost, tp2", "serve 2"]


def test_the_rate_lies_between_measured_batches(load: Any) -> None:
    rate = load("serving")._rate
    took = {8: 0.004, 16: 0.008, 32: 0.012}
    assert rate(took, 0.010) == pytest.approx(24 / 0.010)
    assert rate(took, 0.1) == pytest.approx(32 / 0.012)
    assert rate(took, 0.001) == 0.0


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
