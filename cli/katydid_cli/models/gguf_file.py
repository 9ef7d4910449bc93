"""Reading a Llama-family GGUF file as what Hugging Face would have stored: configs, tokenizer and weights.

llama.cpp stores the rows of q and k for its own rotation, which pairs neighbours; ``_unpermute`` restores the order in
which the two halves of a head are paired. Left as it is, the model ends its answer at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from katydid_runtime.errors import ModelFolderError
from numpy.typing import NDArray

__all__ = ["GgufModel"]

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# llama_token_type: control tokens are special, user-defined ones are matched whole but printed.
_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True, slots=True)
class _Shapes:
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int


class GgufModel:
    """One GGUF file, opened and checked.

    Raises:
        ModelFolderError: not a GGUF file, truncated, of another architecture or pre-tokenizer, or without a field.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
            raise ModelFolderError(f"{path}: corrupt GGUF file: {error}", field="gguf", value=path) from error
        self._expect("general.architecture", "llama")
        self._expect("tokenizer.ggml.model", "gpt2")
        self._expect("tokenizer.ggml.pre", "smollm")
        self._shapes = _Shapes(
            num_layers=int(self._field("llama.block_count")),
            hidden_size=int(self._field("llama.embedding_length")),
            num_heads=int(self._field("llama.attention.head_count")),
            num_kv_heads=int(self._field("llama.attention.head_count_kv")),
        )

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        names = {tensor.name for tensor in self._reader.tensors}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(self._field("tokenizer.ggml.tokens")),
            "hidden_size": self._shapes.hidden_size,
            "intermediate_size": int(self._field("llama.feed_forward_length")),
            "num_hidden_layers": self._shapes.num_layers,
            "num_attention_heads": self._shapes.num_heads,
            "num_key_value_heads": self._shapes.num_kv_heads,
            "max_position_embeddings": int(self._field("llama.context_length")),
            "rms_norm_eps": round(float(self._field("llama.attention.layer_norm_rms_epsilon")), 9),
            "rope_theta": float(self._field("llama.rope.freq_base")),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in names,
            "bos_token_id": int(self._field("tokenizer.ggml.bos_token_id")),
            "eos_token_id": int(self._field("tokenizer.ggml.eos_token_id")),
            "pad_token_id": int(self._field("tokenizer.ggml.padding_token_id")),
            "torch_dtype": "bfloat16",
        }

    def tokenizer_config(self) -> dict[str, Any]:
        """The content of ``tokenizer_config.json``, chat template included."""
        tokens = self._field("tokenizer.ggml.tokens")
        named = {
            name: tokens[int(self._field(f"tokenizer.ggml.{key}_token_id"))]
            for name, key in {
                "bos_token": "bos",
                "eos_token": "eos",
                "unk_token": "unknown",
                "pad_token": "padding",
            }.items()
        }
        return {
            "tokenizer_class": "GPT2Tokenizer",
            "add_bos_token": bool(self._field("tokenizer.ggml.add_bos_token")),
            "add_prefix_space": bool(self._field("tokenizer.ggml.add_space_prefix")),
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(self._field("llama.context_length")),
            "chat_template": self._field("tokenizer.chat_template"),
            **named,
        }

    def tokenizer_json(self) -> str:
        """The content of ``tokenizer.json``: byte-level BPE over text whose digits are split one by one."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        kinds: list[int] = self._field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ", 1)) for merge in self._field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        for token, kind in zip(tokens, kinds, strict=True):
            if kind == _CONTROL:
                tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
            elif kind == _USER_DEFINED:
                tokenizer.add_tokens([AddedToken(token, normalized=False)])
        return str(tokenizer.to_str(pretty=False))

    def shapes(self) -> dict[str, list[int]]:
        """Hugging Face names and shapes, in the file's order (which stores the last dimension first)."""
        return {
            self._hugging_face_name(tensor.name): [int(n) for n in reversed(tensor.shape)]
            for tensor in self._reader.tensors
        }

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Hugging Face names and dequantised weights, fp32, in the file's order.

        Raises:
            ModelFolderError: a tensor whose name has no counterpart, or that cannot be dequantised.
        """
        from gguf.quants import dequantize

        for tensor in self._reader.tensors:
            try:
                values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
            except (ValueError, NotImplementedError) as error:
                raise ModelFolderError(
                    f"{self.path}: tensor {tensor.name} of type {tensor.tensor_type.name}: {error}", field=tensor.name
                ) from error
            yield self._hugging_face_name(tensor.name), self._unpermuted(tensor.name, values)

    def _hugging_face_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if kind == "weight":
            if stem in _OTHER_NAMES:
                return f"{_OTHER_NAMES[stem]}.weight"
            block, _, part = stem.removeprefix("blk.").partition(".")
            if stem.startswith("blk.") and part in _LAYER_NAMES:
                return f"model.layers.{block}.{_LAYER_NAMES[part]}.weight"
        raise ModelFolderError(f"{self.path}: tensor {name} has no counterpart in a Llama model", field=name)

    def _unpermuted(self, name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        if name.endswith(".attn_q.weight"):
            return _unpermute(values, self._shapes.num_heads)
        if name.endswith(".attn_k.weight"):
            return _unpermute(values, self._shapes.num_kv_heads)
        return values

    def _expect(self, name: str, expected: str) -> None:
        found = self._field(name)
        if found != expected:
            raise ModelFolderError(
                f"{self.path}: {name} is {found!r}, expected {expected!r}", field=name, value=found, allowed=expected
            )

    def _field(self, name: str) -> Any:
        field = self._reader.get_field(name)
        if field is None:
            raise ModelFolderError(f"{self.path}: field {name} is missing", field=name)
        try:
            return field.contents()
        except (ValueError, IndexError) as error:
            raise ModelFolderError(f"{self.path}: field {name} is unreadable: {error}", field=name) from error


def _unpermute(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """``[heads * head_dim, in]``: pairs (2i, 2i + 1) of a head go back to (i, i + head_dim / 2)."""
    paired = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, rows.shape[1])
    return paired.swapaxes(1, 2).reshape(rows.shape)
