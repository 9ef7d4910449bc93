"""The engine's model on a GPU, through the kernels, against the reference path on the CPU with the same weights."""

from __future__ import annotations

import pytest
import torch
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_runtime.errors import SettingsError
from tokenizers import Tokenizer
from torch import Tensor

from tests.engine.models.stored_quantized import TINY
from tests.engine.models.test_quantized import TEXT

pytestmark = pytest.mark.gpu


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
    return model.logits(torch.cat(rows)).cpu()


@pytest.mark.parametrize(
    ("dtype", "options", "bound"),
    [
        (torch.float32, {}, 1e-5),
        (torch.bfloat16, {}, 0.015),
        (torch.bfloat16, {"quantization": "fp8"}, 0.055),
        (torch.bfloat16, {"quantization": "fp8", "kv_cache_dtype": "fp8"}, 0.07),
        (torch.bfloat16, {"quantization": "w4a8"}, 0.055),
    ],
)
def test_logits(dtype: torch.dtype, options: dict[str, str], bound: float) -> None:
    """Rounding to bf16 flips some roundings to e4m3, so quantised models differ by those."""
    ids = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(TEXT).ids[:168]
    expected = logits_of(load_model(TINY, dtype=torch.float32, **options), ids)
    found = logits_of(load_model(TINY, device="cuda", dtype=dtype, **options), ids)
    assert (found - expected).norm() / expected.norm() < bound


def test_quantised_weights_need_bf16() -> None:
    with pytest.raises(SettingsError, match="computed in bfloat16 on a GPU"):
        load_model(TINY, device="cuda", dtype=torch.float32, quantization="fp8")
