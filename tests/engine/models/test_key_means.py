"""Pages without the means of keys give the answers that they give with them: prompts, chunks, decodes, drafts, ranks.

Pages keep fp32 and q is not rounded, so that nothing but the means differs; what rounding does to both is not asked.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from katydid_engine.checkpoint import KEY_MEANS, Checkpoint
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.kv_cache import KvCache
from katydid_engine.layers import attention
from katydid_engine.loader import build_model
from katydid_engine.model_config import read_model_config
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.models.hy_v3 import HyV3
from katydid_engine.parallel import ParallelPlan
from katydid_engine.quantization import StoredQuantization
from katydid_kernels import qkv_post
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.models.families import forward, prompt
from tests.engine.thread_group import ThreadGroup, on_ranks
from tests.tiny_model import write_tiny_model

LENGTH, PAGES, STEPS = 150, [0, 1, 2], 12


def unrounded(*operands: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    q = qkv_post(*operands, **options)
    return q, torch.ones(q.shape[:2])


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "qkv_post_fp8", unrounded)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "model", "hy_v3", num_nextn_predict_layers=1)
    config = read_model_config(path)
    torch.manual_seed(0)
    means = {
        f"model.layers.{layer}.self_attn.k_mean": 3 * torch.randn(config.num_kv_heads, config.head_dim)
        for layer in range(config.num_layers + 1)
    }
    save_file(means, path / KEY_MEANS)
    return path


def load(folder: Path, *, means: bool, **options: Any) -> DecoderLM:
    stored = StoredQuantization(key_means=means, rotated_keys=True)
    config = replace(read_model_config(folder), quantization=stored)
    return build_model(config, Checkpoint(folder), kv_cache_dtype="fp8", **options)


def pages_of(model: DecoderLM) -> KvCache:
    """As the model's own, in fp32."""
    own = model.new_kv_cache(len(PAGES))
    return KvCache(tuple(page.float() for page in own.k_pages), tuple(page.float() for page in own.v_pages))


def ids_of(model: DecoderLM) -> list[int]:
    return [token % model.config.vocab_size for token in prompt(LENGTH)]


def answers(model: DecoderLM, *, chunk: int = LENGTH) -> tuple[Tensor, list[int]]:
    """Logits of the prompt and of what follows it token by token, and its tokens."""
    cache, ids = pages_of(model), ids_of(model)
    parts = [forward(model, cache, ids[at : at + chunk], PAGES, start=at) for at in range(0, LENGTH, chunk)]
    rows, tokens = [model.logits(torch.cat(parts))], list[int]()
    while len(tokens) < STEPS:
        tokens.append(int(rows[-1][-1].argmax()))
        run = TokenRun(tokens[-1:], LENGTH + len(tokens) - 1, PAGES)
        rows.append(model.logits(model.forward(ForwardBatch.pack([run], num_decodes=1), cache)))
    return torch.cat(rows), tokens


@pytest.mark.parametrize("chunk", [LENGTH, 67])
def test_prompts_chunks_and_decodes(folder: Path, chunk: int) -> None:
    expected, expected_tokens = answers(load(folder, means=False))
    found, tokens = answers(load(folder, means=True), chunk=chunk)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert tokens == expected_tokens


def test_drafts(folder: Path) -> None:
    made = []
    for means in (False, True):
        model = load(folder, means=means)
        assert isinstance(model, HyV3)
        cache, ids = pages_of(model), ids_of(model)
        hidden = forward(model, cache, ids, PAGES)
        batch = ForwardBatch.pack([TokenRun(ids[1:], 0, PAGES)])
        made.append(model.draft(batch, hidden[:-1], batch.token_ids, cache))
    torch.testing.assert_close(made[1], made[0], atol=1e-4, rtol=1e-4)


def test_pages_hold_keys_without_means(folder: Path) -> None:
    caches = []
    for means in (False, True):
        model = load(folder, means=means)
        caches.append(pages_of(model))
        forward(model, caches[-1], ids_of(model), PAGES)
    mean = Checkpoint(folder).read(
        "model.layers.0.self_attn.k_mean", (2, model.config.head_dim), (slice(0, 2), slice(None))
    )
    with_means, without = (cache.k_pages[0][0] for cache in caches)
    torch.testing.assert_close(without, with_means - mean[:, None], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_take_the_means_of_their_heads(folder: Path, size: int) -> None:
    """Of two KV heads: one a rank, and more ranks than heads."""
    expected, expected_tokens = answers(load(folder, means=True))

    def work(group: ThreadGroup) -> tuple[Tensor, list[int]]:
        return answers(load(folder, means=True, plan=ParallelPlan(tp=size), collectives=group))

    for found, tokens in on_ranks(size, work):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert tokens == expected_tokens
