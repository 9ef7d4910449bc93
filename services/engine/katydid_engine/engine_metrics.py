"""What an engine tells Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from katydid_runtime.metrics import STEP_SECONDS, TOKENS, TTFT_SECONDS, Metrics

from katydid_engine.messages import ExpertBalance

__all__ = ["EngineMetrics"]


class EngineMetrics:
    """The metrics of one engine process; see each help text."""

    def __init__(self) -> None:
        self.metrics = metrics = Metrics("engine")
        rank = ("dp_rank",)
        self.running = metrics.gauge("running_choices", "Choices being computed or loaded", rank)
        self.waiting = metrics.gauge(
            "waiting_choices", "Choices not yet admitted; before its first token a request is one", rank
        )
        self.in_flight = metrics.gauge("in_flight_requests", "Requests accepted and not ended")
        self.free_pages = metrics.gauge("free_pages", "KV pages that can be given out", rank)
        self.total_pages = metrics.gauge("total_pages", "KV pages in all", rank)
        self.step = metrics.histogram("step_seconds", "Time of a step", rank, bounds=STEP_SECONDS)
        self.computed = metrics.counter("computed_tokens", "Tokens computed in steps, prompt and output", rank)
        self.output = metrics.counter("output_tokens", "Tokens sampled", rank)
        self.drafted = metrics.counter("draft_tokens", "Draft tokens verified", rank)
        self.accepted = metrics.counter("accepted_draft_tokens", "Draft tokens that were the model's own", rank)
        self.prompt = metrics.histogram("prompt_tokens", "Prompt tokens of a request", bounds=TOKENS)
        self.cached = metrics.counter("cached_tokens", "Prompt tokens found in a cache, by tier", ("tier",))
        self.phase = metrics.histogram(
            "phase_seconds", "Time of a request in a phase", ("phase", "tier"), bounds=TTFT_SECONDS
        )
        self.finished = metrics.counter("finished_choices", "Choices ended, by reason", ("reason",))
        self.refused = metrics.counter("refused_requests", "Requests refused, by error reason", ("reason",))
        self.grammar = metrics.histogram(
            "grammar_check_seconds", "Time from a request with a grammar to the verdict on it", bounds=STEP_SECONDS
        )
        self.preemptions = metrics.counter("request_preemptions", "Times a choice gave its pages to others")
        self.kv_stored = metrics.counter(
            "kvcache_stored_blocks", "Blocks offered to the cache service, by outcome", ("outcome",)
        )
        self.kv_advised = metrics.counter(
            "kvcache_advised_tokens",
            "Tokens found in the cache service: worth fetching, or cheaper to compute",
            ("what",),
        )
        self.kv_saved = metrics.counter(
            "kvcache_saved_seconds", "Prefill time that fetched blocks saved, net of fetching"
        )
        self.kv_corrupt = metrics.counter(
            "kvcache_corrupt_blocks", "Blocks of the cache service that were wrong when they were unpacked"
        )
        self.silence = metrics.gauge("silence_seconds", "Time since the step loop was last heard of", rank)
        self.expert_placement = metrics.gauge(
            "expert_placement_timestamp_seconds", "Unix time at which redundant experts were placed last", rank
        )
        self.expert_imbalance = metrics.gauge(
            "expert_imbalance_ratio", "Load of the busiest rank's experts over the mean, averaged over layers", rank
        )
        self.expert_progress = metrics.gauge(
            "expert_rebalanced_ratio", "Share of layers that the rebalancing under way has come to; 1 without one", rank
        )
        self.expert_rebalancings = metrics.gauge(
            "expert_rebalancings", "Rebalancings of experts since the start, by outcome", ("dp_rank", "outcome")
        )
        self.start = metrics.gauge("start_seconds", "Time that a worker's start took, by phase", ("dp_rank", "phase"))
        self.kv_attached = metrics.gauge("attached_caches", "1 while the cache service can be asked")

    def note_start(self, dp_rank: int, seconds: Mapping[str, float]) -> None:
        for phase, took in seconds.items():
            self.start.labels(str(dp_rank), phase).set(took)

    def note_balance(self, dp_rank: int, balance: ExpertBalance) -> None:
        rank = str(dp_rank)
        self.expert_imbalance.labels(rank).set(balance.imbalance)
        self.expert_progress.labels(rank).set(balance.layers_moved / balance.layers)
        self.expert_rebalancings.labels(rank, "finished").set(balance.finished)
        self.expert_rebalancings.labels(rank, "abandoned").set(balance.abandoned)
        if balance.placed_at is not None:
            self.expert_placement.labels(rank).set(balance.placed_at)
