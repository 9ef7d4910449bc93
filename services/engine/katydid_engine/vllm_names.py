"""The engine's figures once more under vLLM's names, for dashboards, autoscalers and endpoint pickers that read those.

Off unless asked for: a second set of series costs memory, and `:` in a name is against Prometheus' own rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from katydid_runtime.block_hash import BLOCK_TOKENS
from katydid_runtime.metric_aliases import MetricAlias, MetricAliases

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

__all__ = ["VllmNames"]

_RANK = {"dp_rank": "engine"}
_PHASE = {"phase": "", "tier": ""}
_ALIASES = (
    MetricAlias("vllm:num_requests_running", "katydid_engine_running_choices", renamed=_RANK),
    MetricAlias("vllm:num_requests_waiting", "katydid_engine_waiting_choices", renamed=_RANK),
    MetricAlias("vllm:num_preemptions", "katydid_engine_request_preemptions"),
    MetricAlias("vllm:generation_tokens", "katydid_engine_output_tokens", renamed=_RANK),
    MetricAlias("vllm:request_success", "katydid_engine_finished_choices", renamed={"reason": "finished_reason"}),
    MetricAlias("vllm:request_prompt_tokens", "katydid_engine_prompt_tokens"),
    *(
        MetricAlias(
            f"vllm:request_{phase}_time_seconds", "katydid_engine_phase_seconds", {"phase": f"engine.{phase}"}, _PHASE
        )
        for phase in ("queue", "prefill", "decode")
    ),
)
_LABELS = ("engine", "model_name")


class VllmNames(MetricAliases):
    """Aliases, and what vLLM has as one figure and we as several."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        super().__init__(registry, _ALIASES, {"engine": "0", "model_name": model})
        self._model = model

    def made_of(self, sources: Mapping[str, Metric]) -> Iterator[Metric]:
        """The aliases, and sums and quotients."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        yield from super().made_of(sources)
        free = {sample.labels["dp_rank"]: sample.value for sample in sources["katydid_engine_free_pages"].samples}
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV pages that choices hold", labels=_LABELS)
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "Size of the KV cache", labels=[*_LABELS, "block_size", "num_gpu_blocks"]
        )
        for sample in sources["katydid_engine_total_pages"].samples:
            rank, pages = sample.labels["dp_rank"], sample.value
            usage.add_metric([rank, self._model], 1 - free[rank] / pages if pages else 0.0)
            config.add_metric([rank, self._model, str(BLOCK_TOKENS), f"{pages:.0f}"], 1)
        yield usage
        yield config
        prompts = _sum(sources["katydid_engine_prompt_tokens"], "_sum")
        hits = _sum(sources["katydid_engine_cached_tokens"], "_total")
        for name, tokens in (
            ("prompt_tokens", prompts),
            ("prefix_cache_queries", prompts),
            ("prefix_cache_hits", hits),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", "Tokens of prompts, or of them found", labels=_LABELS)
            counter.add_metric(["0", self._model], tokens)
            yield counter


def _sum(metric: Metric, suffix: str) -> float:
    return sum(sample.value for sample in metric.samples if sample.name.endswith(suffix))
