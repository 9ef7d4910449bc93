"""Block layout arithmetic against a numpy array that really has the layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_cache.layout import BlockLayout, Span, cut
from katydid_runtime.errors import InvalidRequestError


@st.composite
def cases(draw: st.DrawFn) -> tuple[BlockLayout, Span, Span]:
    layout = BlockLayout(
        layers=draw(st.integers(1, 5)),
        kv_heads=draw(st.integers(1, 6)),
        head_dim=draw(st.integers(1, 3)),
        dtype="float16",
    )
    spans = []
    for total in (layout.kv_heads, layout.layers):
        first = draw(st.integers(0, total - 1))
        spans.append(Span(first, draw(st.integers(0, total - first))))
    return layout, spans[0], spans[1]


def whole_object(layout: BlockLayout) -> np.ndarray:
    """An object whose every element is its own index: [layer][head][K, V][64 x head_dim]."""
    shape = (layout.layers, layout.kv_heads, 2, 64 * layout.head_dim)
    return np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)


@given(cases())
def test_runs_hold_the_heads_and_layers_asked_for(case: tuple[BlockLayout, Span, Span]) -> None:
    layout, heads, layers = case
    block = whole_object(layout)
    head_stop = heads.first + heads.count if heads.count else layout.kv_heads
    layer_stop = layers.first + layers.count if layers.count else layout.layers
    expected = block[layers.first : layer_stop, heads.first : head_stop].tobytes()
    raw = block.tobytes()
    assert len(raw) == layout.block_bytes
    assert b"".join(raw[run.start : run.stop] for run in layout.runs(heads, layers)) == expected
    assert layout.payload_bytes(heads, layers) == len(expected)


@given(cases(), st.data())
def test_cut_finds_any_part_of_a_payload(case: tuple[BlockLayout, Span, Span], data: st.DataObject) -> None:
    layout, heads, layers = case
    raw = whole_object(layout).tobytes()
    runs = layout.runs(heads, layers)
    payload = b"".join(raw[run.start : run.stop] for run in runs)
    offset = data.draw(st.integers(0, len(payload) - 1))
    size = data.draw(st.integers(0, len(payload) - offset))
    parts = cut(runs, offset, size)
    assert b"".join(raw[part.start : part.stop] for part in parts) == payload[offset : offset + size]


@pytest.mark.parametrize("span", [Span(4, 0), Span(0, 5), Span(3, 2), Span(-1, 1), Span(0, -1)])
def test_heads_that_do_not_exist(span: Span) -> None:
    layout = BlockLayout(layers=1, kv_heads=4, head_dim=8, dtype="bfloat16")
    with pytest.raises(InvalidRequestError) as caught:
        layout.runs(heads=span)
    assert caught.value.field == "heads"
    assert caught.value.allowed == "within 0..4"


def test_sizes_of_real_models() -> None:
    hy3 = BlockLayout(layers=80, kv_heads=8, head_dim=128, dtype="float8_e4m3fn")
    assert (hy3.head_bytes, hy3.layer_bytes, hy3.block_bytes) == (16 << 10, 128 << 10, 10 << 20)
    smollm2 = BlockLayout(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16")
    assert smollm2.block_bytes == 1_474_560
