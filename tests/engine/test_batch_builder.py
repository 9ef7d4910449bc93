"""The batch of a step equals the one packed from plain lists, whatever came before."""

from __future__ import annotations

from array import array
from dataclasses import fields

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_engine.batch_builder import BatchBuilder
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.plan import Run


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_equals_a_batch_packed_from_lists(data: st.DataObject) -> None:
    """Sequences come, grow by chunks and decodes, have pages swapped, and go; tables are sent as deltas alone."""
    builder = BatchBuilder(torch.device("cpu"))
    tables: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    next_id, next_page = 0, 1
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(0 if tables else 1, 9))):
            builder.start(next_id)
            tables[next_id], lengths[next_id] = [], 0
            next_id += 1
        chosen = data.draw(st.lists(st.sampled_from(sorted(tables)), min_size=1, unique=True))
        decodes = data.draw(st.integers(0, len(chosen)))
        runs, packed = [], []
        for index, sequence in enumerate(chosen):
            count = 1 if index < decodes else data.draw(st.sampled_from([1, 3, 63, 64, 65, 700]))
            start, table = lengths[sequence], tables[sequence]
            known = len(table)
            if known and data.draw(st.booleans()):
                known = data.draw(st.integers(0, known - 1))
                table[known] = next_page
                next_page += 1
            while len(table) * 64 < start + count:
                table.append(next_page)
                next_page += 1
            tokens = array("I", range(sequence, sequence + count))
            writes = data.draw(st.booleans())
            runs.append(Run(sequence, start, tokens, known, array("I", table[known:]), writes=writes))
            packed.append(TokenRun(tokens, start, list(table)))
            lengths[sequence] += count
        got = builder.build(runs, decodes)
        want = ForwardBatch.pack(packed, num_decodes=decodes)
        for run, end in zip(runs, want.cu_q_lens[1:].tolist(), strict=True):
            if not run.writes:
                want.slot_mapping[end - len(run.tokens) : end] = -1
        compare(got.forward, want)
        for sequence in data.draw(st.lists(st.sampled_from(sorted(tables)), unique=True, max_size=3)):
            builder.end(sequence)
            del tables[sequence], lengths[sequence]


def compare(got: ForwardBatch, want: ForwardBatch) -> None:
    for field in fields(ForwardBatch):
        value, expected = getattr(got, field.name), getattr(want, field.name)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(value, expected), field.name
            assert value.dtype == expected.dtype
            assert value.data_ptr() % 16 == got.token_ids.data_ptr() % 16
        else:
            assert value == expected
