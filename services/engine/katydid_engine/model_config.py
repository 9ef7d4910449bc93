"""A model folder's ``config.json``, read once into one frozen record that all four architectures share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

__all__ = [
    "ARCHITECTURES",
    "ModelConfig",
    "ModelConfigError",
    "MoeConfig",
    "RopeConfig",
    "UnknownArchitectureError",
    "read_model_config",
]

ARCHITECTURES = ("hy_v3", "llama", "qwen3", "qwen3_moe")


class ModelConfigError(ValueError):
    """``config.json`` is absent, not JSON, or a field is missing or out of range; names file, field and value."""


class UnknownArchitectureError(ModelConfigError):
    """``model_type`` names a model this engine does not implement."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies. ``llama3`` stretches the long wavelengths (Llama 3.1, "The Llama 3 Herd of Models"); ``linear``
    divides every position by ``factor``; ``default`` ignores the other fields."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts of a sparse layer.

    Attributes:
        scoring: ``sigmoid`` (Hy3, with a selection bias per expert) or ``softmax`` (Qwen3-MoE, without).
        renormalise: divide the chosen weights by their sum.
        routed_scale: factor on the chosen weights, after renormalising.
        shared_intermediate_size: width of the shared expert every token passes; 0 without one.
        fp32_combine: sum routed and shared output in fp32 before rounding to the model's dtype.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: Literal["sigmoid", "softmax"]
    renormalise: bool
    routed_scale: float
    shared_intermediate_size: int
    fp32_combine: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the engine needs to know of a model; sizes in elements, token ids as integers.

    Attributes:
        qk_norm: per-head RMSNorm of q and k before RoPE.
        sparse_layers: per layer, True where the FFN is routed experts.
        num_mtp_layers: draft layers appended after ``num_layers`` (Hy3: 1).
        lm_head_fp32: logits are computed from fp32 weights and hidden states.
        eos_token_ids: any of these ends a generation; ``generation_config.json`` wins over ``config.json``.
        checkpoint_dtype: dtype the weights were saved in, as named in the config ("bfloat16").
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    moe: MoeConfig | None
    sparse_layers: tuple[bool, ...]
    num_mtp_layers: int
    lm_head_fp32: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str


def read_model_config(folder: Path) -> ModelConfig:
    """Reads ``config.json`` (and ``generation_config.json`` where present) of a Hugging Face model folder.

    Raises:
        ModelConfigError: no such file, broken JSON, a missing field or a value out of range.
        UnknownArchitectureError: ``model_type`` is none of ``ARCHITECTURES``.
    """
    path = folder / "config.json"
    fields = _Fields(path, _read_json_object(path))
    architecture = fields.text("model_type")
    if architecture not in ARCHITECTURES:
        raise UnknownArchitectureError(
            f"{path}: model_type={architecture!r} is not implemented, expected one of {', '.join(ARCHITECTURES)}"
        )
    if "quantization_config" in fields.values:
        method = fields.values["quantization_config"]
        raise ModelConfigError(f"{path}: quantization_config={method!r}: expected an unquantised bf16/fp16/fp32 checkpoint")
    hidden_size = fields.positive("hidden_size")
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    num_layers = fields.positive("num_hidden_layers")
    if num_heads % num_kv_heads:
        raise ModelConfigError(f"{path}: num_key_value_heads={num_kv_heads} does not divide num_attention_heads={num_heads}")
    head_dim = fields.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelConfigError(f"{path}: head_dim={head_dim}: expected an even number (RoPE rotates halves)")
    if (activation := fields.values.get("hidden_act", "silu")) != "silu":
        raise ModelConfigError(f"{path}: hidden_act={activation!r}: expected 'silu'")
    if fields.values.get("use_sliding_window"):
        raise ModelConfigError(f"{path}: use_sliding_window=true: expected full attention in every layer")
    moe, sparse_layers = _moe(fields, architecture, num_layers)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, 11_158_840.0 if architecture == "hy_v3" else 10_000.0),
        max_positions=fields.positive("max_position_embeddings"),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=architecture != "llama",
        moe=moe,
        sparse_layers=sparse_layers,
        num_mtp_layers=fields.count("num_nextn_predict_layers", 0) if architecture == "hy_v3" else 0,
        lm_head_fp32=fields.flag("enable_lm_head_fp32", False),
        bos_token_id=fields.values.get("bos_token_id"),
        eos_token_ids=_eos_token_ids(folder, fields),
        checkpoint_dtype=str(fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32"),
    )


def _moe(fields: _Fields, architecture: str, num_layers: int) -> tuple[MoeConfig | None, tuple[bool, ...]]:
    if architecture not in ("hy_v3", "qwen3_moe"):
        return None, (False,) * num_layers
    # transformers writes num_local_experts for some releases of qwen3_moe, num_experts for the others.
    num_experts = fields.positive("num_experts", fields.values.get("num_local_experts"))
    top_k = fields.positive("num_experts_per_tok")
    if top_k > num_experts:
        raise ModelConfigError(f"{fields.path}: num_experts_per_tok={top_k} exceeds num_experts={num_experts}")
    if architecture == "qwen3_moe":
        intermediate_size = fields.positive("moe_intermediate_size")
        dense = set(fields.values.get("mlp_only_layers") or [])
        step = fields.positive("decoder_sparse_step", 1)
        sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
        return (
            MoeConfig(
                num_experts=num_experts,
                top_k=top_k,
                intermediate_size=intermediate_size,
                scoring="softmax",
                renormalise=fields.flag("norm_topk_prob", False),
                routed_scale=1.0,
                shared_intermediate_size=0,
                fp32_combine=False,
            ),
            sparse,
        )
    # The released checkpoint calls the experts' width expert_hidden_dim, transformers moe_intermediate_size.
    intermediate_size = fields.positive("moe_intermediate_size", fields.values.get("expert_hidden_dim"))
    kinds = fields.values.get("mlp_layer_types")
    if kinds is None:
        first_sparse = fields.count("first_k_dense_replace", 1)
        kinds = ["dense" if layer < first_sparse else "sparse" for layer in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise ModelConfigError(f"{fields.path}: mlp_layer_types={kinds!r}: expected {num_layers} of 'dense' or 'sparse'")
    return (
        MoeConfig(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=intermediate_size,
            scoring="sigmoid",
            renormalise=fields.flag("route_norm", True),
            routed_scale=fields.number("router_scaling_factor", 2.826),
            shared_intermediate_size=intermediate_size * fields.count("num_shared_experts", 1),
            fp32_combine=fields.flag("enable_moe_fp32_combine", True),
        ),
        tuple(kind == "sparse" for kind in kinds),
    )


def _rope(fields: _Fields, default_theta: float) -> RopeConfig:
    """Both spellings: ``rope_parameters`` (transformers 5) and ``rope_theta`` with ``rope_scaling`` (before)."""
    scaling = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", fields.values.get("rope_theta")) or default_theta
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ModelConfigError(f"{fields.path}: rope_type={kind!r}: expected one of default, linear, llama3")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        factor = scaling["partial_rotary_factor"]
        raise ModelConfigError(f"{fields.path}: partial_rotary_factor={factor!r}: expected 1.0")
    return RopeConfig(
        theta=float(theta),
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_positions=int(scaling.get("original_max_position_embeddings", 8192)),
    )


def _eos_token_ids(folder: Path, fields: _Fields) -> tuple[int, ...]:
    value = fields.values.get("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.exists():
        value = _read_json_object(generation).get("eos_token_id", value)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(f"{path}: no such file; expected a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


_Default = TypeVar("_Default")


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to the JSON object, so that an error names the file, the field and what was expected."""

    path: Path
    values: dict[str, Any]

    def text(self, name: str) -> str:
        return self._typed(name, None, (str,), "a string")

    def flag(self, name: str, default: bool) -> bool:
        return self._typed(name, default, (bool,), "true or false")

    def number(self, name: str, default: float) -> float:
        return float(self._typed(name, default, (int, float), "a number"))

    def count(self, name: str, default: int | None = None) -> int:
        value = self._typed(name, default, (int,), "an integer >= 0")
        if value < 0:
            raise ModelConfigError(f"{self.path}: {name}={value}: expected an integer >= 0")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.count(name, default)
        if value == 0:
            raise ModelConfigError(f"{self.path}: {name}=0: expected an integer >= 1")
        return value

    def _typed(self, name: str, default: Any, types: tuple[type, ...], expected: str) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelConfigError(f"{self.path}: field {name} is missing, expected {expected}")
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ModelConfigError(f"{self.path}: {name}={value!r}: expected {expected}")
        return value
