"""The gateway's latencies once more under vLLM's names: here they are what a client felt, of all engines together."""

from __future__ import annotations

from katydid_runtime.metric_aliases import MetricAlias

__all__ = ["VLLM_NAMES"]

VLLM_NAMES = (
    MetricAlias("vllm:time_to_first_token_seconds", "katydid_gateway_ttft_seconds"),
    MetricAlias("vllm:request_time_per_output_token_seconds", "katydid_gateway_tpot_seconds"),
    MetricAlias("vllm:inter_token_latency_seconds", "katydid_gateway_tpot_seconds"),
)
