"""Engine and gateway figures under vLLM's names."""

from __future__ import annotations

from katydid_engine.engine_metrics import EngineMetrics
from katydid_engine.vllm_names import VllmNames
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.vllm_names import VLLM_NAMES
from katydid_runtime.metric_aliases import MetricAliases


def test_an_engine_under_vllms_names() -> None:
    metrics = EngineMetrics()
    registry = metrics.metrics.registry
    registry.register(VllmNames(registry, "hy3"))
    metrics.running.labels("0").set(3)
    metrics.waiting.labels("0").set(2)
    metrics.free_pages.labels("0").set(25)
    metrics.total_pages.labels("0").set(100)
    metrics.finished.labels("stop").inc(7)
    metrics.prompt.observe(1000)
    metrics.prompt.observe(3000)
    metrics.cached.labels("device").inc(500)
    metrics.cached.labels("disk").inc(100)
    metrics.phase.labels("engine.queue", "").observe(0.3)
    metrics.phase.labels("kvcache.fetch", "disk").observe(9)
    lines = metrics.metrics.render()[0].decode().splitlines()
    assert 'vllm:num_requests_running{engine="0",model_name="hy3"} 3.0' in lines
    assert 'vllm:num_requests_waiting{engine="0",model_name="hy3"} 2.0' in lines
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="hy3"} 0.75' in lines
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="hy3"} 7.0' in lines
    assert 'vllm:prompt_tokens_total{engine="0",model_name="hy3"} 4000.0' in lines
    assert 'vllm:prefix_cache_queries_total{engine="0",model_name="hy3"} 4000.0' in lines
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="hy3"} 600.0' in lines
    assert 'vllm:request_queue_time_seconds_count{engine="0",model_name="hy3"} 1.0' in lines
    assert 'vllm:request_queue_time_seconds_sum{engine="0",model_name="hy3"} 0.3' in lines
    assert 'vllm:cache_config_info{block_size="64",engine="0",model_name="hy3",num_gpu_blocks="100"} 1.0' in lines
    assert "katydid_engine_running_choices" in "".join(lines), "ours stay"


def test_a_gateway_under_vllms_names() -> None:
    metrics = GatewayMetrics()
    metrics.registry.register(MetricAliases(metrics.registry, VLLM_NAMES, {"model_name": "hy3"}))
    metrics.answered(1.2, 0.02, 40, "", well=True)
    lines = metrics.render()[0].decode().splitlines()
    assert 'vllm:time_to_first_token_seconds_bucket{le="1.5",model_name="hy3"} 1.0' in lines
    assert 'vllm:request_time_per_output_token_seconds_sum{model_name="hy3"} 0.02' in lines
