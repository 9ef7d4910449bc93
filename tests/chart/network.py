"""NetworkPolicies as a cluster applies them: who may open a connection to whom.

A connection needs leave at both ends: of a policy that chooses the caller, to leave, and of one that chooses the
called, to enter. A pod that no policy chooses may do everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Party", "allowed"]


@dataclass(frozen=True)
class Party:
    """A pod, in a namespace known by its name alone."""

    labels: Mapping[str, str]
    namespace: str = "serving"


def allowed(policies: Iterable[Mapping[str, Any]], source: Party, target: Party, port: int) -> bool:
    policies = list(policies)
    return _side(policies, "Egress", source, target, port) and _side(policies, "Ingress", target, source, port)


def _side(policies: list[Mapping[str, Any]], side: str, subject: Party, other: Party, port: int) -> bool:
    applying = [
        policy
        for policy in policies
        if subject.namespace == "serving"
        and side in policy["spec"]["policyTypes"]
        and _chosen(policy["spec"]["podSelector"], subject.labels)
    ]
    if not applying:
        return True
    peers = "to" if side == "Egress" else "from"
    rules = [rule for policy in applying for rule in policy["spec"].get(side.lower()) or []]
    return any(
        (peers not in rule or any(_peer(peer, other) for peer in rule[peers]))
        and ("ports" not in rule or any(each["port"] == port and each["protocol"] == "TCP" for each in rule["ports"]))
        for rule in rules
    )


def _peer(peer: Mapping[str, Any], other: Party) -> bool:
    assert "ipBlock" not in peer
    if "namespaceSelector" in peer:
        if not _chosen(peer["namespaceSelector"], {"kubernetes.io/metadata.name": other.namespace}):
            return False
    elif other.namespace != "serving":
        return False
    return _chosen(peer.get("podSelector", {}), other.labels)


def _chosen(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()
