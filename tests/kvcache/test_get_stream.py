"""In which pieces the payloads of a group of blocks leave: layer by layer, several layers where they fit a frame."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from katydid_kvcache.get_stream import _stretches, _Terms
from katydid_kvcache.requests import FRAME_BYTES


@given(st.integers(1, 1 << 21), st.integers(1, 90), st.integers(1, 64), st.data())
def test_stretches_are_whole_layers_of_all_blocks_within_a_frame(
    step: int, layers: int, blocks: int, data: st.DataObject
) -> None:
    have = data.draw(st.integers(0, step * layers))
    nothing: Any = None
    terms = _Terms(nothing, 0, [], step * layers, step, [], 64)
    stretches = list(_stretches(have, terms, blocks))
    ends = [have, *(each.stop for each in stretches)]
    assert [each.start for each in stretches] == ends[:-1]
    assert ends[-1] == step * layers
    for each in stretches:
        touched = range(each.start // step, -(-each.stop // step))
        assert len(each) > 0
        assert each.stop % step == 0
        assert len(touched) == 1 or len(touched) * step * blocks <= FRAME_BYTES
        fits = max(1, FRAME_BYTES // (step * blocks))
        assert len(touched) == fits or each.stop == step * layers, "no more pieces than are needed"
