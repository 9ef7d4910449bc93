"""The plan ring: records arrive whole and in order, whatever their sizes and however slow a reader is."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_engine.plan_ring import PlanReader, PlanWriter, RingBroken, ring_bytes

CAPACITY = 256


@contextmanager
def ring(readers: int, *, patience_s: float = 5.0) -> Iterator[tuple[PlanWriter, list[PlanReader]]]:
    memory = os.memfd_create("test")
    os.ftruncate(memory, ring_bytes(readers, CAPACITY))
    bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(readers)]
    try:
        yield (
            PlanWriter(memory, bells, patience_s=patience_s),
            [PlanReader(memory, index, readers, bell) for index, bell in enumerate(bells)],
        )
    finally:
        for descriptor in (memory, *bells):
            os.close(descriptor)


@settings(max_examples=60, deadline=None)
@given(records=st.lists(st.binary(max_size=CAPACITY - 8), min_size=1, max_size=30), readers=st.integers(1, 3))
def test_records_arrive_whole_and_in_order(records: list[bytes], readers: int) -> None:
    with ring(readers) as (writer, ends):
        got: list[list[bytes]] = [[] for _ in ends]

        def read(index: int) -> None:
            while len(got[index]) < len(records):
                record = ends[index].read(5.0)
                assert record is not None
                got[index].append(record)

        threads = [threading.Thread(target=read, args=(index,)) for index in range(readers)]
        for thread in threads:
            thread.start()
        for record in records:
            writer.write(record)
        for thread in threads:
            thread.join(10)
        assert got == [records] * readers


def test_waiting_ends_with_its_time_or_with_the_other_descriptor() -> None:
    with ring(1) as (_, (reader,)):
        assert reader.read(0.05) is None
        there, here = os.pipe()
        os.close(here)
        started = time.monotonic()
        assert reader.read(60.0, also=there) is None
        assert time.monotonic() - started < 30
        os.close(there)


def test_a_record_wins_over_the_other_descriptor() -> None:
    with ring(1) as (writer, (reader,)):
        writer.write(b"plan")
        there, here = os.pipe()
        os.close(here)
        assert reader.read(5.0, also=there) == b"plan"
        os.close(there)


def test_a_reader_that_stops_is_noticed() -> None:
    with ring(1, patience_s=0.05) as (writer, _):
        writer.write(b"x" * 200)
        with pytest.raises(RingBroken, match=r"0\.05 s"):
            writer.write(b"x" * 200)


def test_a_record_larger_than_the_ring_is_refused() -> None:
    with ring(1) as (writer, _), pytest.raises(ValueError, match="257 bytes"):
        writer.write(b"x" * 257)
