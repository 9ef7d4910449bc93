"""Settings of an engine: what is wrong is named before anything starts."""

from __future__ import annotations

import pytest
from katydid_engine.faults import FaultDelays
from katydid_engine.parallel import ParallelPlan, Role
from katydid_engine.settings import EngineSettings
from katydid_runtime.errors import SettingsError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--model"),
        (("--model", "m", "--fault-delays", "lunch:5"), "lunch"),
        (("--model", "m", "--fault-delays", "queue:soon"), "milliseconds"),
        (("--model", "m", "--fault-delays", "queue:-1"), "0 to 60000"),
        (("--model", "m", "--plan", "tp0"), "tp=0"),
        (("--model", "m", "--plan", "tp2 dp2"), "expected degrees like"),
        (("--model", "m", "--plan", "dp8,ep8", "--nodes", "3", "--rendezvous", "h:1"), "a divisor of dp"),
        (("--model", "m", "--plan", "dp8,ep8", "--nodes", "2"), "rendezvous is missing"),
        (("--model", "m", "--plan", "dp2,ep2", "--node-rank", "1"), "node_rank=1"),
        (("--model", "m", "--plan", "pp2", "--kvcache-address", "h:1"), "kvcache_address"),
        (("--model", "m", "--max-batch-tokens", "8", "--max-sequences", "9"), "max_sequences=9"),
        (("--model", "m", "--device", "tpu"), "device"),
    ],
)
def test_wrong_settings_are_named(options: tuple[str, ...], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        EngineSettings.load(options)
    assert said in str(caught.value)


def test_defaults_follow_the_device() -> None:
    cpu = EngineSettings.load(("--model", "models/tiny"))
    gpu = EngineSettings.load(("--model", "models/tiny", "--device", "cuda"))
    assert (cpu.name, cpu.batch_tokens, cpu.sequences) == ("tiny", 512, 64)
    assert (gpu.batch_tokens, gpu.sequences) == (8192, 256)
    assert EngineSettings.load(("--model", "m", "--max-batch-tokens", "16")).sequences == 16


def test_fault_delays() -> None:
    slow = EngineSettings.load(("--model", "m", "--fault-delays", "queue:50, decode:2.5"))
    assert slow.faults == FaultDelays(queue=0.05, decode=0.0025)
    assert EngineSettings.load(("--model", "m")).faults == FaultDelays()


def test_plan() -> None:
    settings = EngineSettings.load(("--model", "m", "--plan", "dp8ep8", "--role", "decode"))
    assert settings.plan == "dp8,ep8"
    assert settings.parallel_plan == ParallelPlan(dp=8, ep=8, role=Role.DECODE)
    assert settings.dp_ranks == 8
    assert EngineSettings.load(("--model", "m")).parallel_plan == ParallelPlan()


@pytest.mark.parametrize(
    ("environment", "rendezvous"),
    [
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "leader", "MASTER_PORT": "29500"}, "leader:29500"),
        (
            {
                "GROUP_WORLD_SIZE": "2",
                "GROUP_RANK": "1",
                "MASTER_ADDR": "leader",
                "MASTER_PORT": "29500",
                "TORCHELASTIC_RUN_ID": "x",
            },
            "leader:29501",
        ),
    ],
)
def test_nodes_from_a_launcher(environment: dict[str, str], rendezvous: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = EngineSettings.load(("--model", "m", "--plan", "dp16,ep16"))
    assert (settings.nodes, settings.node_rank, settings.dp_ranks) == (2, 1, 8)
    assert settings.rendezvous == rendezvous
    assert EngineSettings.load(("--model", "m", "--plan", "dp16,ep16", "--rendezvous", "a:1")).rendezvous == "a:1"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"NNODES": "2"}, "rendezvous is missing"),
        ({"NNODES": "2", "MASTER_ADDR": "leader", "MASTER_PORT": "http"}, "MASTER_PORT=http"),
    ],
)
def test_half_a_launcher_is_refused(environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=said):
        EngineSettings.load(("--model", "m", "--plan", "dp16,ep16"))
