"""Checkpoints quantised in every published form, with plain torch, and what their weights stand for.

Each form turns a matrix into the tensors that a checkpoint stores of it and the matrix they dequantise to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TINY = Path(__file__).parents[3] / "models" / "hy3-tiny"
PROJECTION = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.weight$")
E4M3 = torch.float8_e4m3fn
Stored = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Form:
    """``quantization_config`` and how it stores a matrix: name parts to tensors, and the dequantised matrix."""

    config: dict[str, Any]
    store: Callable[[Tensor], Stored]


def per_tensor_static(weight: Tensor) -> Stored:
    """Hy3's names: a scale a matrix, and a constant one for its input."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(E4M3)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(1.5)}, codes.float() * scale


def per_channel(weight: Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(E4M3)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def per_block(weight: Tensor) -> Stored:
    rows, columns = (-(-n // 128) for n in weight.shape)
    scales = torch.empty(rows, columns)
    codes, wide = torch.empty_like(weight, dtype=E4M3), torch.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j]).to(E4M3)
            wide[at] = codes[at].float() * scales[i, j]
    return {"weight": codes, "weight_scale_inv": scales}, wide


def int4_groups(weight: Tensor) -> Stored:
    """compressed-tensors: value + 8 in four bits, eight columns an int32, the first in the lowest bits."""
    rows, columns = weight.shape
    scales = torch.stack([part.abs().amax(1) / 7 for part in weight.split(128, dim=1)], dim=1).bfloat16()
    wide_scales = scales.float().repeat_interleave(128, 1)[:, :columns]
    codes = (weight / wide_scales).round().clamp(-8, 7)
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for index in range(8):
        words += (codes[:, index::8].long() + 8) << (4 * index)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    shape = torch.tensor([rows, columns])
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": shape}, codes * wide_scales


def compressed(storage: str, weights: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    inputs = {"num_bits": 8, "type": "float", "symmetric": True} | inputs
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "config_groups": {"group_0": group | {"input_activations": inputs}},
        "ignore": ["lm_head"],
    }


FORMS = {
    "hy3": Form({"quant_method": "fp8", "activation_scheme": "static"}, per_tensor_static),
    "blocks": Form(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
        per_block,
    ),
    "channel": Form(
        compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            {"dynamic": True, "strategy": "token"},
        ),
        per_channel,
    ),
    "int4": Form(
        compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
            {"dynamic": True, "strategy": "token"},
        ),
        int4_groups,
    ),
}


def write_pair(form: Form, folder: Path, source: Path = TINY) -> tuple[Path, Path]:
    """Folders of ``source`` in the form, and with the fp32 weights that the form stands for."""
    quantised: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            plain[name] = quantised[name] = tensor
            if PROJECTION.search(name):
                stored, plain[name] = form.store(tensor.float())
                del quantised[name]
                quantised |= {name.removesuffix("weight") + part: value for part, value in stored.items()}
    config = json.loads((source / "config.json").read_text())
    for name, tensors, fields in (
        ("quantised", quantised, config | {"quantization_config": form.config}),
        ("plain", plain, config),
    ):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(fields))
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name / "model.safetensors")
    return folder / "quantised", folder / "plain"
