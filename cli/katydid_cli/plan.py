"""`katydid plan`: what each way of cutting a model over a pool of GPUs is predicted to do, and which one to take."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from katydid_runtime.errors import SettingsError
from rich.console import Console
from rich.table import Table

from katydid_cli.model_folder import EMBEDDED, embedded_folder

__all__ = ["PlanOptions", "parse_slo", "parse_tokens", "plan"]

_WIDTH = 100
_TOKENS = re.compile(r"(\d+)([KM]?)")
_SLO = re.compile(r"(ttft|tpot)=(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class PlanOptions:
    """What `katydid plan` was asked for."""

    model: str
    pool: Path | None
    context: str
    slo: str
    memory_cap: str | None
    as_json: bool


def plan(options: PlanOptions) -> None:
    """Prints predictions and the choice. Raises SettingsError for what cannot be planned, ModelFolderError for a folder
    that is no model."""
    # By name, because the command line does not depend on the engine.
    choosing: Any = importlib.import_module("katydid_engine.planning.choose")
    pools: Any = importlib.import_module("katydid_engine.planning.pool")
    speeds: Any = importlib.import_module("katydid_engine.planning.measured")
    ttft_s, tpot_s = parse_slo(options.slo)
    target = choosing.Target(parse_tokens(options.context), ttft_s, tpot_s)
    pool = pools.Pool() if options.pool is None else pools.read_pool(options.pool)
    if options.memory_cap is not None:
        pool = replace(pool, memory_bytes=pools.parse_bytes("memory_cap", options.memory_cap))
    config = _config(options.model)
    known = speeds.measured(pool.gpu)
    predictions = [
        choosing.predict(config, candidate, pool, known, target) for candidate in choosing.candidates(config, pool)
    ]
    choice = choosing.choose(predictions, target)
    if options.as_json:
        print(json.dumps(_record(predictions, choice, known), indent=2))
    else:
        _print(predictions, choice, known, target)


def parse_tokens(text: str) -> int:
    """ "256K" and the like; K is 1024. Raises SettingsError."""
    found = _TOKENS.fullmatch(text)
    if found is None or not int(found[1]):
        raise SettingsError(f"context {text!r}: expected tokens like 32768 or 256K", field="context", value=text)
    return int(found[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[found[2]]


def parse_slo(text: str) -> tuple[float, float]:
    """Seconds of "ttft=4,tpot=0.05". Raises SettingsError."""
    found = {match[1]: float(match[2]) for part in text.split(",") if (match := _SLO.fullmatch(part.strip()))}
    if set(found) != {"ttft", "tpot"} or not all(found.values()):
        raise SettingsError(f"slo {text!r}: expected seconds like ttft=4,tpot=0.05", field="slo", value=text)
    return found["ttft"], found["tpot"]


def _config(model: str) -> Any:
    known: Any = importlib.import_module("katydid_engine.planning.known_models")
    if model in known.KNOWN_MODELS:
        return known.KNOWN_MODELS[model]
    folder = embedded_folder() if model == EMBEDDED else None
    return importlib.import_module("katydid_engine.model_config").read_model_config(folder or Path(model))


def _record(predictions: list[Any], choice: Any, known: Any) -> dict[str, Any]:
    def one(prediction: Any) -> dict[str, Any] | None:
        if prediction is None:
            return None
        return {
            "plan": str(prediction.plan),
            "role": prediction.plan.role.value,
            "gpus": prediction.plan.world_size,
            "weights_bytes": prediction.memory.weights,
            "kv_tokens_per_group": max(0, prediction.memory.tokens),
            "ttft_s": prediction.ttft_s,
            "ttft_sending_s": prediction.ttft_sending_s,
            "requests": prediction.requests,
            "tpot_s": prediction.tpot_s,
            "micro_batches": prediction.micro_batches,
            "tokens_per_gpu_s": prediction.tokens_per_gpu_s,
            "reason": prediction.reason,
        }

    chosen = {name: one(getattr(choice, name)) for name in ("prefill", "decode", "both")}
    return {
        "gpu": known.gpu,
        "assumed": list(known.assumed),
        "candidates": [one(prediction) for prediction in predictions],
        "choice": chosen,
        "why": list(choice.why),
    }


def _print(predictions: list[Any], choice: Any, known: Any, target: Any) -> None:
    console = Console(soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    table = Table(box=None, pad_edge=False)
    for column in ("plan", "GPUs", "weights", "KV tokens", "TTFT s", "of it sent", "requests", "TPOT ms", "tok/GPU/s"):
        table.add_column(column, no_wrap=True, justify="left" if column == "plan" else "right")
    for prediction in predictions:
        if prediction.reason:
            continue
        table.add_row(
            str(prediction.plan),
            str(prediction.plan.world_size),
            f"{prediction.memory.weights / 1e9:.1f} GB",
            f"{prediction.memory.tokens:,}",
            f"{prediction.ttft_s:.3f}",
            f"{prediction.ttft_sending_s:.3f}",
            str(prediction.requests),
            f"{prediction.tpot_s * 1e3:.1f}",
            f"{prediction.tokens_per_gpu_s:,.0f}",
        )
    console.print(table)
    for prediction in predictions:
        if prediction.reason:
            console.print(f"{prediction.plan}: {prediction.reason}", highlight=False)
    console.print(
        f"{known.gpu}; requests of {target.context:,} tokens, nothing of them in a cache. Weights and KV tokens are of "
        f"a GPU and its group. Predicted, not measured; assumed: {', '.join(known.assumed)}.",
        highlight=False,
    )
    for reason in choice.why:
        console.print(reason, highlight=False)
