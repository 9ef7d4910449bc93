"""A whole choice as a property: text, reasoning and tool calls are the same however its tokens are grouped."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_gateway.choice_stream import ChoiceStream
from katydid_gateway.engines.frames import Row
from katydid_gateway.parsers.hy3 import HY3_MARKERS, Hy3Parser
from katydid_gateway.requests import Delta, FinishReason, Tool
from katydid_gateway.text.choice_text import ChoiceText
from katydid_gateway.text.detokenizer import Vocabulary

from tests.gateway.model_folders import HY3_MARKERS as MARKERS
from tests.gateway.model_folders import tiny_tokenizer

TOKENIZER = tiny_tokenizer(["<eos>", *MARKERS])
VOCABULARY = Vocabulary(TOKENIZER, HY3_MARKERS)
CALL = "<tool_calls><tool_call>f<tool_sep><arg_key>a</arg_key><arg_value>1 🦗</arg_value></tool_call></tool_calls>"
TOOL = Tool("f", parameters={"properties": {"a": {"type": "string"}}})
PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "hm ",
        "Köln",
        "🦗🦗",
        "\n",
        "stop",
        "st",
        "op",
        CALL,
        "<tool_call>",
        "<arg_key>",
        "<",
        "a b",
    ]
)


def run(ids: list[int], groups: list[int], stops: tuple[str, ...], reasoning: bool) -> tuple[object, ...]:
    parser = Hy3Parser((TOOL,), reasoning=reasoning)
    stream = ChoiceStream(0, ChoiceText(VOCABULARY.detokenizer(), stops=stops), parser, VOCABULARY, include_stop=False)
    whole = Delta(0)
    groups, start = list(groups), 0
    while start < len(ids) and not stream.done:
        end = start + (groups.pop(0) if groups else 1)
        add(whole, stream.feed(Row(0, array("I", ids[start:end]))))
        start = end
    if not stream.done:
        add(whole, stream.finish(FinishReason.STOP))
    names = [call.name for call in whole.tool_calls if call.id]
    arguments = "".join(call.arguments for call in whole.tool_calls)
    return whole.text, whole.reasoning, names, arguments, whole.finish, stream.tokens, whole.ids


def add(whole: Delta, delta: Delta) -> None:
    whole.text += delta.text
    whole.reasoning += delta.reasoning
    whole.tool_calls += delta.tool_calls
    whole.ids += delta.ids
    whole.finish = delta.finish


@settings(max_examples=300, deadline=None)
@given(
    st.lists(PIECES, max_size=8).map("".join),
    st.lists(st.integers(1, 7), max_size=20),
    st.sampled_from([(), ("stop",), ("stop", "🦗🦗"), ("\n",)]),
    st.booleans(),
)
def test_grouping_changes_nothing(text: str, groups: list[int], stops: tuple[str, ...], reasoning: bool) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert run(ids, groups, stops, reasoning) == run(ids, [], stops, reasoning)
    assert run(ids, [len(ids) + 1], stops, reasoning) == run(ids, [], stops, reasoning)


def test_a_stop_token_ends_the_text_before_itself_and_counts() -> None:
    letters = [TOKENIZER.token_to_id(letter) for letter in "ab"]
    for include, text in ((False, "a"), (True, "ab")):
        choice = ChoiceText(VOCABULARY.detokenizer())
        stream = ChoiceStream(0, choice, Hy3Parser(), VOCABULARY, include_stop=include)
        delta = stream.feed(Row(0, array("I", letters), stop_token=letters[1]))
        assert (delta.text, stream.tokens, len(delta.ids)) == (text, 2, 8)
        assert stream.finish(FinishReason.STOP).finish is FinishReason.STOP


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["hm hm", "東京から\n\nمرحبا", "🦗\n"]),
    st.sampled_from(["", "ok", "\n🦗", CALL]),
    st.lists(st.integers(1, 7), max_size=20),
    st.booleans(),
)
def test_reasoning_tokens_are_those_up_to_its_end(thought: str, answer: str, groups: list[int], opened: bool) -> None:
    """Those too that end in the middle of a character, and whatever comes in one row with the first of the answer."""
    end = TOKENIZER.token_to_id("</think>")
    text = f"{'' if opened else '<think>'}{thought}</think>{answer}"
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    stream = ChoiceStream(
        0,
        ChoiceText(VOCABULARY.detokenizer()),
        Hy3Parser((Tool("f"),), reasoning=opened),
        VOCABULARY,
        include_stop=False,
        thought_ends=frozenset([end]),
    )
    start = 0
    while start < len(ids):
        size = groups.pop(0) if groups else 1
        stream.feed(Row(0, array("I", ids[start : start + size])))
        start += size
    assert stream.reasoning_tokens == ids.index(end) + 1
    cut = ChoiceStream(
        0, ChoiceText(VOCABULARY.detokenizer()), Hy3Parser(reasoning=True), VOCABULARY, include_stop=False
    )
    cut.feed(Row(0, array("I", ids[: ids.index(end)])))
    assert cut.reasoning_tokens == ids.index(end)
