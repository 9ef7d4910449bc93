"""Writes docs/metrics.md out of what the services register."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml
from katydid_engine.engine_metrics import EngineMetrics
from katydid_engine.gpu_figures import GpuFigures
from katydid_engine.vllm_names import VllmNames
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.vllm_names import VLLM_NAMES
from katydid_kvcache.figures import Figures
from katydid_runtime.metric_aliases import MetricAliases
from katydid_runtime.metrics import Metrics
from prometheus_client import CollectorRegistry

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "metrics.md"
RECORDING = ROOT / "helm" / "katydid" / "files" / "rules" / "katydid-recording.yaml"
INTRODUCTION = """# Metrics

Written by `python scripts/metrics_page.py` out of what the services register. The gateway shows them at `/metrics` of
its HTTP address, engines and cache services at that of `--http-listen`. Names are `katydid_<service>_<what>_<unit>`;
counters end in `_total`. A scraper that accepts OpenMetrics gets exemplars: buckets of `katydid_gateway_ttft_seconds`
and `katydid_gateway_tpot_seconds` bear the trace id of a request. Bounds contain the targets, 4 s and 50 ms,
so attainment is read from a bucket. Alerts and what to do about them: [runbook](runbook.md); what an autoscaler reads:
[scaling](scaling.md).
"""


def registries() -> dict[str, CollectorRegistry]:
    """What each service registers, everything optional included."""
    gateway, engine, kvcache = GatewayMetrics(), EngineMetrics(), Metrics("kvcache")
    gateway.registry.register(MetricAliases(gateway.registry, VLLM_NAMES, {}))
    engine.metrics.registry.register(GpuFigures())
    engine.metrics.registry.register(VllmNames(engine.metrics.registry, "model"))
    Figures(kvcache)
    return {"gateway": gateway.registry, "engine": engine.metrics.registry, "kvcache": kvcache.registry}


def page() -> str:
    parts = [INTRODUCTION]
    aliases: list[str] = []
    for service, registry in registries().items():
        parts.append(f"\n## {service}\n\n| metric | type | labels | what it is |\n|---|---|---|---|\n")
        labels = _labels(registry)
        for metric in registry.collect():
            name = metric.name + ("_total" if metric.type == "counter" else "")
            if name.startswith("vllm:"):
                aliases.append(f"| `{name}` | {service} | {metric.documentation} |\n")
            elif name.startswith("katydid_"):
                shown = ", ".join(f"`{label}`" for label in labels.get(metric.name, ())) or "-"
                parts.append(f"| `{name}` | {metric.type} | {shown} | {metric.documentation} |\n")
    parts.append(
        "\n## vLLM's names\n\nWith `--vllm-metric-names`, of gateway or engine.\n\n| metric | service | what it is |\n"
    )
    parts += ["|---|---|---|\n", *aliases]
    parts.append("\n## Recorded\n\nBy `helm/katydid/files/rules/katydid-recording.yaml`.\n\n")
    groups = yaml.safe_load(RECORDING.read_text())["groups"]
    parts += sorted({f"- `{rule['record']}`\n" for group in groups for rule in group["rules"]})
    return "".join(parts)


def _labels(registry: CollectorRegistry) -> dict[str, tuple[str, ...]]:
    """Label names of what has labels, by metric: of collectors that are metrics, and of families that others make."""
    things: list[Any] = [*registry._collector_to_names, *registry.collect()]
    return {
        getattr(thing, "_name", None) or thing.name: tuple(thing._labelnames)
        for thing in things
        if getattr(thing, "_labelnames", ())
    }


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
