"""A Llama forward pass in plain NumPy: enough to ask a prepared model one question without torch or an engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["NumpyLlama"]

Array = NDArray[np.float32]


class NumpyLlama:
    """Weights of a bf16 Llama folder whose head is tied to its embedding, in fp32."""

    def __init__(self, folder: Path) -> None:
        self._config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._weights = _read_bf16(folder / "model.safetensors")

    def greedy(self, ids: list[int], max_tokens: int) -> list[int]:
        """The likeliest continuation of ``ids``, up to the end of sequence; every step recomputes all tokens."""
        output: list[int] = []
        while len(output) < max_tokens:
            token = int(np.argmax(self._last_logits(ids + output)))
            if token == self._config["eos_token_id"]:
                break
            output.append(token)
        return output

    def _last_logits(self, ids: list[int]) -> Array:
        x = self._weights["model.embed_tokens.weight"][ids]
        for layer in range(self._config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            x = x + self._attention(self._norm(x, f"{prefix}input_layernorm"), f"{prefix}self_attn.")
            x = x + self._mlp(self._norm(x, f"{prefix}post_attention_layernorm"), f"{prefix}mlp.")
        logits: Array = self._norm(x[-1:], "model.norm")[0] @ self._weights["model.embed_tokens.weight"].T
        return logits

    def _norm(self, x: Array, name: str) -> Array:
        scale: Array = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(self._config["rms_norm_eps"]))
        return x / scale * self._weights[f"{name}.weight"]

    def _attention(self, x: Array, prefix: str) -> Array:
        heads, kv_heads = self._config["num_attention_heads"], self._config["num_key_value_heads"]
        q = self._rotate(self._heads(x, f"{prefix}q_proj", heads))
        k = self._rotate(self._heads(x, f"{prefix}k_proj", kv_heads)).repeat(heads // kv_heads, axis=0)
        v = self._heads(x, f"{prefix}v_proj", kv_heads).repeat(heads // kv_heads, axis=0)
        scores = q @ k.swapaxes(1, 2) / np.sqrt(np.float32(q.shape[-1]))
        scores = np.where(np.tri(len(x), dtype=bool), scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended: Array = weights / weights.sum(axis=-1, keepdims=True) @ v
        output: Array = attended.swapaxes(0, 1).reshape(len(x), -1) @ self._weights[f"{prefix}o_proj.weight"].T
        return output

    def _heads(self, x: Array, name: str, heads: int) -> Array:
        """``[T, hidden] -> [heads, T, head_dim]``."""
        return (x @ self._weights[f"{name}.weight"].T).reshape(len(x), heads, -1).swapaxes(0, 1)

    def _rotate(self, x: Array) -> Array:
        half = x.shape[-1] // 2
        frequencies = self._config["rope_theta"] ** (-np.arange(half) / half)
        angles = np.outer(np.arange(x.shape[1]), frequencies)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)

    def _mlp(self, x: Array, prefix: str) -> Array:
        gate = x @ self._weights[f"{prefix}gate_proj.weight"].T
        up = x @ self._weights[f"{prefix}up_proj.weight"].T
        output: Array = (gate / (1 + np.exp(-gate)) * up) @ self._weights[f"{prefix}down_proj.weight"].T
        return output


def _read_bf16(path: Path) -> dict[str, Array]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        words = np.frombuffer(data[begin:end], dtype=np.uint16).astype(np.uint32) << 16
        tensors[name] = words.view(np.float32).reshape(entry["shape"])
    return tensors
