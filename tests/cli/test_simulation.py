"""The routing simulator: its engine against sums done by hand, its caches against a plain model, its policies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_cli.simulation.command import SimulateOptions, simulate
from katydid_cli.simulation.engine_model import EngineModel, EngineSpeeds, Job, PrefixCache
from katydid_cli.simulation.policies import POLICIES
from katydid_cli.simulation.replay import replay
from katydid_cli.simulation.trace import Arrival, agent_traffic, read_trace
from katydid_runtime.errors import SettingsError

SPEEDS = EngineSpeeds(prefill_tokens_per_s=1000, step_s=0.01, step_per_request_s=0.001, budget_tokens=128)


def chain(*names: str) -> tuple[bytes, ...]:
    return tuple(name.encode() for name in names)


def test_one_request_takes_what_the_formula_says() -> None:
    engine = EngineModel("e", SPEEDS)
    job = Job(Arrival(0.0, chain("a", "b", "c"), 200, 3))
    engine.submit(job)
    engine.drain()
    # Two steps of prompt, 128 and 72 tokens; then two steps of one running request.
    assert job.first_token_at == pytest.approx(0.01 + 0.128 + 0.01 + 0.072)
    assert job.ended_at == pytest.approx(0.22 + 2 * 0.011)


def test_a_prefix_is_computed_once_even_by_one_who_waits_for_it() -> None:
    engine = EngineModel("e", SPEEDS)
    first, sibling = (Job(Arrival(0.0, chain("a", "b", "c", "d"), 256, 1)) for _ in range(2))
    engine.submit(first)
    engine.submit(sibling)
    engine.drain()
    assert (first.cached_tokens, sibling.cached_tokens) == (0, 255)


def test_long_stretches_are_what_single_steps_are() -> None:
    jobs: list[list[Job]] = []
    for stride in (0.001, 100.0):
        engine = EngineModel("e", SPEEDS)
        own = [Job(Arrival(0.0, chain(f"{n}"), 64 + n, 5 + 7 * n)) for n in range(4)]
        for job in own:
            engine.submit(job)
        at = 0.0
        while engine.requests:
            at += stride
            engine.advance(at)
        jobs.append(own)
    for fine, coarse in zip(*jobs, strict=True):
        assert fine.ended_at == pytest.approx(coarse.ended_at)


@given(st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True), max_size=20))
def test_the_cache_keeps_the_newest_and_prefixes_longest(prompts: Sequence[Sequence[str]]) -> None:
    cache, plain = PrefixCache(4), []
    for prompt in prompts:
        blocks = chain(*prompt)
        cache.put(blocks)
        for block in reversed(blocks):
            plain = [other for other in plain if other != block] + [block]
        plain = plain[-4:]
        held = {block for block in chain(*"abcdef") if cache.depth([block])}
        assert held == set(plain)


def test_a_trace_in_larger_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    records = [
        {"timestamp": 2000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 0, "input_length": 1024, "output_length": 0, "hash_ids": [1, 7]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    first, second = read_trace(path, rate_scale=2.0)
    assert (first.at, second.at, first.output_tokens) == (0.0, 1.0, 1)
    assert (len(first.chain), len(second.chain)) == (16, 17)
    assert first.chain[:8] == second.chain[:8]
    assert first.chain[8] != second.chain[8]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{\n", "trace.jsonl:1 is no trace entry"),
        (b'{"timestamp": 1}\n', "trace.jsonl:1 is no trace entry: it has no 'input_length'"),
        (b'{"timestamp": Infinity, "input_length": 9, "output_length": 1, "hash_ids": [1]}', "its timestamp is inf"),
        (b'{"timestamp": 1, "input_length": Infinity}', "trace.jsonl:1 is no trace entry: cannot convert"),
        (b'{"timestamp": 0, "input_length": 1e12, "output_length": 1, "hash_ids": [1]}', "input_length is 10000"),
        (b"[" * 100_000, "trace.jsonl:1 is no trace entry"),
        (
            b'{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": [1]}\n',
            "trace.jsonl:1: input_length is 0",
        ),
        (b"", "trace.jsonl holds no trace entries"),
        (b"\xff\xfe", "cannot read trace .*trace.jsonl: it is no text"),
        (None, "cannot read trace .*trace.jsonl: No such file"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=said):
        simulate(SimulateOptions(path, 0, 1, 1, 2, SPEEDS, ("katydid",), 4, 0, None))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered(policy: str) -> None:
    arrivals = agent_traffic(requests=120, sessions_per_s=2, seed=3)
    speeds = EngineSpeeds(prefill_tokens_per_s=60_000, budget_tokens=8192)
    outcome = replay(policy, arrivals, 3, speeds)
    assert outcome.requests == 120
    assert 0 < outcome.p50_ttft_s <= outcome.p99_ttft_s
    assert 0 < outcome.hit_rate < 1
    assert replay(policy, arrivals, 3, speeds) == outcome, "a replay is repeatable"


def test_a_capture_counts_from_the_epoch() -> None:
    """A gateway's own clock: seconds so large that a nanosecond more is the same number."""
    arrivals = [Arrival(1.8e9 + second, (bytes(32),), 100, 4) for second in range(3)]
    outcome = replay("katydid", arrivals, 2, EngineSpeeds())
    assert outcome.requests == 3
    assert outcome.busy < 1


def test_agents_gain_most_from_the_router() -> None:
    arrivals = agent_traffic(requests=400, sessions_per_s=1.5, seed=1)
    speeds = EngineSpeeds(60_000, 0.008, 0.0001, 8192, 1_000_000)
    found = {policy: replay(policy, arrivals, 8, speeds) for policy in POLICIES}
    others = [found[name].mean_ttft_s for name in ("cache-aware", "power-of-two", "round-robin")]
    assert found["katydid"].mean_ttft_s < min(others)
    assert found["katydid"].mean_ttft_s < found["oracle"].mean_ttft_s / 0.8


def test_the_table_and_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.json"
    options = SimulateOptions(None, 60, 2, 1, 2, EngineSpeeds(60_000), ("katydid", "oracle"), 4, 0, output)
    simulate(options)
    assert [row["policy"] for row in json.loads(output.read_text())] == ["katydid", "oracle"]
    assert "katydid" in capsys.readouterr().out
    with pytest.raises(SettingsError, match="there is no policy 'best'"):
        simulate(SimulateOptions(None, 60, 2, 1, 2, SPEEDS, ("best",), 4, 0, None))
