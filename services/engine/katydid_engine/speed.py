"""How fast a rank has been of late: tokens per second of prefill and of decode, for the router's predictions."""

from __future__ import annotations

from dataclasses import replace

from katydid_engine.messages import Load

__all__ = ["Speed"]

_SMOOTHING = 0.2


class Speed:
    """Exponential averages over steps. A mixed step counts its time to both kinds by their share of tokens, because a
    decode token in a mixed step costs about as much as a prompt token."""

    def __init__(self) -> None:
        self._prefill = 0.0
        self._decode = 0.0

    def note(self, prefill_tokens: int, decode_tokens: int, step_s: float) -> None:
        if step_s <= 0:
            return
        rate = (prefill_tokens + decode_tokens) / step_s
        if prefill_tokens:
            self._prefill = _average(self._prefill, rate)
        elif decode_tokens:
            self._decode = _average(self._decode, rate)

    def fill(self, load: Load) -> Load:
        """``load`` with the present speeds, to three digits so that an idle rank's load stays equal to itself."""
        return replace(
            load,
            prefill_tokens_per_second=float(f"{self._prefill:.3g}"),
            decode_tokens_per_second=float(f"{self._decode:.3g}"),
        )


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _SMOOTHING * (new - old)
