"""Prompts computed by ranks that share every token and continued by ranks that own whole requests."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import pytest
import torch
from katydid.engine.v1 import engine_pb2 as pb
from katydid_engine.kv_cache import KvCache
from katydid_kernels import kv_pack, kv_unpack, object_bytes
from katydid_runtime.duration import to_duration

from tests.engine.engine_process import Answer, engine, service, session
from tests.engine.test_engine_kvcache import attached, cache_options
from tests.engine.test_engine_process import prompt, run
from tests.tiny_model import write_tiny_model

LENGTHS = (70, 192, 333)
FIELDS = {"max_tokens": 10, "temperature": 0.7, "seed": 11, "ignore_eos": True}


@pytest.mark.e2e
@pytest.mark.parametrize(
    "plan",
    # The second has more ranks than KV heads: two hold the same one, which counts once in a block's checksum.
    ["tp2,sp,ep2", pytest.param("tp4,sp,ep4", marks=pytest.mark.soak)],
)
def test_prefill_over_all_ranks_then_decode_on_one_each(plan: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", "hy_v3")
    address = f"unix:{tmp_path}/cache.sock"
    both = ("--kv-pages", "64", "--kvcache-address", address, "--kvcache-fetch", "always")
    with (
        service("katydid_kvcache", tmp_path, "--listen", address, *cache_options(tmp_path)),
        engine(model, tmp_path, *both, "--plan", plan, "--role", "prefill") as prefill,
        engine(model, tmp_path, *both, "--plan", "dp2,ep2", "--role", "decode") as decode,
    ):

        async def scenario() -> None:
            async with (
                session(prefill.address) as giver,
                session(decode.address) as taker,
            ):
                await attached(giver, True)
                await attached(taker, True)
                described = [await side.stub.Describe(pb.DescribeRequest()) for side in (giver, taker)]
                assert described[0].identity == described[1].identity
                assert [side.role for side in described] == [pb.ROLE_PREFILL, pb.ROLE_DECODE]
                prompts = [prompt(length, length) for length in LENGTHS]
                # Without the cache the decode engine computes everything itself.
                whole = [await taker.generate(ids, **FIELDS, bypass_cache=True) for ids in prompts]
                hold = to_duration(30.0)
                # The last one's blocks are fetched as they come; what is not there yet is not computed meanwhile.
                fields = {"max_tokens": 1, "blocks_within": to_duration(20.0), "fetch_only": True}
                fetch = taker.submit(prompts[-1], **FIELDS | fields, dp_rank=(len(prompts) - 1) % 2)
                firsts = [giver.submit(ids, **FIELDS | {"max_tokens": 1}, hold=hold) for ids in prompts]
                await asyncio.gather(*(first.done.wait() for first in firsts))
                assert [first.output for first in firsts] == [answer.output[:1] for answer in whole]
                await asyncio.wait_for(fetch.done.wait(), 20)
                fetched = LENGTHS[-1] // 64 * 64
                assert (fetch.end.reason, fetch.output, fetch.end.cached.memory) == (
                    pb.FINISH_REASON_LENGTH,
                    [],
                    fetched,
                )

                def resume(index: int) -> Answer:
                    generated = array("I", firsts[index].output).tobytes()
                    # The others wait for the last of theirs, which may be on their way to the service still.
                    within = to_duration(10.0)
                    return taker.submit(
                        prompts[index], **FIELDS, generated_ids=generated, dp_rank=index % 2, blocks_within=within
                    )

                rests = [resume(index) for index in range(len(prompts))]
                await asyncio.gather(*(rest.done.wait() for rest in rests))
                for length, first, rest, answer in zip(LENGTHS, firsts, rests, whole, strict=True):
                    assert first.output + rest.output == answer.output
                    # All but the tail of less than a block comes from the cache service's memory.
                    blocks = length // 64 * 64
                    assert rest.cached() == ((fetched, 0, 0, 0) if length == LENGTHS[-1] else (0, blocks, 0, 0))

        run(scenario())


@pytest.mark.parametrize("ranks", [2, 8])
def test_an_object_of_several_ranks_is_exactly_the_pages_of_one(ranks: int) -> None:
    """Any TP degree reads and writes its heads of the one object a block has."""
    heads, layers, head_dim = 8, 3, 16
    each = heads // ranks
    torch.manual_seed(0)

    def cache(kv_heads: int) -> KvCache:
        made = KvCache.allocate(
            num_layers=layers,
            num_pages=2,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=torch.bfloat16,
            device="cpu",
        )
        for pages in (*made.k_pages, *made.v_pages):
            pages.copy_(torch.randn(pages.shape))
        return made

    givers, taker = [cache(each) for _ in range(ranks)], cache(heads)
    size = object_bytes(num_layers=layers, num_kv_heads=heads, head_dim=head_dim, dtype=torch.bfloat16)
    objects = torch.zeros((1, size), dtype=torch.uint8)
    row, page = torch.tensor([0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    for rank, giver in enumerate(givers):
        kv_pack(giver.k_pages, giver.v_pages, page, objects, row, object_kv_heads=heads, first_head=rank * each)
    kv_unpack(taker.k_pages, taker.v_pages, row, objects, row, object_kv_heads=heads, first_head=0)
    for layer in range(layers):
        for name in ("k_pages", "v_pages"):
            made = torch.cat([getattr(giver, name)[layer][1] for giver in givers])
            assert torch.equal(getattr(taker, name)[layer][0], made)
