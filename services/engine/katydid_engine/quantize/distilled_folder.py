"""Between the files of an unfinished run and the distillation: reads both models, and writes files with new scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from katydid_engine.checkpoint import Checkpoint
from katydid_engine.matrices import Int4Matrix, read_matrix
from katydid_engine.model_config import ModelConfig
from katydid_engine.quantize.block import Block
from katydid_engine.quantize.distill import WholeModel
from katydid_engine.quantize.int4_weights import Int4Weights
from katydid_engine.quantize.layer_files import LayerFile, read_block
from katydid_engine.quantize.layout import Shard
from katydid_engine.quantize.partial_folder import PartialFolder
from katydid_engine.weights import FLOATS, Weights

__all__ = ["read_int4_model", "with_new_scales"]


def read_int4_model(
    original: Checkpoint, written: Path, config: ModelConfig, files: Sequence[LayerFile], device: str
) -> tuple[WholeModel, WholeModel, list[dict[str, Int4Weights]]]:
    """The original model, the quantised one without its int4 matrices, and these by layer."""
    made = Checkpoint(written)
    try:
        blocks, folded, int4 = [], [], []
        for file in files:
            if file.index is None or file.index >= config.num_layers:
                continue
            block = read_block(original, config, file, device)
            matrices = {}
            for name in block.matrices():
                scope = Weights(made, torch.device(device), torch.float32, prefix=f"{file.prefix}{name}.")
                rows, columns = block.tensors[f"{name}.weight"].shape
                matrix = read_matrix(scope, (rows, columns), (slice(0, rows), slice(0, columns)), row_scales=True)
                assert isinstance(matrix, Int4Matrix)
                matrices[name] = Int4Weights(matrix.codes, matrix.scales)
            blocks.append(block)
            folded.append(_folded(made, block, file.prefix, matrices))
            int4.append(matrices)
        return _whole(original, blocks, device), _whole(made, folded, device), int4
    finally:
        made.close()


def with_new_scales(partial: PartialFolder, shard: Shard, scales: Mapping[str, Tensor]) -> None:
    """Writes a file again with the scales that have new values; the same bytes however often."""
    if not any(output.name in scales for output in shard.outputs):
        return
    with safe_open(partial.path / shard.name, framework="pt") as stored:
        tensors = [scales.get(output.name, stored.get_tensor(output.name)) for output in shard.outputs]
    partial.write(shard, tensors)


def _folded(made: Checkpoint, block: Block, prefix: str, matrices: Mapping[str, Int4Weights]) -> Block:
    tensors = {
        name: _read(made, prefix + name, tensor.device)
        for name, tensor in block.tensors.items()
        if name.removesuffix(".weight") not in matrices
    }
    return replace(block, tensors=tensors)


def _whole(checkpoint: Checkpoint, blocks: Sequence[Block], device: str) -> WholeModel:
    embedding = _read(checkpoint, "model.embed_tokens.weight", device)
    head = _read(checkpoint, "lm_head.weight", device) if checkpoint.has("lm_head.weight") else embedding
    return WholeModel(embedding, head, _read(checkpoint, "model.norm.weight", device), blocks)


def _read(checkpoint: Checkpoint, name: str, device: torch.device | str) -> Tensor:
    shape = checkpoint.entries[name].shape
    return checkpoint.read(name, shape, tuple(slice(0, n) for n in shape), FLOATS).float().to(device)
