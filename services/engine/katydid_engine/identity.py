"""Who a model is to caches and routers: a digest of everything that decides the bytes of its KV pages.

    identity = SHA-256(domain || config.json || per shard its name and SHA-256 || KV dtype || layout || numerics)

each part length-prefixed. Weights count by content, so that two folders of one name with other weights never share a
page. The digest of a shard is kept in a sidecar beside it, under the shard's size and modification time, because
hashing hundreds of gigabytes takes minutes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

from katydid_runtime.errors import ModelFolderError

__all__ = ["SIDECAR", "model_identity"]

SIDECAR = "katydid-digests.json"
_DOMAIN = b"katydid.model.v1"
_LAYOUT = b"page 1: K [head][64][dim], V [head][dim][64]"
_CHUNK = 1 << 22

logger = logging.getLogger(__name__)


def model_identity(folder: Path, *, kv_dtype: str, compute_dtype: str) -> bytes:
    """32 bytes. Blocks for as long as it takes to read shards that the sidecar does not know.

    Raises:
        ModelFolderError: no config.json or no safetensors file, or one cannot be read.
    """
    digest = hashlib.sha256()

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little") + part)

    add(_DOMAIN)
    try:
        add((folder / "config.json").read_bytes())
        shards = sorted(folder.glob("*.safetensors"))
        if not shards:
            raise ModelFolderError(f"{folder}: no *.safetensors file", field="model", value=str(folder))
        for shard, shard_digest in _shard_digests(folder, shards):
            add(shard.name.encode())
            add(shard_digest)
    except OSError as error:
        raise ModelFolderError(
            f"cannot read {error.filename}: {error.strerror}", field="model", value=str(folder)
        ) from error
    add(kv_dtype.encode())
    add(compute_dtype.encode())
    add(_LAYOUT)
    return digest.digest()


def _shard_digests(folder: Path, shards: list[Path]) -> list[tuple[Path, bytes]]:
    known = _read_sidecar(folder)
    found: dict[str, dict[str, object]] = {}
    for shard in shards:
        status = shard.stat()
        stamp: dict[str, object] = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        entry = known.get(shard.name, {})
        if any(entry.get(key) != value for key, value in stamp.items()) or "sha256" not in entry:
            entry = stamp | {"sha256": _sha256(shard)}
        found[shard.name] = entry
    if found != known:
        _write_sidecar(folder, found)
    return [(shard, bytes.fromhex(str(found[shard.name]["sha256"]))) for shard in shards]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _read_sidecar(folder: Path) -> dict[str, dict[str, object]]:
    try:
        content = json.loads((folder / SIDECAR).read_text())
    except (OSError, ValueError):
        return {}
    valid = isinstance(content, dict) and all(isinstance(entry, dict) for entry in content.values())
    return content if valid else {}


def _write_sidecar(folder: Path, digests: dict[str, dict[str, object]]) -> None:
    partial = folder / f".{SIDECAR}.{os.getpid()}"
    try:
        partial.write_text(json.dumps(digests, indent=1))
        partial.replace(folder / SIDECAR)
    except OSError as error:
        logger.info("weights will be hashed again at the next start: %s", error)
