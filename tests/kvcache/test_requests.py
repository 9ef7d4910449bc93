"""Wrong fields are named, with what was given and what is allowed."""

from __future__ import annotations

import pytest
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_cache.records import Durability
from katydid_kvcache import requests
from katydid_runtime.duration import to_duration
from katydid_runtime.errors import InvalidRequestError

LAYOUT = {
    "version": 1,
    "layers": 2,
    "kv_heads": 3,
    "head_dim": 4,
    "block_tokens": 64,
    "dtype": "float16",
    "block_bytes": 2 * 3 * 4 * 64 * 2 * 2,
}


def test_layout_is_taken_over() -> None:
    layout = requests.layout(pb.BlockLayout(**LAYOUT))
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.dtype) == (2, 3, 4, "float16")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("layers", 0),
        ("kv_heads", 1 << 20),
        ("head_dim", 0),
        ("block_tokens", 16),
        ("dtype", "int4"),
        ("block_bytes", 17),
    ],
)
def test_wrong_layout_field_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        requests.layout(pb.BlockLayout(**(LAYOUT | {field: value})))
    assert caught.value.field == f"layout.{field}"
    assert caught.value.allowed


@pytest.mark.parametrize("size", [1, 31, 33, 32 * 4097])
def test_hash_lists_of_wrong_length(size: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        requests.hash_list(bytes(size))
    assert caught.value.field == "hashes"


def test_hash_list() -> None:
    assert requests.hash_list(b"") == []
    assert requests.hash_list(b"a" * 32 + b"b" * 32) == [b"a" * 32, b"b" * 32]


def test_durability() -> None:
    assert requests.durability(pb.DURABILITY_UNSPECIFIED) is Durability.MEMORY
    assert requests.durability(pb.DURABILITY_DISK) is Durability.DISK
    with pytest.raises(InvalidRequestError, match="durability 9"):
        requests.durability(9)


@pytest.mark.parametrize("value", [-1.0, 60.5, 1e12])
def test_seconds_out_of_range(value: float) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        requests.seconds(to_duration(value), "ttl", limit=60.0)
    assert (caught.value.field, caught.value.allowed) == ("ttl", "0 to 60 s")


def test_exact_bytes() -> None:
    assert requests.exact_bytes(b"", (0, 16), "tenant") == b""
    with pytest.raises(InvalidRequestError) as caught:
        requests.exact_bytes(b"abc", (0, 16), "tenant")
    assert caught.value.allowed == "0 bytes or 16 bytes"
