"""Which chunks become graphs before a rank is ready."""

from __future__ import annotations

from katydid_engine.chunk_steps import ALONE_CHUNKS, CHUNKS
from katydid_engine.warm_up import WarmUp


def sizes(**options: bool) -> list[int]:
    warm_up = WarmUp(batch_tokens=4096, sequences=1, tokens=9000, depths=(0,), **{"capture": True, **options})
    return [*warm_up.alone_sizes]


def test_larger_chunks_alone_are_graphs_where_they_are_wanted_and_a_step_takes_as_many() -> None:
    assert sizes() == sizes(alone=True, capture=False) == sizes(alone=True, chunks=False) == []
    assert sizes(alone=True) == [3072, 4096]
    assert max(CHUNKS) < min(ALONE_CHUNKS), "of what fits both, the one with decodes is smaller"
