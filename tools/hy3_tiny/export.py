"""Writes a trained hy3-tiny as an `hy_v3` folder in the hub's spelling of names, and reads one back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.hy3_tiny.model import Block, Hy3Tiny, Shape

SHARD_BYTES = 11 * 2**20


class TruncatedCheckpointError(ValueError):
    """A checkpoint folder lacks a shard or a tensor, or a shard is cut short; the message names it."""


def hub_tensors(net: Hy3Tiny) -> dict[str, Tensor]:
    """Every tensor under its hub name: bf16, but routers and selection biases fp32 as Hy3 keeps them."""
    tensors: dict[str, Tensor] = {"model.embed_tokens.weight": net.embed}
    for i, block in enumerate([*net.blocks, net.mtp_block]):
        tensors |= {f"model.layers.{i}.{k}": v for k, v in _block_tensors(block).items()}
    mtp = f"model.layers.{net.shape.layers}"
    tensors |= {
        f"{mtp}.enorm.weight": net.mtp_enorm,
        f"{mtp}.hnorm.weight": net.mtp_hnorm,
        f"{mtp}.eh_proj.weight": net.mtp_proj,
        f"{mtp}.final_layernorm.weight": net.mtp_norm,
        "model.norm.weight": net.norm,
        "lm_head.weight": net.head,
    }
    wide = ("router.gate.weight", "expert_bias")
    return {
        k: v.detach().to("cpu", torch.float32 if k.endswith(wide) else torch.bfloat16).contiguous()
        for k, v in tensors.items()
    }


def _block_tensors(block: Block) -> dict[str, Tensor]:
    s = block.shape
    tensors: dict[str, Tensor] = {
        "input_layernorm.weight": block.input_norm,
        "post_attention_layernorm.weight": block.post_norm,
        "self_attn.q_proj.weight": block.wq,
        "self_attn.k_proj.weight": block.wk,
        "self_attn.v_proj.weight": block.wv,
        "self_attn.o_proj.weight": block.wo,
        "self_attn.q_norm.weight": block.q_norm,
        "self_attn.k_norm.weight": block.k_norm,
    }
    if not block.moe:
        return tensors | {
            "mlp.gate_proj.weight": block.gate,
            "mlp.up_proj.weight": block.up,
            "mlp.down_proj.weight": block.down,
        }
    tensors |= {"mlp.router.gate.weight": block.router, "mlp.expert_bias": block.bias}
    for e in range(s.experts + 1):
        columns = slice(e * s.expert_intermediate, (e + 1) * s.expert_intermediate)
        owner = "mlp.shared_mlp" if e == s.experts else f"mlp.experts.{e}"
        tensors[f"{owner}.gate_proj.weight"] = block.gate[columns]
        tensors[f"{owner}.up_proj.weight"] = block.up[columns]
        tensors[f"{owner}.down_proj.weight"] = block.down[:, columns]
    return tensors


def config_of(shape: Shape) -> dict[str, Any]:
    """config.json: transformers' fields and the extra ones that vLLM's own Hy3 config reads."""
    return {
        "architectures": ["HYV3ForCausalLM"],
        "model_type": "hy_v3",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 16384,
        "initializer_range": 0.006,
        "rms_norm_eps": shape.eps,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "num_shared_experts": 1,
        "moe_intermediate_size": shape.expert_intermediate,
        "expert_hidden_dim": shape.expert_intermediate,
        "first_k_dense_replace": 1,
        "qk_norm": True,
        "route_norm": True,
        "router_scaling_factor": shape.router_scale,
        "moe_router_use_sigmoid": True,
        "moe_router_enable_expert_bias": True,
        "num_nextn_predict_layers": 1,
        "enable_moe_fp32_combine": True,
        "enable_lm_head_fp32": False,
        "enable_attention_fp32_softmax": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "use_cache": True,
    }


def save_checkpoint(net: Hy3Tiny, folder: Path) -> None:
    """Safetensors shards, their index and config.json."""
    tensors = hub_tensors(net)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, t in tensors.items():
        if size + t.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = t
        size += t.nbytes
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        path = folder / name
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(0o644)
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": {k: n for n, s in zip(names, shards, strict=True) for k in s},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(config_of(net.shape), indent=1) + "\n")


def load_checkpoint(net: Hy3Tiny, folder: Path) -> None:
    """Fills `net` from an exported folder; raises TruncatedCheckpointError."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(index["weight_map"].values())):
        if not (folder / shard).is_file():
            raise TruncatedCheckpointError(f"{folder} lacks the shard {shard} that its index names")
        try:
            tensors |= load_file(folder / shard)
        except Exception as error:
            raise TruncatedCheckpointError(f"{folder / shard} cannot be read whole: {error}") from error
    with torch.no_grad():
        for name, target in _targets(net):
            if name not in tensors:
                raise TruncatedCheckpointError(f"{folder} lacks the tensor {name}")
            target.copy_(tensors[name])


def _targets(net: Hy3Tiny) -> list[tuple[str, Tensor]]:
    """Hub names with the slices of `net` that they fill."""
    mtp = f"model.layers.{net.shape.layers}"
    named: list[tuple[str, Tensor]] = [
        ("model.embed_tokens.weight", net.embed),
        ("model.norm.weight", net.norm),
        ("lm_head.weight", net.head),
        (f"{mtp}.enorm.weight", net.mtp_enorm),
        (f"{mtp}.hnorm.weight", net.mtp_hnorm),
        (f"{mtp}.eh_proj.weight", net.mtp_proj),
        (f"{mtp}.final_layernorm.weight", net.mtp_norm),
    ]
    for i, block in enumerate([*net.blocks, net.mtp_block]):
        named += [(f"model.layers.{i}.{k}", v) for k, v in _block_tensors(block).items()]
    return named
