"""Load generation: what is planned, what is sent and when, and the arithmetic of the report."""

from __future__ import annotations

import asyncio
import json
import statistics
from itertools import islice, pairwise
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid_cli.load.bench import BenchOptions, make_sessions
from katydid_cli.load.choices import Arrivals, Workload
from katydid_cli.load.replay import parse_trace, read_trace
from katydid_cli.load.report import Distribution, Targets, percentile, summarize
from katydid_cli.load.runner import Outcome, run_workload
from katydid_cli.load.workload import (
    Piece,
    Session,
    TokenSource,
    Turn,
    constant_arrivals,
    multi_turn,
    poisson_arrivals,
    random_prompts,
    shared_prefix,
)
from katydid_client import AsyncKatydid, MockTransport
from katydid_runtime.errors import OverloadedError, SettingsError

POOL = range(100, 200)
TRACE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "conversation_trace.jsonl"


def test_equal_pieces_are_equal_tokens():
    source = TokenSource(POOL, seed=1)
    short, long = source.ids([Piece("a", 10)]), source.ids([Piece("a", 20)])
    assert long[:10] == short
    assert set(long) <= set(POOL)
    assert source.ids([Piece("a", 10), Piece("b", 5)])[:10] == short
    assert source.ids([Piece("b", 10)]) != short
    assert TokenSource(POOL, seed=2).ids([Piece("a", 10)]) != short


def test_arrivals_keep_their_rate():
    poisson = list(islice(poisson_arrivals(20.0, seed=3), 4000))
    gaps = [b - a for a, b in pairwise(poisson)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert list(islice(constant_arrivals(4.0), 3)) == [0.0, 0.25, 0.5]


def test_random_prompts_share_nothing_and_shared_ones_their_system_prompt():
    source = TokenSource(range(1000), seed=0)
    alone = [source.ids(s.turns[0].pieces) for s in random_prompts(constant_arrivals(1), 4, 64, 8)]
    assert len({tuple(ids[:8]) for ids in alone}) == 4
    sessions = shared_prefix(constant_arrivals(1), 6, 100, 8, shared_tokens=64, groups=2)
    prompts = [source.ids(s.turns[0].pieces) for s in sessions]
    assert all(len(ids) == 100 for ids in prompts)
    assert len({tuple(ids[:64]) for ids in prompts}) == 2
    assert len({tuple(ids[64:]) for ids in prompts}) == 6


@given(st.integers(1, 40), st.integers(1, 7))
def test_multi_turn_has_the_requests_asked_for(requests, turns):
    sessions = multi_turn(constant_arrivals(1), requests, 10, 5, turns=turns, think_s=2)
    assert sum(len(session.turns) for session in sessions) == requests
    assert all(session.turns[0].think_s == 0 for session in sessions)
    assert all(turn.think_s == 2 for session in sessions for turn in session.turns[1:])


def entry(**fields: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [7, 8, 9]} | fields)


def test_replay_keeps_lengths_times_and_sharing():
    lines = [entry(timestamp=5000), "", entry(timestamp=7000, hash_ids=[7, 8, 10], input_length=1300)]
    first, second = parse_trace(lines, "t", speed=2.0)
    assert (first.start_s, second.start_s) == (0.0, 1.0)
    assert (first.turns[0].input_tokens, second.turns[0].input_tokens) == (1100, 1300)
    assert first.turns[0].output_tokens == 20
    source = TokenSource(range(1000), seed=0)
    a, b = source.ids(first.turns[0].pieces), source.ids(second.turns[0].pieces)
    assert a[:1024] == b[:1024]
    assert a[1024:1100] != b[1024:1100]


def test_replay_scales_and_clips():
    (session,) = parse_trace([entry()], "t", scale=0.25)
    assert session.turns[0].input_tokens == 275
    assert [piece.tokens for piece in session.turns[0].pieces] == [128, 128, 19]
    (session,) = parse_trace([entry()], "t", max_input_tokens=600)
    assert [piece.tokens for piece in session.turns[0].pieces] == [512, 88]
    (session,) = parse_trace([entry(hash_ids=[1], input_length=600)], "t")
    assert [piece.tokens for piece in session.turns[0].pieces] == [512, 88]


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"timestamp": 1}', entry(hash_ids="x"), entry(input_length=None)])
def test_a_line_that_is_no_trace_entry_is_named(line):
    with pytest.raises(SettingsError, match="t:2 is no trace entry"):
        parse_trace([entry(), line], "t")


def test_an_empty_or_missing_trace_is_named(tmp_path):
    with pytest.raises(SettingsError, match="t holds no trace entries"):
        parse_trace([], "t")
    with pytest.raises(SettingsError, match=r"none\.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="it is no text"):
        read_trace(tmp_path / "binary")


@pytest.mark.skipif(not TRACE.exists(), reason="the published trace is not here")
def test_the_published_conversation_trace():
    sessions = read_trace(TRACE)
    assert len(sessions) == 12_031
    assert max(session.start_s for session in sessions) > 3000


class FakeGateway:
    """Answers every prompt with tokens 1, 2, 3 in two events; notes prompts and times."""

    def __init__(self, delay_s: float = 0.0, failing: int | None = None) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.times: list[float] = []
        self.delay_s = delay_s
        self.failing = failing

    async def __call__(self, method, request):
        self.times.append(asyncio.get_running_loop().time())
        ids = request.prompt.token_ids
        self.prompts.append(tuple(int.from_bytes(ids[i : i + 4], "little") for i in range(0, len(ids), 4)))
        if self.failing == len(self.prompts):
            raise OverloadedError("full")
        await asyncio.sleep(self.delay_s)
        return [
            pb.GenerateResponse(token_ids=b"\1\0\0\0"),
            pb.GenerateResponse(
                token_ids=b"\2\0\0\0\3\0\0\0",
                finish_reason=pb.FINISH_REASON_LENGTH,
                usage=pb.Usage(prompt_tokens=len(ids) // 4, completion_tokens=3, cached_tokens=4),
                timing=pb.Timing(ttft=Duration(), tpot=Duration(), engine="e0"),
            ),
        ]


def run(gateway: FakeGateway, sessions: list[Session]) -> list[Outcome]:
    async def body() -> list[Outcome]:
        async with AsyncKatydid(transport=MockTransport(gateway), max_retries=0) as client:
            return await run_workload(client, sessions, TokenSource(POOL, 0))

    return asyncio.run(asyncio.wait_for(body(), 30))


def test_a_slow_server_does_not_slow_the_load_down():
    gateway = FakeGateway(delay_s=0.5)
    sessions = [Session(0.05 * i, (Turn((Piece(str(i), 4),), 3),)) for i in range(6)]
    outcomes = run(gateway, sessions)
    assert gateway.times[-1] - gateway.times[0] == pytest.approx(0.25, abs=0.15)
    assert all(outcome.ttft_s == pytest.approx(0.5, abs=0.2) for outcome in outcomes)
    assert [outcome.due_s for outcome in outcomes] == pytest.approx([0.05 * i for i in range(6)])


def test_each_turn_continues_the_conversation():
    gateway = FakeGateway()
    turns = (Turn((Piece("a", 4),), 3), Turn((Piece("b", 2),), 3, think_s=0.05))
    first, second = run(gateway, [Session(0.0, turns)])
    assert gateway.prompts[1][:4] == gateway.prompts[0]
    assert gateway.prompts[1][4:7] == (1, 2, 3)
    assert (first.prompt_tokens, second.prompt_tokens, second.cached_tokens) == (4, 9, 4)
    assert second.due_s >= first.end_s + 0.05


def test_a_failure_is_an_outcome_and_ends_its_session():
    gateway = FakeGateway(failing=1)
    turns = (Turn((Piece("a", 4),), 3), Turn((Piece("b", 2),), 3))
    (outcome,) = run(gateway, [Session(0.0, turns)])
    assert (outcome.error, outcome.ttft_s, outcome.output_tokens) == ("OVERLOADED", None, 0)


def outcome(ttft_s: float | None = 1.0, end_s: float = 2.0, tokens: int = 11, error: str = "", **fields) -> Outcome:
    defaults = {"due_s": 0.0, "late_s": 0.0, "gaps_s": (0.1,), "prompt_tokens": 100, "cached_tokens": 50}
    return Outcome(**(defaults | fields), ttft_s=ttft_s, end_s=end_s, output_tokens=tokens, error=error)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=60))
def test_percentiles_agree_with_the_standard_library(values):
    ordered = sorted(values)
    expected = statistics.quantiles(ordered, n=100, method="inclusive")
    for q in (50, 90, 95, 99):
        assert percentile(ordered, q) == pytest.approx(expected[q - 1])


def test_report_counts_failures_against_goodput():
    outcomes = [
        outcome(),
        outcome(ttft_s=4.5, end_s=4.6),
        outcome(end_s=3.0),
        outcome(ttft_s=None, end_s=0.1, tokens=0, error="OVERLOADED"),
        outcome(end_s=1.0, tokens=1, due_s=9.0),
    ]
    report = summarize(outcomes, Targets(ttft_s=4.0, tpot_s=0.11))
    assert (report.requests, report.completed, report.errors) == (5, 4, {"OVERLOADED": 1})
    assert report.goodput_share == pytest.approx(2 / 5)
    assert report.duration_s == 10.0
    assert report.requests_per_s == pytest.approx(0.4)
    assert report.output_tokens_per_s == pytest.approx(3.4)
    assert report.cached_share == 0.5
    assert (report.tpot.count, report.ttft.count, report.ttft.largest) == (3, 4, 4.5)
    assert outcomes[0].tpot_s == pytest.approx(0.1)
    json.dumps(report.as_json())
    assert any("failed: 1 OVERLOADED" in text for text in report.lines(Targets()))
    assert report.table().row_count == 4


def test_an_empty_run_reports_zeros():
    report = summarize([], Targets())
    assert (report.requests, report.goodput_share, report.duration_s) == (0, 0.0, 0.0)
    assert report.ttft == Distribution.of([])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (BenchOptions(rate=0), "--rate=0: must be more than 0"),
        (BenchOptions(input_tokens=-1), "--input-tokens=-1"),
        (BenchOptions(workload=Workload.REPLAY), "needs --replay"),
    ],
)
def test_numbers_that_make_no_workload_are_named(options, complaint):
    with pytest.raises(SettingsError, match=complaint):
        make_sessions(options)


@pytest.mark.parametrize("workload", [Workload.RANDOM, Workload.SHARED_PREFIX, Workload.MULTI_TURN])
def test_workloads_by_name(workload):
    options = BenchOptions(workload=workload, arrivals=Arrivals.CONSTANT, rate=2, requests=8)
    assert sum(len(session.turns) for session in make_sessions(options)) == 8
