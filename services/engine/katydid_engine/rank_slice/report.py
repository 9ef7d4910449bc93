"""A slice's figures as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from katydid_engine.rank_slice.measure import Figure
from katydid_engine.rank_slice.phases import PHASES

__all__ = ["report_lines"]

_MB = 1e6


def report_lines(figure: Figure) -> Iterator[str]:
    """The time, then where it goes and what would be sent."""
    launches = "" if figure.phases is None else f", {sum(figure.phases.launches.values())} launches"
    yield (
        f"{figure.name}: {_time(figure.seconds)}, floor {_time(figure.floor)} "
        f"({figure.floor / figure.seconds:.0%}){launches}"
    )
    if figure.phases is not None:
        yield from _phase_lines(figure)
    for name, carried in figure.traffic.items():
        yield (
            f"    not in it: {name}, {carried['calls']:.0f} calls, {carried['sent_bytes'] / _MB:,.1f} MB sent, "
            f"{_time(carried['modelled_s'])} by the link model"
        )


def _phase_lines(figure: Figure) -> Iterator[str]:
    assert figure.phases is not None
    rows: list[Sequence[str]] = [("phase", "time", "floor", "launches")]
    for phase in PHASES:
        seconds = figure.phases.seconds[phase]
        if seconds:
            bound = figure.floor_phases.get(phase)
            rows.append(
                (phase, _time(seconds), "" if bound is None else _time(bound), str(figure.phases.launches[phase]))
            )
    for row in rows:
        yield f"    {row[0]:<18}{row[1]:>12}{row[2]:>12}{row[3]:>10}"


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.3f} ms"
