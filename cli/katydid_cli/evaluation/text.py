"""The tokenizer and chat template of a model folder, as evaluations use them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from katydid_cli.evaluation.scorer import EvaluationError, Scorer, VocabularyMismatchError


class ModelText:
    """Text to ids and back for one model folder; raises EvaluationError where the folder lacks a file or a key."""

    def __init__(self, folder: Path) -> None:
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = json.loads((folder / "tokenizer_config.json").read_text())
        except FileNotFoundError as error:
            raise EvaluationError(f"{folder} has no {Path(error.filename).name}: it is not a model folder") from error
        except Exception as error:  # tokenizers raises a bare Exception
            raise EvaluationError(f"the tokenizer of {folder} cannot be read: {error}") from error
        self.bos = self._special(folder, config, "bos_token")
        self.eos = self._special(folder, config, "eos_token")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(config.get("chat_template", ""))
        self._bos_token = config["bos_token"]

    def _special(self, folder: Path, config: dict[str, Any], key: str) -> int:
        token = self.tokenizer.token_to_id(str(config.get(key)))
        if token is None:
            raise EvaluationError(f"{folder}/tokenizer_config.json: {key} {config.get(key)!r} is not in the vocabulary")
        return int(token)

    def check(self, scorer: Scorer) -> None:
        """Raises VocabularyMismatchError unless the scorer's model has this tokenizer's number of ids."""
        size = self.tokenizer.get_vocab_size()
        if scorer.vocabulary != size:
            raise VocabularyMismatchError(
                f"the model has {scorer.vocabulary} token ids, the tokenizer of the evaluation {size}: "
                "evaluate a model with the tokenizer of its own folder"
            )

    def encode(self, text: str) -> list[int]:
        """Ids of `text` with no special tokens added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each id of `encode(text)` begins and ends, in characters."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).offsets)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, markers included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Ids of a chat prompt up to where the assistant's reply begins."""
        rendered = self._template.render(
            messages=messages, tools=tools, add_generation_prompt=True, bos_token=self._bos_token
        )
        return self.encode(rendered)
