"""Quantised models on the trained hy3-tiny, in every form a checkpoint may have, against transformers in fp32 on the
dequantised weights. What is left between them is the rounding of activations to e4m3.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.models.hy_v3 import HyV3
from katydid_engine.parallel import ParallelPlan
from katydid_runtime.errors import ModelFolderError, SettingsError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3MoeConfig

from tests.engine.models.families import EXPERTS, SIZES, forward, greedy, make_family, prompt
from tests.engine.models.stored_quantized import FORMS, TINY, write_pair
from tests.engine.thread_group import ThreadGroup, on_ranks

TEXT = '''"""Reads records from a file of lines, each a name and a number."""

import csv
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Record:
    name: str
    value: float


def read_records(path: Path) -> list[Record]:
    records = []
    with path.open(newline="") as file:
        for row in csv.reader(file):
            if len(row) != 2:
                raise ValueError(f"expected two fields, found {len(row)}")
            records.append(Record(name=row[0], value=float(row[1])))
    return records


def total(records: list[Record]) -> float:
    result = 0.0
    for record in records:
        result += record.value
    return result
'''
PAGES = [0, 1, 2, 3]
KV_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}


@pytest.fixture(scope="module")
def ids() -> list[int]:
    found: list[int] = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(TEXT).ids
    assert len(found) > 170
    return found


def logits_of(model: DecoderLM, ids: list[int]) -> Tensor:
    return model.logits(forward(model, model.new_kv_cache(4), ids, PAGES))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@torch.inference_mode()
def reference_logits(folder: Path, ids: list[int]) -> Tensor:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference.set_experts_implementation("eager")
    return reference(torch.tensor([ids])).logits[0]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    return {name: write_pair(form, tmp_path_factory.mktemp(name)) for name, form in FORMS.items()}


# e4m3 rounds a value by 2.6 % (rms) of itself, products average that out, and near ties of the router bring some back.
# Experts whose scales are joined to one (channel, blocks) are rounded a second time.
@pytest.mark.parametrize(("form", "bound"), [("hy3", 0.055), ("channel", 0.055), ("blocks", 0.065), ("int4", 0.055)])
def test_stored_forms(pairs: dict[str, tuple[Path, Path]], ids: list[int], form: str, bound: float) -> None:
    quantised, plain = pairs[form]
    expected = reference_logits(plain, ids)
    found = logits_of(load_model(quantised), ids)
    assert 0.005 < relative_error(found, expected) < bound
    sure = expected.topk(2, dim=-1).values.diff().squeeze(1).abs() > 2 * (found - expected).abs().amax(-1)
    assert sure.float().mean() > 0.25
    assert torch.equal(found.argmax(-1)[sure], expected.argmax(-1)[sure])


@torch.inference_mode()
def test_ranks_that_begin_inside_a_group(pairs: dict[str, tuple[Path, Path]], ids: list[int]) -> None:
    """Two ranks of 32 columns an expert, of groups of 128: one rank's logits but for other roundings of activations."""
    folder, plain = pairs["int4"]

    def work(group: ThreadGroup) -> Tensor:
        return logits_of(load_model(folder, plan=ParallelPlan(tp=2), collectives=group), ids)

    first, second = on_ranks(2, work)
    assert torch.equal(first, second)
    assert relative_error(first, logits_of(load_model(folder), ids)) < 0.055
    assert relative_error(first, reference_logits(plain, ids)) < 0.055


@pytest.mark.parametrize("scheme", ["fp8", "w4a8"])
def test_quantised_while_loading(ids: list[int], scheme: str) -> None:
    """Further from the plain model than rounded activations alone, nearer than a model with a wrong scale."""
    plain = logits_of(load_model(TINY), ids)
    error = relative_error(logits_of(load_model(TINY, quantization=scheme), ids), plain)
    assert {"fp8": 0.02, "w4a8": 0.08}[scheme] < error < {"fp8": 0.07, "w4a8": 0.18}[scheme]


@pytest.mark.parametrize("form", ["hy3", "int4"])
def test_a_token_does_not_depend_on_its_batch(pairs: dict[str, tuple[Path, Path]], ids: list[int], form: str) -> None:
    """What preemption, resume and prefix hits rely on holds for quantised models too."""
    model = load_model(pairs[form][0], kv_cache_dtype="fp8")
    whole = forward(model, model.new_kv_cache(4), ids, PAGES)
    cache = model.new_kv_cache(6)
    parts = [forward(model, cache, ids[start : start + 77], PAGES, start=start) for start in range(0, 154, 77)]
    for position in range(154, 156):
        runs = [TokenRun([ids[position]], position, PAGES), TokenRun(ids[:3], 0, [4]), TokenRun(ids[:9], 0, [5])]
        parts.append(model.forward(ForwardBatch.pack(runs, num_decodes=1), cache)[:1])
    assert torch.equal(torch.cat(parts), whole[:156])


def test_fp8_pages(ids: list[int]) -> None:
    plain, model = load_model(TINY), load_model(TINY, kv_cache_dtype="fp8")
    assert model.new_kv_cache(1).k_pages[0].dtype == torch.float8_e4m3fn
    assert model.dtype == torch.float32
    assert 1e-3 < relative_error(logits_of(model, ids), logits_of(plain, ids)) < 0.05


@pytest.mark.parametrize(("heads", "spelling"), [(1, "{}_scale"), (2, "{}_scale"), (1, "{}_cache.scale")])
def test_pages_hold_values_over_the_checkpoints_scales(
    tmp_path: Path, ids: list[int], heads: int, spelling: str
) -> None:
    """Powers of two move no rounding but that of the smallest: the logits of scale 1, other bytes in the pages."""
    tensors = {name: tensor for shard in TINY.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    for layer in range(7):
        attention = f"model.layers.{layer}.self_attn"
        tensors[f"{attention}.{spelling.format('k')}"] = torch.tensor([0.5, 0.25][:heads])
        tensors[f"{attention}.{spelling.format('v')}"] = torch.tensor([0.125, 0.5][:heads])
        if "cache" in spelling:  # Hy3's names; its constant scale of q is not needed: q has one for each token
            tensors[f"{attention}.q.scale"] = torch.tensor(0.01)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text())
    scaled, plain = load_model(tmp_path, kv_cache_dtype="fp8"), load_model(TINY, kv_cache_dtype="fp8")
    caches = scaled.new_kv_cache(4), plain.new_kv_cache(4)
    found, expected = (
        model.logits(forward(model, cache, ids, PAGES)) for model, cache in zip((scaled, plain), caches, strict=True)
    )
    assert relative_error(found, expected) < 0.02
    for head, factor in enumerate([2, 4] if heads == 2 else [2, 2]):
        pages, plain_pages = (cache.k_pages[0][:, head].float() for cache in caches)
        assert relative_error(pages, factor * plain_pages) < 1e-3
    assert torch.equal(logits_of(load_model(tmp_path), ids), logits_of(load_model(TINY), ids))


def test_pages_are_fp8_where_the_checkpoint_says_so(pairs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    quantised, _ = pairs["channel"]
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = KV_SCHEME
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(quantised / "model.safetensors")
    assert load_model(tmp_path).new_kv_cache(1).k_pages[0].dtype == torch.float8_e4m3fn
    assert load_model(quantised).new_kv_cache(1).k_pages[0].dtype == torch.float32


def test_drafts_agree_with_the_target(pairs: dict[str, tuple[Path, Path]], ids: list[int]) -> None:
    model = load_model(pairs["int4"][0])
    assert isinstance(model, HyV3)
    ids = ids[:60] + greedy(model, ids[:60], 16)
    cache = model.new_kv_cache(4)
    batch = ForwardBatch.pack([TokenRun(ids[:-1], 0, PAGES)])
    hidden = model.forward(batch, cache)
    target = model.logits(hidden).argmax(-1)[1:]
    drafted = model.draft(batch, hidden, torch.tensor(ids[1:], dtype=torch.int32), cache)
    assert (model.logits(drafted).argmax(-1)[:-1] == target).float().mean() > 0.3  # 0.5 of the plain model's


@pytest.mark.parametrize("size", [64, 128])
def test_softmax_experts_in_blocks(tmp_path: Path, size: int) -> None:
    """Qwen3-MoE as its fp8 checkpoints are stored, with whole blocks or parts of one. All experts are chosen: random
    routers have ties everywhere."""
    sizes = SIZES | EXPERTS | {"hidden_size": size, "intermediate_size": size, "moe_intermediate_size": size}
    config = Qwen3MoeConfig(**sizes | {"num_experts_per_tok": 8}, head_dim=32, norm_topk_prob=True, mlp_only_layers=[1])
    family = make_family("qwen3_moe", tmp_path / "source", config=config)
    quantised, plain = write_pair(FORMS["blocks"], tmp_path, source=family.folder)
    found, expected = logits_of(load_model(quantised), prompt(200)), reference_logits(plain, prompt(200))
    # Random weights amplify: rounding activations to bf16, which has four bits more, moves these logits by 2 %.
    assert 0.005 < relative_error(found, expected) < 0.25


def test_projections_of_one_product_must_be_stored_alike(pairs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    quantised, plain = pairs["hy3"]
    tensors = load_file(quantised / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj"
    for part in ("weight_scale", "input_scale"):
        del tensors[f"{name}.{part}"]
    tensors[f"{name}.weight"] = load_file(plain / "model.safetensors")[f"{name}.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((quantised / "config.json").read_text())
    with pytest.raises(ModelFolderError, match=r"under model\.layers\.0\.self_attn\. .* not stored alike"):
        load_model(tmp_path)


def test_another_scheme_than_the_checkpoints(pairs: dict[str, tuple[Path, Path]]) -> None:
    with pytest.raises(SettingsError, match="quantization is 'w4a8', but the checkpoint is stored as fp8") as caught:
        load_model(pairs["channel"][0], quantization="w4a8")
    assert caught.value.field == "quantization"
    load_model(pairs["channel"][0], quantization="fp8")
