"""Manifests against what a cluster would take: Kubernetes' own schemas, and those of the custom resources."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

from tools.chart.install import node_modules
from tools.chart.render import KUBERNETES, Manifest

__all__ = ["complaints"]

_SCRIPT = Path(__file__).with_name("crds.mjs")
_CUSTOM = ("cert-manager.io/", "gateway.networking.k8s.io/", "keda.sh/", "monitoring.coreos.com/")
_GROUP = "leaderworkerset.x-k8s.io/v1"


def complaints(manifests: Sequence[Manifest]) -> list[str]:
    """A line for everything that is wrong; unknown fields are."""
    own: list[Manifest] = []
    custom: list[Manifest] = []
    found: list[str] = []
    for manifest in manifests:
        if manifest["apiVersion"].startswith(_CUSTOM):
            custom.append(manifest)
        elif manifest["apiVersion"] == _GROUP:
            found += _shape(manifest)
            own += _pods_of_group(manifest)
        else:
            own.append(manifest)
    return found + [line for manifest in own for line in _kubernetes(manifest)] + _custom(custom)


def _kubernetes(manifest: Manifest) -> Iterable[str]:
    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.InvalidSchemaError) as error:
        yield f"{manifest['kind']} {manifest['metadata']['name']}: {error}"


def _custom(manifests: Sequence[Manifest]) -> list[str]:
    if not manifests:
        return []
    node = ["node", "--no-warnings", str(_SCRIPT), str(node_modules())]
    done = subprocess.run(node, input=json.dumps(manifests), capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return list(json.loads(done.stdout))


def _closed(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


_COUNT = {"type": "integer", "minimum": 1}
_ANY: dict[str, Any] = {"type": "object"}
# No registry has the types of LeaderWorkerSet; these are the fields of its v1.
_LEADER_WORKER_SET = _closed(
    ["leaderWorkerTemplate"],
    replicas={"type": "integer", "minimum": 0},
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    rolloutStrategy=_closed(
        ["type"],
        type={"const": "RollingUpdate"},
        rollingUpdateConfiguration=_closed(
            [], partition={"type": "integer"}, maxUnavailable={}, maxSurge={"type": ["integer", "string"]}
        ),
    ),
    networkConfig=_closed(["subdomainPolicy"], subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
    leaderWorkerTemplate=_closed(
        ["workerTemplate"],
        size=_COUNT,
        leaderTemplate=_ANY,
        workerTemplate=_ANY,
        restartPolicy={"enum": ["None", "RecreateGroupOnPodRestart", "Default"]},
        subGroupPolicy=_closed([], subGroupSize=_COUNT, subGroupPolicyType={"type": "string"}),
    ),
)


def _shape(manifest: Manifest) -> Iterable[str]:
    for error in jsonschema.Draft202012Validator(_LEADER_WORKER_SET).iter_errors(manifest["spec"]):
        yield f"LeaderWorkerSet {manifest['metadata']['name']}: {error.json_path}: {error.message}"


def _pods_of_group(manifest: Manifest) -> Iterable[Manifest]:
    """Its templates as pods, which Kubernetes' schemas know."""
    for which in ("leaderTemplate", "workerTemplate"):
        if template := manifest["spec"]["leaderWorkerTemplate"].get(which):
            metadata = {"name": f"{manifest['metadata']['name']}-{which}", **template.get("metadata", {})}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
