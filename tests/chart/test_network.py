"""What may speak to what: the connections that the services' own settings make, and no other."""

from __future__ import annotations

import itertools
import re

import pytest

from tests.chart.network import Party, allowed
from tests.chart.rendered import CONFIGURATIONS, Pod, kinds, pods

pytestmark = pytest.mark.chart

STRANGER = Party({"app": "stranger"}, "default")
NEIGHBOUR = Party({"app": "neighbour"})
ELSEWHERE = Party({"app": "ingress-or-prometheus"}, "elsewhere")


def party(pod: Pod) -> Party:
    return Party(pod.labels)


def parties(configuration: str) -> dict[str, Pod]:
    return {pod.name: pod for pod in pods(configuration)}


def needed(configuration: str) -> set[tuple[str, str, int]]:
    """Caller, called and port of every address in the environments."""
    there = parties(configuration)
    found = set()
    for pod in there.values():
        for name, value in pod.environment.items():
            if not name.startswith("KATYDID_") and name != "GATEWAY_URL":
                continue
            # "-0" of a pod or of a group's leader, "-0-1" of one of its workers, or nothing.
            for host, index, port in re.findall(r"(demo-[a-z-]+?)((?:-\d+)*)\.[a-z.-]+\.?svc:(\d+)", value):
                member = f"{host}-worker" if index.count("-") == 2 else f"{host}-leader"
                called = [other for other in (host, member) if other in there]
                if "PEER_ADDRESS" not in name:
                    found |= {(pod.name, other, int(port)) for other in called}
    return found


def lanes(configuration: str) -> set[tuple[str, str, int]]:
    """Whoever reads blocks by gRPC may read them over lanes."""
    lane = 8203
    there = parties(configuration)
    return {
        (caller, called, lane)
        for caller, called, _ in needed(configuration)
        if there[called].component.startswith("kvcache") and there[caller].component != "gateway"
    }


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_services_reach_what_they_call_and_nothing_else(configuration: str) -> None:
    policies = kinds(configuration, "NetworkPolicy")
    there = parties(configuration)
    ports = sorted({8203, *(port for pod in there.values() for port in pod.ports.values())})
    possible = {
        (caller, called, port)
        for (caller, called), port in itertools.product(itertools.product(there, repeat=2), ports)
        if allowed(policies, party(there[caller]), party(there[called]), port)
    }
    wanted = needed(configuration) | lanes(configuration)
    assert wanted <= possible
    # Ranks of a group speak as they like.
    group = {name for name in there if name.endswith(("-leader", "-worker"))}
    surplus = {
        (caller, called, port)
        for caller, called, port in possible - wanted
        if not (caller in group and called in group)
    }
    assert surplus == set()


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_others_reach_the_gateway_alone(configuration: str) -> None:
    policies = kinds(configuration, "NetworkPolicy")
    named = "gatewayFrom" in CONFIGURATIONS[configuration][1].get("networkPolicy", {})
    for pod in pods(configuration):
        for name, port in pod.ports.items():
            entrance = pod.component == "gateway" and name in ("http", "grpc")
            assert not allowed(policies, STRANGER, party(pod), port)
            assert allowed(policies, NEIGHBOUR, party(pod), port) == (entrance and not named)
            if named:
                assert allowed(policies, ELSEWHERE, party(pod), port) == (entrance or name == "metrics")


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_nothing_gets_out(configuration: str) -> None:
    policies = kinds(configuration, "NetworkPolicy")
    dns = Party({"k8s-app": "kube-dns"}, "kube-system")
    named = "otlpTo" in CONFIGURATIONS[configuration][1].get("networkPolicy", {})
    for pod in pods(configuration):
        assert allowed(policies, party(pod), dns, 53)
        assert not allowed(policies, party(pod), STRANGER, 443)
        assert not allowed(policies, party(pod), NEIGHBOUR, 80)
        assert allowed(policies, party(pod), ELSEWHERE, 4317) == named
