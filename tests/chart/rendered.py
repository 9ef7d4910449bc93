"""What the tests ask of rendered charts: configurations that together turn everything on, pods, and lookups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from tools.chart.render import PRESETS, Manifest, render

__all__ = ["CONFIGURATIONS", "Pod", "find", "kinds", "manifests", "pods"]

_SOMEBODY = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}}}]
_WATCHED = {"monitoring": {"enabled": True, "rules": {"enabled": True}, "dashboards": {"enabled": True}}}
_IN = {
    "ingress": {"enabled": True, "host": "llm.test", "grpcHost": "grpc.llm.test", "tlsSecret": "public"},
    "gatewayApi": {
        "enabled": True,
        "parentRefs": [{"name": "public"}],
        "hostnames": ["llm.test"],
        "grpcHostnames": ["grpc.llm.test"],
    },
    "networkPolicy": {
        "gatewayFrom": _SOMEBODY,
        "metricsFrom": _SOMEBODY,
        "otlpTo": _SOMEBODY,
        "sharedStoreTo": _SOMEBODY,
    },
}
_SECRETS = {
    "gateway": {"apiKeysSecret": "keys", "cacheSaltSecret": "salt"},
    "tests": {"apiKeySecret": "a-key"},
    "kvcache": {"tokensSecret": "tokens", "sharedStoreSecret": "store", "policy": {"tenants": {}}},
}
_POOL = {"pool": {"enabled": True}}

CONFIGURATIONS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "defaults": (None, {}),
    **{preset: (preset, {}) for preset in PRESETS},
    "everything": (
        None,
        {
            **_WATCHED,
            **_IN,
            "tls": {"enabled": True},
            "model": {"existingClaim": "models", "path": "/models/hy3"},
            "gateway": _SECRETS["gateway"] | {"autoscaling": {"kind": "hpa"}},
            "tests": _SECRETS["tests"],
            "kvcache": _SECRETS["kvcache"] | _POOL,
            "engine": {
                "pools": {
                    "main": {"autoscaling": {"kind": "keda", "minReplicas": 1, "maxReplicas": 3}},
                    "wide": {
                        "role": "decode",
                        "gpus": 8,
                        "nodes": 4,
                        "settings": {"plan": "dp32,ep32"},
                        "podLabels": {"team": "a"},
                        "autoscaling": {"kind": "hpa", "minReplicas": 1, "maxReplicas": 2},
                    },
                }
            },
        },
    ),
    "existing secrets": (
        None,
        {
            "tls": {
                "enabled": True,
                "certManager": {"enabled": False},
                "existingSecrets": {"gateway": "g", "engine": "e", "kvcache": "k"},
            },
            "gateway": {"autoscaling": {"kind": "keda"}, "image": {"digest": f"sha256:{'0' * 64}"}},
        },
    ),
    "cpu demo with TLS": (
        "cpu-demo",
        {"tls": {"enabled": True, "existingSecrets": {"gateway": "g", "engine": "e", "kvcache": "k"}}},
    ),
    "neighbours": ("one-gpu", {"kvcache": {"node": {"peers": True}, "tokensSecret": "tokens"}}),
    "pool alone": (
        "cpu-demo",
        {
            "kvcache": {
                "node": {"enabled": False},
                "pool": {"enabled": True, "replicas": 1, "storage": {"size": "2Gi"}},
            }
        },
    ),
    "no cache": ("cpu-demo", {"kvcache": {"node": {"enabled": False}}}),
    "image of the model": (None, {"model": {"image": "models/hy3:1", "path": "/models"}}),
}


@cache
def manifests(configuration: str) -> tuple[Manifest, ...]:
    preset, values = CONFIGURATIONS[configuration]
    return tuple(render(preset, values))


def kinds(configuration: str, *wanted: str) -> list[Manifest]:
    return [manifest for manifest in manifests(configuration) if manifest["kind"] in wanted]


def find(configuration: str, kind: str, name: str) -> Manifest:
    (found,) = [each for each in kinds(configuration, kind) if each["metadata"]["name"] == name]
    return found


@dataclass(frozen=True)
class Pod:
    """A pod that the chart makes, by whatever workload."""

    name: str
    labels: dict[str, str]
    spec: dict[str, Any]
    component: str

    @property
    def container(self) -> dict[str, Any]:
        (only,) = self.spec["containers"]
        return dict(only)

    @property
    def environment(self) -> dict[str, str]:
        """What its container is told; secrets and fields as words that could be theirs."""
        samples = {"status.podIP": "10.0.0.7", "metadata.name": f"{self.name}-0"}
        found: dict[str, str] = {}
        for variable in self.container.get("env", []):
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                found[variable["name"]] = samples.get(source["fieldRef"]["fieldPath"], "1")
            elif "secretKeyRef" in source:
                found[variable["name"]] = "secret"
            else:
                text = variable["value"]
                for name, value in found.items():
                    text = text.replace(f"$({name})", value)
                found[variable["name"]] = text
        return found

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}


def pods(configuration: str) -> Iterator[Pod]:
    for manifest in manifests(configuration):
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "Pod":
            templates = [("", manifest)]
        elif manifest["kind"] == "LeaderWorkerSet":
            group = manifest["spec"]["leaderWorkerTemplate"]
            templates = [("-leader", group["leaderTemplate"]), ("-worker", group["workerTemplate"])]
        else:
            template = manifest["spec"].get("template") if isinstance(manifest.get("spec"), dict) else None
            templates = [("", template)] if template else []
        for suffix, template in templates:
            labels = template["metadata"]["labels"]
            yield Pod(name + suffix, labels, template["spec"], labels["app.kubernetes.io/component"])
