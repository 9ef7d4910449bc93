"""Is a prepared folder intact, and does the model in it make sense? Checksums first, then a short greedy answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from katydid_runtime.errors import ModelFolderError

from katydid_cli.models.catalogue import MANIFEST, find_entry
from katydid_cli.models.numpy_llama import NumpyLlama
from katydid_cli.models.prepare import file_sha256

__all__ = ["VerifyReport", "verify"]

_ANSWER_TOKENS = 12


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``verify`` found: the files it hashed, and the model's greedy answer to the catalogue's question."""

    files: tuple[str, ...]
    question: str
    answer: str


def verify(name: str, cache_dir: Path) -> VerifyReport:
    """Checks every file of a prepared model against its manifest and asks the model its question.

    Raises:
        UnknownModelError: the catalogue has no such name.
        ModelFolderError: the model is not prepared, a file is absent or altered, or the answer makes no sense.
    """
    entry = find_entry(name)
    folder = cache_dir / entry.name
    files = _check_files(folder)
    answer = _answer(folder, entry.question)
    if entry.answer_contains not in answer:
        raise ModelFolderError(
            f"{folder}: asked {entry.question!r}, it answered {answer!r}, expected {entry.answer_contains!r} in it",
            field="answer",
            value=answer,
            allowed=entry.answer_contains,
        )
    return VerifyReport(files, entry.question, answer)


def _check_files(folder: Path) -> tuple[str, ...]:
    path = folder / MANIFEST
    try:
        expected: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["sha256"]
    except FileNotFoundError:
        raise ModelFolderError(
            f"{folder}: not a prepared model; run: katydid models prepare {folder.name}", field="model", value=folder
        ) from None
    except (OSError, ValueError, KeyError) as error:
        raise ModelFolderError(f"{path}: unreadable manifest: {error}", field=MANIFEST) from error
    for name, digest in expected.items():
        try:
            found = file_sha256(folder / name)
        except OSError as error:
            raise ModelFolderError(f"{folder / name}: {error.strerror or error}", field=name) from error
        if found != digest:
            raise ModelFolderError(
                f"{folder / name}: SHA-256 is {found}, expected {digest}", field=name, value=found, allowed=digest
            )
    return tuple(expected)


def _answer(folder: Path, question: str) -> str:
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer

    template = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    prompt = environment.from_string(template).render(
        messages=[{"role": "user", "content": question}], add_generation_prompt=True
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    return str(tokenizer.decode(NumpyLlama(folder).greedy(ids, _ANSWER_TOKENS)))
