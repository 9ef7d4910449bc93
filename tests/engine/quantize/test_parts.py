"""Which matrices stay in e4m3, and that what is written says so of each of them."""

from __future__ import annotations

import re

import pytest
from katydid_engine.quantization import Scheme
from katydid_engine.quantize.layout import quantization_config, steps
from katydid_engine.quantize.parts import Part, Parts

from tests.engine.test_quantization import read

NAMES = {
    "model.layers.0.self_attn.q_proj": "attention",
    "model.layers.0.mlp.down_proj": "dense",
    "model.layers.1.mlp.shared_mlp.gate_proj": "shared",
    "model.layers.1.mlp.shared_experts.up_proj": "shared",
    "model.layers.1.mlp.experts.12.up_proj": "",
    "model.layers.80.self_attn.o_proj": "draft",
    "model.layers.80.mlp.experts.3.down_proj": "draft",
    "model.layers.80.mtp_block.mlp.shared_mlp.up_proj": "draft",
}
KEPT: list[tuple[Part, ...]] = [
    (),
    ("attention",),
    ("dense", "shared"),
    ("draft",),
    ("attention", "draft"),
    ("attention", "dense", "shared", "draft"),
]


@pytest.mark.parametrize("kept", KEPT)
def test_every_matrix_is_told_by_one_target(kept: tuple[Part, ...]) -> None:
    parts = Parts(kept, draft_layers=(80,))
    for name, part in NAMES.items():
        kind = next((kind for kind in ("attention", "shared") if part == "draft" and kind in _kind(name)), part)
        expected = part in kept or kind in kept
        assert parts.is_fp8(name) is parts.is_fp8(f"{name}.weight") is expected
        fp8, int4 = (
            any(re.match(target, name) for target in targets) for targets in (parts.fp8_targets, parts.int4_targets)
        )
        assert (fp8, int4) == (expected, not expected)


def test_layers_as_a_whole() -> None:
    parts = Parts(("draft",), draft_layers=(80,), layers=(1, 8))
    for name in [*NAMES, "model.layers.18.self_attn.q_proj", "model.layers.8.mlp.up_proj"]:
        expected = int(name.split(".")[2]) in (1, 8, 80)
        assert parts.is_fp8(name) is expected
        assert any(re.match(target, name) for target in parts.int4_targets) is not expected


def _kind(name: str) -> str:
    return "attention" if "self_attn" in name else "shared" if "shared" in name else ""


@pytest.mark.parametrize("kept", KEPT)
def test_the_engine_reads_what_is_written_of_them(kept: tuple[Part, ...]) -> None:
    config = quantization_config(Scheme.W4A8, ignore=["lm_head"], parts=Parts(kept, (80,)))
    assert config["format"] == ("mixed-precision" if kept else "pack-quantized")
    stored = read(config)
    assert stored.scheme is Scheme.W4A8
    assert not stored.static_inputs


def test_each_matrix_is_laid_out_as_its_part() -> None:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {f"{name}.weight": ("BF16", (64, 256)) for name in NAMES}
    tensors["model.layers.2.mlp.experts.gate_up_proj"] = ("BF16", (2, 96, 256))
    work = steps(tensors, Scheme.W4A8, Parts(("attention",), (80,)))
    kinds = {step.outputs[0].name.rpartition(".")[0]: step.outputs[0].dtype for step in work}
    assert {name for name, dtype in kinds.items() if dtype == "F8_E4M3"} == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.80.self_attn.o_proj",
    }
    assert kinds["model.layers.2.mlp.experts.1.up_proj"] == "I32"
