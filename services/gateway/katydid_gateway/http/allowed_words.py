"""Which words a field of a body may hold, found by its path in the body's type: msgspec names the wrong one alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache

import msgspec

__all__ = ["allowed_words"]

_STEP = re.compile(r"\[[^]]*\]|[^.\[\]]+")


def allowed_words(body: object, path: str) -> str | None:
    """Those of the type `body` at `path` ("messages[0].role"), as "a, b or c"; None where any value may be."""
    types = _parts(_known(body))
    words: list[str] = []
    for step in _STEP.findall(path):
        words = [word for kind in types for word in _tag(kind, step)]
        types = [inner for kind in types for inner in _inner(kind, step)]
    words += [str(value) for kind in types if isinstance(kind, msgspec.inspect.LiteralType) for value in kind.values]
    words = sorted(set(words))
    if not words:
        return None
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


@cache
def _known(body: object) -> msgspec.inspect.Type:
    return msgspec.inspect.type_info(body)


def _parts(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    """The members of a union, or the type itself."""
    return list(kind.types) if isinstance(kind, msgspec.inspect.UnionType) else [kind]


def _tag(kind: msgspec.inspect.Type, step: str) -> Iterable[str]:
    if isinstance(kind, msgspec.inspect.StructType) and kind.tag_field == step:
        yield str(kind.tag)


def _inner(kind: msgspec.inspect.Type, step: str) -> Iterator[msgspec.inspect.Type]:
    if isinstance(kind, msgspec.inspect.StructType):
        for field in kind.fields:
            if field.encode_name == step:
                yield from _parts(field.type)
    elif isinstance(kind, msgspec.inspect.ListType):
        yield from _parts(kind.item_type)
    elif isinstance(kind, msgspec.inspect.DictType):
        yield from _parts(kind.value_type)
