"""Grammars in the worker: what is prepared for requests that never begin does not stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from katydid_engine import compiled_grammars
from katydid_engine.compiled_grammars import CompiledGrammars
from katydid_engine.grammar import Grammar, GrammarKind


def test_grammars_of_requests_that_never_begin_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(compiled_grammars, "_MOST_COMING", 4)
    monkeypatch.setattr(CompiledGrammars, "_compile", lambda _, grammar: compiled.append(grammar.source))
    grammars = CompiledGrammars(Path(), 8, ())
    for number in range(20):
        grammars.prepare(Grammar(GrammarKind.REGEX, str(number)))
        grammars.prepare(Grammar(GrammarKind.REGEX, str(number)))
    assert [future.result() for future in grammars._coming.values()] == [None] * 4
    assert compiled == [str(number) for number in range(20)], "each once, in order"
