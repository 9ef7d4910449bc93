"""Which folder a model's name means: the embedded model, one of the catalogue, or a path.

Nothing named: `hy3-tiny` when this installation carries it, else SmolLM2, prepared on first use.
"""

from __future__ import annotations

from pathlib import Path

from katydid_runtime.errors import ModelFolderError, UnknownModelError

__all__ = ["EMBEDDED", "FALLBACK", "default_cache_dir", "embedded_folder", "resolve_model"]

EMBEDDED = "hy3-tiny"
FALLBACK = "SmolLM2-135M-Instruct"


def default_cache_dir() -> Path:
    """Where prepared models live unless `--cache-dir` says otherwise."""
    return Path.home() / ".cache" / "katydid"


def embedded_folder() -> Path | None:
    """The folder of the model that came with the code, or None."""
    folder = Path(__file__).resolve().parents[2] / "models" / EMBEDDED
    return folder if (folder / "config.json").is_file() else None


def resolve_model(name: str | None, cache_dir: Path) -> Path:
    """The folder to serve for `name`; a catalogue model is prepared if need be, which takes seconds.

    Raises UnknownModelError for a name that is neither a folder nor known, ModelFolderError for a folder that holds
    no model, SettingsError when the cache directory cannot be written.
    """
    if name is None:
        name = EMBEDDED if embedded_folder() is not None else FALLBACK
    embedded = embedded_folder()
    if name == EMBEDDED and embedded is not None:
        return embedded
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelFolderError(f"{folder} is no model folder: it has no config.json", field="model", value=name)
        return folder.resolve()
    from katydid_cli.models import CATALOGUE, prepare

    known = [entry.name for entry in CATALOGUE]
    if name.lower() not in (entry.lower() for entry in known):
        allowed = ", ".join([EMBEDDED, *known] if embedded is not None else known)
        raise UnknownModelError(
            f"model {name!r} is neither a folder nor one of {allowed}", field="model", value=name, allowed=allowed
        )
    return prepare(name, cache_dir)
