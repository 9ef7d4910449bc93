"""How a checkpoint stores its linear weights and what the engine was asked to make of them: names and numbers alone.

Read are Hugging Face's ``fp8`` (Qwen3's and DeepSeek's 128 x 128 blocks, Hy3's scale a tensor) and compressed-tensors'
``float-quantized`` (fp8) and ``pack-quantized`` (int4 in groups of 128 with fp8 activations: W4A8).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from katydid_runtime.errors import SettingsError

from katydid_engine.config_fields import ConfigFields

__all__ = [
    "FP8_PAGES",
    "GROUP",
    "UNQUANTISED",
    "Scheme",
    "StoredQuantization",
    "kv_dtype",
    "read_quantization",
    "scheme_to_apply",
]

GROUP = 128
FP8_PAGES = "float8_e4m3fn"
_BLOCK = [128, 128]
_INT4, _MIXED = "pack-quantized", "mixed-precision"
_STORAGES = ("float-quantized", _INT4)


class Scheme(StrEnum):
    """What linear and expert weights are in memory; norms, routers, embedding and head are never quantised."""

    NONE = "none"
    FP8 = "fp8"
    W4A8 = "w4a8"


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """What ``quantization_config`` says of a checkpoint.

    Attributes:
        scheme: of the weights that it stores quantised; those it leaves out are told by their dtype.
        static_inputs: activations have the constant scales ``input_scale``; otherwise one a token, made while serving.
        blocks: a weight scale stands for 128 x 128 weights; otherwise for a matrix or an output row of it.
        kv_cache: K and V were calibrated for fp8 pages, with scales ``k_scale`` and ``v_scale``.
        rotated_keys: q and k are multiplied by the Hadamard matrix of head_dim behind RoPE.
        key_means: fp8 pages hold K without the vectors ``k_mean``, one a head.
    """

    scheme: Scheme = Scheme.NONE
    static_inputs: bool = False
    blocks: bool = False
    kv_cache: bool = False
    rotated_keys: bool = False
    key_means: bool = False


UNQUANTISED = StoredQuantization()


def read_quantization(config: ConfigFields) -> StoredQuantization:
    """From the fields of ``config.json``.

    Raises:
        ModelFolderError: a method or variant that this engine does not read; names the field and what it reads.
    """
    if config.values.get("quantization_config") is None:
        return UNQUANTISED
    fields = config.object("quantization_config")
    if fields.choice("quant_method", ("fp8", "compressed-tensors")) == "compressed-tensors":
        return _compressed_tensors(fields)
    static = fields.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    block = fields.values.get("weight_block_size")
    if block is not None and (block != _BLOCK or static):
        raise fields.wrong("weight_block_size", f"{_BLOCK} with activation_scheme 'dynamic', or none")
    fields.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    return StoredQuantization(Scheme.FP8, static_inputs=static, blocks=block is not None)


def scheme_to_apply(asked: str, stored: StoredQuantization) -> Scheme:
    """What to do to weights that the checkpoint stores unquantised.

    Args:
        asked: the setting ``quantization``: "auto" serves the checkpoint as it is.

    Raises:
        SettingsError: the checkpoint is quantised, and otherwise than asked.
    """
    if asked == "auto" or asked == stored.scheme:
        return Scheme.NONE
    if stored.scheme is not Scheme.NONE:
        raise SettingsError(
            f"quantization is {asked!r}, but the checkpoint is stored as {stored.scheme.value}",
            field="quantization",
            value=asked,
            allowed=f"auto, {stored.scheme.value}",
        )
    return Scheme(asked)


def kv_dtype(asked: str, stored: StoredQuantization, dtype: str) -> str:
    """The pages' dtype, by torch's name.

    Args:
        asked: the setting ``kv_cache_dtype``: "fp8", or "auto" for what the checkpoint was calibrated for.
        dtype: of the activations.
    """
    return FP8_PAGES if asked == "fp8" or (asked == "auto" and stored.kv_cache) else dtype


def _compressed_tensors(fields: ConfigFields) -> StoredQuantization:
    storage = fields.choice("format", (*_STORAGES, _MIXED))
    groups = fields.object("config_groups")
    if not groups.values:
        raise fields.wrong("config_groups", "at least one group")
    kinds = {_group(groups.object(name), storage) for name in groups.values}
    if len({kind[0] for kind in kinds}) < len(kinds):
        raise fields.wrong("config_groups", "groups of a format that quantise alike")
    kv_cache = fields.values.get("kv_cache_scheme") is not None
    if kv_cache:
        scheme = fields.object("kv_cache_scheme")
        _expect(scheme, {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False})
        scheme.choice("strategy", ("tensor", "attn_head"), "tensor")
    return StoredQuantization(
        Scheme.W4A8 if any(kind[0] == _INT4 for kind in kinds) else Scheme.FP8,
        static_inputs=any(static for _, _, static in kinds),
        blocks=any(blocks for _, blocks, _ in kinds),
        kv_cache=kv_cache,
        rotated_keys=_rotated_keys(fields),
        key_means=fields.flag("key_means", False),
    )


def _rotated_keys(fields: ConfigFields) -> bool:
    """Whether the transform R3 is there, and nothing else: other transforms change what is multiplied."""
    if fields.values.get("transform_config") is None:
        return False
    groups = fields.object("transform_config").object("config_groups")
    for name in groups.values:
        group = groups.object(name)
        group.choice("type", ("hadamard",))
        places = {place.get("location") for place in group.values.get("apply", []) if isinstance(place, dict)}
        if places != {"q_attn", "k_cache"}:
            raise group.wrong("apply", "the locations q_attn and k_cache")
    return bool(groups.values)


def _group(group: ConfigFields, storage: str) -> tuple[str, bool, bool]:
    """How it is stored, whether its scales stand for blocks, and whether its activations' are static."""
    if storage == _MIXED:
        storage = group.choice("format", _STORAGES)
    weights, inputs = group.object("weights"), group.object("input_activations")
    _expect(inputs, {"num_bits": 8, "type": "float", "symmetric": True})
    if storage == _INT4:
        _expect(weights, {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP})
        if weights.values.get("actorder") not in (None, "static", "weight"):
            raise weights.wrong("actorder", "none, 'static' or 'weight': groups of consecutive columns")
        _expect(inputs, {"dynamic": True, "strategy": "token"})
        return storage, False, False
    _expect(weights, {"num_bits": 8, "type": "float", "symmetric": True})
    blocks = weights.choice("strategy", ("tensor", "channel", "block")) == "block"
    if blocks and weights.values.get("block_structure") != _BLOCK:
        raise weights.wrong("block_structure", str(_BLOCK))
    static = not inputs.flag("dynamic", False)
    if static and (blocks or inputs.choice("strategy", ("tensor",), "tensor") != "tensor"):
        raise inputs.wrong("dynamic", "true for weights in blocks")
    return storage, blocks, static


def _expect(fields: ConfigFields, values: dict[str, Any]) -> None:
    for name, value in values.items():
        default = True if name == "symmetric" else None
        if fields.values.get(name, default) != value:
            raise fields.wrong(name, repr(value))
