"""Several ranks over gloo give what one rank gives, for every way of cutting a model that a plan offers."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_engine.models.rank_context import HALVED_FROM
from katydid_engine.parallel import ParallelPlan
from katydid_runtime.errors import SettingsError
from transformers import HYV3Config, LlamaConfig

from tests.engine.models.families import EXPERTS, SIZES, forward, greedy, make_family, prompt
from tests.engine.thread_group import ThreadGroup, on_ranks

LENGTHS = (101, 70, 163)  # odd, so that sequence parallelism pads; ragged
CHUNK = 67
STEPS = 9

# (model, plan, prompts, options)
Case = tuple[str, str, int, dict[str, Any]]
PAIRS: list[Case] = [
    ("llama", "tp2,sp", 2, {}),
    ("llama", "pp2", 2, {"micro_batches": 2}),
    ("one_kv_head", "tp2", 2, {}),
    ("hy_v3", "tp2", 2, {}),
    ("hy_v3", "tp2,ep2", 2, {}),
    ("hy_v3", "tp2,sp,ep2", 2, {}),
    ("hy_v3", "tp2,sp,ep2", 3, {"micro_batches": 2, "halved_from": 20}),  # chunks in two parts that take turns
    ("hy_v3", "dp2,ep2", 3, {}),
    ("hy_v3", "dp2,ep2", 1, {}),  # the second rank has nothing to compute
    ("hy_v3", "dp2,ep2", 3, {"capacity": 256, "micro_batches": 2}),
    ("hy_v3", "dp2,ep2+4", 3, {}),
]
FOURS: list[Case] = [
    ("one_kv_head", "tp4", 2, {}),
    ("hy_v3", "tp4,sp,ep4", 3, {}),  # more ranks than KV heads
    ("hy_v3", "tp4,sp", 3, {"micro_batches": 2, "halved_from": 20}),
    ("hy_v3", "dp4,ep4", 3, {}),
    ("hy_v3", "tp2,dp2,sp,ep4", 3, {}),
    ("hy_v3", "tp2,pp2", 3, {"micro_batches": 3}),
    ("hy_v3", "tp2,ep2,pp2", 3, {"micro_batches": 2}),
]
EIGHTS: list[Case] = [
    ("hy_v3", "dp8,ep8", 3, {}),
    ("hy_v3", "dp8,ep8", 3, {"capacity": 256, "micro_batches": 2}),
    ("hy_v3", "dp8,ep8+8", 3, {}),
    ("hy_v3", "tp4,dp2,sp,ep8", 3, {}),
    ("wide", "tp8,sp,ep8", 3, {}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An odd vocabulary, so that the ranks' parts differ in size."""
    sizes = SIZES | {"vocab_size": 321}
    configs = {
        "llama": LlamaConfig(**sizes, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        "one_kv_head": LlamaConfig(**sizes | {"num_key_value_heads": 1}, attention_bias=True),
        "hy_v3": HYV3Config(**sizes, **EXPERTS, head_dim=32),
        "wide": HYV3Config(**sizes | {"num_attention_heads": 8, "num_key_value_heads": 4}, **EXPERTS, head_dim=32),
    }
    return {
        name: make_family(name, tmp_path_factory.mktemp(name), config=config).folder for name, config in configs.items()
    }


@functools.cache
def expected(folder: Path) -> list[tuple[torch.Tensor, list[int]]]:
    """Logits and tokens of each prompt by one rank, in one chunk."""
    model = load_model(folder)
    return [
        (model.logits(forward(model, model.new_kv_cache(4), ids, [0, 1, 2, 3])), greedy(model, ids, STEPS))
        for ids in map(prompt, LENGTHS)
    ]


def check(folders: dict[str, Path], scratch: Path, ranks: int, cases: list[Case]) -> None:
    """All cases in the same processes, because starting them costs seconds."""
    jobs = [
        {
            "folder": str(folders[name]),
            "plan": plan,
            "prompts": [prompt(length) for length in LENGTHS[:prompts]],
            "chunk": CHUNK,
            "steps": STEPS,
            "output": str(scratch / str(index)),
            "capacity": None,
            "micro_batches": 1,
            "halved_from": HALVED_FROM,
            **options,
        }
        for index, (name, plan, prompts, options) in enumerate(cases)
    ]
    script = str(Path(__file__).with_name("plan_rank.py"))
    processes = [
        subprocess.Popen([sys.executable, script, str(rank), str(ranks), str(scratch / "meet"), json.dumps(jobs)])
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
    for index, (name, spelled, prompts, options) in enumerate(cases):
        plan = ParallelPlan.parse(spelled)
        whole = expected(folders[name])
        for group in range(plan.dp):
            found = torch.load(scratch / f"{index}-{group}")
            own = range(group, prompts, plan.dp)
            if plan.redundant_experts:
                assert found["rebalanced"] > 0  # while tokens were made
            assert found["tokens"] == [whole[number][1] for number in own], (name, spelled, options)
            for number, logits in zip(own, found["logits"], strict=True):
                torch.testing.assert_close(logits, whole[number][0], atol=1e-4, rtol=0)


def test_two_ranks_equal_one(folders: dict[str, Path], tmp_path: Path) -> None:
    check(folders, tmp_path, 2, PAIRS)


@pytest.mark.soak
def test_four_ranks_equal_one(folders: dict[str, Path], tmp_path: Path) -> None:
    check(folders, tmp_path, 4, FOURS)


@pytest.mark.soak
def test_eight_ranks_equal_one(folders: dict[str, Path], tmp_path: Path) -> None:
    check(folders, tmp_path, 8, EIGHTS)


@pytest.mark.parametrize("spelled", ["dp8,ep8", "dp8,ep8+8,fp8"])
def test_eight_ranks_as_threads(folders: dict[str, Path], spelled: str) -> None:
    """Eight ranks, five of them without a request, in one process: a prompt and a token."""
    plan = ParallelPlan.parse(spelled)
    whole = expected(folders["hy_v3"])

    def work(group: ThreadGroup) -> list[torch.Tensor]:
        model = load_model(folders["hy_v3"], plan=plan, experts=group)
        if group.rank >= len(LENGTHS):
            model.take_part()
            model.take_part()
            return []
        ids, cache = prompt(LENGTHS[group.rank]), model.new_kv_cache(4)
        logits = model.logits(forward(model, cache, ids, [0, 1, 2, 3]))
        run = TokenRun([int(whole[group.rank][0][-1].argmax())], len(ids), [0, 1, 2, 3])
        return [logits, model.logits(model.forward(ForwardBatch.pack([run], num_decodes=1), cache))]

    for found, (logits, tokens) in zip(on_ranks(8, work), whole, strict=False):
        if plan.fp8_transfers:
            assert 1e-3 < (found[0] - logits).norm() / logits.norm() < 0.2
        else:
            torch.testing.assert_close(found[0], logits, atol=1e-4, rtol=0)
            assert int(found[1].argmax()) == tokens[1]


def test_group_of_another_size(folders: dict[str, Path]) -> None:
    with pytest.raises(SettingsError, match="tp=2, but the group has 1 ranks"):
        load_model(folders["llama"], plan=ParallelPlan(tp=2))
