"""From a model folder to its quantised copy: complete under its name, or resumable under the name with ``.partial``.

Every shard is written beside its place and renamed when it is whole, the folder when all of them are. A run that was
interrupted continues with the first shard that is missing; the bytes are the same as if it had not been.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from katydid_runtime.errors import ModelFolderError, SettingsError
from torch import Tensor

from katydid_engine.checkpoint import DTYPE_BYTES, Checkpoint
from katydid_engine.matrices import pack_words, to_fp8, to_int4
from katydid_engine.model_config import ModelConfig, read_model_config
from katydid_engine.quantization import Scheme
from katydid_engine.quantize.calibrated import CalibratedRun
from katydid_engine.quantize.layout import Shard, Step, cut_into_shards, quantization_config, steps
from katydid_engine.quantize.partial_folder import PartialFolder, told_as_settings_error
from katydid_engine.quantize.parts import Parts
from katydid_engine.quantize.recipe import Recipe

__all__ = ["SCHEMES", "Options", "Progress", "Summary", "quantize_folder"]

SCHEMES = {"w4a8": Scheme.W4A8, "w8a8": Scheme.FP8, "w8a8c8": Scheme.FP8}
_CLIPS = ("mse", "none")
# Linears that no step quantises, in the words of whoever builds the model's modules.
_IGNORED = ("lm_head", "re:.*router\\.gate$", "re:.*mlp\\.gate$", "re:.*eh_proj$")

Progress = Callable[[int, int, str], None]
"""Called with all bytes, the bytes read so far, and the name of the tensor that is next; in a distillation with its
steps, those that are done, and its loss in words."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to quantise.

    Attributes:
        scheme: "w8a8": e4m3 with a scale a matrix; "w8a8c8": and calibrated scales of K and V; "w4a8": int4 with a
            scale for every 128 columns of a row.
        clip: of w4a8's scales: "mse" for the least squared error of a group, "none" for its largest magnitude. A recipe
            says it itself.
        device: where matrices are quantised.
        shard_bytes: largest file, unless a tensor is larger; by a recipe, every layer is a file.
        recipe: to quantise by data; None looks at the weights alone.
    """

    scheme: str = "w4a8"
    clip: str = "mse"
    device: str = "cpu"
    shard_bytes: int = 4 << 30
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (("scheme", self.scheme, SCHEMES), ("clip", self.clip, _CLIPS)):
            if value not in allowed:
                raise SettingsError(f"--{name} is {value!r}", field=name, value=value, allowed=", ".join(allowed))
        if self.scheme == "w8a8c8" and (self.recipe is None or self.recipe.kv_scales == "none"):
            raise SettingsError(
                "w8a8c8 calibrates the scales of K and V: it needs a recipe with kv_scales",
                field="recipe.kv_scales",
                value="none",
                allowed="tensor, head",
            )


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
    config = read_model_config(source)
    if config.quantization.scheme is not Scheme.NONE:
        raise ModelFolderError(
            f"{source}: this checkpoint is quantised already",
            field="quantization_config",
            allowed="a folder of weights that are not",
        )
    if options.device != "cpu" and not torch.cuda.is_available():
        raise SettingsError(f"--device is {options.device!r}, but torch sees no GPU", field="device", allowed="cpu")
    checkpoint = Checkpoint(source)
    try:
        _check_types(checkpoint)
        with told_as_settings_error(target):
            if options.recipe is not None:
                with _thread_each():
                    return _by_data(
                        source, target, checkpoint, config, options, options.recipe, progress or _say_nothing
                    )
            return _by_weights(source, target, checkpoint, config, options, progress or _say_nothing)
    finally:
        checkpoint.close()


def _by_weights(
    source: Path, target: Path, checkpoint: Checkpoint, config: ModelConfig, options: Options, progress: Progress
) -> Summary:
    scheme = SCHEMES[options.scheme]
    work = steps({name: (entry.dtype, entry.shape) for name, entry in checkpoint.entries.items()}, scheme)
    shards = cut_into_shards(work, options.shard_bytes)
    summary = _summary(shards)
    partial = PartialFolder(source, target, checkpoint, _manifest(options))
    partial.check_room(shards)
    report = functools.partial(progress, summary.source_bytes)
    with _thread_each() as pool:
        _write_shards(checkpoint, shards, partial, options, report, pool)
    described = quantization_config(scheme, ignore=list(_IGNORED), parts=Parts.of((), config))
    partial.finish(shards, {"quantization_config": described})
    return summary


def _by_data(
    source: Path,
    target: Path,
    checkpoint: Checkpoint,
    config: ModelConfig,
    options: Options,
    recipe: Recipe,
    progress: Progress,
) -> Summary:
    done = 0

    def report(read: int, what: str) -> None:
        nonlocal done
        done += read
        progress(summary.source_bytes, done, what)

    scheme = SCHEMES[options.scheme]
    run = CalibratedRun(source, checkpoint, config, scheme, recipe, options.device, report, progress)
    shards = [file.shard for file in run.files]
    summary = _summary(shards)
    partial = PartialFolder(source, target, checkpoint, run.manifest())
    partial.check_room(shards)
    try:
        run.write(partial)
    except SettingsError:
        partial.drop_if_empty()  # a mended recipe is another run, in whose way this one's folder would be
        raise
    described = quantization_config(
        scheme,
        ignore=list(_IGNORED),
        parts=run.parts,
        kv_scales=recipe.kv_scales,
        rotate_keys=recipe.rotate_keys,
        key_means=recipe.key_means,
    )
    changes: dict[str, Any] = {"quantization_config": described}
    if recipe.rotate_residual:
        changes["tie_word_embeddings"] = False
    partial.finish(shards, changes, remove=run.unfinished)
    return summary


def _summary(shards: list[Shard]) -> Summary:
    return Summary(
        sum(step.read_bytes for shard in shards for step in shard.steps),
        sum(output.nbytes for shard in shards for output in shard.outputs),
        sum(step.quantises for shard in shards for step in shard.steps),
    )


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


def _manifest(options: Options) -> dict[str, str]:
    return {"scheme": options.scheme, "clip": options.clip, "shard_bytes": str(options.shard_bytes)}


def _write_shards(
    checkpoint: Checkpoint,
    shards: list[Shard],
    partial: PartialFolder,
    options: Options,
    report: Callable[[int, str], None],
    pool: Executor,
) -> None:
    done = 0

    def tensors(shard: Shard) -> Iterator[Tensor]:
        nonlocal done
        for step in shard.steps:
            report(done, step.source)
            yield from _carry_out(checkpoint, step, options, pool)
            done += step.read_bytes

    for shard in shards:
        if partial.has(shard):
            done += sum(step.read_bytes for step in shard.steps)
        else:
            partial.write(shard, tensors(shard))
    report(done, "")


def _carry_out(checkpoint: Checkpoint, step: Step, options: Options, pool: Executor) -> Iterator[Tensor]:
    tensor = checkpoint.read(step.source, step.shape, step.part, (step.dtype,))
    if not step.quantises:
        yield tensor
        return
    weight = tensor.reshape(tensor.shape[-2:]).to(options.device)
    if not weight.isfinite().all():
        raise ModelFolderError(f"tensor {step.source} holds NaN or infinity and cannot be quantised", field=step.source)
    if SCHEMES[options.scheme] is Scheme.FP8:
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
