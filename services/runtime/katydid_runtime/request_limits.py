"""How far a request may go, whatever the model: an engine refuses what lies outside, the gateway says so before.

The sampling ranges are those of OpenAI's API where it has the parameter. What depends on the model is in Describe.
"""

from __future__ import annotations

__all__ = [
    "MAX_BIAS",
    "MAX_BIASED_TOKENS",
    "MAX_PENALTY",
    "MAX_PRIORITY",
    "MAX_REPETITION_PENALTY",
    "MAX_STOP_TOKENS",
    "MAX_TEMPERATURE",
]

MAX_TEMPERATURE = 2.0
MAX_REPETITION_PENALTY = 2.0
# Of presence and frequency, either sign.
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_STOP_TOKENS = 64
# Either sign.
MAX_PRIORITY = 1000
