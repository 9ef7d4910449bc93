"""Writes helm/katydid/files/dashboards/*.json, Grafana's, out of scripts/dashboards.yaml."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "scripts" / "dashboards.yaml"
FOLDER = ROOT / "helm" / "katydid" / "files" / "dashboards"
NAMESPACE = 'namespace=~"$ns"'
HEIGHT = {"stat": 4, "bargauge": 8, "table": 8, "timeseries": 8}
WIDTH = 24
SOURCE_OF_DATA = {"type": "prometheus", "uid": "${datasource}"}


def documents() -> dict[str, str]:
    """File name and text of every dashboard."""
    boards = yaml.safe_load(SOURCE.read_text())
    return {f"katydid-{board['name']}.json": json.dumps(_dashboard(board), indent=1) + "\n" for board in boards}


def _dashboard(board: dict[str, Any]) -> dict[str, Any]:
    """Grafana's JSON model of one; panels flow from left to right."""
    panels, x, y, row = [], 0, 0, 0
    for number, panel in enumerate(board["panels"], 1):
        width, height = panel.get("width", 8), HEIGHT[panel.get("kind", "timeseries")]
        if x + width > WIDTH:
            x, y, row = 0, y + row, 0
        panels.append(_panel(panel, number, {"x": x, "y": y, "w": width, "h": height}))
        x, row = x + width, max(row, height)
    return {
        "uid": f"katydid-{board['name']}",
        "title": board["title"],
        "tags": ["katydid"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    namespaces = {
        "name": "ns",
        "label": "Namespace",
        "type": "query",
        "datasource": SOURCE_OF_DATA,
        "query": "label_values(katydid_gateway_in_flight_requests, namespace)",
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    window = {"name": "w", "label": "Rates over", "type": "custom", "query": "5m,1m,15m,1h"}
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        namespaces,
        {**window, "current": {"text": "5m", "value": "5m"}},
    ]


def _panel(panel: dict[str, Any], number: int, position: dict[str, int]) -> dict[str, Any]:
    kind, line, stacked = panel.get("kind", "timeseries"), panel.get("line"), panel.get("stacked", False)
    drawn = kind == "timeseries"
    custom = {
        "fillOpacity": 30 if stacked else 0,
        "stacking": {"mode": "normal" if stacked else "none"},
        "thresholdsStyle": {"mode": "off" if line is None else "dashed"},
    }
    # A share that is a target is good above its line; everything else is good below.
    below, above = ("red", "green") if panel["unit"] == "percentunit" and not drawn else ("green", "red")
    steps = [{"color": below if line is not None else "green", "value": None}]
    if line is not None:
        steps.append({"color": above, "value": line})
    return {
        "id": number,
        "type": kind,
        "title": panel["title"],
        "description": panel.get("text", ""),
        "gridPos": position,
        "datasource": SOURCE_OF_DATA,
        "fieldConfig": {
            "defaults": {
                "unit": panel["unit"],
                "min": 0,
                "custom": custom if drawn else {},
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "expr": expression.replace("NS", NAMESPACE),
                "legendFormat": legend,
                "instant": not drawn,
                "exemplar": drawn and "_bucket" in expression,
            }
            for place, (legend, expression) in enumerate(panel["queries"].items())
        ],
    }


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, text in documents().items():
        (FOLDER / name).write_text(text)
