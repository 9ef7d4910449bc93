"""The choices of `katydid bench`, apart from what implements them so that the command line loads quickly."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Arrivals", "Workload"]


class Workload(StrEnum):
    """What the prompts have in common."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    MULTI_TURN = "multi-turn"
    REPLAY = "replay"


class Arrivals(StrEnum):
    """How requests are spread in time."""

    POISSON = "poisson"
    CONSTANT = "constant"
