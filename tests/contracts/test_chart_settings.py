"""Every setting of the services is in the chart, once: as a value, told by a template, or by nobody who deploys."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tools.chart.values_schema import CHART, NOT_TOLD, SCHEMA, SERVICES, TOLD_BY_TEMPLATES


def fields(service: str) -> set[str]:
    return set(SERVICES[service].model_fields)


def values(service: str) -> set[str]:
    return set(json.loads(SCHEMA.read_text())["$defs"][f"{service}Settings"]["properties"])


def variables() -> set[str]:
    """All that the templates set, but for those they make out of `settings`."""
    found = set()
    for path in CHART.glob("templates/**/*"):
        if path.suffix not in (".yaml", ".tpl"):
            continue
        text = re.sub(r"\{\{-? ?/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        found |= set(re.findall(r"KATYDID_[A-Z]+_[A-Z0-9_]+", text))
        # Some are set for several services at once, which a prefix tells apart.
        for name in re.findall(r"KATYDID_\{\{ \.prefix \}\}_([A-Z_]+)", text):
            found |= {f"KATYDID_{service.upper()}_{name}" for service in SERVICES}
    return found


def test_the_schema_is_up_to_date() -> None:
    command = [sys.executable, "-m", "tools.chart.values_schema", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=CHART.parents[1])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_a_setting_is_told_in_one_place(service: str) -> None:
    told = TOLD_BY_TEMPLATES[service]
    assert not values(service) & told
    assert values(service) | told | (NOT_TOLD & fields(service)) == fields(service)


@pytest.mark.parametrize("service", SERVICES)
def test_templates_tell_what_they_are_said_to_tell(service: str) -> None:
    settings = SERVICES[service]
    set_here = {name for name in variables() if name.startswith(settings.env_prefix())}
    wanted = {settings.variable(name) for name in TOLD_BY_TEMPLATES[service]}
    # The shared store's address comes out of a secret, whole. A plan is made of the number of GPUs where no value
    # names one.
    from_secrets = {"KATYDID_KVCACHE_SHARED_URL"}
    either = {"KATYDID_ENGINE_PLAN"}
    assert set_here - either == wanted - from_secrets
