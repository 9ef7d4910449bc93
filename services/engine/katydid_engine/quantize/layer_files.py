"""Parts of a checkpoint, and the file that each becomes: the embedding, a layer each, and what follows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from katydid_runtime.errors import ModelFolderError
from torch import Tensor

from katydid_engine.checkpoint import Checkpoint
from katydid_engine.matrices import Fp8Matrix, Int4Matrix, pack_words
from katydid_engine.model_config import ModelConfig
from katydid_engine.quantization import Scheme
from katydid_engine.quantize.block import Block
from katydid_engine.quantize.layout import Output, Shard, Step, steps
from katydid_engine.quantize.pages import PageScales
from katydid_engine.quantize.parts import Parts

__all__ = ["LayerFile", "layer_files", "layer_tensors", "read_block"]

_EMBEDDING = "model.embed_tokens."
_HEAD = "lm_head.weight"
_NESTED = "mtp_block."  # between a draft layer and its decoder layer, as some exporters have it


@dataclass(frozen=True)
class LayerFile:
    """One file; ``prefix`` is what its tensors' names begin with in a layer, empty before and behind the layers."""

    shard: Shard
    prefix: str
    index: int | None


def layer_files(
    checkpoint: Checkpoint,
    config: ModelConfig,
    scheme: Scheme,
    *,
    parts: Parts | None = None,
    page_scales: int,
    exact_router: bool,
    untie: bool,
) -> list[LayerFile]:
    """In the order in which they are made.

    Args:
        parts: what stays in e4m3 of a scheme that is int4.
        page_scales: numbers in each of a layer's ``k_scale`` and ``v_scale``; 0 for none.
        exact_router: routers are written in fp32, because factors were folded into them.
        untie: a head is written of a model whose head is its embedding.
    """
    work = steps({name: (entry.dtype, entry.shape) for name, entry in checkpoint.entries.items()}, scheme, parts)
    layers = config.num_layers + config.num_mtp_layers
    groups: list[list[Step]] = [[] for _ in range(layers + 2)]
    for step in work:
        words = step.source.split(".")
        if words[:2] == ["model", "layers"]:
            if not (words[2].isdigit() and int(words[2]) < layers):
                raise ModelFolderError(f"tensor {step.source} belongs to no layer of the config", field=step.source)
            groups[1 + int(words[2])].append(_with_extras(step, page_scales, exact_router))
        else:
            groups[0 if step.source.startswith(_EMBEDDING) else -1].append(step)
    if untie:
        embedding = groups[0][0]
        head = Output(_HEAD, embedding.dtype, embedding.shape)
        groups[-1].append(dataclasses.replace(embedding, quantises=False, outputs=(head,)))
    files = []
    for number, group in enumerate(groups):
        name = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        index = number - 1 if 0 < number < len(groups) - 1 else None
        nested = index is not None and any(f".{_NESTED}" in step.source for step in group)
        prefix = "" if index is None else f"model.layers.{index}." + (_NESTED if nested else "")
        files.append(LayerFile(Shard(name, tuple(group)), prefix, index))
    return files


def read_block(checkpoint: Checkpoint, config: ModelConfig, file: LayerFile, device: str) -> Block:
    """A layer in fp32, experts one by one. Raises ModelFolderError for a tensor that is not finite."""
    tensors = {}
    for step in file.shard.steps:
        tensor = checkpoint.read(step.source, step.shape, step.part, (step.dtype,)).float()
        if not tensor.isfinite().all():
            raise ModelFolderError(f"tensor {step.source} holds NaN or infinity", field=step.source)
        if step.quantises:
            tensor = tensor.reshape(tensor.shape[-2:])
        tensors[_name(step, file.prefix)] = tensor.to(device)
    assert file.index is not None
    sparse = file.index >= config.num_layers or config.sparse_layers[file.index]
    return Block(config, tensors, config.moe is not None and sparse)


def layer_tensors(
    file: LayerFile,
    tensors: Mapping[str, Tensor],
    matrices: Mapping[str, Int4Matrix | Fp8Matrix],
    pages: PageScales | None,
) -> Iterator[Tensor]:
    """What is written, in the order of the file's outputs, out of tensors by their names below the prefix."""
    for step in file.shard.steps:
        name = _name(step, file.prefix)
        if not step.quantises:
            yield tensors[name].to(_DTYPES[step.outputs[0].dtype])
            continue
        made = matrices[name.removesuffix(".weight")]
        if isinstance(made, Int4Matrix):
            yield pack_words(made.codes)
            yield made.scales
            yield torch.tensor(tensors[name].shape)
        else:
            yield made.weight
            yield made.scale.reshape(step.outputs[1].shape)
        for output in step.outputs:
            if pages is not None and output.name.endswith("_scale") and output.dtype == "F32":
                if output.name.endswith("k_scale"):
                    yield pages.key
                elif output.name.endswith("v_scale"):
                    yield pages.value


_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def _with_extras(step: Step, page_scales: int, exact_router: bool) -> Step:
    outputs: Sequence[Output] = step.outputs
    for projection, scale in (("k_proj.weight", "k_scale"), ("v_proj.weight", "v_scale")):
        if page_scales and step.source.endswith(f"self_attn.{projection}"):
            extra = Output(step.source.removesuffix(projection) + scale, "F32", (page_scales,))
            outputs = (*outputs, extra)
    if exact_router and step.source.endswith(("router.gate.weight", "mlp.gate.weight")):
        outputs = (dataclasses.replace(step.outputs[0], dtype="F32"),)
    return dataclasses.replace(step, outputs=tuple(outputs))


def _name(step: Step, prefix: str) -> str:
    """Of what a step reads, below the layer's prefix, as a matrix of its own."""
    name = step.outputs[0].name.removeprefix(prefix).removeprefix(prefix.removesuffix(_NESTED))
    return f"{name.removesuffix('_packed')}" if step.quantises else name
