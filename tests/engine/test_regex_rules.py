"""What is left of an expression means the same; what the library would pass over is refused."""

from __future__ import annotations

import itertools
import re

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine.regex_rules import RegexError, enforceable_regex


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("", ""),
        ("^a$", "a"),
        ("^$|^\\d+$", "|\\d+"),
        ("^(^a$|^b$)$", "(a|b)"),
        ("(?:^a|b)c$", "(?:a|b)c"),
        ("(?P<n>^a)b{2}$", "(?P<n>a)b{2}"),
        ("(?i)^a$", "(?i)a"),
        ("[^a$]\\^\\$", "[^a$]\\^\\$"),
        ("a\\", "a\\"),
        ("[(]a", "[(]a"),
        ("(a", "(a"),
        ("a)", "a)"),
    ],
)
def test_anchors_that_say_nothing_are_taken_out(pattern: str, kept: str) -> None:
    assert enforceable_regex(pattern) == kept


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("a^b", r"\^ at character 1"),
        ("a$b", r"\$ at character 1"),
        ("(a$)b", r"\$ at character 2"),
        ("(^a)*", r"\^ at character 1"),
        ("(a$)+", r"\$ at character 2"),
        ("(a|b)^c", r"\^ at character 5"),
        ("(?=a)b", r"lookahead \(\(\?=...\) at character 0"),
        ("a(?!b)", r"lookahead \(\(\?!...\) at character 1"),
        (r"\Aa\z", r"\\A at character 0"),
        (r"a[\p{L}]", r"\\p in the class at character 1"),
        (r"[\1]", r"\\1 in the class at character 0"),
        (r"[\u12]", r"\\u in the class at character 0"),
        (r"[\^-a]", "a range that begins with a caret, in the class at character 0"),
    ],
)
def test_what_would_be_passed_over_is_refused(pattern: str, named: str) -> None:
    with pytest.raises(RegexError, match=named):
        enforceable_regex(pattern)


PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "^", "$", "^a$", ""]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        inner.map(lambda part: f"({part})"),
        inner.map(lambda part: f"({part})*"),
    ),
    max_leaves=6,
)


@given(PATTERNS, st.text("ab", max_size=3))
def test_the_same_texts_match(pattern: str, text: str) -> None:
    try:
        kept = enforceable_regex(pattern)
    except RegexError:
        return
    assert bool(re.fullmatch(kept, text)) == bool(re.fullmatch(pattern, text))


LETTERS = [*"ab^]-\\+5.\n", "</s>"]


CARETS = [r"[\^a]+", r"[\^]", r"[\x5Ea-]", r"[\u005e^\]]", r"[^\^a]", r"[a\^]*b", r"[\^\d]", r"^[\^-]$", r"[\\\^]"]


@pytest.mark.parametrize("pattern", [*CARETS, r"[a-b\-]", ".", r"a.*", r"[.]\."])
def test_the_library_matches_what_the_expression_does(pattern: str) -> None:
    vocabulary = xgrammar.TokenizerInfo(LETTERS, stop_token_ids=[len(LETTERS) - 1])
    compiled = xgrammar.GrammarCompiler(vocabulary, max_threads=1).compile_regex(enforceable_regex(pattern))
    for text in map("".join, (*itertools.product(LETTERS[:-1], repeat=1), *itertools.product(LETTERS[:-1], repeat=2))):
        matcher = xgrammar.GrammarMatcher(compiled)
        taken = all(matcher.accept_token(LETTERS.index(letter)) for letter in text) and matcher.is_completed()
        assert taken == bool(re.fullmatch(pattern, text)), text
