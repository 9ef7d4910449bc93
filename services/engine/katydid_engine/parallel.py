"""How one model is cut over ranks, as data: spelled and validated once, then read by the loader and the layers.

    plan = ParallelPlan.parse("tp4,sp,ep4,fp8")
    str(plan) == "tp4,sp,ep4,fp8"

The one spelling of settings, command line, chart and docs: ``tp``, ``dp``, ``ep`` and ``pp`` with their degree, ``sp``
and ``fp8`` bare, ``ep8+32`` for 32 redundant experts; in any order, commas optional where a number ends ("dp8ep8").
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from katydid_runtime.errors import SettingsError

__all__ = ["ParallelPlan", "Place", "Role"]

_TOKEN = re.compile(r"(tp|dp|ep|pp)(\d+)(?:\+(\d+))?|(sp|fp8)(?=,|$)|(single)$")
_SPELLING = "degrees like tp4,sp or dp8,ep8+32 or tp2,pp2 (tpN, sp, dpN, epN, epN+REDUNDANT, ppN, fp8), or single"


class Role(StrEnum):
    """What requests an engine takes: prompts only, generation only, or whole requests."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in its plan; ranks count tp first, then dp, then pp."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """Degrees of parallelism; ``world_size = tp * dp * pp`` ranks run one model.

    Attributes:
        tp: tensor parallel: heads, FFN columns and vocabulary are split over ``tp`` ranks.
        sp: sequence parallel: between blocks the residual is split by token over the TP group.
        dp: data-parallel attention: each of ``dp`` groups owns whole requests and all their pages.
        ep: experts are split by id over ``ep`` ranks; 1 means they are split by column like a dense FFN (tp).
        pp: pipeline stages.
        role: which phase the ranks serve.
        redundant_experts: copies of busy experts beyond one of each, over the ``ep`` ranks; they are placed and moved
            by load.
        fp8_transfers: rows that ranks send each other are e4m3 with a scale a row.

    Raises:
        SettingsError: a degree below 1, ``sp`` without ``tp``, ``ep`` other than 1, ``tp`` or ``tp * dp``, redundant
            experts that ``ep`` does not divide or without ``ep``, or parts that do not go together.
    """

    tp: int = 1
    sp: bool = False
    dp: int = 1
    ep: int = 1
    pp: int = 1
    role: Role = Role.BOTH
    redundant_experts: int = 0
    fp8_transfers: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep", "pp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _wrong(name, value, "an integer >= 1")
        if self.sp and self.tp == 1:
            raise _wrong("sp", self.sp, "false when tp=1: it splits the residual over the TP ranks")
        allowed = sorted({1, self.tp, self.tp * self.dp})
        if self.ep not in allowed:
            raise _wrong("ep", self.ep, f"one of {allowed} for tp={self.tp}, dp={self.dp}")
        if self.shares_experts and self.tp > 1 and not self.sp:
            raise _wrong("sp", self.sp, "true when ep=tp*dp: every rank sends rows of its own to the experts")
        if self.redundant_experts < 0 or self.redundant_experts % self.ep or (self.redundant_experts and self.ep == 1):
            raise _wrong("redundant_experts", self.redundant_experts, f"a multiple of ep={self.ep}, 0 without ep")
        if self.redundant_experts and not self.dispatches:
            raise _wrong("redundant_experts", self.redundant_experts, "0 unless tokens go to experts (sp, or ep=tp*dp)")
        if self.fp8_transfers and not (self.sp or self.dispatches):
            raise _wrong("fp8_transfers", True, "false unless rows are sent (sp, or ep=tp*dp with dp)")
        if self.pp > 1 and (self.dp > 1 or self.sp):
            raise _wrong("pp", self.pp, "1 with dp or sp: a pipeline stage is cut by tp and ep=tp alone")

    @classmethod
    def parse(cls, text: str, role: Role = Role.BOTH) -> ParallelPlan:
        """Reads the spelling above; "single" is one rank.

        Raises:
            SettingsError: another spelling, a part told twice, or a plan that contradicts itself.
        """
        values: dict[str, int | bool] = {}
        position = 0
        while position < len(text):
            token = _TOKEN.match(text, position)
            if token is None or (token[3] is not None and token[1] != "ep"):
                raise _misspelled(text)
            found: dict[str, int | bool] = {}
            if token[1] is not None:
                found[token[1]] = int(token[2])
                if token[3] is not None:
                    found["redundant_experts"] = int(token[3])
            elif token[4] is not None:
                found["sp" if token[4] == "sp" else "fp8_transfers"] = True
            elif position:
                raise _misspelled(text)
            if found.keys() & values.keys():
                raise _misspelled(text)
            values |= found
            position = token.end()
            if text[position : position + 1] == "," and position + 1 < len(text):
                position += 1
        if not text:
            raise _misspelled(text)
        return cls(role=role, **values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        parts = [f"{name}{getattr(self, name)}" for name in ("tp", "dp") if getattr(self, name) > 1]
        if self.sp:
            parts.append("sp")
        if self.ep > 1:
            parts.append(f"ep{self.ep}" + (f"+{self.redundant_experts}" if self.redundant_experts else ""))
        if self.pp > 1:
            parts.append(f"pp{self.pp}")
        if self.fp8_transfers:
            parts.append("fp8")
        return ",".join(parts) or "single"

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def dispatches(self) -> bool:
        """Whether tokens are sent to the ranks of their experts: each rank of the expert group has rows of its own."""
        return self.ep > 1 and (self.sp or self.shares_experts)

    @property
    def shares_experts(self) -> bool:
        """Whether DP groups compute together, and so step together."""
        return self.dp > 1 and self.ep == self.tp * self.dp

    def place(self, rank: int) -> Place:
        return Place(rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp))

    def group(self) -> ParallelPlan:
        """The plan of one DP group that shares nothing with the others."""
        return replace(self, dp=1, ep=self.ep if self.ep <= self.tp else 1)

    def kv_heads(self, num_kv_heads: int) -> int:
        """KV heads of a rank: one that several ranks hold when there are fewer than ranks."""
        return max(1, num_kv_heads // self.tp)

    def first_kv_head(self, num_kv_heads: int, tp_rank: int) -> int:
        return tp_rank * num_kv_heads // self.tp

    def check_model(self, *, num_heads: int, num_kv_heads: int, num_experts: int, num_layers: int) -> None:
        """Refuses a plan that cannot cut this model evenly.

        Raises:
            SettingsError: naming the degree and the model dimension it does not divide.
        """
        if num_heads % self.tp:
            raise _wrong("tp", self.tp, f"a divisor of num_attention_heads={num_heads}")
        if num_kv_heads % self.tp and self.tp % num_kv_heads:
            raise _wrong("tp", self.tp, f"a divisor or a multiple of num_key_value_heads={num_kv_heads}")
        if self.ep > 1 and num_experts == 0:
            raise _wrong("ep", self.ep, "1 for a model without experts")
        if (num_experts + self.redundant_experts) % self.ep:
            raise _wrong("ep", self.ep, f"a divisor of num_experts={num_experts}")
        if self.pp > num_layers:
            raise _wrong("pp", self.pp, f"at most num_hidden_layers={num_layers}")


def _wrong(field: str, value: object, allowed: str) -> SettingsError:
    return SettingsError(
        f"parallel plan: {field}={value!r}, expected {allowed}", field=field, value=value, allowed=allowed
    )


def _misspelled(text: str) -> SettingsError:
    return SettingsError(f"parallel plan {text!r}: expected {_SPELLING}", field="plan", value=text, allowed=_SPELLING)
