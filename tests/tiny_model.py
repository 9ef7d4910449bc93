"""Writes small model folders with random weights: everything an engine and a gateway need, in a tenth of a second.

The tokenizer is byte-level: 256 tokens for bytes, then the special ones, so any text goes there and back.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from katydid_engine.loader import build_model
from katydid_engine.model_config import read_model_config
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

__all__ = ["EOS_ID", "VOCAB_SIZE", "write_tiny_model"]

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 272
# A prime, so that rows of a matrix differ.
_POOL = 1_048_573
EOS_ID = 256 + _SPECIAL.index("<|im_end|>")

_CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools, called as <tool_call>: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": EOS_ID,
    "bos_token_id": 256,
    "torch_dtype": "float32",
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000.0},
    "hy_v3": {
        "architectures": ["HYV3ForCausalLM"],
        "model_type": "hy_v3",
        "rope_theta": 11158840.0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
}


def write_tiny_model(
    folder: Path, architecture: str = "llama", *, seed: int = 0, quick: bool = False, **config: Any
) -> Path:
    """A model folder in the layout of Hugging Face; ``architecture`` is "llama" or "hy_v3", ``config`` overrides fields
    of config.json. ``quick``: gigabytes in seconds, in the config's dtype, from one pool of random numbers. Returns
    ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_SHAPE | _CONFIGS[architecture] | config, indent=1))
    shape = read_model_config(folder)
    source = _PooledSource(seed, getattr(torch, shape.checkpoint_dtype)) if quick else _RecordedSource(seed)
    build_model(shape, source)
    save_file(source.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {"chat_template": _CHAT_TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


class _RecordedSource:
    """Random tensors, large enough that tokens vary, kept for writing them down."""

    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._seed = seed

    def has(self, name: str) -> bool:
        return False

    def stored(self, name: str) -> None:
        return None

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        if len(shape) == 1:
            tensor = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            tensor = torch.randn(shape, generator=generator) * (1.0 if "embed" in name else shape[-1] ** -0.5)
        self.tensors[name] = tensor.contiguous()
        return tensor[part]

    def skip(self, name: str, shape: tuple[int, ...]) -> None:
        self.read(name, shape, ())


class _PooledSource(_RecordedSource):
    """Pieces of one pool, each from its own place on."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__(seed)
        self._pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
        count, first = math.prod(shape), zlib.crc32(name.encode()) % _POOL
        numbers = self._pool.repeat(-(-(first + count) // _POOL))[first : first + count].view(shape)
        if len(shape) == 1:
            tensor = 1 + 0.1 * numbers
        else:
            tensor = numbers * (1.0 if "embed" in name else shape[-1] ** -0.5)
        self.tensors[name] = tensor
        return tensor[part]


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    return tokenizer
