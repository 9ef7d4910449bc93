"""Time of a decode step and of a prompt under a plan, phase by phase, from measured speeds and the model of links.

Computing and sending are kept apart. Nothing that is sent is hidden, unless steps of decodes go in two micro-batches:
they read every weight twice for it, and are taken where that is shorter. The shared expert that is computed while rows
go out hides about what waiting for them costs. fp8 weights, activations and pages; even routing; no draft tokens, no
prefix found in a cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from katydid_engine.fixed_room import fixed_room
from katydid_engine.model_config import ModelConfig
from katydid_engine.parallel import ParallelPlan
from katydid_engine.planning.measured import Measured

__all__ = ["PhaseTime", "Phases"]

_FP8_ROW_SCALE = 4
_BESIDE_A_ROW = 8
# Up to so many, a row adds to what a launch takes although reading weights takes longest.
_FEW_ROWS = 128


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds of one pass: computing by part, all that is sent, and what of that is not hidden."""

    attention: float
    linear: float
    experts: float
    rows: float
    head: float
    sending: float
    exposed: float
    micro_batches: int = 1

    @property
    def computing(self) -> float:
        return self.attention + self.linear + self.experts + self.rows + self.head

    @property
    def total(self) -> float:
        return self.computing + self.exposed


class Phases:
    """Of one model under one plan."""

    def __init__(self, config: ModelConfig, plan: ParallelPlan, speeds: Measured) -> None:
        self._config = config
        self._plan = plan
        self._speeds = speeds

    def decode(self, requests: int, context: int) -> PhaseTime:
        """A step with ``requests`` of a DP group, each with ``context`` tokens behind it; in one micro-batch or two."""
        whole = self._step(requests, context)
        if not self._plan.shares_experts or requests < 2:
            return whole
        halves = self._in_turns(self._step(-(-requests // 2), context), whole.head)
        return min(whole, halves, key=lambda time: time.total)

    def _in_turns(self, half: PhaseTime, head: float) -> PhaseTime:
        """Two micro-batches: one computes while the other's rows travel. Head and sampling see both."""
        hidden = self._speeds["overlapped"]
        return PhaseTime(
            2 * half.attention,
            2 * half.linear,
            2 * half.experts,
            2 * half.rows,
            head,
            2 * half.sending,
            2 * half.sending * (1 - hidden),
            2,
        )

    def _step(self, requests: int, context: int) -> PhaseTime:
        config, plan, speeds = self._config, self._plan, self._speeds
        kv = plan.kv_heads(config.num_kv_heads) * config.head_dim
        read = speeds["copy_bytes_per_s"] * speeds["attention_share_of_copy"]
        attention = speeds["attention_s"] + requests * context * 2 * kv / read
        return self._pass(attention, speeds.element_wise_s(requests), requests, requests)

    def prefill(self, tokens: int, context: int = 0) -> PhaseTime:
        """A prompt's ``tokens`` new tokens behind ``context`` others, by one DP group."""
        config, plan, speeds = self._config, self._plan, self._speeds
        heads = config.num_heads // plan.tp
        flop = 4 * heads * config.head_dim * tokens * (context + tokens / 2)
        attention = speeds["attention_s"] + flop / speeds["attention_flop_per_s"]
        return self._pass(attention, self._prefill_rows(tokens) + self._qkv_post(tokens), tokens, 1)

    def prefill_rows(self, tokens: int) -> float:
        """Norms, quantisation and router of a whole prompt, all layers, seconds."""
        return self._prefill_rows(tokens) * self._config.num_layers

    def sent_bytes(self, tokens: int) -> float:
        """Bytes that a rank sends to others in one sparse layer for ``tokens`` of its DP group."""
        return sum(size for size, _ in self._sendings(tokens))

    def _prefill_rows(self, tokens: int) -> float:
        """Norms with quantisation, and the router: what a split residual splits."""
        config, plan, speeds = self._config, self._plan, self._speeds
        own = tokens / (plan.tp if plan.sp else 1)
        # Two norms: two rows in, the residual and a quantised row out.
        norms = 2 * own * config.hidden_size * 7 / self._through
        return speeds["norm_s"] + speeds["norm_router_s"] + norms + own * speeds["router_s_per_token"]

    def _exchanged(self, tokens: float) -> float:
        """What this rank moves in its own memory to send rows and to sum what arrives, of one layer."""
        config, plan, speeds = self._config, self._plan, self._speeds
        seconds = 0.0
        if plan.sp:
            # A summand in, its rows out and in again quantised or not, and the sum's rows out to all.
            row = config.hidden_size * (5 if plan.fp8_transfers else 8)
            seconds += 2 * tokens * row / (speeds["copy_bytes_per_s"] * speeds["exchange_share_of_copy"])
        if config.moe is not None and plan.dispatches and (plan.shares_experts or not plan.sp):
            seconds += speeds["dispatch_s"] + min(tokens / plan.tp, _FEW_ROWS) * speeds["dispatch_s_per_row"]
        return seconds

    def _qkv_post(self, tokens: int) -> float:
        """Cut by heads in every plan."""
        config, plan = self._config, self._plan
        columns = (config.num_heads // plan.tp + 2 * plan.kv_heads(config.num_kv_heads)) * config.head_dim
        return self._speeds["qkv_post_s"] + tokens * columns * 3 / self._through

    @property
    def _through(self) -> float:
        return self._speeds["copy_bytes_per_s"] * self._speeds["rows_share_of_copy"]

    def _pass(self, attention: float, rows: float, tokens: float, sampled: float) -> PhaseTime:
        config, speeds = self._config, self._speeds
        layers = config.num_layers
        linear = self._linears(tokens)
        experts = self._experts(tokens)
        sending = sum(seconds for _, seconds in self._sendings(tokens)) * layers
        head_bytes = 4 * config.vocab_size * config.hidden_size / self._plan.tp
        head = speeds["head_s"] + head_bytes / speeds["copy_bytes_per_s"]
        head += 2 * sampled * config.vocab_size * config.hidden_size / self._plan.tp / speeds["linear_flop_per_s"]
        rows += self._exchanged(tokens)
        return PhaseTime(attention * layers, linear * layers, experts * layers, rows * layers, head, sending, sending)

    def _linears(self, tokens: float) -> float:
        """The two attention products of a layer, and the shared expert's two where it is not one of the experts."""
        config, plan = self._config, self._plan
        q = config.num_heads * config.head_dim // plan.tp
        kv = plan.kv_heads(config.num_kv_heads) * config.head_dim
        seconds = self._linear(tokens, config.hidden_size, q + 2 * kv) + self._linear(tokens, q, config.hidden_size)
        if config.moe is not None and config.moe.shared_intermediate_size and plan.ep > 1:
            width = config.moe.shared_intermediate_size // (1 if plan.dispatches else plan.tp)
            own = tokens / (plan.tp if plan.dispatches else 1)
            seconds += self._linear(own, config.hidden_size, 2 * width) + self._linear(own, width, config.hidden_size)
        elif config.moe is None:
            width = config.intermediate_size // plan.tp
            seconds += self._linear(tokens, config.hidden_size, 2 * width)
            seconds += self._linear(tokens, width, config.hidden_size)
        return seconds

    def _linear(self, rows: float, inputs: int, outputs: int) -> float:
        speeds = self._speeds
        reading = inputs * outputs / speeds["copy_bytes_per_s"] + speeds.linear_s(min(rows, _FEW_ROWS))
        return max(reading, speeds.linear_s(1) + 2 * rows * inputs * outputs / speeds["linear_flop_per_s"])

    def _experts(self, tokens: float) -> float:
        moe, plan, speeds = self._config.moe, self._plan, self._speeds
        if moe is None:
            return 0.0
        if plan.ep == 1:
            return speeds.sliced_experts_s(plan.tp, tokens)
        weights = 3 * self._config.hidden_size * moe.intermediate_size
        held = (moe.num_experts + plan.redundant_experts) / plan.ep
        everyone = tokens * (plan.dp if plan.shares_experts else 1)
        hit = held * (1 - (1 - moe.top_k / moe.num_experts) ** everyone)
        reading: float = hit * weights / (speeds["copy_bytes_per_s"] * speeds["weights_share_of_copy"])
        rows = everyone * moe.top_k / plan.ep
        return speeds["experts_s"] + max(reading, 2 * rows * weights / speeds["whole_experts_flop_per_s"])

    def _sendings(self, tokens: float) -> list[tuple[float, float]]:
        """Bytes and seconds of each exchange of a sparse layer."""
        config, plan = self._config, self._plan
        plain = 2 * config.hidden_size
        row = config.hidden_size + _FP8_ROW_SCALE if plan.fp8_transfers else plain
        others = (plan.tp - 1) / plan.tp
        sendings = []
        if plan.sp:
            sendings += 2 * [self._sending(tokens * others * row, 1)]
        elif plan.tp > 1:
            count = 1 if plan.dispatches else 2
            sendings += count * [self._sending(2 * tokens * others * plain, 1)]
        if plan.dispatches and config.moe is not None:
            own, hosts = tokens / plan.tp, self._hosts()
            room = fixed_room(math.ceil(own)) if plan.shares_experts else None
            # Room of the fixed form, or to distinct ranks that a token's experts lie on, but for its own.
            share = 1 if room else 1 - (1 - 1 / plan.ep) ** config.moe.top_k
            rows = (room or own) * (plan.ep - 1) * share
            # Experts want fp8 rows: they are sent so in any case.
            there = config.hidden_size + _FP8_ROW_SCALE + _BESIDE_A_ROW * config.moe.top_k
            sendings += [self._sending(rows * there, hosts), self._sending(rows * row, hosts)]
        elif plan.sp:
            sendings += 2 * [self._sending(tokens * others * row, 1)]
        return sendings

    def _hosts(self) -> int:
        return -(-self._plan.world_size // int(self._speeds["gpus_of_a_host"]))

    def _sending(self, size: float, hosts: int) -> tuple[float, float]:
        """Of ``size`` bytes from each rank to all others of ``hosts`` hosts, of which it sends alike to all."""
        speeds = self._speeds
        far = size * (hosts - 1) / hosts
        near_s = speeds["nvlink_s"] + (size - far) / speeds["nvlink_bytes_per_s"]
        if hosts == 1:
            return size, near_s
        return size, max(near_s, speeds["network_s"] + far / speeds["network_bytes_per_s"])
