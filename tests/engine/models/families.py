"""Small random models of every architecture, made and saved by transformers: the oracle of the engine's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.models.decoder_lm import DecoderLM
from torch import Tensor
from transformers import HYV3Config, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    # Wide enough that attention is far from uniform and experts disagree.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32, rms_norm_eps=1e-5),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32, norm_topk_prob=True, mlp_only_layers=[1]),
    "hy_v3": lambda: HYV3Config(**SIZES, **EXPERTS, head_dim=32),
}


@dataclass(frozen=True)
class Family:
    """A saved model folder and the transformers model it came from."""

    name: str
    folder: Path
    reference: PreTrainedModel

    @torch.inference_mode()
    def reference_logits(self, ids: list[int]) -> Tensor:
        """fp32 ``[len(ids), vocab]``."""
        return self.reference(torch.tensor([ids])).logits[0]

    @torch.inference_mode()
    def reference_greedy(self, ids: list[int], count: int) -> list[int]:
        output = self.reference.generate(
            torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
        )
        return output[0, len(ids) :].tolist()


def make_family(name: str, folder: Path, *, config: PreTrainedConfig | None = None) -> Family:
    """Saves a random model. Norm weights and the router's selection bias are randomised too: transformers starts them
    at one and zero, where a swapped or ignored one would go unnoticed."""
    generator = torch.Generator().manual_seed(len(name))
    torch.manual_seed(len(name))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_config(config or FAMILIES[name]()).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data = 0.5 + torch.rand(parameter.shape, generator=generator)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")
    model.save_pretrained(folder)
    return Family(name, folder, model)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def forward(model: DecoderLM, cache: Any, ids: list[int], pages: list[int], *, start: int = 0) -> Tensor:
    """Hidden states of one run of tokens computed alone."""
    return model.forward(ForwardBatch.pack([TokenRun(ids, start, pages)]), cache)


def greedy(model: DecoderLM, ids: list[int], count: int) -> list[int]:
    """Prefill, then one decode step a token."""
    pages = list(range(-(-(len(ids) + count) // 64)))
    cache = model.new_kv_cache(len(pages))
    token = int(model.logits(forward(model, cache, ids, pages)[-1:]).argmax())
    output = [token]
    while len(output) < count:
        run = TokenRun([token], len(ids) + len(output) - 1, pages)
        hidden = model.forward(ForwardBatch.pack([run], num_decodes=1), cache)
        token = int(model.logits(hidden).argmax())
        output.append(token)
    return output
