"""What a quantised folder will hold, before a weight is read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine.quantization import Scheme
from katydid_engine.quantize.layout import Output, Step, cut_into_shards, header, quantization_config, steps
from katydid_engine.quantize.parts import Parts

from tests.engine.test_quantization import read

LAYER = "model.layers.10"
KEPT = [
    "model.embed_tokens.weight",
    "lm_head.weight",
    f"{LAYER}.mlp.router.gate.weight",
    f"{LAYER}.mlp.gate.weight",
    f"{LAYER}.eh_proj.weight",
]
QUANTISED = [
    f"{LAYER}.self_attn.q_proj.weight",
    f"{LAYER}.mlp.down_proj.weight",
    f"{LAYER}.mlp.shared_mlp.up_proj.weight",
    f"{LAYER}.mlp.experts.7.gate_proj.weight",
    f"{LAYER}.mtp_block.self_attn.o_proj.weight",
]


def names(work: list[Step]) -> list[str]:
    return [output.name for step in work for output in step.outputs]


@pytest.mark.parametrize("scheme", [Scheme.FP8, Scheme.W4A8])
def test_projections_are_quantised_and_nothing_else(scheme: Scheme) -> None:
    work = steps(dict.fromkeys(KEPT + QUANTISED, ("BF16", (64, 256))), scheme)
    assert {step.source for step in work if step.quantises} == set(QUANTISED)
    assert set(KEPT) <= set(names(work))


def test_what_a_matrix_becomes() -> None:
    tensors = {QUANTISED[0]: ("BF16", (64, 200))}
    (fp8,), (int4,) = (steps(tensors, scheme) for scheme in (Scheme.FP8, Scheme.W4A8))
    stem = QUANTISED[0].removesuffix(".weight")
    assert fp8.outputs == (
        Output(f"{stem}.weight", "F8_E4M3", (64, 200)),
        Output(f"{stem}.weight_scale", "F32", (1,)),
    )
    assert int4.outputs == (
        Output(f"{stem}.weight_packed", "I32", (64, 25)),
        Output(f"{stem}.weight_scale", "BF16", (64, 2)),
        Output(f"{stem}.weight_shape", "I64", (2,)),
    )


def test_joined_experts_are_written_one_by_one() -> None:
    prefix = f"{LAYER}.mlp.experts"
    tensors = {f"{prefix}.gate_up_proj": ("BF16", (2, 96, 64)), f"{prefix}.down_proj": ("BF16", (2, 64, 48))}
    work = steps(tensors, Scheme.FP8)
    weights = {name for name in names(work) if name.endswith(".weight")}
    assert weights == {f"{prefix}.{i}.{part}_proj.weight" for i in range(2) for part in ("gate", "up", "down")}
    (up,) = [step for step in work if step.outputs[0].name == f"{prefix}.1.up_proj.weight"]
    assert up.part == (slice(1, 2), slice(48, 96), slice(0, 64))
    assert up.read_bytes == 2 * 48 * 64


def test_layers_come_in_their_order() -> None:
    order = [f"model.layers.{index}.input_layernorm.weight" for index in (9, 10, 100)]
    assert [step.source for step in steps(dict.fromkeys(reversed(order), ("F32", (8,))), Scheme.FP8)] == order


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=30), shard_bytes=st.integers(1, 150))
def test_shards_hold_every_step_in_order(sizes: list[int], shard_bytes: int) -> None:
    work = steps({f"t.{index}": ("F8_E4M3", (size,)) for index, size in enumerate(sizes)}, Scheme.FP8)
    shards = cut_into_shards(work, shard_bytes)
    assert [step for shard in shards for step in shard.steps] == work
    for shard in shards:
        assert len(shard.steps) == 1 or sum(output.nbytes for output in shard.outputs) <= shard_bytes
    assert [shard.name for shard in shards] == sorted({shard.name for shard in shards})


def test_header_is_aligned_and_consecutive() -> None:
    (shard,) = cut_into_shards(steps({"a.b": ("BF16", (3,)), "a.c": ("F32", ())}, Scheme.FP8), 1000)
    data = header(shard)
    assert len(data) % 8 == 0
    fields = json.loads(data[8:])
    assert int.from_bytes(data[:8], "little") == len(data) - 8
    assert fields["a.b"] == {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}
    assert fields["a.c"]["data_offsets"] == [6, 10]


@pytest.mark.parametrize("scheme", [Scheme.FP8, Scheme.W4A8])
def test_the_engine_reads_its_own_config(scheme: Scheme) -> None:
    stored = read(quantization_config(scheme, ignore=["lm_head"], parts=Parts()))
    assert stored.scheme is scheme
    assert not stored.static_inputs
