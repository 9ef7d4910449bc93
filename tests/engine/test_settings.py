"""Settings of an engine: what is wrong is named before anything starts."""

from __future__ import annotations

import pytest
from katydid_engine.faults import FaultDelays
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
