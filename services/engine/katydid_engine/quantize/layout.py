"""What a quantised folder holds, decided from names and shapes before a weight is read: tensors, shards, config.

The projections of attention, dense blocks and experts are quantised; embedding, head, norms, routers and the product
that joins a draft layer's inputs are copied. Experts that one tensor holds are written one by one, as the hub has them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from katydid_engine.checkpoint import DTYPE_BYTES
from katydid_engine.quantization import GROUP, Scheme
from katydid_engine.quantize.parts import Fp8Scales, Parts

__all__ = ["Output", "Shard", "Step", "cut_into_shards", "header", "quantization_config", "steps"]

Shape = tuple[int, ...]
Part = tuple[slice, ...]

_PROJECTION = re.compile(r"^model\.layers\.\d+\..*\.(q|k|v|o|gate|up|down)_proj\.weight$")
_JOINED = re.compile(r"^(model\.layers\.\d+\..*\.experts)\.(gate_up|down)_proj$")


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor to be written; ``dtype`` as safetensors spells it."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Step:
    """One read, and what is written of it: a copy, or a matrix with its scales.

    Attributes:
        source, shape, dtype: the tensor that is read.
        part: what of it.
    """

    source: str
    shape: Shape
    dtype: str
    part: Part
    quantises: bool
    outputs: tuple[Output, ...]

    @property
    def read_bytes(self) -> int:
        return (
            math.prod(len(range(*cut.indices(n))) for n, cut in zip(self.shape, self.part, strict=True))
            * (DTYPE_BYTES[self.dtype])
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of the result."""

    name: str
    steps: tuple[Step, ...]

    @property
    def outputs(self) -> list[Output]:
        return [output for step in self.steps for output in step.outputs]


def steps(tensors: Mapping[str, tuple[str, Shape]], scheme: Scheme, parts: Parts | None = None) -> list[Step]:
    """What to do with every tensor of a checkpoint (name to dtype and shape), layer by layer.

    Args:
        parts: what stays in e4m3 of a scheme that is int4; None for nothing.
    """

    def scheme_of(name: str) -> Scheme:
        return Scheme.FP8 if parts is not None and parts.is_fp8(name) else scheme

    names = sorted(tensors, key=_in_model_order)
    scales: Fp8Scales = "tensor" if parts is None else parts.scales
    return [step for name in names for step in _steps_of(name, *tensors[name], scheme_of, scales)]


def cut_into_shards(work: Iterable[Step], shard_bytes: int) -> list[Shard]:
    """Consecutive steps whose outputs fill a shard each; a tensor that is larger has one to itself."""
    groups: list[list[Step]] = []
    room = 0
    for step in work:
        size = sum(output.nbytes for output in step.outputs)
        if not groups or size > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(step)
        room -= size
    count = len(groups)
    return [
        Shard(f"model-{index:05d}-of-{count:05d}.safetensors", tuple(group))
        for index, group in enumerate(groups, start=1)
    ]


def header(shard: Shard) -> bytes:
    """What stands before a shard's data: u64 length and JSON, padded so that the data is aligned."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in shard.outputs:
        begin, end = end, end + output.nbytes
        fields[output.name] = {"dtype": output.dtype, "shape": output.shape, "data_offsets": [begin, end]}
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def quantization_config(
    scheme: Scheme,
    *,
    ignore: list[str],
    parts: Parts,
    kv_scales: str = "none",
    rotate_keys: bool = False,
    key_means: bool = False,
) -> dict[str, Any]:
    """In compressed-tensors' terms.

    Args:
        parts: of the model, and which of them stay in e4m3 of a scheme that is int4.
        ignore: the linears that stay as they are.
        kv_scales: "tensor" or "head": pages are e4m3 over calibrated scales.
        rotate_keys: q and k are multiplied by a Hadamard matrix behind RoPE (compressed-tensors' transform R3).
        key_means: pages leave out the means of keys; a field of our own, which other readers skip.
    """
    if scheme is not Scheme.W4A8:
        groups = [_fp8_group(["Linear"], parts.scales, experts="experts" in parts.places)]
    elif not parts.fp8_targets:
        groups = [_int4_group(["Linear"])]
    else:
        fp8 = [f"re:{target}" for target in parts.fp8_targets]
        experts = "experts" in parts.places and ("draft" in parts.kept or bool(parts.layers))
        int4 = [f"re:{target}" for target in parts.int4_targets]
        groups = [_int4_group(int4), _fp8_group(fp8, parts.scales, experts=experts)]
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": groups[0]["format"] if len(groups) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
        "ignore": ignore,
    }
    if kv_scales != "none":
        strategy = "attn_head" if kv_scales == "head" else "tensor"
        pages = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
        config["kv_cache_scheme"] = pages
    if rotate_keys:
        places = [{"targets": ["re:.*self_attn$"], "location": location} for location in ("q_attn", "k_cache")]
        config["transform_config"] = {"config_groups": {"R3": {"type": "hadamard", "apply": places}}}
    if key_means:
        config["key_means"] = True
    return config


def _int4_group(targets: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    return _config_group(targets, "pack-quantized", weights, {"strategy": "token"})


def _fp8_group(targets: list[str], scales: Fp8Scales, *, experts: bool) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": scales}
    inputs: dict[str, Any] = {"strategy": "token"}
    if scales == "block":
        weights["block_structure"] = [GROUP, GROUP]
        inputs = {"strategy": "group", "group_size": GROUP}
    elif scales == "tensor" and experts:
        # Other engines take experts with a scale a matrix only where activations have one a tensor.
        inputs = {"strategy": "tensor"}
    return _config_group(targets, "float-quantized", weights, inputs)


def _config_group(targets: list[str], storage: str, weights: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, **inputs}
    weights = {"symmetric": True, "dynamic": False, **weights}
    return {"targets": targets, "weights": weights, "input_activations": activations, "format": storage}


def _steps_of(
    name: str, dtype: str, shape: Shape, scheme_of: Callable[[str], Scheme], scales: Fp8Scales
) -> Iterator[Step]:
    joined = _JOINED.match(name)
    if joined is not None and len(shape) == 3:
        experts, rows, columns = shape
        halves = ("gate", "up") if joined[2] == "gate_up" else ("down",)
        height = rows // len(halves)
        for expert in range(experts):
            for index, half in enumerate(halves):
                part = (slice(expert, expert + 1), slice(index * height, (index + 1) * height), slice(0, columns))
                matrix = f"{joined[1]}.{expert}.{half}_proj"
                outputs = _matrix(matrix, (height, columns), scheme_of(matrix), scales)
                yield Step(name, shape, dtype, part, True, outputs)
        return
    quantises = _PROJECTION.match(name) is not None and len(shape) == 2
    outputs = (Output(name, dtype, shape),)
    if quantises:
        outputs = _matrix(name.removesuffix(".weight"), (shape[0], shape[1]), scheme_of(name), scales)
    yield Step(name, shape, dtype, tuple(slice(0, n) for n in shape), quantises, outputs)


def _matrix(name: str, shape: tuple[int, int], scheme: Scheme, scales: Fp8Scales) -> tuple[Output, ...]:
    rows, columns = shape
    if scheme is Scheme.FP8:
        grid = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // GROUP), -(-columns // GROUP))}[scales]
        return Output(f"{name}.weight", "F8_E4M3", shape), Output(f"{name}.weight_scale", "F32", grid)
    return (
        Output(f"{name}.weight_packed", "I32", (rows, -(-columns // 8))),
        Output(f"{name}.weight_scale", "BF16", (rows, -(-columns // GROUP))),
        Output(f"{name}.weight_shape", "I64", (2,)),
    )


def _in_model_order(name: str) -> list[tuple[int, str]]:
    """Numbers by value: layer 10 comes after layer 9."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]
