"""The client's enumerations are those of the protocol, and know what to do with a newer service's words."""

from __future__ import annotations

from enum import IntEnum

import pytest
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_cache import BlockMissReason, Durability, PutRefusal, PutStatus, Tier

PAIRS = [
    (Tier, pb.Tier, "TIER_"),
    (Durability, pb.Durability, "DURABILITY_"),
    (PutStatus, pb.PutStatus, "PUT_STATUS_"),
    (PutRefusal, pb.PutRefusal, "PUT_REFUSAL_"),
    (BlockMissReason, pb.BlockMissReason, "BLOCK_MISS_REASON_"),
]


@pytest.mark.parametrize(("ours", "theirs", "prefix"), PAIRS)
def test_names_and_numbers_are_the_protocols(ours: type[IntEnum], theirs: EnumTypeWrapper, prefix: str) -> None:
    named = {prefix + member.name: member.value for member in ours}
    assert {f"{prefix}UNSPECIFIED": 0} | named == dict(theirs.items())


def test_a_reason_of_a_newer_service_is_unspecified() -> None:
    assert PutRefusal(99) is PutRefusal.UNSPECIFIED
    assert BlockMissReason(99) is BlockMissReason.UNSPECIFIED
