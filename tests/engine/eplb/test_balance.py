"""Placement of experts against the published example of DeepSeek's EPLB, and against what it promises for any load."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine.eplb.balance import deal, imbalance, place_experts, replicate

# The example of the algorithm's own README: two layers of twelve experts in four groups, sixteen places on eight GPUs
# of two nodes, and what it says comes out.
LOADS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    dtype=float,
)
PUBLISHED = (
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
)


@pytest.mark.parametrize("layer", [0, 1])
def test_published_example(layer: int) -> None:
    """The same experts on every GPU; the order within a GPU means nothing."""
    places = place_experts(LOADS[layer], 16, 8, nodes=2, groups=4)
    assert np.sort(places.reshape(8, 2)).tolist() == np.sort(np.reshape(PUBLISHED[layer], (8, 2))).tolist()


loads = st.lists(st.integers(0, 1000), min_size=8, max_size=8).map(lambda values: np.array(values, dtype=float))


@given(loads, st.sampled_from([1, 2, 4, 8]))
def test_every_pack_gets_as_many(values: np.ndarray, packs: int) -> None:
    pack_of = deal(values, packs)
    assert np.bincount(pack_of, minlength=packs).tolist() == [8 // packs] * packs


@given(loads, st.integers(0, 8))
def test_copies_go_where_the_load_is(values: np.ndarray, extra: int) -> None:
    expert_of = replicate(values, 8 + extra)
    count = np.bincount(expert_of, minlength=8)
    assert count.min() >= 1
    assert count.sum() == 8 + extra
    # No copy would do more elsewhere: an expert that has several is not worse off with one less than the worst now.
    worst = (values / count).max()
    assert all(values[expert] / (count[expert] - 1) >= worst for expert in np.flatnonzero(count > 1))


@given(loads, st.sampled_from([(8, 4, 1, 1), (12, 4, 2, 4), (16, 8, 2, 8), (16, 8, 2, 1)]))
def test_every_expert_has_a_place_on_its_groups_node(values: np.ndarray, sizes: tuple[int, int, int, int]) -> None:
    copies, gpus, nodes, groups = sizes
    places = place_experts(values, copies, gpus, nodes=nodes, groups=groups)
    assert set(places) == set(range(8))
    assert len(places) == copies
    if groups % nodes == 0:
        homes = [set(part // (8 // groups)) for part in places.reshape(nodes, -1)]
        assert not set.intersection(*homes) or nodes == 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gpus", [8, 16, 32])
def test_skewed_load(gpus: int, seed: int) -> None:
    """Zipf 1.2 over Hy3's experts, 32 redundant ones."""
    values = np.random.default_rng(seed).permutation(1 / np.arange(1, 193) ** 1.2)
    assert imbalance(values, np.arange(192), gpus) > 2
    assert imbalance(values, place_experts(values, 224, gpus), gpus) <= 1.10


@pytest.mark.parametrize("sizes", [(7, 2), (8, 3), (9, 2)])
def test_sizes_that_do_not_divide(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="cannot place"):
        place_experts(np.ones(8), *sizes)
    with pytest.raises(ValueError, match="do not divide"):
        deal(np.ones(8), 3)
