"""The training form against transformers' Hy3, through the exported folder; the optimizer; a few real steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from katydid_engine.scoring import ModelScorer
from transformers import AutoModelForCausalLM

from tools.hy3_tiny import train as training
from tools.hy3_tiny.batches import Phase
from tools.hy3_tiny.export import TruncatedCheckpointError, load_checkpoint, save_checkpoint
from tools.hy3_tiny.local_scorer import LocalScorer
from tools.hy3_tiny.model import Hy3Tiny, Shape, route
from tools.hy3_tiny.muon import Muon, as_matrices, orthogonalise


@pytest.fixture(scope="module")
def net() -> Hy3Tiny:
    """Random weights in which routing, biases and norms all matter."""
    net = Hy3Tiny(Shape())
    generator = torch.Generator().manual_seed(0)
    net.init_weights(generator)
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() == 1:
                p.mul_(1 + 0.2 * torch.randn(p.shape, generator=generator))
        for block in net.moe_blocks():
            block.bias.copy_(0.1 * torch.randn(16, generator=generator))
            block.router.mul_(4)
    return net


@pytest.fixture(scope="module")
def folder(net: Hy3Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    save_checkpoint(net, folder)
    return folder


def test_the_export_is_what_transformers_and_the_engine_compute(folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trained = LocalScorer(folder, "cpu")
    ids = torch.randint(0, 4096, (96,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
        hidden, loads = trained.net.trunk(ids, 96, torch.float32)
        assert torch.allclose(hidden @ trained.net.head.T, expected, atol=1e-5)
    assert [float(load.sum()) for load in loads] == [96 * 4] * 5
    ours, engines = trained.score(ids.tolist()), ModelScorer(folder).score(ids.tolist())
    assert ours.greedy == engines.greedy
    assert ours.logprobs == pytest.approx(engines.logprobs, abs=1e-4)


def test_a_checkpoint_comes_back_as_it_was_rounded(folder: Path, net: Hy3Tiny) -> None:
    back = Hy3Tiny(Shape())
    load_checkpoint(back, folder)
    for (name, a), (_, b) in zip(net.named_parameters(), back.named_parameters(), strict=True):
        assert torch.equal(a if name.endswith("router") else a.bfloat16().float(), b), name
    assert torch.equal(net.blocks[1].bias, back.blocks[1].bias)


def test_a_truncated_checkpoint_is_named(folder: Path, tmp_path: Path) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    (tmp_path / index.name).write_text(index.read_text())
    with pytest.raises(TruncatedCheckpointError, match=r"lacks the shard model-00001-of-00002\.safetensors"):
        load_checkpoint(Hy3Tiny(Shape()), tmp_path)
    (tmp_path / shards[0].name).write_bytes(shards[0].read_bytes()[:-100])
    with pytest.raises(TruncatedCheckpointError, match="cannot be read whole"):
        load_checkpoint(Hy3Tiny(Shape()), tmp_path)
    weights = json.loads(index.read_text())
    weights["weight_map"] = {k: v for k, v in weights["weight_map"].items() if v == shards[1].name}
    (tmp_path / index.name).write_text(json.dumps(weights))
    (tmp_path / shards[1].name).write_bytes(shards[1].read_bytes())
    with pytest.raises(TruncatedCheckpointError, match=r"lacks the tensor model\.embed_tokens\.weight"):
        load_checkpoint(Hy3Tiny(Shape()), tmp_path)


def test_routing_weights_follow_scores_and_choice_follows_the_bias() -> None:
    h, router = torch.randn(50, 8), torch.randn(6, 8)
    bias = torch.tensor([9.0, 0, 0, 0, 0, 0])
    weights, load = route(h, router, bias, 2, 2.826)
    assert torch.allclose(weights.sum(1), torch.full((50,), 2.826))
    assert (weights > 0).sum(1).tolist() == [2] * 50
    assert load[0] == 50
    scores = torch.sigmoid(h @ router.T)
    ratio = weights[:, 0] / 2.826
    other = (weights > 0).long()
    other[:, 0] = 0
    second = scores.gather(1, other.argmax(1, keepdim=True)).squeeze(1)
    assert torch.allclose(ratio, scores[:, 0] / (scores[:, 0] + second), atol=1e-6)


def test_orthogonalised_updates_have_unit_singular_values() -> None:
    g = torch.randn(3, 64, 256, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalise(g).float())
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_muon_sees_experts_as_matrices_of_their_own() -> None:
    down = torch.arange(24.0).view(4, 6)
    assert torch.equal(as_matrices(down, (3, 4, 2))[1], down[:, 2:4])
    weight = torch.nn.Parameter(torch.zeros(8, 6))
    muon = Muon([(weight, (2, 4, 6))], lr=0.5)
    weight.grad = torch.cat((torch.eye(4, 6), 100 * torch.eye(4, 6)))
    muon.step(1.0)
    first, second = float(weight[:4].detach().norm()), float(weight[4:].detach().norm())
    assert first == pytest.approx(second, rel=0.05), "one expert's large gradient must not drown another's"


def test_a_few_steps_learn_and_balance(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        dense_intermediate=64,
        experts=4,
        top_k=2,
        expert_intermediate=16,
    )
    monkeypatch.setattr(training.hy3, "Shape", lambda: shape)
    monkeypatch.setattr(training, "LOG_EVERY", 2)
    monkeypatch.setattr(training, "PHASES", ((1.01, training_phase()),))
    recipe = training.Recipe(steps=8, budget_s=120, tokens=256, warmup_steps=1, workers=1, muon_lr=0.05)
    summary = training.train(data, tmp_path / "out", recipe, None, "cpu", compiled=False)
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert summary["tokens"] == 8 * 256
    assert rows[-1]["loss"] < rows[0]["loss"] < 8.4
    assert rows[-1]["mtp"] < rows[0]["mtp"]
    assert ModelScorer(tmp_path / "out").vocabulary == 4096


def training_phase() -> Phase:
    return Phase(((128, 1.0),), {128: 0.0})
