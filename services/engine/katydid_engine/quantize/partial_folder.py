"""The result of a long run on its way: files under the name with ``.partial``, each whole or absent, and the real name
at the end. A run that was interrupted finds there what it had finished.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from katydid_runtime.errors import SettingsError
from torch import Tensor

from katydid_engine.checkpoint import Checkpoint
from katydid_engine.config_fields import read_json_object
from katydid_engine.identity import SIDECAR
from katydid_engine.quantize.layout import Output, Shard, header

__all__ = ["PartialFolder", "told_as_settings_error"]

_MANIFEST = "katydid-quantize.json"
_INDEX = "model.safetensors.index.json"
# Sidecars of folders this project writes; they describe the files they lie beside.
_NOT_COPIED = (SIDECAR, _INDEX, "katydid-model.json", "config.json")


@contextlib.contextmanager
def told_as_settings_error(target: Path) -> Iterator[None]:
    """Turns what a disk says into an error that names the folder that was asked for."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = f"the disk is full ({error.strerror})" if full else f"cannot be written: {error.strerror}"
        raise SettingsError(f"{target}: {what}", field="out", value=str(target)) from error


class PartialFolder:
    """``target`` as far as it is written.

    Args:
        options: what the bytes depend on beside the source.

    Raises:
        SettingsError: ``target`` is in the way, or another run left its partial folder there.
    """

    def __init__(self, source: Path, target: Path, checkpoint: Checkpoint, options: Mapping[str, str]) -> None:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise SettingsError(
                f"{target} is not empty", field="out", value=str(target), allowed="a new or an empty folder"
            )
        self.path = target.with_name(f"{target.name}.partial")
        self._source, self._target = source, target
        manifest = {"source": _stamp(source, checkpoint), **options}
        known = self.path / _MANIFEST
        if self.path.exists():
            if not known.is_file() or json.loads(known.read_text()) != manifest:
                raise SettingsError(
                    f"{self.path} is left from another run; remove it or choose another name",
                    field="out",
                    value=str(self.path),
                    allowed="what an interrupted run with the same model and options left",
                )
            return
        self.path.mkdir(parents=True)
        try:
            known.write_text(json.dumps(manifest))
        except OSError:
            # Without its manifest it would be taken for another run's.
            shutil.rmtree(self.path)
            raise

    def has(self, shard: Shard) -> bool:
        """Whether a shard is written."""
        path = self.path / shard.name
        return path.exists() and path.stat().st_size == shard_bytes(shard)

    def check_room(self, shards: Iterable[Shard]) -> None:
        """Raises OSError when the disk has less room than the shards that are missing need.

        A folder in which nothing has been written yet is taken away then.
        """
        needed = sum(shard_bytes(shard) for shard in shards if not self.has(shard))
        free = shutil.disk_usage(self.path).free
        if free < needed:
            self.drop_if_empty()
            raise OSError(errno.ENOSPC, f"{needed} bytes are needed, {free} are free")

    def drop_if_empty(self) -> None:
        """Takes the folder away unless a shard is written: nothing could go on from it."""
        if not any(self.path.glob("*.safetensors")):
            shutil.rmtree(self.path)

    def write(self, shard: Shard, tensors: Iterable[Tensor]) -> None:
        """Writes one shard out of its outputs' tensors, in their order."""
        path = self.path / shard.name
        unfinished = path.with_suffix(".unfinished")
        try:
            with unfinished.open("wb") as file:
                file.write(header(shard))
                for output, tensor in zip(shard.outputs, tensors, strict=True):
                    assert list(tensor.shape) == list(output.shape)
                    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            # A full disk has no room for half a shard.
            unfinished.unlink(missing_ok=True)
            raise
        unfinished.rename(path)

    def finish(self, shards: Iterable[Shard], changes: Mapping[str, Any], *, remove: Iterable[str] = ()) -> None:
        """Adds index, config and everything that is no weight (tokenizer, templates, licence), and takes the real name.

        Args:
            changes: fields of config.json.
            remove: names of files that only an unfinished run needs.
        """
        outputs: list[tuple[Output, str]] = [(output, shard.name) for shard in shards for output in shard.outputs]
        index = {
            "metadata": {"total_size": sum(output.nbytes for output, _ in outputs)},
            "weight_map": {output.name: name for output, name in outputs},
        }
        (self.path / _INDEX).write_text(json.dumps(index, indent=1) + "\n")
        config = read_json_object(self._source / "config.json") | dict(changes)
        (self.path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        for path in sorted(self._source.iterdir()):
            if path.is_file() and path.suffix != ".safetensors" and path.name not in _NOT_COPIED:
                shutil.copyfile(path, self.path / path.name)
        for name in remove:
            (self.path / name).unlink(missing_ok=True)
        if self._target.exists():
            self._target.rmdir()
        self.path.rename(self._target)
        (self._target / _MANIFEST).unlink()


def shard_bytes(shard: Shard) -> int:
    """Size of a shard's file."""
    return len(header(shard)) + sum(output.nbytes for output in shard.outputs)


def _stamp(source: Path, checkpoint: Checkpoint) -> str:
    digest = hashlib.sha256((source / "config.json").read_bytes())
    for shard in checkpoint.shards:
        status = shard.stat()
        digest.update(f"{shard.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
