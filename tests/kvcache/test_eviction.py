"""The LRU policy against a list in order of use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from katydid_kvcache.eviction import Lru

OPERATIONS = st.lists(st.tuples(st.sampled_from(["insert", "touch", "discard", "pop"]), st.integers(0, 8)))


@given(OPERATIONS)
def test_order_is_that_of_last_use(operations: list[tuple[str, int]]) -> None:
    lru: Lru[int] = Lru()
    model: list[int] = []
    for operation, item in operations:
        if operation == "pop":
            assert lru.pop() == (model.pop(0) if model else None)
            continue
        known = item in model
        if known:
            model.remove(item)
        if operation == "insert" or (operation == "touch" and known):
            model.append(item)
        getattr(lru, operation)(item)
        assert list(lru) == model
        assert len(lru) == len(model)
        assert (item in lru) == (item in model)
