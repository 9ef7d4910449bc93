"""The chart as helm renders it: with a preset, with values of one's own, or not at all and why."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from tools.chart.install import helm
from tools.chart.values_schema import CHART

__all__ = ["PRESETS", "Manifest", "RefusedError", "lint", "render"]

Manifest: TypeAlias = dict[str, Any]

PRESETS = sorted(path.stem for path in (CHART / "presets").glob("*.yaml"))
RELEASE, NAMESPACE = "demo", "serving"
# Of the clusters that the chart is for, the oldest.
KUBERNETES = "1.32"


class RefusedError(Exception):
    """Helm's own words on values that it does not take."""


def lint(preset: str | None = None) -> str:
    """What `helm lint --strict` says. Raises RefusedError."""
    return _run("lint", "--strict", str(CHART), *_file(preset))


def render(preset: str | None = None, values: Mapping[str, Any] | None = None) -> list[Manifest]:
    """All objects, in the order of the output. Raises RefusedError."""
    with tempfile.TemporaryDirectory() as folder:
        options: Sequence[str] = _file(preset)
        if values is not None:
            path = Path(folder, "values.json")
            path.write_text(json.dumps(values))
            options = [*options, "-f", str(path)]
        text = _run(
            *("template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--kube-version", KUBERNETES), *options
        )
    return [document for document in yaml.safe_load_all(text) if document]


def _file(preset: str | None) -> Sequence[str]:
    return () if preset is None else ("-f", str(CHART / "presets" / f"{preset}.yaml"))


def _run(*words: str) -> str:
    done = subprocess.run([str(helm()), *words], capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise RefusedError(done.stderr + done.stdout)
    return done.stdout
