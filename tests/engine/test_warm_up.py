"""Which chunks become graphs before a rank is ready."""

from __future__ import annotations

from katydid_engine.chunk_steps import ALONE_CHUNKS, CHUNKS
from katydid_engine.warm_up import WarmUp


def sizes(tokens: int = 4096, **options: bool) -> list[int]:
    warm_up = WarmUp(batch_tokens=tokens, sequences=1, tokens=90_000, depths=(0,), **{"capture": True, **options})
    return [*warm_up.alone_sizes, *warm_up.halved_sizes]


def test_larger_chunks_alone_are_graphs_where_a_step_takes_as_many() -> None:
    assert sizes(capture=False) == sizes(chunks=False) == []
    assert sizes() == [3072, 4096]
    assert max(CHUNKS) < min(ALONE_CHUNKS), "of what fits both, the one with decodes is smaller"


def test_the_largest_is_one_where_it_is_computed_in_two_parts() -> None:
    assert sizes(32_768, halved=True) == [*ALONE_CHUNKS, 32_768]
    assert sizes(8192, halved=True) == [*ALONE_CHUNKS], "one part takes less"
    assert sizes(32_768, halved=True, capture=False) == sizes(32_768, halved=True, chunks=False) == []
