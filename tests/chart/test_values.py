"""Values that cannot be meant are refused, in words that say which and why."""

from __future__ import annotations

from typing import Any

import pytest

from tools.chart.render import RefusedError, render

pytestmark = pytest.mark.chart


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split("/")):
        value = {key: value}
    return dict(value)


@pytest.mark.parametrize(
    "path",
    [
        *(
            "gatway",
            "gateway/replica",
            "gateway/settings/drain_timeout",
            "engine/pools/main/gpu",
            "engine/settings/model",
        ),
        *("engine/pools/main/settings/kv_page", "engine/pools/main/autoscaling/max", "kvcache/settings/memory_mb"),
        *("kvcache/node/hostPath", "kvcache/pool/storage/class", "tls/secret", "networkPolicy/from"),
        *("monitoring/rules/label", "gateway/resources/request", "image/digest", "tests/key"),
    ],
)
def test_unknown_keys_are_refused(path: str) -> None:
    with pytest.raises(RefusedError) as refusal:
        render(None, nested(path, "1"))
    assert path.rpartition("/")[2] in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("gateway/settings/drain_timeout_s", -1),
        ("gateway/settings/drain_timeout_s", "long"),
        ("gateway/settings/tool_format", "hy4"),
        ("engine/settings/nodes", 0),
        ("engine/settings/gpu_memory_share", 1.5),
        ("engine/pools/main/role", "decoder"),
        ("engine/pools/Main", {}),
        ("engine/pools/main/replicas", 0),
        ("kvcache/settings/slab_bytes", 1),
        ("kvcache/pool/storage/size", "5 TB"),
        ("gateway/image/digest", "sha256:abc"),
        ("engine/pools/more", {"role": "decode"}),
        ("gateway/ports/http", 70000),
        ("gateway/autoscaling/kind", "vpa"),
        ("kvcache/node/socketHostPath", "run"),
    ],
)
def test_values_out_of_bounds_are_refused(path: str, value: Any) -> None:
    with pytest.raises(RefusedError) as refusal:
        render(None, nested(path, value))
    assert path.rpartition("/")[2] in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (nested("kvcache/node/resources/limits/memory", "4Gi"), "it must hold memory_bytes=4294967296"),
        (
            {"kvcache": {"pool": {"enabled": True, "storage": {"size": "20G"}}}},
            "it must hold disk_bytes=17179869184 and index_map_bytes=4294967296",
        ),
        (nested("ingress/enabled", True), "networkPolicy.gatewayFrom is empty"),
        (nested("monitoring/enabled", True), "networkPolicy.metricsFrom is empty"),
        (
            {"tls": {"enabled": True, "certManager": {"enabled": False}, "existingSecrets": {"engine": "e"}}},
            "tls.existingSecrets lacks gateway, kvcache",
        ),
        ({"tls": {"enabled": True}, "kvcache": {"node": {"peers": True}}}, "which no certificate names"),
        ({"kvcache": {"node": {"peers": True}, "pool": {"enabled": True}}}, "choose one of the two"),
        (
            {"engine": {"pools": {"main": {"autoscaling": {"kind": "hpa"}}, "more": {"gpus": 1}}}},
            "2 pools have the role both",
        ),
        (
            {"gateway": {"autoscaling": {"kind": "hpa", "minReplicas": 9}}},
            "gateway.autoscaling: minReplicas is 9, above maxReplicas=8",
        ),
        ({"engine": {"pools": {"main": None, "a": {"gpus": 1, "autoscaling": {"kind": "keda"}}}}}, "minReplicas"),
        ({"model": {"existingClaim": "a", "image": "b"}}, "model: existingClaim, image"),
        (nested("model/path", "/models/hy3"), "model.path is /models/hy3, and no volume"),
    ],
)
def test_values_that_do_not_go_together_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(RefusedError) as refusal:
        render(None, values)
    assert reason in str(refusal.value)
