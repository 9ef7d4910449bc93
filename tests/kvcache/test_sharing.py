"""Under which names blocks are kept: nobody finds what the sharing policy does not give him."""

from __future__ import annotations

import itertools

from katydid_cache.asking import Asker
from katydid_kvcache.policy.sharing import SHARINGS, stored_names

HASHES = [b"h" * 32, b"i" * 32, b""]
ASKERS = [Asker(), Asker(b"a" * 16), Asker(b"b" * 16), Asker(b"a" * 16, b"1" * 16), Asker(b"a" * 16, b"2" * 16)]
ASKERS.append(Asker(b"", b"a" * 16))  # a session of nobody is not the tenant of the same id
SHARED = {
    "public_prefix": lambda one, other: True,
    "tenant": lambda one, other: one.tenant == other.tenant,
    "none": lambda one, other: one == other,
}


def test_names_are_shared_as_the_policy_says() -> None:
    for sharing in SHARINGS:
        for one, other in itertools.product(ASKERS, ASKERS):
            same = list(stored_names(sharing, one, HASHES))[:2] == list(stored_names(sharing, other, HASHES))[:2]
            assert same == SHARED[sharing](one, other), (sharing, one, other)


def test_names_are_hashes_and_a_missing_parent_stays_missing() -> None:
    for sharing in SHARINGS:
        names = stored_names(sharing, ASKERS[1], HASHES)
        assert [len(name) for name in names] == [32, 32, 0]
        assert names[0] != names[1]
