"""`katydid models list|prepare|verify`: what `katydid_cli.models` does, printed."""

from __future__ import annotations

from pathlib import Path

from katydid_runtime.errors import UnknownModelError
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from katydid_cli.model_folder import EMBEDDED, embedded_folder
from katydid_cli.models import list_models, prepare, verify

__all__ = ["prepare_model", "show_models", "verify_model"]


def show_models(cache_dir: Path) -> None:
    """A line a model: name, whether it can be served at once, what it is."""
    table = Table("model", "state", "what it is", box=None, pad_edge=False)
    if (folder := embedded_folder()) is not None:
        table.add_row(EMBEDDED, "embedded", f"small Hy3, trained for this repository ({folder})")
    for listing in list_models(cache_dir):
        state = "prepared" if listing.prepared else "not prepared"
        table.add_row(listing.entry.name, state, listing.entry.summary)
    Console(highlight=False).print(table)


def prepare_model(name: str, cache_dir: Path) -> None:
    """Prepare with a progress bar on stderr; the folder's path goes to stdout."""
    if name == EMBEDDED and (embedded := embedded_folder()) is not None:
        print(embedded)
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("preparing", total=1.0)
        folder = prepare(
            name, cache_dir, progress=lambda what, share: bar.update(task, description=what, completed=share)
        )
    print(folder)


def verify_model(name: str, cache_dir: Path) -> None:
    """Print what was checked and what the model answered; a wrong file or answer is raised as ModelFolderError."""
    if name == EMBEDDED and embedded_folder() is not None:
        raise UnknownModelError(
            f"{EMBEDDED} comes with the code and is checked like it; `katydid eval --model {EMBEDDED}` measures it",
            field="model",
            value=name,
        )
    report = verify(name, cache_dir)
    console = Console(highlight=False, markup=False)
    console.print(f"{len(report.files)} files are intact")
    console.print(f"{report.question} {report.answer.strip()}")
