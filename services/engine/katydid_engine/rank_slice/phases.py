"""Where a step's time goes: the kernels of a timeline, told apart by their names and by what came before them.

The same GEMM multiplies in five places of a layer, and a captured graph tells no more of a kernel than its name. But
the order is always the same, so the last kernel that stands in one place alone says where the others are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PHASES", "KernelSpan", "PhaseTimes", "phase_times"]

PHASES = (
    "attention",
    "block selection",
    "experts",
    "router",
    "norms",
    "qkv",
    "qkv post",
    "output projection",
    "shared expert",
    "dense layers",
    "exchange",
    "lm head",
    "sampling",
    "other",
    "gaps",
)

# What a kernel is, whatever came before it; the first that is found in its name.
_PLACES = (
    ("qkv post", r"qkv_post"),
    ("block selection", r"pool_keys|pool_queries|^score_kernel|^select_kernel|stem_"),
    ("attention", r"^(decode|prefill|sparse)_\w+_kernel|_plan_kernel|plan_decode"),
    ("router", r"normed_router|^few_tokens|^many_tokens"),
    ("experts", r"^experts_|^_place_(few|many)|^_claim|^_combine|^grouped_w4a8"),
    ("sampling", r"^choose_kernel|^scan_kernel|_verify_draft|_advance|logprob"),
    ("norms", r"rms_norm"),
    # Rows on their way to other ranks.
    ("exchange", r"two_shot|lamport|^(all_gather|reduce_scatter)_kernel|^_(route|scatter|split|join|gather)_kernel"),
)
_PRODUCT = re.compile(r"gemm|w4a8|swiglu|quantize|linear_few|nvjet|cutlass|xmma|splitK|cublas", re.IGNORECASE)
# What products are that come after a kernel of such a place.
_AFTER = {
    "attention": "output projection",
    "block selection": "output projection",
    "router": "shared expert",
    "experts": "experts",
    "sampling": "sampling",
    "exchange": "shared expert",
}
# Sums of all ranks' rows with the norm behind them.
_NORMING = re.compile(r"two_shot|lamport")


@dataclass(frozen=True, slots=True)
class KernelSpan:
    """One kernel or copy on the device; microseconds."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds by phase, which add up to ``span``, and launches by phase; ``others`` are the names in "other", the
    longest first."""

    seconds: dict[str, float]
    launches: dict[str, int]
    others: tuple[str, ...]

    @property
    def span(self) -> float:
        return sum(self.seconds.values())


def phase_times(spans: Sequence[KernelSpan]) -> PhaseTimes:
    """Of a timeline in order of starts. Kernels that overlap count from the end of the one before; where nothing runs
    there is a gap."""
    places = [_place(span.name) for span in spans]
    seconds = dict.fromkeys(PHASES, 0.0)
    launches = dict.fromkeys(PHASES, 0)
    others: dict[str, float] = {}
    ahead = _next_places(places)
    last, before_norm, end = "", "", spans[0].start if spans else 0.0
    for index, span in enumerate(spans):
        place = places[index]
        if place is None and _PRODUCT.search(span.name):
            phase = _product(last, before_norm, ahead[index])
        else:
            phase = place or "other"
        if place is not None:
            stands_for = "norms" if _NORMING.search(span.name) else place
            before_norm = last if stands_for == "norms" and last != "norms" else before_norm
            last = stands_for
        seconds["gaps"] += max(0.0, span.start - end) * 1e-6
        own = max(0.0, span.end - max(span.start, end)) * 1e-6
        seconds[phase] += own
        launches[phase] += 1
        if phase == "other":
            others[span.name] = others.get(span.name, 0.0) + own
        end = max(end, span.end)
    return PhaseTimes(seconds, launches, tuple(sorted(others, key=lambda name: -others[name])))


def _place(name: str) -> str | None:
    return next((place for place, pattern in _PLACES if re.search(pattern, name)), None)


def _next_places(places: Sequence[str | None]) -> list[str]:
    """Of each kernel the place of the next one behind it that has one."""
    ahead, found = "", [""] * len(places)
    for index in range(len(places) - 1, -1, -1):
        found[index] = ahead
        ahead = places[index] or ahead
    return found


def _product(last: str, before_norm: str, ahead: str) -> str:
    if ahead == "qkv post":
        return "qkv"
    if last != "norms":
        return _AFTER.get(last, "other")
    # Behind the norm after attention stands a dense block; behind the last norm of all the head.
    return "dense layers" if before_norm in ("attention", "block selection") else "lm head"
