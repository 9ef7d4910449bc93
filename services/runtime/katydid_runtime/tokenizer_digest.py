"""Whether two processes cut text into the same tokens: one digest over the files of a model folder that decide it.

Engines report it in `DescribeResponse.tokenizer_digest`; ids from a gateway with another one would mean other text.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from katydid_runtime.errors import ModelFolderError

__all__ = ["chat_template_of", "tokenizer_digest"]


def tokenizer_digest(folder: str | Path) -> bytes:
    """SHA-256 (32 bytes) over tokenizer.json and the chat template of a model folder, each length-prefixed.

    Raises ModelFolderError when tokenizer.json is missing or a file cannot be read.
    """
    path = Path(folder) / "tokenizer.json"
    try:
        tokenizer = path.read_bytes()
    except OSError as error:
        raise ModelFolderError(f"cannot read {path}: {error.strerror}", field="model", value=str(folder)) from error
    template = (chat_template_of(folder) or "").encode()
    digest = sha256(b"katydid.tokenizer.v1")
    for content in (tokenizer, template):
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


def chat_template_of(folder: str | Path) -> str | None:
    """The Jinja source: chat_template.jinja, else the (default) `chat_template` of tokenizer_config.json, else None.

    Raises ModelFolderError for a file that cannot be read or parsed.
    """
    own = Path(folder) / "chat_template.jinja"
    config = Path(folder) / "tokenizer_config.json"
    try:
        if own.is_file():
            return own.read_text("utf-8")
        if not config.is_file():
            return None
        template = json.loads(config.read_text("utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelFolderError(
            f"cannot read the chat template of {folder}: {error}", field="model", value=str(folder)
        ) from error
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelFolderError(f"chat_template in {config} is no text", field="model", value=str(folder))
    return template
