"""What the protocol tells of a model: facts of its folder, and its tokenizer's files in one archive."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from katydid_engine.submission import EngineLimits

__all__ = ["model_info", "tokenizer_chunks"]

_CHUNK_BYTES = 1024 * 1024
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("config.json", "generation_config.json", "added_tokens.json"),
)


def model_info(folder: Path, name: str, limits: EngineLimits) -> vllm.GetModelInfoResponse:
    """Facts of the model; sampling defaults are those of generation_config.json."""
    config = _json(folder / "config.json")
    ends = config.get("eos_token_id")
    return vllm.GetModelInfoResponse(
        model_path=str(folder),
        tokenizer_path=str(folder),
        is_generation=True,
        max_context_length=limits.max_model_tokens,
        max_req_input_len=limits.max_model_tokens - 1,
        vocab_size=limits.vocab_size,
        served_model_name=name,
        model_type=config.get("model_type", ""),
        architectures=config.get("architectures") or [],
        eos_token_ids=ends if isinstance(ends, list) else [] if ends is None else [ends],
        pad_token_id=_id(config.get("pad_token_id")),
        bos_token_id=_id(config.get("bos_token_id")),
        default_sampling_params_json=json.dumps(
            {
                key: value
                for key, value in _json(folder / "generation_config.json").items()
                if key in {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"} and value is not None
            }
        ),
    )


def tokenizer_chunks(folder: Path) -> Iterator[common_pb2.GetTokenizerChunk]:
    """The archive in parts; the last one names its SHA-256."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _FILES:
            if (folder / name).is_file():
                # A fixed time: the same files give the same bytes.
                archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), (folder / name).read_bytes())
    data = packed.getvalue()
    for start in range(0, len(data), _CHUNK_BYTES):
        last = start + _CHUNK_BYTES >= len(data)
        digest = hashlib.sha256(data).hexdigest() if last else ""
        yield common_pb2.GetTokenizerChunk(data=data[start : start + _CHUNK_BYTES], sha256=digest)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text("utf-8"))
    return found if isinstance(found, dict) else {}


def _id(value: object) -> int:
    return value if isinstance(value, int) else -1
