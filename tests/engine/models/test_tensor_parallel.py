"""Two ranks over gloo give what one rank gives, for every way of cutting a model that a plan offers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from katydid_engine.loader import load_model
from katydid_engine.parallel import ParallelPlan
from katydid_runtime.errors import SettingsError
from transformers import HYV3Config, LlamaConfig

from tests.engine.models.families import EXPERTS, SIZES, forward, greedy, make_family, prompt

LENGTH = 101  # odd, so that sequence parallelism pads
STEPS = 24
PLANS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "tp_sp": {"tp": 2, "sp": True},
    "tp_ep": {"tp": 2, "ep": 2},
    "tp_sp_ep": {"tp": 2, "sp": True, "ep": 2},
}
CASES = [("llama", "tp"), ("llama", "tp_sp"), *(("hy_v3", plan) for plan in PLANS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An odd vocabulary, so that the ranks' parts differ in size."""
    sizes = SIZES | {"vocab_size": 321}
    configs = {
        "llama": LlamaConfig(**sizes, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        "hy_v3": HYV3Config(**sizes, **EXPERTS, head_dim=32),
    }
    return {
        name: make_family(name, tmp_path_factory.mktemp(name), config=config).folder for name, config in configs.items()
    }


@pytest.fixture(scope="module")
def outputs(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """All cases in one pair of processes, because starting them costs seconds."""
    scratch = tmp_path_factory.mktemp("tp")
    jobs = [
        {
            "folder": str(folders[name]),
            "plan": PLANS[plan],
            "prompt": prompt(LENGTH),
            "steps": STEPS,
            "output": str(scratch / f"{name}-{plan}.pt"),
        }
        for name, plan in CASES
    ]
    script = str(Path(__file__).with_name("tp_rank.py"))
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), str(scratch / "rendezvous"), json.dumps(jobs)])
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return {case: torch.load(scratch / f"{case[0]}-{case[1]}.pt") for case in CASES}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_two_ranks_equal_one(
    folders: dict[str, Path], outputs: dict[tuple[str, str], Any], case: tuple[str, str]
) -> None:
    model = load_model(folders[case[0]])
    logits = model.logits(forward(model, model.new_kv_cache(4), prompt(LENGTH), [0, 1, 2, 3]))
    found = outputs[case]
    assert found["heads"] == SIZES["num_key_value_heads"] // 2
    torch.testing.assert_close(found["logits"], logits, atol=1e-4, rtol=0)
    assert found["tokens"] == greedy(model, prompt(LENGTH), STEPS)


def test_group_of_another_size(folders: dict[str, Path]) -> None:
    with pytest.raises(SettingsError, match="tp=2, but the group has 1 ranks"):
        load_model(folders["llama"], plan=ParallelPlan(tp=2))
