"""A model folder's ``config.json``, read once into one frozen record that all four architectures share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from katydid_engine.config_fields import ConfigFields, read_json_object
from katydid_engine.quantization import UNQUANTISED, StoredQuantization, read_quantization

__all__ = ["ARCHITECTURES", "ModelConfig", "MoeConfig", "RopeConfig", "read_model_config"]

ARCHITECTURES = ("hy_v3", "llama", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies.

    ``llama3`` stretches the long wavelengths (Llama 3.1, "The Llama 3 Herd of Models"), ``linear`` divides every
    position by ``factor``, ``default`` ignores the other fields.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts of a sparse layer. Routed and shared output are always summed in fp32 (Hy3's
    ``enable_moe_fp32_combine``): without the flag the sum would only be rounded more often.

    Attributes:
        scoring: ``sigmoid`` (Hy3, with a selection bias per expert) or ``softmax`` (Qwen3-MoE, without).
        renormalise: divide the chosen weights by their sum.
        routed_scale: factor on the chosen weights, after renormalising.
        shared_intermediate_size: width of the shared expert every token passes; 0 without one.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: Literal["sigmoid", "softmax"]
    renormalise: bool
    routed_scale: float
    shared_intermediate_size: int


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
        quantization: how linear weights are stored.
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
    quantization: StoredQuantization = UNQUANTISED


def read_model_config(folder: Path) -> ModelConfig:
    """Reads ``config.json`` (and ``generation_config.json`` where present) of a Hugging Face model folder.

    Raises:
        ModelFolderError: no such file, broken JSON, a field missing or out of range, or something this engine does not
            implement: an architecture not in ``ARCHITECTURES``, another quantisation, a sliding window.
    """
    path = folder / "config.json"
    fields = ConfigFields(path, read_json_object(path))
    architecture = fields.choice("model_type", ARCHITECTURES)
    hidden_size = fields.positive("hidden_size")
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    num_layers = fields.positive("num_hidden_layers")
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    head_dim = fields.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise fields.wrong("head_dim", "an even number (RoPE rotates halves)")
    fields.choice("hidden_act", ("silu",), "silu")
    if fields.flag("use_sliding_window", False):
        raise fields.wrong("use_sliding_window", "false (full attention in every layer)")
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
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5 if architecture == "hy_v3" else 1e-6),
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
        bos_token_id=fields.optional_count("bos_token_id"),
        eos_token_ids=_eos_token_ids(folder, fields),
        checkpoint_dtype=fields.choice(
            "torch_dtype" if "torch_dtype" in fields.values else "dtype", ("bfloat16", "float16", "float32"), "float32"
        ),
        quantization=read_quantization(fields),
    )


def _moe(fields: ConfigFields, architecture: str, num_layers: int) -> tuple[MoeConfig | None, tuple[bool, ...]]:
    if architecture == "hy_v3":
        return _hy_v3_moe(fields, num_layers)
    if architecture == "qwen3_moe":
        return _qwen3_moe(fields, num_layers)
    return None, (False,) * num_layers


def _hy_v3_moe(fields: ConfigFields, num_layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
    # The released checkpoint calls the experts' width expert_hidden_dim, transformers moe_intermediate_size.
    width = "moe_intermediate_size" if "moe_intermediate_size" in fields.values else "expert_hidden_dim"
    intermediate_size = fields.positive(width)
    for name in ("qk_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        if not fields.flag(name, True):
            raise fields.wrong(name, "true (as in every released Hy3)")
    kinds = fields.values.get("mlp_layer_types")
    if kinds is None:
        num_dense = fields.count("first_k_dense_replace", 1)
        kinds = ["dense" if layer < num_dense else "sparse" for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise fields.wrong("mlp_layer_types", f"{num_layers} times 'dense' or 'sparse'")
    num_experts = fields.positive("num_experts")
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=_top_k(fields, num_experts),
        intermediate_size=intermediate_size,
        scoring="sigmoid",
        renormalise=fields.flag("route_norm", True),
        routed_scale=fields.number("router_scaling_factor", 2.826),
        shared_intermediate_size=intermediate_size * fields.count("num_shared_experts", 1),
    )
    return moe, tuple(kind == "sparse" for kind in kinds)


def _qwen3_moe(fields: ConfigFields, num_layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
    # transformers 5 renames num_experts to num_local_experts when it saves.
    num_experts = fields.positive("num_experts" if "num_experts" in fields.values else "num_local_experts")
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fields.wrong("mlp_only_layers", "a list of layer numbers")
    step = fields.positive("decoder_sparse_step", 1)
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=_top_k(fields, num_experts),
        intermediate_size=fields.positive("moe_intermediate_size"),
        scoring="softmax",
        renormalise=fields.flag("norm_topk_prob", False),
        routed_scale=1.0,
        shared_intermediate_size=0,
    )
    return moe, tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _top_k(fields: ConfigFields, num_experts: int) -> int:
    top_k = fields.positive("num_experts_per_tok")
    if top_k > num_experts:
        raise fields.wrong("num_experts_per_tok", f"at most num_experts={num_experts}")
    return top_k


def _rope(fields: ConfigFields, default_theta: float) -> RopeConfig:
    """Both spellings: ``rope_parameters`` (transformers 5), and ``rope_theta`` with ``rope_scaling`` (before it)."""
    name = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    scaling = fields.values.get(name) or {}
    if not isinstance(scaling, dict):
        raise fields.wrong(name, "an object")
    nested = ConfigFields(fields.path, {"rope_theta": fields.values.get("rope_theta"), **scaling}, prefix=f"{name}.")
    kind = nested.choice("rope_type" if "rope_type" in scaling else "type", ("default", "linear", "llama3"), "default")
    if nested.number("partial_rotary_factor", 1.0) != 1.0:
        raise nested.wrong("partial_rotary_factor", "1.0")
    return RopeConfig(
        theta=nested.number("rope_theta", default_theta),
        kind=kind,
        factor=nested.number("factor", 1.0),
        low_freq_factor=nested.number("low_freq_factor", 1.0),
        high_freq_factor=nested.number("high_freq_factor", 4.0),
        original_max_positions=nested.positive("original_max_position_embeddings", 8192),
    )


def _eos_token_ids(folder: Path, fields: ConfigFields) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    if generation.exists():
        overrides = ConfigFields(generation, read_json_object(generation))
        if overrides.values.get("eos_token_id") is not None:
            fields = overrides
    value = fields.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise fields.wrong("eos_token_id", "a token id or a list of them")
    return tuple(ids)
