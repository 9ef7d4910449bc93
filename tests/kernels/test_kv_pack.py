from __future__ import annotations

import pytest
import torch
from katydid_kernels import kv_pack, kv_unpack, object_bytes
from torch import Tensor

LAYERS, HEADS, DIM, PAGES, SLOTS = 3, 4, 16, 6, 5
Pages = tuple[list[Tensor], list[Tensor]]


def make_pages(dtype: torch.dtype, heads: int = HEADS) -> Pages:
    torch.manual_seed(0)

    def layer(*shape: int) -> Tensor:
        return torch.randint(0, 255, (PAGES, heads, *shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)

    return [layer(64, DIM) for _ in range(LAYERS)], [layer(DIM, 64) for _ in range(LAYERS)]


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def new_objects(dtype: torch.dtype) -> Tensor:
    size = object_bytes(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype=dtype)
    assert size == LAYERS * HEADS * 2 * 64 * DIM * dtype.itemsize
    return torch.full((SLOTS, size), 0xEE, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_layout_and_round_trip(dtype: torch.dtype) -> None:
    k_pages, v_pages = make_pages(dtype)
    objects = new_objects(dtype)
    page_ids, slot_ids = torch.tensor([4, 0, 5]), torch.tensor([1, 3, 0])
    kv_pack(k_pages, v_pages, page_ids, objects, slot_ids, object_kv_heads=HEADS)
    run = 64 * DIM * dtype.itemsize
    for page, slot in zip(page_ids.tolist(), slot_ids.tolist(), strict=True):
        for layer in range(LAYERS):
            for head in range(HEADS):
                begin = (layer * HEADS + head) * 2 * run
                found = objects[slot, begin : begin + 2 * run]
                assert torch.equal(found[:run], k_pages[layer][page, head].contiguous().view(torch.uint8).flatten())
                assert torch.equal(found[run:], v_pages[layer][page, head].contiguous().view(torch.uint8).flatten())
    assert (objects[[2, 4]] == 0xEE).all()

    new_k, new_v = ([torch.zeros_like(page) for page in pages] for pages in (k_pages, v_pages))
    kv_unpack(new_k, new_v, torch.tensor([2, 1, 3]), objects, slot_ids, object_kv_heads=HEADS)
    for old, new in zip(k_pages + v_pages, new_k + new_v, strict=True):
        assert same_bytes(new[[2, 1, 3]], old[page_ids])
        assert (new[[0, 4, 5]].float() == 0).all()


def test_two_ranks_fill_one_object() -> None:
    """Each rank holds half of the heads; one rank reading alone gets its own back."""
    whole = make_pages(torch.bfloat16)
    expected, found = new_objects(torch.bfloat16), new_objects(torch.bfloat16)
    ids = torch.tensor([2]), torch.tensor([4])
    kv_pack(*whole, ids[0], expected, ids[1], object_kv_heads=HEADS)
    for first in (0, 2):
        part: Pages = tuple([page[:, first : first + 2].contiguous() for page in pages] for pages in whole)  # type: ignore[assignment]
        kv_pack(*part, ids[0], found, ids[1], object_kv_heads=HEADS, first_head=first)
    assert torch.equal(found, expected)
    back = make_pages(torch.bfloat16, heads=2)
    kv_unpack(*back, ids[0], found, ids[1], object_kv_heads=HEADS, first_head=2)
    assert same_bytes(back[0][1][2], whole[0][1][2, 2:])


def test_layer_by_layer() -> None:
    k_pages, v_pages = make_pages(torch.float32)
    expected, found = new_objects(torch.float32), new_objects(torch.float32)
    ids = torch.tensor([0, 1]), torch.tensor([0, 1])
    kv_pack(k_pages, v_pages, ids[0], expected, ids[1], object_kv_heads=HEADS)
    for layer in range(LAYERS):
        one = slice(layer, layer + 1)
        kv_pack(k_pages[one], v_pages[one], ids[0], found, ids[1], object_kv_heads=HEADS, first_layer=layer)
    assert torch.equal(found, expected)


def test_no_pages() -> None:
    objects = new_objects(torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    kv_pack(*make_pages(torch.float32), none, objects, none, object_kv_heads=HEADS)
    kv_unpack(*make_pages(torch.float32), none, objects, none, object_kv_heads=HEADS)
    assert (objects == 0xEE).all()


def test_objects_of_another_layout() -> None:
    objects = torch.zeros(1, 1000, dtype=torch.uint8)
    with pytest.raises(ValueError, match="rows of 1000 bytes, expected a multiple of 32768"):
        kv_pack(*make_pages(torch.float32), torch.tensor([0]), objects, torch.tensor([0]), object_kv_heads=HEADS)
