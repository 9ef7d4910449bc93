"""The engine's model on a GPU, through the kernels, against the reference path in float64 with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_runtime.errors import SettingsError
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3MoeConfig

from tests.engine.models.families import SIZES, make_family, prompt
from tests.engine.models.stored_quantized import TINY
from tests.engine.models.test_quantized import TEXT

pytestmark = pytest.mark.gpu

TIMES = 1.25
"""How far from float64 the kernels may be, in errors of plain bf16 arithmetic."""


def logits_of(model: DecoderLM, ids: list[int]) -> Tensor:
    """A prompt in two chunks beside another prompt, then decodes beside a chunk."""
    cache, pages, other = model.new_kv_cache(8), [0, 1, 2, 3], [4, 5]
    rows = []
    for start, end in ((0, 100), (100, 160)):
        runs = [TokenRun(ids[start:end], start, pages), TokenRun(ids[:70], 0, other)]
        batch = ForwardBatch.pack(runs, device=model.device)
        rows.append(model.forward(batch, cache)[: end - start])
    for position in range(160, len(ids)):
        runs = [TokenRun([ids[position]], position, pages), TokenRun(ids[:9], 0, other)]
        batch = ForwardBatch.pack(runs, num_decodes=1, device=model.device)
        rows.append(model.forward(batch, cache)[:1])
    return model.logits(torch.cat(rows)).cpu().double()


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def assert_like_plain_bf16(folder: Path, ids: list[int], options: dict[str, str]) -> None:
    """Logits as near to float64's as those of the reference path in bf16, which rounds after each operation.

    With quantised weights what bf16 rounds flips roundings to e4m3, in both alike; most of the error is that.
    """
    exact = logits_of(load_model(folder, dtype=torch.float64, **options), ids)
    plain = error(logits_of(load_model(folder, dtype=torch.bfloat16, **options), ids), exact)
    found = error(logits_of(load_model(folder, device="cuda", dtype=torch.bfloat16, **options), ids), exact)
    print(f"{options}: {found:.5f}, plain bf16 {plain:.5f}")
    assert found <= TIMES * plain


def text() -> list[int]:
    return Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(TEXT).ids[:168]


def test_logits_in_float32() -> None:
    exact = logits_of(load_model(TINY, dtype=torch.float64), text())
    assert error(logits_of(load_model(TINY, device="cuda", dtype=torch.float32), text()), exact) < 1e-5


@pytest.mark.parametrize(
    "options",
    [{}, {"quantization": "fp8"}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}, {"quantization": "w4a8"}],
)
def test_logits(options: dict[str, str]) -> None:
    assert_like_plain_bf16(TINY, text(), options)


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}, {"quantization": "w4a8"}])
def test_logits_of_a_softmax_router(tmp_path: Path, options: dict[str, str]) -> None:
    """Qwen3-MoE of shapes that the kernels take. Its weights are random, so what rounding changes grows faster than in
    a trained model; the router is sharpened, that it does not choose other experts."""
    sizes = SIZES | {"hidden_size": 256, "num_hidden_layers": 1, "initializer_range": 0.06}
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
    family = make_family("qwen3_moe", tmp_path, config=Qwen3MoeConfig(**sizes, **experts, head_dim=64))
    for name, parameter in family.reference.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data *= 8
    family.reference.save_pretrained(tmp_path)
    assert_like_plain_bf16(tmp_path, prompt(168), options)


def test_quantised_weights_need_bf16() -> None:
    with pytest.raises(SettingsError, match="computed in bfloat16 on a GPU"):
        load_model(TINY, device="cuda", dtype=torch.float32, quantization="fp8")
