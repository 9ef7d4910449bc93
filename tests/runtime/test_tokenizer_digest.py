"""The tokenizer digest: every file that decides the token ids counts, nothing else does."""

from __future__ import annotations

import json
import struct
from hashlib import sha256

import pytest
from katydid_runtime.errors import ModelFolderError
from katydid_runtime.tokenizer_digest import chat_template_of, tokenizer_digest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b'{"model": {}}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return tmp_path


def test_it_is_the_formula(folder):
    parts = (b'{"model": {}}', b"{{ messages }}")
    packed = b"katydid.tokenizer.v1" + b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    assert tokenizer_digest(folder) == sha256(packed).digest()


def test_tokenizer_and_template_count_and_nothing_else(folder):
    before = tokenizer_digest(folder)
    (folder / "config.json").write_text("{}")
    assert tokenizer_digest(folder) == before
    (folder / "chat_template.jinja").write_text("{{ other }}")
    with_template = tokenizer_digest(folder)
    (folder / "tokenizer.json").write_bytes(b'{"model": {} }')
    assert len({before, with_template, tokenizer_digest(folder)}) == 3


@pytest.mark.parametrize(
    ("config", "template"),
    [
        ({"chat_template": "x"}, "x"),
        ({"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]}, "d"),
        ({"chat_template": [{"name": "tool", "template": "t"}]}, None),
        ({}, None),
    ],
)
def test_where_the_template_comes_from(folder, config, template):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert chat_template_of(folder) == template


def test_a_template_file_wins(folder):
    (folder / "chat_template.jinja").write_text("file")
    assert chat_template_of(folder) == "file"


def test_no_template_at_all(folder):
    (folder / "tokenizer_config.json").unlink()
    assert chat_template_of(folder) is None
    assert len(tokenizer_digest(folder)) == 32


@pytest.mark.parametrize("text", ["{", "[]", '{"chat_template": 3}'])
def test_a_broken_config_is_named(folder, text):
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelFolderError, match=r"chat.template"):
        tokenizer_digest(folder)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelFolderError, match=r"cannot read .*tokenizer\.json: No such file"):
        tokenizer_digest(tmp_path)
