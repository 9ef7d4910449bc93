"""Every configuration of the chart renders to what a cluster takes, and the check that says so can say no."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.chart.rendered import CONFIGURATIONS, find, kinds, manifests
from tools.chart.render import PRESETS, lint
from tools.chart.validate import complaints

pytestmark = pytest.mark.chart


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_helm_finds_nothing_to_criticise(preset: str | None) -> None:
    assert "0 chart(s) failed" in lint(preset)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_cluster_takes_it(configuration: str) -> None:
    assert complaints(manifests(configuration)) == []


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_no_two_objects_have_one_name(configuration: str) -> None:
    names = [(each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in manifests(configuration)]
    assert len(set(names)) == len(names)
    assert all(each["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo" for each in manifests(configuration))


def wrong(kind: str, *path: str | int, value: Any) -> list[str]:
    """The complaints about "everything" with one thing changed."""
    name = next(each["metadata"]["name"] for each in kinds("everything", kind))
    changed = copy.deepcopy(find("everything", kind, name))
    place: Any = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return complaints([changed])


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "replica"), 2),
        ("Deployment", ("spec", "template", "spec", "containers", 0, "startupprobe"), {}),
        ("NetworkPolicy", ("spec", "policyTypes"), "Ingress"),
        ("LeaderWorkerSet", ("spec", "size"), 4),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "container"), []),
        ("ScaledObject", ("spec", "minReplica"), 1),
        ("ScaledObject", ("spec", "triggers", 0, "metadatas"), {}),
        ("ScaledObject", ("spec", "maxReplicaCount"), "many"),
        ("HTTPRoute", ("spec", "rules", 0, "timeout"), {}),
        ("Certificate", ("spec", "dnsName"), []),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "ports"), "metrics"),
        ("ServiceMonitor", ("spec", "endpoints"), {}),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "expression"), "1"),
    ],
)
def test_what_no_cluster_takes_is_found(kind: str, path: tuple[str | int, ...], value: Any) -> None:
    assert wrong(kind, *path, value=value)


def test_a_pool_is_a_set_or_a_set_of_groups() -> None:
    assert [each["metadata"]["name"] for each in kinds("everything", "LeaderWorkerSet")] == ["demo-engine-wide"]
    assert find("everything", "LeaderWorkerSet", "demo-engine-wide")["spec"]["leaderWorkerTemplate"]["size"] == 4
    assert {each["metadata"]["name"] for each in kinds("prefill-decode", "StatefulSet")} == {
        *("demo-engine-prefill", "demo-engine-decode", "demo-kvcache-pool")
    }


def test_rules_and_dashboards_are_the_files() -> None:
    rules = [group["name"] for each in kinds("everything", "PrometheusRule") for group in each["spec"]["groups"]]
    assert rules
    dashboards = [
        each for each in kinds("everything", "ConfigMap") if "grafana_dashboard" in each["metadata"]["labels"]
    ]
    assert dashboards
