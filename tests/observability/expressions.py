"""The PromQL of dashboards and rules, and which metrics it reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "helm" / "katydid" / "files"
DASHBOARDS = sorted((FILES / "dashboards").glob("*.json"))
RULES = sorted((FILES / "rules").glob("*.yaml"))
# Of GPUs, which this machine may lack, and of NVIDIA's dcgm-exporter.
ELSEWHERE = {
    *("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_GPU_TEMP"),
    *("katydid_engine_gpu_used_bytes", "katydid_engine_gpu_total_bytes", "katydid_engine_gpu_temperature_celsius"),
}
_NAME = re.compile(r"\b(?:katydid_\w+|DCGM_\w+)")
_TEXT = re.compile(r'"[^"]*"')
_RECORDED = re.compile(r"\bkatydid:[\w:]+")


def panels() -> list[tuple[str, dict[str, Any]]]:
    """Every panel with the name of its dashboard."""
    return [(path.stem, panel) for path in DASHBOARDS for panel in json.loads(path.read_text())["panels"]]


def rules() -> list[dict[str, Any]]:
    """Recording and alert rules."""
    return [rule for path in RULES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    """Of all panels, their variables filled in, and of all rules."""
    drawn = [target["expr"] for _, panel in panels() for target in panel["targets"]]
    return [filled(expression) for expression in drawn] + [rule["expr"] for rule in rules()]


def filled(expression: str, window: str = "5m") -> str:
    """A panel's expression as Grafana sends it with all namespaces chosen."""
    return expression.replace("$ns", ".*").replace("$w", window)


def recorded_names() -> set[str]:
    """Names of recorded metrics that expressions read."""
    return {name for expression in expressions() for name in _RECORDED.findall(expression)}


def metrics_named() -> set[str]:
    """Names of scraped metrics that expressions read."""
    return {name for expression in expressions() for name in _NAME.findall(_TEXT.sub("", expression))}


def metrics_shown(texts: Iterable[str]) -> set[str]:
    """Names of series that expositions have, or would have if something had been counted."""
    shown = set()
    for line in "\n".join(texts).splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:4]
            shown |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return shown
