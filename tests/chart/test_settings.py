"""Every pod's environment is one that its service starts with."""

from __future__ import annotations

import os

import pytest

from tests.chart.rendered import CONFIGURATIONS, Pod, pods
from tools.chart.values_schema import SERVICES

pytestmark = pytest.mark.chart

ALL = [
    (configuration, pod) for configuration in CONFIGURATIONS for pod in pods(configuration) if pod.component != "test"
]


@pytest.mark.parametrize(("configuration", "pod"), ALL, ids=[f"{name}/{pod.name}" for name, pod in ALL])
def test_a_service_starts_with_its_environment(configuration: str, pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    service = SERVICES[pod.component.partition("-")[0]]
    given = pod.environment
    for name in [name for name in os.environ if name.startswith("KATYDID_")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = service.load()
    for name in type(settings).model_fields:
        assert (name in settings.model_fields_set) == (service.variable(name) in given), name


def test_large_numbers_arrive_as_they_are() -> None:
    (node,) = [pod for pod in pods("hy3-tp8") if pod.component == "kvcache-node"]
    assert node.environment["KATYDID_KVCACHE_DISK_BYTES"] == "4398046511104"


def test_a_pool_has_its_own_settings_over_those_of_all() -> None:
    roles = {pod.name: pod.environment for pod in pods("prefill-decode") if pod.component == "engine"}
    assert roles["demo-engine-prefill"]["KATYDID_ENGINE_ROLE"] == "prefill"
    assert roles["demo-engine-decode"]["KATYDID_ENGINE_ROLE"] == "decode"
    assert roles["demo-engine-prefill"]["KATYDID_ENGINE_PLAN"] == "tp8,sp,ep8"
    assert roles["demo-engine-decode"]["KATYDID_ENGINE_PLAN"] == "dp8,ep8+32"
    for environment in roles.values():
        assert environment["KATYDID_ENGINE_QUANTIZATION"] == "fp8"


def test_where_engines_look_for_blocks() -> None:
    def told(configuration: str) -> tuple[str | None, str | None]:
        engine = next(pod for pod in pods(configuration) if pod.component == "engine").environment
        return engine.get("KATYDID_ENGINE_KVCACHE_ADDRESS"), engine.get("KATYDID_ENGINE_KVCACHE_INSTANCES")

    pool = ",".join(f"demo-kvcache-pool-{index}.demo-kvcache-pool.serving.svc:8200" for index in range(3))
    socket = "unix:/run/katydid/kvcache.sock"
    assert told("cpu-demo") == (socket, None)
    assert told("neighbours") == (socket, "dns:demo-kvcache-node.serving.svc:8200")
    assert told("prefill-decode") == (socket, pool)
    assert told("pool alone") == ("demo-kvcache-pool-0.demo-kvcache-pool.serving.svc:8200", None)
    assert told("no cache") == (None, None)
