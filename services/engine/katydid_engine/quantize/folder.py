"""From a model folder to its quantised copy: complete under its name, or resumable under the name with ``.partial``.

Every shard is written beside its place and renamed when it is whole, the folder when all of them are. A run that was
interrupted continues with the first shard that is missing; the bytes are the same as if it had not been.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from katydid_runtime.errors import ModelFolderError, SettingsError
from torch import Tensor

from katydid_engine.checkpoint import DTYPE_BYTES, Checkpoint
from katydid_engine.config_fields import read_json_object
from katydid_engine.identity import SIDECAR
from katydid_engine.matrices import pack_words, to_fp8, to_int4
from katydid_engine.model_config import read_model_config
from katydid_engine.quantization import Scheme
from katydid_engine.quantize.layout import Output, Shard, Step, cut_into_shards, header, quantization_config, steps

__all__ = ["SCHEMES", "Options", "Progress", "Summary", "quantize_folder"]

SCHEMES = (Scheme.FP8.value, Scheme.W4A8.value)
_CLIPS = ("mse", "none")
_MANIFEST = "katydid-quantize.json"
_INDEX = "model.safetensors.index.json"
# Linears that no step quantises, in the words of whoever builds the model's modules.
_IGNORED = ("lm_head", "re:.*router\\.gate$", "re:.*mlp\\.gate$", "re:.*eh_proj$")
# Sidecars of folders this project writes; they describe the files they lie beside.
_NOT_COPIED = (SIDECAR, _INDEX, "katydid-model.json", "config.json")

Progress = Callable[[int, int, str], None]
"""Called with all bytes, the bytes read so far, and the name of the tensor that is next."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to quantise.

    Attributes:
        scheme: "fp8": e4m3 with a scale a matrix; "w4a8": int4 with one for every 128 columns of a row.
        clip: of w4a8's scales: "mse" for the least squared error of a group, "none" for its largest magnitude.
        device: where matrices are quantised.
        shard_bytes: largest file, unless a tensor is larger.
    """

    scheme: str = "w4a8"
    clip: str = "mse"
    device: str = "cpu"
    shard_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        for name, value, allowed in (("scheme", self.scheme, SCHEMES), ("clip", self.clip, _CLIPS)):
            if value not in allowed:
                raise SettingsError(f"--{name} is {value!r}", field=name, value=value, allowed=", ".join(allowed))


@dataclass(frozen=True, slots=True)
class Summary:
    """Sizes of all tensors before and after, and how many matrices were quantised."""

    source_bytes: int
    target_bytes: int
    matrices: int


def quantize_folder(source: Path, target: Path, options: Options, *, progress: Progress | None = None) -> Summary:
    """Writes ``target``, which must not exist or be empty.

    Raises:
        ModelFolderError: ``source`` holds no whole model of a known architecture, or one that is quantised already.
        SettingsError: ``target`` is in the way or cannot be written, or the disk is full.
    """
    scheme = Scheme(options.scheme)
    if read_model_config(source).quantization.scheme is not Scheme.NONE:
        raise ModelFolderError(
            f"{source}: this checkpoint is quantised already", field="quantization_config", allowed="none"
        )
    if options.device != "cpu" and not torch.cuda.is_available():
        raise SettingsError(f"--device is {options.device!r}, but torch sees no GPU", field="device", allowed="cpu")
    checkpoint = Checkpoint(source)
    try:
        _check_types(checkpoint)
        work = steps({name: (entry.dtype, entry.shape) for name, entry in checkpoint.entries.items()}, scheme)
        shards = cut_into_shards(work, options.shard_bytes)
        summary = Summary(
            sum(step.read_bytes for step in work),
            sum(output.nbytes for shard in shards for output in shard.outputs),
            sum(step.quantises for step in work),
        )
        with _writing(target):
            partial = _open_partial(source, target, checkpoint, options)
            _check_room(partial, shards)
            report = functools.partial(progress or _say_nothing, summary.source_bytes)
            with _thread_each() as pool:
                _write_shards(checkpoint, shards, partial, options, report, pool)
            _write_rest(source, partial, shards, scheme)
            if target.exists():
                target.rmdir()
            partial.rename(target)
            (target / _MANIFEST).unlink()
    finally:
        checkpoint.close()
    return summary


@contextlib.contextmanager
def _thread_each() -> Iterator[Executor]:
    """A thread a core, each with operations of one thread: they are short, and where cores are busy the threads of one
    operation wait for each other far longer than they compute (hy3-tiny in 60 s instead of 1)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Turns what a disk says into an error that names the folder that was asked for."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = f"the disk is full ({error.strerror})" if full else f"cannot be written: {error.strerror}"
        raise SettingsError(f"{target}: {what}", field="out", value=str(target)) from error


def _open_partial(source: Path, target: Path, checkpoint: Checkpoint, options: Options) -> Path:
    """The folder to write in: new, or that of an interrupted run with the same source and options."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(
            f"{target} is not empty", field="out", value=str(target), allowed="a new or an empty folder"
        )
    partial = target.with_name(f"{target.name}.partial")
    manifest = {"source": _stamp(source, checkpoint), "scheme": options.scheme, "clip": options.clip}
    manifest["shard_bytes"] = str(options.shard_bytes)
    known = partial / _MANIFEST
    if partial.exists():
        if not known.is_file() or json.loads(known.read_text()) != manifest:
            raise SettingsError(
                f"{partial} is left from another run; remove it or choose another name",
                field="out",
                value=str(partial),
                allowed="what an interrupted run with the same model and options left",
            )
        return partial
    partial.mkdir(parents=True)
    known.write_text(json.dumps(manifest))
    return partial


def _stamp(source: Path, checkpoint: Checkpoint) -> str:
    digest = hashlib.sha256((source / "config.json").read_bytes())
    for shard in checkpoint.shards:
        status = shard.stat()
        digest.update(f"{shard.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _check_room(partial: Path, shards: list[Shard]) -> None:
    needed = sum(_file_bytes(shard) for shard in shards if not (partial / shard.name).exists())
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed} bytes are needed, {free} are free")


def _file_bytes(shard: Shard) -> int:
    return len(header(shard)) + sum(output.nbytes for output in shard.outputs)


def _write_shards(
    checkpoint: Checkpoint,
    shards: list[Shard],
    partial: Path,
    options: Options,
    report: Callable[[int, str], None],
    pool: Executor,
) -> None:
    done = 0
    for shard in shards:
        path = partial / shard.name
        if path.exists() and path.stat().st_size == _file_bytes(shard):
            done += sum(step.read_bytes for step in shard.steps)
            continue
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            file.write(header(shard))
            for step in shard.steps:
                report(done, step.source)
                for output, tensor in zip(step.outputs, _carry_out(checkpoint, step, options, pool), strict=True):
                    assert list(tensor.shape) == list(output.shape)
                    file.write(tensor.reshape(-1).view(torch.uint8).cpu().numpy().data)
                done += step.read_bytes
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    report(done, "")


def _carry_out(checkpoint: Checkpoint, step: Step, options: Options, pool: Executor) -> Iterator[Tensor]:
    tensor = checkpoint.read(step.source, step.shape, step.part, (step.dtype,))
    if not step.quantises:
        yield tensor
        return
    weight = tensor.reshape(tensor.shape[-2:]).to(options.device)
    if not weight.isfinite().all():
        raise ModelFolderError(f"tensor {step.source} holds NaN or infinity and cannot be quantised", field=step.source)
    if options.scheme == Scheme.FP8:
        matrix = to_fp8(weight)
        yield matrix.weight
        yield matrix.scale
        return
    int4 = to_int4(weight, cast(Literal["none", "mse"], options.clip), run=pool.map)
    yield pack_words(int4.codes)
    yield int4.scales
    yield torch.tensor(weight.shape)


def _say_nothing(_total: int, _done: int, _what: str) -> None:
    """Progress that nobody watches."""


def _check_types(checkpoint: Checkpoint) -> None:
    for name, entry in checkpoint.entries.items():
        if entry.dtype not in DTYPE_BYTES:
            raise ModelFolderError(
                f"{entry.shard}: tensor {name} has type {entry.dtype}, expected one of {', '.join(DTYPE_BYTES)}",
                field=name,
                value=entry.dtype,
                allowed=", ".join(DTYPE_BYTES),
            )


def _write_rest(source: Path, partial: Path, shards: list[Shard], scheme: Scheme) -> None:
    """Index, config and everything that is no weight: tokenizer, templates, licence."""
    outputs: list[tuple[Output, str]] = [(output, shard.name) for shard in shards for output in shard.outputs]
    index = {
        "metadata": {"total_size": sum(output.nbytes for output, _ in outputs)},
        "weight_map": {output.name: name for output, name in outputs},
    }
    (partial / _INDEX).write_text(json.dumps(index, indent=1) + "\n")
    config = read_json_object(source / "config.json")
    config["quantization_config"] = quantization_config(scheme, ignore=list(_IGNORED))
    (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix != ".safetensors" and path.name not in _NOT_COPIED:
            shutil.copyfile(path, partial / path.name)
