"""What a caller may do, by name; a key or token without scopes of its own may do the ordinary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ORDINARY", "Identity", "Scope", "scopes_of"]


class Scope(StrEnum):
    """Groups of APIs."""

    INFERENCE = "inference"
    TOKENIZE = "tokenize"
    EXPLAIN = "explain"
    METRICS = "metrics"
    ADMIN = "admin"


ORDINARY = frozenset({Scope.INFERENCE, Scope.TOKENIZE, Scope.EXPLAIN})


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller who is known: whose budget it uses, and what it may do."""

    tenant: str
    scopes: frozenset[Scope] = ORDINARY


def scopes_of(names: Iterable[str]) -> frozenset[Scope]:
    """Scopes by name. Raises ValueError for a name that is none."""
    return frozenset(Scope(name) for name in names)
