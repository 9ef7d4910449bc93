"""Training rows: sizes, weights, order, and tasks that their context answers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tools.hy3_tiny import dialogues, tasks
from tools.hy3_tiny.batches import POLISH, Maker, MissingDataError, cut_lines, load_stream, stream_batches
from tools.hy3_tiny.pieces import Pieces


def decode(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


@pytest.mark.parametrize("size", [1026, 4098, 16386])
def test_rows_have_their_size_and_answers_that_the_context_states(
    tokenizer: Tokenizer, words: list[str], filler: np.ndarray, size: int
) -> None:
    answers = 0
    for seed in range(12):
        ids, weights = tasks.row(random.Random(seed), tokenizer, words, filler, size)
        assert ids.shape == weights.shape == (size,)
        assert ids.dtype == np.uint16
        heavy = np.flatnonzero(weights == tasks.ANSWER)
        for run in np.split(heavy, np.flatnonzero(np.diff(heavy) > 1) + 1) if len(heavy) else []:
            answer = decode(tokenizer, ids[run]).strip().strip('"').removesuffix("<｜hy_eos｜>")
            assert answer in decode(tokenizer, ids[: run[0]]), answer
            answers += 1
    assert answers > 20


def test_facts_weigh_nothing_where_they_are_stated(tokenizer: Tokenizer, words: list[str], filler: np.ndarray) -> None:
    task = tasks.recall(random.Random(4), words, 2050)
    made = tasks.scatter(random.Random(4), tokenizer, task, filler, 2050)
    assert made is not None
    ids, weights = made
    assert len(ids) == 2050
    stated = sum(len(s.encode(tokenizer)[0]) for s in task.statements)
    assert (weights == tasks.GIVEN).sum() >= stated
    assert tasks.scatter(random.Random(4), tokenizer, task, filler, 300) is None


def test_pieces_are_cut_where_the_tokenizer_cuts(tokenizer: Tokenizer, words: list[str]) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        pieces = dialogues.tool_dialogue(rng, words) if seed % 2 else dialogues.chat_dialogue(rng, words)
        ids, _ = pieces.encode(tokenizer)
        whole = "".join(text for text, _ in pieces.parts)
        assert tokenizer.encode(whole, add_special_tokens=False).ids == ids.tolist()


def test_cut_rows_hold_the_same_text_with_pieces_of_their_own(tokenizer: Tokenizer, filler: np.ndarray) -> None:
    row = filler[:514]
    cut, weights = cut_lines(random.Random(0), tokenizer, row)
    assert len(cut) == len(weights) == 514
    text = decode(tokenizer, cut)
    assert decode(tokenizer, row).startswith(text) or text.startswith(decode(tokenizer, row)[: len(text) - 40])
    newline = tokenizer.token_to_id("Ċ")
    after = np.flatnonzero(cut[:-1] == newline) + 1
    assert len(after) > 5
    assert all(weights[after] == 2)
    assert all(decode(tokenizer, cut[i : i + 1]).isspace() for i in after)


def test_batches_depend_on_seed_and_step_alone(data: Path) -> None:
    first, second = Maker(data, 1, 40, 16384), Maker(data, 1, 40, 16384)
    streamed = [b for b, _ in zip(stream_batches(first, 2, start=17), range(6), strict=False)]
    for step, batch in enumerate(streamed, 17):
        again = second.batch(step)
        assert batch.length == again.length
        assert batch.ids.shape == (16384 // batch.length, batch.length + 2)
        assert np.array_equal(batch.ids, again.ids)
        assert np.array_equal(batch.weights, again.weights)
    assert not np.array_equal(Maker(data, 2, 40, 16384).batch(17).ids[:1, :900], streamed[0].ids[:1, :900])
    assert Maker(data, 1, 10, 16384, POLISH).batch(3).ids.size


def test_short_contexts_come_first(data: Path) -> None:
    maker = Maker(data, 1, 100, 16384)
    assert {maker.batch(s).length for s in range(8)} <= {1024, 2048}
    assert 16384 in {maker.batch(s).length for s in range(60, 90)}


def test_missing_data_and_wrong_sizes_are_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"code_train.xz is missing: run .*prepare"):
        load_stream(tmp_path, "code_train")
    with pytest.raises(ValueError, match="tokens of a batch is 4096, allowed are multiples of the longest row, 16384"):
        Maker(data, 1, 10, 4096)


def test_encoding_pieces_joins_ids_and_weights(tokenizer: Tokenizer) -> None:
    ids, weights = Pieces().add("a = 1\n", 0.0).add("b", 2.0).encode(tokenizer)
    assert ids.tolist() == tokenizer.encode("a = 1\nb", add_special_tokens=False).ids
    assert weights.tolist() == [0.0] * (len(ids) - 1) + [2.0]


def test_a_row_without_a_line_break_has_nothing_to_cut(tokenizer: Tokenizer) -> None:
    row = np.asarray(tokenizer.encode("x = 1 " * 40, add_special_tokens=False).ids, dtype=np.uint16)
    cut, weights = cut_lines(random.Random(0), tokenizer, row)
    assert cut.tolist() == row.tolist()
    assert set(weights.tolist()) == {1.0}
