"""A folder of safetensors shards as a source of named tensors: headers are checked before a byte of data is used."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from katydid_runtime.errors import ModelFolderError
from safetensors import safe_open
from torch import Tensor

from katydid_engine.weights import FLOATS

__all__ = ["DTYPE_BYTES", "KEY_MEANS", "Checkpoint", "TensorEntry"]

DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "I64": 8}
# Lies beside the files of the index: other engines, which read these alone, refuse tensors that they do not know.
KEY_MEANS = "key-means.safetensors"
# The format's own limit (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as a shard's header describes it."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a model folder, from ``model.safetensors.index.json`` or every ``*.safetensors`` in it; means
    of keys lie in a file of their own.

    Remembers which names were used, so that ``unused`` can tell what a model left lying.

    Raises:
        ModelFolderError: no shards, a shard of the index is absent or lacks its tensor, or a header is corrupt.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards = _shards(folder)
        self.entries: dict[str, TensorEntry] = {}
        for shard in self.shards:
            for name, entry in _read_header(shard).items():
                if name in self.entries:
                    raise ModelFolderError(
                        f"{folder}: tensor {name} stands in both {self.entries[name].shard.name} and {shard.name}",
                        field=name,
                    )
                self.entries[name] = entry
        self._open: dict[Path, Any] = {}
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.entries

    def stored(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        entry = self.entries.get(name)
        return None if entry is None else (entry.dtype, entry.shape)

    def skip(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> None:
        entry = self.entries.get(name)
        if entry is None:
            raise ModelFolderError(
                f"{self.folder}: tensor {name} is missing, expected shape {list(shape)}",
                field=name,
                allowed=str(list(shape)),
            )
        if entry.shape != shape:
            raise ModelFolderError(
                f"{entry.shard}: tensor {name} has shape {list(entry.shape)}, expected {list(shape)}",
                field=name,
                value=list(entry.shape),
                allowed=str(list(shape)),
            )
        if entry.dtype not in dtypes:
            raise ModelFolderError(
                f"{entry.shard}: tensor {name} has type {entry.dtype}, expected one of {', '.join(dtypes)}",
                field=name,
                value=entry.dtype,
                allowed=", ".join(dtypes),
            )
        self._used.add(name)

    def read(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...], dtypes: tuple[str, ...] = FLOATS
    ) -> Tensor:
        self.skip(name, shape, dtypes)
        shard = self.entries[name].shard
        if shard not in self._open:
            self._open[shard] = safe_open(shard, framework="pt")
        # A slice of a tensor without dimensions does not exist.
        tensor: Tensor = self._open[shard].get_slice(name)[part] if part else self._open[shard].get_tensor(name)
        return tensor

    def unused(self) -> list[str]:
        """Names no layer asked for, sorted."""
        return sorted(self.entries.keys() - self._used)

    def close(self) -> None:
        """Unmaps the shards; tensors already read stay valid."""
        self._open.clear()


def _shards(folder: Path) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        shards = tuple(sorted(folder.glob("*.safetensors")))
        if not shards:
            raise ModelFolderError(
                f"{folder}: no *.safetensors file, expected model.safetensors or shards with an index", field="model"
            )
        return shards
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelFolderError(f"{index}: expected an object with weight_map: {error}", field="model") from error
    shards = tuple(folder / name for name in sorted(names))
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise ModelFolderError(f"{index}: names shards that are absent: {', '.join(absent[:5])}", field="model")
    extra = folder / KEY_MEANS
    return (*shards, extra) if extra.is_file() else shards


def _read_header(shard: Path) -> dict[str, TensorEntry]:
    """Parses and checks the header: u64 length, JSON, then data that must fill the file exactly."""

    def corrupt(why: str) -> ModelFolderError:
        return ModelFolderError(f"{shard}: corrupt safetensors header: {why}", field=shard.name)

    size = shard.stat().st_size
    with shard.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise corrupt(f"it claims {length} bytes, the file has {size}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise corrupt(f"not JSON ({error})") from error
    if not isinstance(header, dict):
        raise corrupt(f"expected an object, found {type(header).__name__}")
    header.pop("__metadata__", None)
    entries = {}
    end_of_data = 0
    for name, fields in header.items():
        try:
            dtype, shape = str(fields["dtype"]), tuple(int(n) for n in fields["shape"])
            begin, end = (int(n) for n in fields["data_offsets"])
        except (TypeError, KeyError, ValueError) as error:
            raise corrupt(f"tensor {name} lacks dtype, shape or data_offsets ({error!r})") from error
        if not 0 <= begin <= end <= size - 8 - length:
            raise corrupt(f"tensor {name} lies at bytes {begin}..{end}, the data has {size - 8 - length}")
        if dtype in DTYPE_BYTES and end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
            raise corrupt(f"tensor {name} of {dtype} {list(shape)} spans {end - begin} bytes")
        entries[name] = TensorEntry(shard, dtype, shape)
        end_of_data = max(end_of_data, end)
    if end_of_data != size - 8 - length:
        raise corrupt(f"tensors end at byte {end_of_data}, the data has {size - 8 - length}")
    return entries
