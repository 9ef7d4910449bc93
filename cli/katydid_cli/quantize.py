"""`katydid quantize`: the engine's quantiser with a progress bar, time left and a line about the result."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from katydid_runtime.errors import SettingsError
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from katydid_cli.writable import check_writable_folder

__all__ = ["QuantizeOptions", "quantize"]


@dataclass(frozen=True)
class QuantizeOptions:
    """What `katydid quantize` was asked for."""

    model: Path
    out: Path
    scheme: str
    clip: str
    device: str
    shard_mib: int
    recipe: Path | None = None


def quantize(options: QuantizeOptions) -> None:
    """Writes the quantised folder and says how large it is.

    Raises ModelFolderError for a model that cannot be quantised, SettingsError for what stands in the result's way.
    """
    out = options.out.expanduser().absolute()
    if out == options.model or options.model in out.parents:
        raise SettingsError(f"{out} lies in the model's own folder", field="out", value=str(out))
    check_writable_folder("OUT", out.parent)
    # By name, because the command line does not depend on torch.
    engine: Any = importlib.import_module("katydid_engine.quantize")
    chosen = engine.Options(
        scheme=options.scheme,
        clip=options.clip,
        device=options.device,
        shard_bytes=options.shard_mib << 20,
        recipe=None if options.recipe is None else engine.read_recipe(options.recipe),
    )
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    start = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("quantising", total=None)

        def show(total: int, done: int, what: str) -> None:
            if bar.tasks[0].total not in (None, total):  # a distillation counts steps: their pace is another
                bar.reset(task)
            bar.update(task, total=total, completed=done, description=_layer(what))

        summary = engine.quantize_folder(options.model, out, chosen, progress=show)
    before, after = summary.source_bytes / 2**20, summary.target_bytes / 2**20
    print(
        f"{out}: {summary.matrices} matrices in {options.scheme}, {before:,.1f} MiB -> {after:,.1f} MiB, "
        f"{time.monotonic() - start:.1f} s"
    )


def _layer(tensor: str) -> str:
    """The first words of a tensor's name, model.layers.12, or what a distillation says of itself."""
    return tensor if " " in tensor else ".".join(tensor.split(".")[:3]) or "quantising"
