"""The planner against sums done by hand, what must hold of any model of time, and the figures it was made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from katydid_engine.parallel import ParallelPlan, Role
from katydid_engine.planning.choose import Target, candidates, choose, predict
from katydid_engine.planning.known_models import KNOWN_MODELS
from katydid_engine.planning.measured import measured
from katydid_engine.planning.memory import check_memory, rank_memory
from katydid_engine.planning.phases import Phases
from katydid_engine.planning.pool import Pool, read_pool
from katydid_runtime.errors import SettingsError

HY3 = KNOWN_MODELS["hy3"]
H200 = measured("h200")
GB = 10**9
RESULTS = Path(__file__).parents[3] / "bench" / "results"


def test_hy3s_weights_are_all_there() -> None:
    """295.0e9 parameters, in fp8 but for embedding and head; of a single rank."""
    memory = rank_memory(HY3, ParallelPlan(), memory_bytes=10**12)
    plain = HY3.vocab_size * HY3.hidden_size * 2
    assert memory.weights - plain == pytest.approx(295.0e9, rel=0.002)
    assert memory.expert_weights == 79 * 192 * 3 * 4096 * 1536
    assert memory.page_bytes_per_token == 80 * 2 * 8 * 128


@pytest.mark.parametrize(
    ("plan", "experts", "page"),
    [
        ("tp8", 79 * 192 * 3 * 4096 * 192, 80 * 2 * 128),
        ("tp16", 79 * 192 * 3 * 4096 * 96, 80 * 2 * 128),  # a KV head is held twice
        ("tp8,sp,ep8", 79 * 24 * 3 * 4096 * 1536, 80 * 2 * 128),
        ("dp8,ep8", 79 * 24 * 3 * 4096 * 1536, 80 * 2 * 1024),
        ("dp8,ep8+32", 79 * 28 * 3 * 4096 * 1536, 80 * 2 * 1024),
        ("tp8,pp2", 40 * 192 * 3 * 4096 * 192, 40 * 2 * 128),
    ],
)
def test_what_a_rank_holds(plan: str, experts: int, page: int) -> None:
    memory = rank_memory(HY3, ParallelPlan.parse(plan), memory_bytes=141 * GB)
    assert (memory.expert_weights, memory.page_bytes_per_token) == (experts, page)
    assert memory.tokens == (int(141 * GB * 0.92) - memory.weights - (6 << 30)) // page


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded() -> None:
    check_memory(HY3, ParallelPlan(tp=8), free_bytes=40 * GB, weight_bytes=1.0)
    check_memory(HY3, ParallelPlan(tp=8), free_bytes=20 * GB, weight_bytes=0.5)
    with pytest.raises(SettingsError, match=r"plan tp8: a rank's weights take 37\.0 GB, 36\.0 GB of its GPU are free"):
        check_memory(HY3, ParallelPlan(tp=8), free_bytes=36 * GB, weight_bytes=1.0)


def phases(plan: str) -> Phases:
    return Phases(HY3, ParallelPlan.parse(plan), H200)


def test_bytes_sent_by_hand() -> None:
    """32768 tokens over 8 ranks: each gathers 7/8 of the rows and scatters 7/8 of its sums, 4096 columns of bf16."""
    rows = 32768 * 7 / 8
    assert phases("tp8,sp").sent_bytes(32768) == pytest.approx(4 * rows * 8192)
    assert phases("tp8,sp,fp8").sent_bytes(32768) == pytest.approx(4 * rows * 4100)
    # All-reduces of two shots move as much twice.
    assert phases("tp8").sent_bytes(32768) == pytest.approx(2 * 2 * rows * 8192)


def test_bytes_of_steps_by_hand() -> None:
    """A rank's 11 rows take room for 12 on the way to each other; many are sent to the ranks that they need alone."""
    assert phases("dp32,ep32").sent_bytes(11) == pytest.approx(12 * 31 * (4164 + 8192))
    assert phases("dp32,ep32").sent_bytes(1024) == pytest.approx(
        1024 * 31 * (1 - (31 / 32) ** 8) * (4164 + 8192), rel=1e-3
    )


@pytest.mark.parametrize("plan", ["tp8", "tp8,sp,fp8", "tp8,sp,ep8", "dp8,ep8", "dp32,ep32"])
def test_more_work_takes_longer(plan: str) -> None:
    model = phases(plan)
    steps = [model.decode(requests, 8192).total for requests in (1, 4, 16, 64, 256)]
    prompts = [model.prefill(tokens).total for tokens in (1024, 8192, 65536)]
    assert steps == sorted(steps)
    assert prompts == sorted(prompts)
    assert model.decode(16, 65536).total > model.decode(16, 1024).total
    time = model.prefill(8192)
    assert time.total == pytest.approx(time.computing + time.exposed)


def test_two_micro_batches_pay_where_sending_is_long_and_read_weights_twice() -> None:
    plan = ParallelPlan.parse("dp32,ep32")
    quick, slow = (replace(H200, figures={**H200.figures, "network_s": seconds}) for seconds in (0.0, 2e-3))
    one, two = Phases(HY3, plan, quick).decode(16, 8192), Phases(HY3, plan, slow).decode(64, 8192)
    assert (one.micro_batches, two.micro_batches) == (1, 2)
    assert one.exposed == one.sending
    assert two.exposed == pytest.approx((1 - H200["overlapped"]) * two.sending)
    assert two.experts > 1.5 * one.experts
    assert Phases(HY3, plan, slow).decode(1, 8192).micro_batches == 1


def test_experts_are_as_measured() -> None:
    rows = {row["figure"]: row for row in json.loads((RESULTS / "slice.json").read_text())["rows"]}
    for batch in (16, 64):
        row = rows[f"tp8 rank 0, fp8, fp8 KV: decode of {batch} at 4096"]
        measured_s = row["phases"]["experts"] / sum(HY3.sparse_layers)
        assert H200.sliced_experts_s(8, batch) == pytest.approx(measured_s, rel=1e-3)


def test_between_measured_steps_it_is_how_many_experts_are_read() -> None:
    """16 tokens choose 94.8 of 192 on average, 32 of them 142.8, 64 then 179.4; of thousands all are."""
    few, many = (H200.sliced_experts_s(8, tokens) for tokens in (16, 64))
    share = (142.8 - 94.8) / (179.4 - 94.8)
    assert H200.sliced_experts_s(8, 32) == pytest.approx(few + share * (many - few), rel=1e-3)
    prompts = [H200.sliced_experts_s(8, tokens) for tokens in (8192, 16384, 32768)]
    assert prompts[1] == pytest.approx((prompts[0] * prompts[2]) ** 0.5)


@pytest.mark.parametrize(("tokens", "microseconds"), [(64, 119.62), (128, 127.6), (1024, 305.98)])
def test_whole_experts_are_near_what_their_benchmark_measured(tokens: int, microseconds: float) -> None:
    """Rows that no constant was taken from: 8 ranks with so many tokens each, a row a token on each. In a step the plan
    of their order comes before them."""
    time = phases("dp8,ep8").decode(tokens, 1).experts / HY3.num_layers
    assert time == pytest.approx(microseconds * 1e-6, rel=0.15)


def test_every_figure_has_a_source() -> None:
    text = Path(__file__).parents[3] / "services/engine/katydid_engine/planning/h200.json"
    data = json.loads(text.read_text())
    for group in ("speeds", "constants", "links"):
        assert all(len(entry["source"]) > 5 for entry in data[group].values())
    assert set(H200.assumed) == {"network_bytes_per_s", "network_s"}
    with pytest.raises(SettingsError, match="there are speeds of h200"):
        measured("h20")


def test_a_choice_meets_its_target() -> None:
    pool, target = Pool(max_gpus=32, memory_bytes=96 * GB), Target(32768, 4.0, 0.05)
    predictions = [predict(HY3, plan, pool, H200, target) for plan in candidates(HY3, pool)]
    choice = choose(predictions, target)
    assert choice.prefill is not None
    assert choice.decode is not None
    assert choice.prefill.ttft_s <= 4.0
    assert choice.decode.tpot_s <= 0.05
    assert (choice.prefill.plan.role, choice.decode.plan.role) == (Role.PREFILL, Role.DECODE)
    assert choice.decode.tokens_per_gpu_s == max(one.tokens_per_gpu_s for one in predictions)
    assert len(choice.why) == 3
    # One GPU does not hold the model, and it is said.
    alone = next(one for one in predictions if one.plan == ParallelPlan())
    assert "its pages hold 0 tokens" in alone.reason
    strict = choose(
        [predict(HY3, plan, pool, H200, replace(target, ttft_s=0.01)) for plan in candidates(HY3, pool)],
        replace(target, ttft_s=0.01),
    )
    assert strict.prefill is None
    assert "none meets 0.01 s" in strict.why[0]


def test_a_pool(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text("gpu: h200\ngpus: {min: 8, max: 32}\nmemory: 96GB\nnetwork: 400Gbps\n")
    assert read_pool(path) == Pool("h200", 8, 32, 96 * GB, 5e10, 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu: h20", "gpu='h20'"),
        ("cpus: 3", "cpus=3, expected one of"),
        ("gpus: {min: 9, max: 8}", "gpus.min=9"),
        ("gpus: {min: 0}", "min=0"),
        ("gpus: 8", "gpus=8"),
        ("memory: much", "memory='much', expected a size"),
        ("memory: 0.0GB", "memory='0.0GB', expected a size"),
        (f"memory: {'9' * 400}GB", "expected a size"),
        ("network: fast", "network='fast', expected a rate"),
        ("network: 0Gbps", "network='0Gbps', expected a rate"),
        ("gpu: \udcff", "is no YAML"),
        ("a: " + "[" * 3000, "is no YAML"),
        ("- 1", "a mapping"),
        ("a: [", "is no YAML"),
    ],
)
def test_wrong_pools_are_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(SettingsError, match=said.replace("[", "\\[")):
        read_pool(path)
    with pytest.raises(SettingsError, match="cannot read"):
        read_pool(tmp_path / "absent.yaml")
