"""The layers that calibration computes, smoothed and rotated too, against the engine's own models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from katydid_engine.checkpoint import Checkpoint
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.layers.rotary import rotary_table
from katydid_engine.loader import load_model
from katydid_engine.model_config import read_model_config
from katydid_engine.models.hy_v3 import HyV3
from katydid_engine.quantization import Scheme
from katydid_engine.quantize.block import Block, rotary_angles
from katydid_engine.quantize.layer_files import layer_files, read_block
from katydid_engine.quantize.rotation import Rotation, hadamard
from katydid_engine.quantize.smoothing import SEAMS, smooth
from katydid_engine.quantize.whole_model import Draft, WholeModel, stacked
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.models.families import FAMILIES, forward, make_family, prompt
from tests.tiny_model import write_tiny_model

LENGTH = 70


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(request.param, tmp_path_factory.mktemp(request.param)).folder


def whole(folder: Path) -> tuple[WholeModel, list[Block], tuple[Tensor, Tensor]]:
    checkpoint, config = Checkpoint(folder), read_model_config(folder)
    files = layer_files(checkpoint, config, Scheme.W4A8, page_scales=0, exact_router=False, untie=False)
    every = [read_block(checkpoint, config, file, "cpu") for file in files if file.index is not None]
    blocks, drafts = every[: config.num_layers], every[config.num_layers :]

    def read(name: str) -> Tensor:
        shape = checkpoint.entries[name].shape
        return checkpoint.read(name, shape, tuple(slice(0, n) for n in shape)).float()

    embedding = read("model.embed_tokens.weight")
    head = embedding if config.tie_embeddings else read("lm_head.weight")
    angles = rotary_angles(rotary_table(config.rope, config.head_dim, LENGTH, torch.device("cpu")), LENGTH)
    layers = [stacked(block) for block in blocks]
    model = WholeModel(embedding, head, read("model.norm.weight"), layers, [Draft(stacked(draft)) for draft in drafts])
    return model, blocks, angles


def served(folder: Path) -> Tensor:
    model = load_model(folder, dtype=torch.float32)
    return model.logits(forward(model, model.new_kv_cache(2), prompt(LENGTH), [0, 1]))


def test_same_logits_as_the_engine(folder: Path) -> None:
    model, _, angles = whole(folder)
    torch.testing.assert_close(
        model.logits(torch.tensor([prompt(LENGTH)]), angles)[0], served(folder), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("nested", [False, True])
def test_same_drafts_as_the_engine(tmp_path: Path, nested: bool) -> None:
    folder = write_tiny_model(tmp_path / "model", "hy_v3", num_nextn_predict_layers=1)
    if nested:
        tensors = load_file(folder / "model.safetensors")
        own = ("enorm", "hnorm", "eh_proj", "final_layernorm")
        layer = max(name.rpartition("enorm")[0] for name in tensors if name.endswith("enorm.weight"))
        moved = {
            name.replace(layer, f"{layer}mtp_block.") if name.split(".")[3] not in own else name: tensor
            for name, tensor in tensors.items()
            if name.startswith(layer)
        }
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(layer)}
        save_file(kept | moved, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(folder, dtype=torch.float32)
    assert isinstance(model, HyV3)
    ids = [token % model.config.vocab_size for token in prompt(LENGTH)]
    cache = model.new_kv_cache(2)
    hidden = model.forward(ForwardBatch.pack([TokenRun(ids, 0, [0, 1])]), cache)
    batch = ForwardBatch.pack([TokenRun(ids[1:], 0, [0, 1])])
    served = model.draft(batch, hidden[:-1], batch.token_ids, cache)
    plain, _, angles = whole(folder)
    given = torch.tensor([ids])
    (found,) = plain.draft_hidden(given, plain.hidden(given, angles), angles)
    torch.testing.assert_close(found[0], served, atol=1e-4, rtol=1e-4)


def rows_of(block: Block, x: Tensor, angles: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    rows = block.enter_attention(x)
    attended = block.attend(rows, angles)
    entered = block.enter_feed_forward(block.leave_attention(x, attended)).flatten(0, 1)
    found = {"self_attn.q_proj": rows.flatten(0, 1), "self_attn.o_proj": attended.flatten(0, 1)}
    found[f"{block.dense_blocks()[0]}.gate_proj"] = entered
    return found | {f"{one}.down_proj": block.hidden(one, entered) for one in block.dense_blocks()}


@pytest.mark.parametrize("gains", [torch.float32, torch.bfloat16])
def test_smoothing_changes_no_logit(folder: Path, gains: torch.dtype) -> None:
    model, blocks, angles = whole(folder)
    ids = torch.tensor([prompt(LENGTH)])
    x, smoothed = F.embedding(ids, model.embedding), []
    alphas: dict[str, float] = {}

    def coarse(_name: str, weight: Tensor) -> Tensor:  # three bits a row, so that smoothing pays
        scale = weight.abs().amax(-1, keepdim=True) / 3
        return (weight / scale).round() * scale

    for block in blocks:
        made, chosen = smooth(block, SEAMS, rows_of(block, x, angles), coarse, gains)
        smoothed.append(made)
        alphas |= chosen
        x = block.leave_attention(x, block.attend(block.enter_attention(x), angles))
        x = block.leave_feed_forward(x.flatten(0, 1), block.enter_feed_forward(x).flatten(0, 1)).view_as(x)
    assert {seam.split(":")[0] for seam in alphas} == set(SEAMS)
    folded = WholeModel(model.embedding, model.head, model.norm, [stacked(block) for block in smoothed])
    torch.testing.assert_close(folded.logits(ids, angles), model.logits(ids, angles), atol=1e-4, rtol=0)


def test_rotation_changes_no_logit(folder: Path) -> None:
    model, blocks, angles = whole(folder)
    ids = torch.tensor([prompt(LENGTH)])
    rotation = Rotation.make(model.embedding.shape[1], seed=0, device="cpu")
    rotated = WholeModel(
        rotation.embedding(model.embedding),
        rotation.reader(model.head, model.norm),
        torch.ones_like(model.norm),
        [stacked(Block(block.config, rotation.layer(block.tensors), block.sparse)) for block in blocks],
    )
    torch.testing.assert_close(rotated.logits(ids, angles), model.logits(ids, angles), atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [1, 2, 64, 256])
def test_hadamard_is_orthonormal(size: int) -> None:
    matrix = hadamard(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size))
    torch.testing.assert_close(matrix.abs(), torch.full((size, size), size**-0.5))
