"""Long chunks in two parts: where a plan has none, a rank holds no memory for them and refuses to be told of them. Few
rows to all ranks: which plans have memory for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from katydid_engine.models.rank_context import HALVED_FROM
from katydid_engine.parallel import ParallelPlan
from katydid_engine.peer_rooms import copies_of, expert_peers_of
from katydid_engine.rank_groups import RankGroups
from katydid_engine.settings import EngineSettings
from katydid_engine.worker_config import WorkerConfig
from katydid_runtime.errors import SettingsError

from tests.engine.test_worker_group import CONFIG

TINY = Path(__file__).parents[2] / "models" / "hy3-tiny"


def config(plan: str, tokens: int, parts: int = 2) -> WorkerConfig:
    parsed = ParallelPlan.parse(plan)
    return replace(CONFIG, folder=str(TINY), plan=parsed, micro_batches=parts, max_batch_tokens=tokens)


def test_rows_that_go_to_their_experts_have_no_memory_for_parts() -> None:
    """Eight ranks are more than a row's four experts; of two all have some."""
    groups, gpu = RankGroups(), torch.device("cuda")
    assert copies_of(config("tp8,sp,ep8,fp8", HALVED_FROM), groups, gpu) is None
    with pytest.raises(AssertionError):  # it would ask for the group of GPUs
        copies_of(config("tp2,sp,ep2,fp8", HALVED_FROM), groups, gpu)


@pytest.mark.parametrize("plan", ["tp2,sp", "tp2,sp,ep2"])
def test_parts_that_no_step_is_cut_into_are_refused(plan: str) -> None:
    groups, cpu = RankGroups(), torch.device("cpu")
    with pytest.raises(SettingsError, match=f"micro_batches=2: with plan={plan} .* max_batch_tokens is 8191") as caught:
        copies_of(config(plan, HALVED_FROM - 1), groups, cpu)
    assert caught.value.field == "micro_batches"
    for allowed in (config(plan, HALVED_FROM), config(plan, 512, parts=1), config("tp8,sp,ep8", 512)):
        assert copies_of(allowed, groups, cpu) is None


def test_the_setting_says_from_how_many_tokens() -> None:
    assert f"{HALVED_FROM} tokens" in str(EngineSettings.model_fields["micro_batches"].description)


@pytest.mark.parametrize(
    ("plan", "dtype", "meet"),
    [
        ("dp2,ep2", "float32", "file:///tmp/all"),
        ("dp2,ep2", "bfloat16", "tcp://node0:29500"),  # ranks on several hosts, perhaps
        ("dp2,ep2+2", "bfloat16", "file:///tmp/all"),
        ("tp2,dp2,sp,ep4", "bfloat16", "file:///tmp/all"),
        ("tp2,ep2", "bfloat16", "file:///tmp/all"),
        ("dp2", "bfloat16", "file:///tmp/all"),
    ],
)
def test_plans_whose_rows_to_experts_go_by_messages_alone(plan: str, dtype: str, meet: str) -> None:
    asked = replace(config(plan, 512, parts=1), dtype=dtype, rendezvous=meet)
    assert expert_peers_of(asked, RankGroups(), torch.device("cuda")) is None


def test_between_gpus_of_one_host_few_rows_go_to_all() -> None:
    asked = replace(config("dp2,ep2", 512, parts=1), dtype="bfloat16", rendezvous="file:///tmp/all")
    assert expert_peers_of(asked, RankGroups(), torch.device("cpu")) is None
    with pytest.raises(AssertionError):  # it would ask for the group of GPUs
        expert_peers_of(asked, RankGroups(), torch.device("cuda"))
