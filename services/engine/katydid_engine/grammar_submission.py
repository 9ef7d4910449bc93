"""From the protocol's Grammar to a domain one: what can be said against it without reading its source is said here."""

from __future__ import annotations

import json

from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.block_hash import unpack_ids
from katydid_runtime.errors import InvalidRequestError, UnsupportedError
from katydid_runtime.request_limits import MAX_GRAMMAR_CHARACTERS, MAX_GRAMMAR_CHOICES

from katydid_engine.grammar import MAX_BEGIN_AFTER, Grammar, GrammarKind

__all__ = ["parse_grammar"]


def parse_grammar(message: pb.Grammar, served: tuple[GrammarKind, ...], vocab_size: int) -> Grammar:
    """Raises InvalidRequestError, and UnsupportedError for a kind that is not ``served``."""
    name = message.WhichOneof("kind")
    if name is None:
        raise InvalidRequestError(
            "sampling.grammar is empty", field="sampling.grammar", allowed=f"one of {', '.join(served) or 'none'}"
        )
    kind, field = GrammarKind(name), f"sampling.grammar.{name}"
    if kind not in served:
        allowed = f"one of {', '.join(served)}" if served else "no grammar"
        raise UnsupportedError(f"this engine has no grammars of kind {name}", field=field, allowed=allowed)
    source = _choices(message.choice) if kind is GrammarKind.CHOICE else getattr(message, name)
    size = sum(map(len, message.choice.choices)) if kind is GrammarKind.CHOICE else len(source)
    if size > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequestError(
            f"the grammar has {size} characters",
            field=field,
            value=size,
            allowed=f"at most {MAX_GRAMMAR_CHARACTERS}",
        )
    return Grammar(kind, source, _begin_after(message.begin_after_ids, vocab_size))


def _choices(message: pb.ChoiceGrammar) -> str:
    if not message.choices or not all(message.choices):
        raise InvalidRequestError(
            "a choice has no strings, or an empty one",
            field="sampling.grammar.choice.choices",
            value=len(message.choices),
            allowed="at least one string, none of them empty",
        )
    if len(message.choices) > MAX_GRAMMAR_CHOICES:
        raise InvalidRequestError(
            f"a choice has {len(message.choices)} strings",
            field="sampling.grammar.choice.choices",
            value=len(message.choices),
            allowed=f"at most {MAX_GRAMMAR_CHOICES}",
        )
    return json.dumps(list(message.choices))


def _begin_after(packed: bytes, vocab_size: int) -> tuple[int, ...]:
    field = "sampling.grammar.begin_after_ids"
    if len(packed) % 4 or len(packed) > 4 * MAX_BEGIN_AFTER:
        raise InvalidRequestError(
            f"{field} has {len(packed)} bytes",
            field=field,
            value=len(packed),
            allowed=f"4 bytes a token, {MAX_BEGIN_AFTER} tokens at most",
        )
    ids = tuple(unpack_ids(packed))
    if ids and max(ids) >= vocab_size:
        raise InvalidRequestError(
            f"{field} holds the id {max(ids)}", field=field, value=max(ids), allowed=f"ids below {vocab_size}"
        )
    return ids
