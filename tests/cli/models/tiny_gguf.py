"""Writes a small Llama model as GGUF the way llama.cpp's converter does, rows of q and k permuted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

LAYERS, HIDDEN, WIDTH, HEADS, KV_HEADS = 2, 64, 96, 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "1 2"]
TOKENS = [*SPECIAL, *ALPHABET, "he", "ll", "hell", "hello", "12", "<user>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

Array = NDArray[np.float32]


def random_weights() -> dict[str, Array]:
    """Under Hugging Face names; multiples of 1/64, which bf16 and Q8_0 rows of them keep nearly exact."""
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> Array:
        return random.integers(-63, 64, shape).astype(np.float32) / 64

    head_dim = HIDDEN // HEADS
    weights = {"model.embed_tokens.weight": matrix(len(TOKENS), HIDDEN), "model.norm.weight": matrix(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": matrix(HIDDEN),
            f"{prefix}self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{prefix}post_attention_layernorm.weight": matrix(HIDDEN),
            f"{prefix}mlp.gate_proj.weight": matrix(WIDTH, HIDDEN),
            f"{prefix}mlp.up_proj.weight": matrix(WIDTH, HIDDEN),
            f"{prefix}mlp.down_proj.weight": matrix(HIDDEN, WIDTH),
        }
    return weights


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(rows: Array, heads: int) -> Array:
    """As ``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, weights: dict[str, Array], **changes: Any) -> Path:
    """``changes`` replace string fields ("pre"), or drop one when None."""
    fields: dict[str, Any] = {"architecture": "llama", "model": "gpt2", "pre": "smollm", "template": TEMPLATE} | changes
    writer = GGUFWriter(path, fields["architecture"])
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(fields["model"])
    writer.add_tokenizer_pre(fields["pre"])
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [4])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    if fields["template"] is not None:
        writer.add_chat_template(fields["template"])
    for name, values in weights.items():
        for old, new in GGUF_NAMES.items():
            name = name.replace(old, new)
        if ".attn_q." in name or ".attn_k." in name:
            values = permute(values, HEADS if ".attn_q." in name else KV_HEADS)
        if "ffn_up" in name:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
