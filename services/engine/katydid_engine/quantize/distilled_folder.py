"""Between the files of an unfinished run and the distillation: reads both models, writes what was learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from katydid_engine.checkpoint import Checkpoint
from katydid_engine.matrices import Int4Matrix, pack_words, read_matrix
from katydid_engine.model_config import ModelConfig
from katydid_engine.quantization import Scheme, StoredQuantization
from katydid_engine.quantize.block import Block
from katydid_engine.quantize.distill import QuantisedMatrix
from katydid_engine.quantize.layer_files import LayerFile, read_block
from katydid_engine.quantize.layout import Shard
from katydid_engine.quantize.pages import PageRounding, PageScales
from katydid_engine.quantize.partial_folder import PartialFolder
from katydid_engine.quantize.parts import Fp8Scales
from katydid_engine.quantize.rows import Rows, rows_of
from katydid_engine.quantize.whole_model import Draft, Layer, WholeModel, stacked
from katydid_engine.weights import FLOATS, Weights

__all__ = ["read_both", "stored_tensors", "with_new_tensors"]


def read_both(
    original: Checkpoint,
    written: Path,
    config: ModelConfig,
    files: Sequence[LayerFile],
    device: str,
    *,
    rotate: bool,
    scales: Fp8Scales,
) -> tuple[WholeModel, WholeModel, list[dict[str, QuantisedMatrix]]]:
    """The original model, the quantised one without its quantised matrices, and these by layer.

    Args:
        rotate: the quantised model's q and k are multiplied by a Hadamard matrix before they are rounded.
        scales: what one of e4m3 stands for.
    """
    made = Checkpoint(written)
    stored = StoredQuantization(Scheme.FP8, blocks=scales == "block")
    try:
        blocks, folded, matrices = [], [], []
        for file in files:
            if file.index is None:
                continue
            block = read_block(original, config, file, device)
            found: dict[str, QuantisedMatrix] = {}
            for name in block.matrices():
                scope = Weights(
                    made, torch.device(device), torch.float32, prefix=f"{file.prefix}{name}.", quantization=stored
                )
                rows, columns = block.tensors[f"{name}.weight"].shape
                matrix = read_matrix(scope, (rows, columns), (slice(0, rows), slice(0, columns)), row_scales=True)
                assert isinstance(matrix, QuantisedMatrix)
                found[name] = matrix
            blocks.append(stacked(block))
            folded.append(Layer(_folded(made, block, file.prefix, found, rotate, rows_of(scales))))
            matrices.append(found)
        count = config.num_layers
        return _whole(original, blocks, count, device), _whole(made, folded, count, device), matrices
    finally:
        made.close()


def stored_tensors(prefix: str, matrices: Mapping[str, QuantisedMatrix]) -> dict[str, Tensor]:
    """What of the matrices of a layer is learned, by the names of a folder's tensors."""
    tensors = {}
    for name, matrix in matrices.items():
        if isinstance(matrix, Int4Matrix):
            tensors[f"{prefix}{name}.weight_packed"] = pack_words(matrix.codes)
            tensors[f"{prefix}{name}.weight_scale"] = matrix.scales
        else:
            tensors[f"{prefix}{name}.weight"] = matrix.weight
    return tensors


def with_new_tensors(partial: PartialFolder, shard: Shard, tensors: Mapping[str, Tensor]) -> None:
    """Writes a file again with the tensors that have new values; the same bytes however often."""
    if not any(output.name in tensors for output in shard.outputs):
        return
    with safe_open(partial.path / shard.name, framework="pt") as stored:
        whole = [tensors.get(output.name, stored.get_tensor(output.name)) for output in shard.outputs]
    partial.write(shard, whole)


def _folded(
    made: Checkpoint, block: Block, prefix: str, matrices: Mapping[str, QuantisedMatrix], rotate: bool, rows: Rows
) -> Block:
    device = next(iter(block.tensors.values())).device
    tensors = {
        name: _read(made, _stored_name(made, prefix, name), device)
        for name in block.tensors
        if name.removesuffix(".weight") not in matrices
    }
    pages = None
    if made.has(f"{prefix}self_attn.k_scale"):
        key, value = (_read(made, f"{prefix}self_attn.{name}_scale", device) for name in "kv")
        name = f"{prefix}self_attn.k_mean"
        mean = _read(made, name, device) if made.has(name) else None
        pages = PageRounding(PageScales(key, value, mean), rotate)
    return replace(block, tensors=tensors, rows=rows, pages=pages)


def _whole(checkpoint: Checkpoint, layers: Sequence[Layer], count: int, device: str) -> WholeModel:
    embedding = _read(checkpoint, "model.embed_tokens.weight", device)
    head = _read(checkpoint, "lm_head.weight", device) if checkpoint.has("lm_head.weight") else embedding
    norm, drafts = _read(checkpoint, "model.norm.weight", device), [Draft(layer) for layer in layers[count:]]
    return WholeModel(embedding, head, norm, layers[:count], drafts)


def _stored_name(checkpoint: Checkpoint, prefix: str, name: str) -> str:
    """Of a tensor that lies in a draft layer, but not in its nested decoder layer."""
    return prefix + name if checkpoint.has(prefix + name) else prefix.removesuffix("mtp_block.") + name


def _read(checkpoint: Checkpoint, name: str, device: torch.device | str) -> Tensor:
    shape = checkpoint.entries[name].shape
    return checkpoint.read(name, shape, tuple(slice(0, n) for n in shape), FLOATS).float().to(device)
