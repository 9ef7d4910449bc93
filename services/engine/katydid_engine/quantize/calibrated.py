"""Quantises a model folder by data: layer after layer, one in memory at a time, whatever the model's size.

Hidden states of the calibration sequences walk through the model beside it and are saved with every layer that is
finished; a run that was interrupted goes on behind the last one, and ends in the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from katydid_runtime.errors import ModelFolderError, SettingsError
from safetensors.torch import load_file, save_file
from torch import Tensor

from katydid_engine.checkpoint import KEY_MEANS, Checkpoint
from katydid_engine.layers.rotary import rotary_table
from katydid_engine.model_config import ModelConfig
from katydid_engine.quantization import GROUP, Scheme
from katydid_engine.quantize.block import Block, rms_norm, rotary_angles
from katydid_engine.quantize.calibration import calibration_ids
from katydid_engine.quantize.distill import distill
from katydid_engine.quantize.distilled_folder import read_both, stored_tensors, with_new_tensors
from katydid_engine.quantize.layer_files import LayerFile, layer_files, layer_tensors, read_block
from katydid_engine.quantize.partial_folder import PartialFolder
from katydid_engine.quantize.parts import Parts
from katydid_engine.quantize.recipe import Calibration, Recipe
from katydid_engine.quantize.report import LayerReport, as_html, as_json, layer_report
from katydid_engine.quantize.rotation import Rotation
from katydid_engine.quantize.walk import LayerResult, Streams, quantise_layer
from katydid_engine.weights import FLOATS

__all__ = ["CalibratedRun"]

_IDS, _LEARNING_IDS = "calibration.ids", "learning.ids"
_STATE, _REPORTS, _LEARNED = "calibration.state", "calibration.json", "learned.state"
_REPORT = "quantization-report"
_KEY_MEAN = "self_attn.k_mean"
# Tokens that go through a layer at a time.
_CPU_BATCH, _GPU_BATCH = 8192, 32768


class CalibratedRun:
    """One model on its way.

    Args:
        progress: called with the bytes of a layer that were finished, and the name of what is next.
        learning: called with a distillation's steps, those that are done, and its loss in words.
    """

    def __init__(
        self,
        source: Path,
        checkpoint: Checkpoint,
        config: ModelConfig,
        scheme: Scheme,
        recipe: Recipe,
        device: str,
        progress: Callable[[int, str], None],
        learning: Callable[[int, int, str], None],
    ) -> None:
        self._source, self._checkpoint, self._config = source, checkpoint, config
        self._scheme, self._recipe, self._device = scheme, recipe, device
        self._progress, self._learning = progress, learning
        self._batch_tokens = _CPU_BATCH if device == "cpu" else _GPU_BATCH
        if recipe.rotate_residual and config.num_mtp_layers:
            raise SettingsError(
                "rotate_residual: draft layers read hidden states through the final norm's gain, which is folded away",
                field="rotate_residual",
                value="true",
                allowed="false for a model with draft layers",
            )
        if recipe.rotate_keys and config.head_dim & (config.head_dim - 1):
            raise SettingsError(
                f"rotate_keys: heads have {config.head_dim} columns",
                field="rotate_keys",
                value="true",
                allowed="false where head_dim is no power of two",
            )
        if recipe.key_means and recipe.kv_scales == "none":
            raise SettingsError(
                "key_means: pages that keep the model's dtype have nothing to gain",
                field="key_means",
                value="true",
                allowed="false without kv_scales",
            )
        if recipe.balance_keys and (recipe.kv_scales == "none" or not recipe.rotate_keys):
            raise SettingsError(
                "balance_keys: it is rotated keys in e4m3 pages that have something to gain",
                field="balance_keys",
                value="true",
                allowed="false without kv_scales and rotate_keys",
            )
        learns = recipe.distill
        if learns is not None and scheme is Scheme.FP8 and not learns.rounding_rate:
            raise SettingsError(
                "distill.rounding_rate is 0, and of e4m3 nothing else is learned",
                field="distill.rounding_rate",
                value="0",
                allowed="> 0 for this scheme",
            )
        wanted = [("calibration", recipe.calibration)]
        if recipe.distill is not None and recipe.distill.calibration is not None:
            wanted.append(("distill.calibration", recipe.distill.calibration))
        for name, calibration in wanted:
            if calibration.tokens > config.max_positions:
                raise SettingsError(
                    f"{name}.tokens is {calibration.tokens}, the model has {config.max_positions} positions",
                    field=f"{name}.tokens",
                    value=calibration.tokens,
                    allowed=f"<= {config.max_positions}",
                )
        layers = config.num_layers + config.num_mtp_layers
        for layer in recipe.fp8_layers:
            if layer >= layers:
                raise SettingsError(
                    f"fp8_layers: {layer}, the model's last layer is {layers - 1}",
                    field="fp8_layers",
                    value=layer,
                    allowed=f"<= {layers - 1}",
                )
        if recipe.fp8_scales == "block" and scheme is not Scheme.FP8:
            raise SettingsError(
                "fp8_scales is block: rows of int4 have one scale each",
                field="fp8_scales",
                value="block",
                allowed="tensor or channel for this scheme",
            )
        self._rotation = Rotation.make(config.hidden_size, seed=0, device=device) if recipe.rotate_residual else None
        self._angles = self._rotary(recipe.calibration.tokens)
        self.parts = Parts.of(recipe.fp8, config, layers=recipe.fp8_layers, scales=recipe.fp8_scales)
        heads = {"none": 0, "tensor": 1, "head": config.num_kv_heads}
        self.files = layer_files(
            checkpoint,
            config,
            scheme,
            parts=self.parts,
            page_scales=heads[recipe.kv_scales],
            exact_router="feed_forward_input" in recipe.smooth or recipe.rotate_residual,
            untie=recipe.rotate_residual and config.tie_embeddings,
        )
        if recipe.fp8_scales == "block":
            self._check_blocks()
        self._reports: list[LayerReport] = []
        self._key_means: dict[str, Tensor] = {}

    def _check_blocks(self) -> None:
        for step in (step for file in self.files for step in file.shard.steps if step.quantises):
            matrix = step.outputs[0]
            if any(size % GROUP for size in matrix.shape):
                raise SettingsError(
                    f"fp8_scales is block: {matrix.name} is {matrix.shape[0]} x {matrix.shape[1]}, no whole blocks of "
                    f"{GROUP} x {GROUP}",
                    field="fp8_scales",
                    value="block",
                    allowed="tensor or channel for this model",
                )

    def manifest(self) -> dict[str, str]:
        """What the result's bytes depend on beside the source."""
        text = self._recipe.model_dump_json()
        return {"scheme": self._scheme.value, "recipe": hashlib.sha256(text.encode()).hexdigest()}

    @torch.no_grad()
    def write(self, partial: PartialFolder) -> None:
        """Writes what is missing of all files.

        Raises:
            SettingsError: a calibration source that does not exist or is too small.
            ModelFolderError: weights or hidden states that are not finite.
        """
        ids = self._calibration(partial.path / _IDS, self._recipe.calibration)
        if self._recipe.distill is not None:  # what cannot be had is told before the work
            self._learning_rows(partial)
        start, streams = self._resume(partial, ids)
        for file in self.files:
            read = sum(step.read_bytes for step in file.shard.steps)
            if file.index is None:
                self._progress(0, file.shard.steps[0].source if file.shard.steps else "")
                partial.write(file.shard, self._unlayered(file))
            elif file.index >= start:
                self._progress(0, file.prefix)
                self._layer(partial, file, ids, streams)
            self._progress(read, file.prefix)
        if self._key_means:
            _save(partial.path / KEY_MEANS, self._key_means)
        losses = self._distil(partial) if self._recipe.distill is not None else []
        described = json.loads(self._recipe.model_dump_json())
        (partial.path / f"{_REPORT}.json").write_text(as_json(described, self._reports, losses))
        (partial.path / f"{_REPORT}.html").write_text(as_html(described, self._reports, losses))

    unfinished = (_IDS, _LEARNING_IDS, _STATE, _REPORTS, _LEARNED)
    """Names of files that only an unfinished run needs."""

    def _calibration(self, path: Path, options: Calibration) -> Tensor:
        if path.exists():
            ids: Tensor = load_file(path)["ids"]
            return ids
        ids = calibration_ids(self._source, options, device=self._device)
        _save(path, {"ids": ids})
        return ids

    def _resume(self, partial: PartialFolder, ids: Tensor) -> tuple[int, Streams]:
        """The first layer that is missing, and the streams in front of it."""
        path = partial.path / _STATE
        if not path.exists():
            embedding = self._read(self.files[0], "model.embed_tokens.weight")
            original = [F.embedding(batch.to(self._device), embedding).cpu() for batch in self._batches(ids)]
            rotated = self._rotation
            quantised = [x if rotated is None else rotated.embedding(x.to(self._device)).cpu() for x in original]
            return 0, Streams(list(quantised), list(quantised))
        state = load_file(path)
        self._reports = [LayerReport(**fields) for fields in json.loads((partial.path / _REPORTS).read_text())]
        done = int(state["layers"])
        del self._reports[done:]
        self._key_means = {name: tensor for name, tensor in state.items() if name.endswith(_KEY_MEAN)}
        return done, Streams(list(self._batches(state["original"])), list(self._batches(state["quantised"])))

    def _layer(self, partial: PartialFolder, file: LayerFile, ids: Tensor, streams: Streams) -> None:
        assert file.index is not None
        block = self._block(file)
        moved = streams
        if file.index >= self._config.num_layers:
            moved = self._draft_inputs(block, ids, streams)
        result = self._quantise(block, file.prefix, moved)
        partial.write(file.shard, layer_tensors(file, result.block.tensors, result.matrices, result.pages))
        if file.index >= self._config.num_layers:
            moved = streams  # what follows the decoder layers starts from their states again
        if result.pages is not None and result.pages.key_mean is not None:
            self._key_means[file.prefix + _KEY_MEAN] = result.pages.key_mean.cpu()
        self._reports.append(layer_report(file.index, result))
        _write(partial.path / _REPORTS, json.dumps([dataclasses.asdict(one) for one in self._reports]))
        _save(
            partial.path / _STATE,
            self._key_means
            | {
                "layers": torch.tensor(file.index + 1),
                "original": torch.cat(moved.original),
                "quantised": torch.cat(moved.quantised),
            },
        )

    def _quantise(self, block: Block, prefix: str, streams: Streams) -> LayerResult:
        dtype = self._checkpoint.entries["model.norm.weight"].dtype
        on_device = Streams(
            [x.to(self._device) for x in streams.original], [x.to(self._device) for x in streams.quantised]
        )
        result = quantise_layer(
            block,
            on_device,
            tuple(part[: on_device.original[0].shape[1]] for part in self._angles),  # type: ignore[arg-type]
            self._recipe,
            int4=lambda name: self._scheme is Scheme.W4A8 and not self.parts.is_fp8(prefix + name),
            gain_dtype={"BF16": torch.bfloat16, "F16": torch.float16}.get(dtype, torch.float32),
        )
        for stream, moved in ((streams.original, on_device.original), (streams.quantised, on_device.quantised)):
            stream[:] = [x.cpu() for x in moved]
            if not all(x.isfinite().all() for x in stream):
                raise ModelFolderError("calibration rows are not finite behind a layer", field="model")
        return result

    def _draft_inputs(self, block: Block, ids: Tensor, streams: Streams) -> Streams:
        """What a draft layer's decoder layer reads: the next token's embedding joined with the model's states."""
        embedding = self._read(self.files[0], "model.embed_tokens.weight")
        norm = self._read(self.files[-1], "model.norm.weight")
        eps, tensors = self._config.rms_norm_eps, block.tensors

        def enter(x: Tensor, tokens: Tensor) -> Tensor:
            embedded = F.embedding(tokens[:, 1:].to(self._device), embedding)
            embedded[:, 0] = 0
            hidden = rms_norm(x[:, :-1].to(self._device), norm, eps)
            merged = (
                rms_norm(embedded, tensors["enorm.weight"], eps),
                rms_norm(hidden, tensors["hnorm.weight"], eps),
            )
            return F.linear(torch.cat(merged, -1), tensors["eh_proj.weight"]).cpu()

        batches = list(self._batches(ids))
        return Streams(
            [enter(x, tokens) for x, tokens in zip(streams.original, batches, strict=True)],
            [enter(x, tokens) for x, tokens in zip(streams.quantised, batches, strict=True)],
        )

    def _block(self, file: LayerFile) -> Block:
        block = read_block(self._checkpoint, self._config, file, self._device)
        if self._rotation is None:
            return block
        return dataclasses.replace(block, tensors=self._rotation.layer(block.tensors))

    def _unlayered(self, file: LayerFile) -> list[Tensor]:
        """Embedding, final norm and head: copied, or rotated."""
        made = []
        for step in file.shard.steps:
            tensor = self._checkpoint.read(step.source, step.shape, step.part, (step.dtype,))
            if self._rotation is not None:
                wide = tensor.float().to(self._device)
                if step.outputs[0].name == "lm_head.weight":
                    wide = self._rotation.reader(wide, self._read(self.files[-1], "model.norm.weight"))
                elif step.outputs[0].name == "model.embed_tokens.weight":
                    wide = self._rotation.embedding(wide)
                elif step.outputs[0].name == "model.norm.weight":
                    wide = torch.ones_like(wide)
                tensor = wide.to(tensor.dtype)
            made.append(tensor)
        return made

    def _distil(self, partial: PartialFolder) -> list[float]:
        options = self._recipe.distill
        assert options is not None
        rows = options.calibration or self._recipe.calibration
        path = partial.path / _LEARNED
        shards = [file.shard for file in self.files]
        if not path.exists():
            original, quantised, matrices = read_both(
                self._checkpoint,
                partial.path,
                self._config,
                self.files,
                self._device,
                rotate=self._recipe.rotate_keys,
                scales=self._recipe.fp8_scales,
            )
            ids = self._learning_rows(partial)
            with torch.enable_grad():
                learned, losses = distill(
                    original,
                    quantised,
                    matrices,
                    ids,
                    self._rotary(rows.tokens),
                    options,
                    seed=rows.seed,
                    report=lambda step, loss: self._learning(options.steps, step, f"distilling, loss {loss:.4f}"),
                )
            prefixes = [file.prefix for file in self.files if file.index is not None]
            made = {"losses": torch.tensor(losses)}
            for prefix, layer in zip(prefixes, learned, strict=True):
                made |= stored_tensors(prefix, layer)
            _save(path, made)
        made = load_file(path)
        for shard in shards:
            with_new_tensors(partial, shard, made)
        return [float(loss) for loss in made["losses"]]

    def _learning_rows(self, partial: PartialFolder) -> Tensor:
        assert self._recipe.distill is not None
        options = self._recipe.distill.calibration or self._recipe.calibration
        return self._calibration(partial.path / _LEARNING_IDS, options)

    def _rotary(self, tokens: int) -> tuple[Tensor, Tensor]:
        config = self._config
        return rotary_angles(rotary_table(config.rope, config.head_dim, tokens, torch.device(self._device)), tokens)

    def _read(self, file: LayerFile, name: str) -> Tensor:
        step = next(step for step in file.shard.steps if step.source == name)
        return self._checkpoint.read(name, step.shape, step.part, FLOATS).float().to(self._device)

    def _batches(self, rows: Tensor) -> tuple[Tensor, ...]:
        return torch.split(rows, max(1, self._batch_tokens // rows.shape[1]))


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, unfinished)
    unfinished.rename(path)


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.rename(path)
