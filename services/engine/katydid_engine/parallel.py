"""How one model is cut over ranks, as data: validated once, then read by the loader and the layers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from katydid_runtime.errors import SettingsError

__all__ = ["ParallelPlan", "Role"]


class Role(StrEnum):
    """What requests an engine takes: prompts only, generation only, or whole requests."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


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

    Raises:
        SettingsError: a degree below 1, ``sp`` without ``tp``, or ``ep`` other than 1, ``tp`` or ``tp * dp``.
    """

    tp: int = 1
    sp: bool = False
    dp: int = 1
    ep: int = 1
    pp: int = 1
    role: Role = Role.BOTH

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

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.pp

    def check_model(self, *, num_heads: int, num_kv_heads: int, num_experts: int, num_layers: int) -> None:
        """Refuses a plan that cannot cut this model evenly.

        Raises:
            SettingsError: naming the degree and the model dimension it does not divide.
        """
        if num_heads % self.tp:
            raise _wrong("tp", self.tp, f"a divisor of num_attention_heads={num_heads}")
        if num_kv_heads % self.tp:
            raise _wrong("tp", self.tp, f"a divisor of num_key_value_heads={num_kv_heads}")
        if self.ep > 1 and num_experts % self.ep:
            raise _wrong("ep", self.ep, f"a divisor of num_experts={num_experts}")
        if self.ep > 1 and num_experts == 0:
            raise _wrong("ep", self.ep, "1 for a model without experts")
        if self.pp > num_layers:
            raise _wrong("pp", self.pp, f"at most num_hidden_layers={num_layers}")


def _wrong(field: str, value: object, allowed: str) -> SettingsError:
    return SettingsError(
        f"parallel plan: {field}={value!r}, expected {allowed}", field=field, value=value, allowed=allowed
    )
