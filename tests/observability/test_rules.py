"""Alerts fire when they should, by promtool's own tests, and each tells what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from katydid_runtime.errors import OUTCOMES

from tests.observability.expressions import ROOT, RULES, expressions, rules

ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
TESTS = sorted(Path(__file__).parent.glob("*.test.yaml"))
RUNBOOK = ROOT / "docs" / "runbook.md"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (make metrics)")


def test_every_alert_has_a_runbook_entry_with_its_four_parts() -> None:
    entries = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOK.read_text(), re.M | re.S))
    assert entries.keys() == ALERTS.keys()
    for name, text in entries.items():
        for part in ("**Symptom.**", "**Cause.**", "**Look at.**", "**Do.**"):
            assert part in text, f"{name} lacks {part}"
        assert ALERTS[name]["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_grave_it_is(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert {"summary", "description", "runbook"} <= rule["annotations"].keys()


def test_failures_are_the_outcomes_that_http_calls_5xx() -> None:
    # What stops a service from starting is no outcome of a request, and 501 is the caller's to change.
    startup = {"settings", "address_in_use", "model_folder", "unsupported"}
    served = {kind.reason.lower() for kind, outcome in OUTCOMES.items() if outcome.http_status >= 500} - startup
    lists = {found for text in expressions() for found in re.findall(r'outcome=~"([^"]+)"', text)}
    assert [set(found.split("|")) for found in lists] == [served]


def test_each_alert_is_tested_both_ways() -> None:
    found = defaultdict(set)
    for case in (case for path in TESTS for case in yaml.safe_load(path.read_text())["tests"]):
        for check in case.get("alert_rule_test", ()):
            found[check["alertname"]].add(bool(check.get("exp_alerts")))
    assert {name for name, ways in found.items() if True in ways} == ALERTS.keys()
    silent = {name for name, ways in found.items() if False in ways}
    assert len(silent) > len(ALERTS) / 2


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", *RULES], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_when_they_should() -> None:
    done = subprocess.run(["promtool", "test", "rules", *TESTS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
