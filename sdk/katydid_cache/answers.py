"""Several instances' answers to parts of one chain, put together to the longest prefix that can be read. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from katydid_cache.records import LookupResult, Tier, TierRun

__all__ = ["Answer", "Prefix", "join", "missing"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What instance `name` found of `runs` (places in the chain), which it was asked for as if they were one chain."""

    name: str
    runs: Sequence[range]
    found: LookupResult

    def blocks(self, run: range) -> int:
        """How many blocks of one of `runs` it has, from the run's first on."""
        before = sum(len(other) for other in self.runs[: self.runs.index(run)])
        return max(0, min(len(run), self.found.blocks - before))

    def tiers(self, run: range) -> list[tuple[Tier, float]]:
        """Tier and expected time of each block it has of one of `runs`."""
        before = sum(len(other) for other in self.runs[: self.runs.index(run)])
        held = [(part.tier, part.eta_s) for part in self.found.runs for _ in range(part.blocks)]
        return held[before : before + self.blocks(run)]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The blocks that can be read, by tier in `runs`; `owners` names the instance to read each from."""

    runs: tuple[TierRun, ...]
    owners: tuple[str, ...]

    @property
    def blocks(self) -> int:
        return len(self.owners)


def join(runs: Sequence[range], answers: Sequence[Answer]) -> Prefix:
    """The longest prefix of the chain cut into `runs`, each from whoever has most of it, the first of equals."""
    owners: list[str] = []
    joined: list[TierRun] = []
    for run in runs:
        having = [answer for answer in answers if run in answer.runs]
        best = max(having, key=lambda answer: answer.blocks(run), default=None)
        if best is None:
            break
        for tier, eta_s in best.tiers(run):
            owners.append(best.name)
            if joined and joined[-1].tier is tier:
                joined[-1] = TierRun(tier, joined[-1].blocks + 1, max(joined[-1].eta_s, eta_s))
            else:
                joined.append(TierRun(tier, 1, eta_s))
        if best.blocks(run) < len(run):
            break
    return Prefix(tuple(joined), tuple(owners))


def missing(runs: Sequence[range], answers: Sequence[Answer]) -> list[range]:
    """The runs of which nobody has the first block."""
    held = {(run.start, run.stop) for answer in answers for run in answer.runs if answer.blocks(run)}
    return [run for run in runs if (run.start, run.stop) not in held]
