"""vLLM's times, where it has been measured on as many GPUs and layers, beside ours; and the keys that every row has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

__all__ = ["beside_vllm", "complete"]

Rows = list[dict[str, Any]]
LEAST_TIMES = 1.5
_KEYS = ("figure", "value", "unit", "floor", "peer", "peer_value", "bar", "met")
_PROMPT = re.compile(r"serve (\d+), (\S+(?: in chunks of \d+)?): TTFT, (\d+) layers")
_STEP = re.compile(r"serve (\d+) x 4096, (\S+(?: ahead)?): a step, (\d+) layers")


def complete(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row.get(key) for key in _KEYS} | row


def beside_vllm(rows: Rows, path: Path) -> Rows:
    """Prompts and steps with vLLM's of the same size as their peer, and how many times faster ours are; as they were
    where ``path``, a result of ``vllm_peer.py``, is missing or of another number of layers."""
    if not path.exists():
        return rows
    vllm = json.loads(path.read_text())
    found, times = [], []
    for row in rows:
        for pattern, kind in ((_PROMPT, "ttft_ms"), (_STEP, "step_ms")):
            match = pattern.fullmatch(row["figure"])
            theirs = vllm[kind].get(match[1]) if match and int(match[3]) == vllm["layers"] else None
            if match is None or theirs is None or not row["value"]:
                continue
            row = row | {"peer": f"vLLM {vllm['version']}, {vllm['how']}, ms", "peer_value": theirs}
            gain = round(theirs / row["value"], 3)
            figure = row["figure"].replace(f", {match[3]} layers", f": times faster than vLLM, {match[3]} layers")
            more = {"figure": figure, "value": gain, "unit": "x", "bar": LEAST_TIMES, "met": gain >= LEAST_TIMES}
            times.append(row | more | {"floor": 1})
        found.append(row)
    return found + times
