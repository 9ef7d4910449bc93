"""Hy3's draft layer against the same formula over transformers' decoder layer (which implements no MTP itself)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.models.hy_v3 import HyV3
from katydid_runtime.errors import ModelFolderError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import HYV3Config
from transformers.models.hy_v3.modeling_hy_v3 import HYV3DecoderLayer

from tests.engine.models.families import EXPERTS, SIZES, Family, make_family, prompt

LENGTH = 130
PAGES = [2, 0, 1]
PREFIX = "model.layers.3."


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Family:
    config = HYV3Config(**SIZES, **EXPERTS, head_dim=32, num_nextn_predict_layers=1)
    return make_family("hy_v3", tmp_path_factory.mktemp("mtp"), config=config)


@pytest.fixture(scope="module")
def block(target: Family) -> HYV3DecoderLayer:
    """The draft layer's decoder block, randomised like a trained one."""
    torch.manual_seed(11)
    block = HYV3DecoderLayer(target.reference.config, layer_idx=1).eval()
    for name, tensor in block.state_dict().items():
        scale, mean = (0.2, 0.0) if tensor.ndim > 1 or name.endswith("bias") else (0.2, 1.0)
        tensor.copy_(mean + scale * torch.randn(tensor.shape))
    return block


@pytest.fixture(scope="module")
def extras(target: Family) -> dict[str, Tensor]:
    torch.manual_seed(12)
    norms = {name: 1 + 0.2 * torch.randn(64) for name in ("enorm.weight", "hnorm.weight", "final_layernorm.weight")}
    return norms | {"eh_proj.weight": 0.2 * torch.randn(64, 128)}


@pytest.fixture(scope="module")
def model(target: Family, block: HYV3DecoderLayer, extras: dict[str, Tensor]) -> HyV3:
    """The folder completed with the draft layer, in the released checkpoint's spelling."""
    path = target.folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in block.state_dict().items():
        if name.startswith("mlp.experts."):
            for expert in range(8):
                if name.endswith("down_proj"):
                    tensors[f"{PREFIX}mlp.experts.{expert}.down_proj.weight"] = tensor[expert].clone()
                else:
                    gate, up = tensor[expert].chunk(2)
                    tensors[f"{PREFIX}mlp.experts.{expert}.gate_proj.weight"] = gate.clone()
                    tensors[f"{PREFIX}mlp.experts.{expert}.up_proj.weight"] = up.clone()
            continue
        name = name.replace("mlp.gate.", "mlp.router.gate.").replace("e_score_correction_bias", "expert_bias")
        tensors[PREFIX + name.replace("shared_experts", "shared_mlp")] = tensor.clone()
    tensors |= {PREFIX + name: tensor for name, tensor in extras.items()}
    # Copies that released checkpoints carry and nothing reads.
    tensors[f"{PREFIX}embed_tokens.weight"] = torch.zeros(320, 64)
    tensors[f"{PREFIX}shared_head.head.weight"] = torch.zeros(320, 64)
    save_file(tensors, path)
    model = load_model(target.folder)
    assert isinstance(model, HyV3)
    return model


@pytest.fixture(scope="module")
def expected(target: Family, block: HYV3DecoderLayer, extras: dict[str, Tensor]) -> Tensor:
    """Draft hidden states of the formula in ``hy_v3``'s docstring."""
    ids = torch.tensor([prompt(LENGTH + 1)])
    reference = target.reference.model

    def norm(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, (64,), extras[f"{name}.weight"], reference.config.rms_norm_eps)

    with torch.inference_mode():
        hidden = reference(ids[:, :LENGTH]).last_hidden_state
        embedded = reference.embed_tokens(ids[:, 1:]).clone()
        embedded[:, 0] = 0
        merged = torch.cat((norm(embedded, "enorm"), norm(hidden, "hnorm")), dim=-1) @ extras["eh_proj.weight"].T
        positions = torch.arange(LENGTH).unsqueeze(0)
        mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
        rotary = reference.rotary_emb(merged, positions)
        return norm(block(merged, attention_mask=mask, position_embeddings=rotary), "final_layernorm")[0]


@pytest.mark.parametrize("chunk", [LENGTH, 50])
def test_draft_equals_the_formula(model: HyV3, expected: Tensor, chunk: int) -> None:
    ids = prompt(LENGTH + 1)
    cache = model.new_kv_cache(3)
    assert cache.num_layers == 4
    parts = []
    for start in range(0, LENGTH, chunk):
        end = min(start + chunk, LENGTH)
        batch = ForwardBatch.pack([TokenRun(ids[start:end], start, PAGES)])
        hidden = model.forward(batch, cache)
        parts.append(model.draft(batch, hidden, torch.tensor(ids[start + 1 : end + 1], dtype=torch.int32), cache))
    assert expected.std() > 0.5
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)


def test_target_is_untouched(model: HyV3, target: Family) -> None:
    ids = prompt(65)
    hidden = model.forward(ForwardBatch.pack([TokenRun(ids, 0, PAGES)]), model.new_kv_cache(3))
    torch.testing.assert_close(model.logits(hidden), target.reference_logits(ids), atol=1e-4, rtol=0)


def test_draft_layer_is_found_without_the_config(model: HyV3, tmp_path: Path, target: Family) -> None:
    """Checkpoints append draft layers whether or not the config counts them."""
    text = (target.folder / "config.json").read_text()
    assert '"num_nextn_predict_layers": 1' in text
    (tmp_path / "config.json").write_text(
        text.replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 0')
    )
    (tmp_path / "model.safetensors").symlink_to(target.folder / "model.safetensors")
    assert load_model(tmp_path).config.num_mtp_layers == model.config.num_mtp_layers == 1


def test_config_promises_a_draft_layer_that_is_not_there(tmp_path: Path) -> None:
    config = HYV3Config(**SIZES, **EXPERTS, head_dim=32, num_nextn_predict_layers=1)
    folder = make_family("hy_v3", tmp_path, config=config).folder
    with pytest.raises(ModelFolderError, match=r"tensor model\.layers\.3\.enorm\.weight is missing"):
        load_model(folder)
