"""kv_pack and kv_unpack by both ways: torch, and the kernel (in the interpreter where there is no GPU)."""

from __future__ import annotations

import importlib
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_kernels import kv_pack, kv_unpack, linear_checksum, object_bytes, published_checksum
from torch import Tensor

# The package names its ops' functions, which hide the folders of the same names from a plain import statement.
op = importlib.import_module("katydid_kernels.kv_pack.op")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

LAYERS, HEADS, DIM, PAGES, SLOTS = 3, 4, 16, 6, 5
Pages = tuple[list[Tensor], list[Tensor]]


@pytest.fixture(params=["torch", "kernel"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_reachable", lambda page, objects: request.param == "kernel")


def on_device(values: list[int]) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def make_pages(dtype: torch.dtype, heads: int = HEADS) -> Pages:
    torch.manual_seed(0)

    def layer(*shape: int) -> Tensor:
        values = torch.randint(0, 255, (PAGES, heads, *shape, dtype.itemsize), dtype=torch.uint8)
        return values.view(dtype).squeeze(-1).to(DEVICE)

    return [layer(64, DIM) for _ in range(LAYERS)], [layer(DIM, 64) for _ in range(LAYERS)]


def as_bytes(page: Tensor) -> Tensor:
    return page.contiguous().view(torch.uint8).flatten().cpu()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def finish() -> None:
    """The host reads what a kernel wrote."""
    if CUDA:
        torch.cuda.synchronize()


def new_objects(dtype: torch.dtype) -> Tensor:
    size = object_bytes(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype=dtype)
    assert size == LAYERS * HEADS * 2 * 64 * DIM * dtype.itemsize
    objects = torch.full((SLOTS, size), 0xEE, dtype=torch.uint8)
    return objects.pin_memory() if CUDA else objects


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_layout_and_round_trip(dtype: torch.dtype) -> None:
    k_pages, v_pages = make_pages(dtype)
    objects = new_objects(dtype)
    page_ids, slot_ids = on_device([4, 0, 5]), on_device([1, 3, 0])
    kv_pack(k_pages, v_pages, page_ids, objects, slot_ids, object_kv_heads=HEADS)
    run = 64 * DIM * dtype.itemsize
    finish()
    for page, slot in zip(page_ids.tolist(), slot_ids.tolist(), strict=True):
        for layer in range(LAYERS):
            for head in range(HEADS):
                begin = (layer * HEADS + head) * 2 * run
                found = objects[slot, begin : begin + 2 * run]
                assert torch.equal(found[:run], as_bytes(k_pages[layer][page, head]))
                assert torch.equal(found[run:], as_bytes(v_pages[layer][page, head]))
    assert (objects[[2, 4]] == 0xEE).all()

    new_k, new_v = ([torch.zeros_like(page) for page in pages] for pages in (k_pages, v_pages))
    kv_unpack(new_k, new_v, on_device([2, 1, 3]), objects, slot_ids, object_kv_heads=HEADS)
    for old, new in zip(k_pages + v_pages, new_k + new_v, strict=True):
        assert same_bytes(new[[2, 1, 3]], old[page_ids])
        assert (new[[0, 4, 5]].float() == 0).all()


def test_two_ranks_fill_one_object() -> None:
    """Each rank holds half of the heads; one rank reading alone gets its own back."""
    whole = make_pages(torch.bfloat16)
    expected, found = new_objects(torch.bfloat16), new_objects(torch.bfloat16)
    ids = on_device([2]), on_device([4])
    kv_pack(*whole, ids[0], expected, ids[1], object_kv_heads=HEADS)
    for first in (0, 2):
        part: Pages = tuple([page[:, first : first + 2].contiguous() for page in pages] for pages in whole)  # type: ignore[assignment]
        kv_pack(*part, ids[0], found, ids[1], object_kv_heads=HEADS, first_head=first)
    finish()
    assert torch.equal(found, expected)
    back = make_pages(torch.bfloat16, heads=2)
    kv_unpack(*back, ids[0], found, ids[1], object_kv_heads=HEADS, first_head=2)
    assert same_bytes(back[0][1][2], whole[0][1][2, 2:])


def test_layer_by_layer() -> None:
    k_pages, v_pages = make_pages(torch.float32)
    expected, found = new_objects(torch.float32), new_objects(torch.float32)
    ids = on_device([0, 1]), on_device([0, 1])
    kv_pack(k_pages, v_pages, ids[0], expected, ids[1], object_kv_heads=HEADS)
    for layer in range(LAYERS):
        one = slice(layer, layer + 1)
        kv_pack(k_pages[one], v_pages[one], ids[0], found, ids[1], object_kv_heads=HEADS, first_layer=layer)
    finish()
    assert torch.equal(found, expected)


def test_no_pages() -> None:
    objects = new_objects(torch.float32)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    kv_pack(*make_pages(torch.float32), none, objects, none, object_kv_heads=HEADS)
    kv_unpack(*make_pages(torch.float32), none, objects, none, object_kv_heads=HEADS)
    assert (objects == 0xEE).all()


def test_objects_of_another_layout() -> None:
    objects = torch.zeros(1, 1000, dtype=torch.uint8)
    with pytest.raises(ValueError, match="rows of 1000 bytes, expected a multiple of 32768"):
        kv_pack(*make_pages(torch.float32), on_device([0]), objects, on_device([0]), object_kv_heads=HEADS)


def test_layers_and_heads_that_the_object_has_not() -> None:
    objects, ids = new_objects(torch.float32), (on_device([0]), on_device([0]))
    with pytest.raises(ValueError, match="hold 3 layers of 4 heads, got layers 1 to 4"):
        kv_pack(*make_pages(torch.float32), ids[0], objects, ids[1], object_kv_heads=HEADS, first_layer=1)
    with pytest.raises(ValueError, match="heads 1 to 5"):
        kv_unpack(*make_pages(torch.float32), ids[0], objects, ids[1], object_kv_heads=HEADS, first_head=1)
    with pytest.raises(ValueError, match=r"checksums must be int64 \[1\]"):
        kv_pack(
            *make_pages(torch.float32), ids[0], objects, ids[1], object_kv_heads=HEADS,
            checksums=torch.zeros(2, dtype=torch.int64),
        )  # fmt: skip


def test_checksums_of_parts_add_up_to_the_object_and_find_a_changed_byte() -> None:
    whole = make_pages(torch.bfloat16)
    objects = new_objects(torch.bfloat16)
    pages, slots = on_device([2, 5]), on_device([4, 1])
    sums = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    for first in (0, 2):
        for layer in range(LAYERS):
            part = [[page[:, first : first + 2].contiguous() for page in side[layer : layer + 1]] for side in whole]
            kv_pack(
                *part, pages, objects, slots,
                object_kv_heads=HEADS, first_head=first, first_layer=layer, checksums=sums,
            )  # fmt: skip
    finish()
    expected = [linear_checksum(objects[slot].numpy().tobytes()) for slot in (4, 1)]
    assert [published_checksum(total) for total in sums.tolist()] == expected

    back = make_pages(torch.bfloat16)
    for changed in (False, True):
        objects[1, 12345] ^= 0x80 if changed else 0
        arrived = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        kv_unpack(*back, pages, objects, slots, object_kv_heads=HEADS, checksums=arrived)
        assert (arrived == sums).tolist() == [True, not changed]


def test_rows_further_apart_than_long() -> None:
    k_pages, v_pages = make_pages(torch.bfloat16)
    expected = new_objects(torch.bfloat16)
    storage = torch.full((SLOTS, expected.shape[1] + 64), 0xEE, dtype=torch.uint8)
    storage = storage.pin_memory() if CUDA else storage
    found = storage[:, : expected.shape[1]]
    ids = on_device([0, 1]), on_device([3, 2])
    for objects in (expected, found):
        kv_pack(k_pages, v_pages, ids[0], objects, ids[1], object_kv_heads=HEADS)
    finish()
    assert torch.equal(found, expected)
    assert (storage[:, expected.shape[1] :] == 0xEE).all()


def test_published_vectors() -> None:
    """Other implementations check themselves against these."""
    assert linear_checksum(struct.pack("<4I", 1, 0, 0, 0)) == 0xE220A8397B1DCDAF
    assert linear_checksum(struct.pack("<4I", 0, 1, 0, 0)) == 0x6E789E6AA1B965F5
    assert linear_checksum(bytes(range(256))) == scalar_checksum(bytes(range(256)))
    assert published_checksum(0) == published_checksum(-1) == 2**64 - 1
    assert published_checksum(-(2**63)) == 2**63
    with pytest.raises(ValueError, match="whole 32-bit words"):
        linear_checksum(b"abc")


def scalar_checksum(data: bytes) -> int:
    total, mask = 0, 2**64 - 1
    for i, (word,) in enumerate(struct.iter_unpack("<I", data)):
        z = (i + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        total += word * ((z ^ z >> 31) | 1)
    return total & mask


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=4, max_size=400), st.data())
def test_the_checksum_is_linear_and_sees_any_two_changed_bits(data: bytes, draw: st.DataObject) -> None:
    data = data[: len(data) // 4 * 4]
    assert linear_checksum(data) == scalar_checksum(data)
    cut = draw.draw(st.integers(0, len(data) // 4)) * 4
    parts = linear_checksum(data[:cut]) + linear_checksum(data[cut:], first_byte=cut)
    assert parts % 2**64 == linear_checksum(data)
    bits = draw.draw(st.sets(st.integers(0, 8 * len(data) - 1), min_size=1, max_size=2))
    changed = np.unpackbits(np.frombuffer(data, np.uint8))
    changed[list(bits)] ^= 1
    assert linear_checksum(np.packbits(changed).tobytes()) != linear_checksum(data)
