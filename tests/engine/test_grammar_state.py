"""A sequence's place in its grammar: the marker before it, stop tokens, the end, and going back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine.compiled_grammars import CompiledGrammars
from katydid_engine.grammar import Grammar, GrammarKind
from katydid_engine.grammar_state import GrammarState

from tests.tiny_model import EOS_ID, VOCAB_SIZE, write_tiny_model

# The tiny tokenizer numbers the printable characters in order.
A, B, X = (ord(letter) - ord("!") for letter in "abx")

pytest.importorskip("xgrammar")


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> CompiledGrammars:
    return CompiledGrammars(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"), VOCAB_SIZE, (EOS_ID,))


def allowed(state: GrammarState) -> set[int]:
    words = state.mask().view(-1).tolist()
    return {token for token in range(VOCAB_SIZE) if words[token // 32] >> token % 32 & 1}


def begin(grammars: CompiledGrammars, regex: str, after: tuple[int, ...] = ()) -> GrammarState:
    return grammars.begin(Grammar(GrammarKind.REGEX, regex, after), (EOS_ID, 5))


def test_stop_tokens_come_only_where_it_may_end(grammars: CompiledGrammars) -> None:
    state = begin(grammars, "ab?")
    assert allowed(state) == {A}
    assert [token for token in range(VOCAB_SIZE) if state.allows(state.mask(), token)] == [A]
    assert not state.accept(EOS_ID)
    assert not state.accept(B)
    assert state.accept(A)
    assert allowed(state) == {B, EOS_ID, 5}
    assert not state.ended, "it may end, and it may go on"
    assert state.accept(B)
    assert state.ended
    assert state.only_stops(state.mask())
    state.rollback(1)
    assert state.accept(5)
    assert state.ended
    assert not state.accept(B)
    assert allowed(state) == set()


def test_anything_but_a_stop_comes_before_the_marker(grammars: CompiledGrammars) -> None:
    state = begin(grammars, "x", (1, 2, 1, 3))
    assert allowed(state) == set(range(VOCAB_SIZE)) - {EOS_ID, 5}
    for token in (1, 2, 1, 2, 1):
        assert state.accept(token)
        assert not state.begun
    assert not state.accept(EOS_ID)
    assert state.accept(3)
    assert state.begun
    assert allowed(state) == {X}
    state.rollback(2)
    assert not state.begun
    for token in (1, 3, X):
        assert state.accept(token), "1 2 1 2 ends with the first half of the marker again"
    assert state.ended


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), min_size=1, max_size=4), st.data())
def test_the_marker_is_found_wherever_it_is(output: list[int], marker: list[int], data: st.DataObject) -> None:
    class Nothing:
        """Accepts everything."""

        accepted = 0

        def accept_token(self, token_id: int) -> bool:
            self.accepted += 1
            return True

        def rollback(self, num_tokens: int = 1) -> None:
            self.accepted -= num_tokens

        def is_terminated(self) -> bool:
            return False

    matcher = Nothing()
    state = GrammarState(matcher, tuple(marker), (), 64)  # type: ignore[arg-type]
    done: list[int] = []
    for token in output:
        assert state.accept(token)
        done.append(token)
        if data.draw(st.booleans()):
            back = data.draw(st.integers(0, len(done)))
            state.rollback(back)
            del done[len(done) - back :]
        found = next((i for i in range(len(done)) if done[i : i + len(marker)] == marker), None)
        assert state.begun == (found is not None)
        assert matcher.accepted == (0 if found is None else len(done) - found - len(marker))


def test_going_back_is_as_if_nothing_had_been(grammars: CompiledGrammars) -> None:
    chooser = random.Random(1)
    state, plain = (begin(grammars, "[a-f]{2,5}(x|[0-9]+)y") for _ in range(2))
    while not plain.ended:
        drafts = 0
        while drafts < 3 and not state.ended:
            assert state.accept(chooser.choice(sorted(allowed(state))))
            drafts += 1
        state.rollback(drafts)
        assert allowed(state) == allowed(plain)
        token = chooser.choice(sorted(allowed(plain) - {EOS_ID, 5}))
        assert state.accept(token)
        assert plain.accept(token)
