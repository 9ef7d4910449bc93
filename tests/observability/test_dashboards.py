"""Dashboards are what their source says, read metrics that exist, and lie on Grafana's grid."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest

from scripts.dashboards import documents
from scripts.metrics_page import PAGE, page, registries
from tests.observability.expressions import (
    DASHBOARDS,
    ELSEWHERE,
    expressions,
    metrics_named,
    metrics_shown,
    panels,
    recorded_names,
    rules,
)

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (make metrics)")


def test_the_page_of_metrics_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python scripts/metrics_page.py"


def test_dashboards_are_what_their_source_says() -> None:
    assert {path.name: path.read_text() for path in DASHBOARDS} == documents(), "run python scripts/dashboards.py"


def test_every_metric_that_is_read_is_registered_or_recorded() -> None:
    registered = metrics_shown(generate_latest(registry).decode() for registry in registries().values())
    assert metrics_named() - registered <= {name for name in ELSEWHERE if name.startswith("DCGM")}
    assert recorded_names() <= {rule["record"] for rule in rules() if "record" in rule}


def test_a_metric_that_is_missing_would_be_found() -> None:
    shown = metrics_shown(["# TYPE katydid_gateway_ttft_seconds histogram\n# TYPE katydid_x_total counter\n"])
    assert shown == {f"katydid_gateway_ttft_seconds_{part}" for part in ("bucket", "sum", "count")} | {
        "katydid_x_total"
    }


def test_the_six_dashboards_have_what_operators_look_for() -> None:
    titles = {json.loads(path.read_text())["title"] for path in DASHBOARDS}
    assert len(titles) == len(DASHBOARDS) == 6
    shown = {panel["title"] for _, panel in panels()}
    wanted = (
        "First token within 4 s",
        "Tokens within 50 ms",
        "Failed (5xx)",
        "Hit rate by tier",
        "GPU memory",
        "GPU temperature",
    )
    assert shown >= set(wanted)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_are_on_the_grid_and_do_not_overlap(path: Path) -> None:
    board = json.loads(path.read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not cells & own, panel["title"]
        cells |= own
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = {"datasource", *({"w"} if "$w" in path.read_text() else ()), "ns"}
    assert used <= variables


@needs_promtool
def test_promql_parses(tmp_path: Path) -> None:
    rules = [{"record": f"x:{number}", "expr": expression} for number, expression in enumerate(expressions())]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


@needs_promtool
@pytest.mark.parametrize("service", ["gateway", "engine", "kvcache"])
def test_metrics_follow_prometheus_own_rules(service: str) -> None:
    lines = generate_latest(registries()[service]).splitlines(keepends=True)
    own = b"".join(line for line in lines if b"vllm:" not in line)
    done = subprocess.run(["promtool", "check", "metrics"], input=own, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
