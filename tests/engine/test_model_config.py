"""What is read of ``config.json``, by architecture, and how a field that does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from katydid_engine.model_config import RopeConfig, read_model_config
from katydid_runtime.errors import ModelFolderError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
HY_V3 = LLAMA | {"model_type": "hy_v3", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def write(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_defaults(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, LLAMA))
    assert config.head_dim == 16
    assert config.rope == RopeConfig(theta=10_000.0)
    assert (config.qk_norm, config.moe, config.tie_embeddings) == (False, None, False)
    assert config.eos_token_ids == ()


def test_hy3_defaults_are_those_of_the_released_model(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, HY_V3 | {"num_nextn_predict_layers": 1}))
    assert config.moe is not None
    assert (config.moe.scoring, config.moe.routed_scale, config.moe.renormalise) == ("sigmoid", 2.826, True)
    assert config.moe.shared_intermediate_size == 48
    assert config.rope.theta == 11_158_840.0
    assert config.rms_norm_eps == 1e-5
    assert config.sparse_layers == (False, True)
    assert config.num_mtp_layers == 1


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}},
    ],
)
def test_both_spellings_of_rope(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = read_model_config(write(tmp_path, LLAMA | rope))
    assert config.rope == RopeConfig(theta=5e5, kind="linear", factor=4.0)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, None, (2,)), ([2, 7], None, (2, 7)), (2, {"eos_token_id": [5, 6]}, (5, 6)), (2, {"do_sample": True}, (2,))],
)
def test_end_of_sequence(
    tmp_path: Path, config: Any, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    write(tmp_path, LLAMA | {"eos_token_id": config})
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_model_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"model_type": "gpt2"}, "model_type", "is 'gpt2', expected one of hy_v3, llama, qwen3, qwen3_moe"),
        ({"model_type": None}, "model_type", "is missing, expected one of"),
        ({"hidden_size": None}, "hidden_size", "is missing, expected an integer >= 0"),
        ({"vocab_size": 0}, "vocab_size", "is 0, expected an integer >= 1"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers", "is '2', expected an integer"),
        ({"num_attention_heads": True}, "num_attention_heads", "is True, expected an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "is 3, expected a divisor of num_attention_heads=4"),
        ({"head_dim": 15}, "head_dim", "is 15, expected an even number"),
        ({"hidden_act": "gelu"}, "hidden_act", "is 'gelu', expected one of silu"),
        ({"use_sliding_window": True}, "use_sliding_window", "is True, expected false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps", "is 'small', expected a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings", "is 1, expected true or false"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type", "is 'yarn', expected one of"),
        ({"rope_scaling": [1]}, "rope_scaling", "expected an object"),
        ({"eos_token_id": "</s>"}, "eos_token_id", "is '</s>', expected a token id"),
        ({"torch_dtype": "float8"}, "torch_dtype", "is 'float8', expected one of bfloat16"),
    ],
)
def test_wrong_fields(tmp_path: Path, change: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ModelFolderError) as caught:
        read_model_config(write(tmp_path, LLAMA | change))
    assert caught.value.field == field
    assert message in caught.value.message
    assert str(tmp_path / "config.json") in caught.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected at most num_experts=8"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types is ['dense'], expected 2 times"),
        ({"qk_norm": False}, "qk_norm is False, expected true"),
        ({"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid is False, expected true"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ],
)
def test_wrong_expert_fields(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFolderError) as caught:
        read_model_config(write(tmp_path, HY_V3 | change))
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), ("{", "not readable as JSON"), ("[1]", "expected a JSON object, found list")],
)
def test_unreadable_file(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFolderError, match=message):
        read_model_config(tmp_path)
