"""Compiles grammars for one vocabulary with XGrammar, which is loaded only where a request has a grammar.

Ordinary kinds match text: special tokens of the vocabulary stand for no text and are never allowed. Structural tags
name special tokens (the markers of tool calls), so there those stand for their own text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import xgrammar
from katydid_runtime.request_limits import MAX_JSON_WHITESPACE

from katydid_engine.grammar import Grammar, GrammarError, GrammarKind

__all__ = ["GrammarCompiler"]

# "[19:58:07] /project/cpp/regex_converter.cc:94: Regex parsing error at position 3: ..."
_LOG_PREFIX = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")


class GrammarCompiler:
    """Safe to use from several threads.

    Args:
        folder: of the model; holds tokenizer.json.
        vocab_size: of the logits.
        eos_token_ids: of the model.
        cache_bytes: compiled grammars kept, approximately; 0 keeps none.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], cache_bytes: int = 0) -> None:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        self._vocab_size = vocab_size
        self._text, self._tagged = (
            xgrammar.GrammarCompiler(
                _tokenizer_info(text, vocab_size, eos_token_ids, special=special),
                max_threads=1,
                cache_enabled=cache_bytes > 0,
                cache_limit_bytes=cache_bytes,
            )
            for special in (False, True)
        )

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Raises GrammarError."""
        try:
            match grammar.kind:
                case GrammarKind.JSON_SCHEMA:
                    return self._text.compile_json_schema(grammar.source, max_whitespace_cnt=MAX_JSON_WHITESPACE)
                case GrammarKind.REGEX:
                    return self._text.compile_regex(grammar.source)
                case GrammarKind.EBNF:
                    return self._text.compile_grammar(grammar.source)
                case GrammarKind.CHOICE:
                    return self._text.compile_structural_tag(_choices(json.loads(grammar.source)))
                case GrammarKind.STRUCTURAL_TAG:
                    return self._tagged.compile_structural_tag(grammar.source)
        except (RuntimeError, ValueError) as error:
            # The library says nothing of some, such as a bound beyond the range of a double.
            said = _LOG_PREFIX.sub("", str(error)).strip()
            raise GrammarError(said or "the grammar library cannot read it") from error

    def check(self, grammar: Grammar) -> None:
        """Raises GrammarError unless the grammar compiles and some token can begin it."""
        matcher = xgrammar.GrammarMatcher(self.compile(grammar))
        mask = torch.zeros(1, -(-self._vocab_size // 32), dtype=torch.int32)
        matcher.fill_next_token_bitmask(mask)
        if not mask.any():
            raise GrammarError("no text of this vocabulary satisfies it")


def _choices(choices: list[str]) -> dict[str, Any]:
    strings = [{"type": "const_string", "value": choice} for choice in choices]
    return {"type": "structural_tag", "format": {"type": "or", "elements": strings}}


def _tokenizer_info(
    tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...], *, special: bool
) -> xgrammar.TokenizerInfo:
    """The text of every token id; ids without text (padding of the head) are never allowed."""
    tokenizer = json.loads(tokenizer_json)
    vocabulary = tokenizer["model"]["vocab"]
    texts = [""] * vocab_size
    # Unigram models list (text, score) pairs, the others map texts to ids.
    tokens = enumerate(text for text, _ in vocabulary) if isinstance(vocabulary, list) else _by_id(vocabulary)
    for token, text in tokens:
        if token < vocab_size:
            texts[token] = text
    for added in tokenizer.get("added_tokens", ()):
        if added["id"] < vocab_size:
            texts[added["id"]] = added["content"] if special or not added["special"] else ""
    metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer_json)
    return xgrammar.TokenizerInfo(
        texts,
        vocab_type=metadata["vocab_type"],
        vocab_size=vocab_size,
        stop_token_ids=list(eos_token_ids),
        add_prefix_space=metadata["add_prefix_space"],
    )


def _by_id(vocabulary: dict[str, int]) -> list[tuple[int, str]]:
    return [(token, text) for text, token in vocabulary.items()]
