"""How far a request may go, whatever the model: an engine refuses what lies outside, the gateway says so before.

The sampling ranges are those of OpenAI's API where it has the parameter. What depends on the model is in Describe.
"""

from __future__ import annotations

__all__ = [
    "MAX_BIAS",
    "MAX_BIASED_TOKENS",
    "MAX_BLOCKS_WITHIN_S",
    "MAX_GRAMMAR_CHARACTERS",
    "MAX_GRAMMAR_CHOICES",
    "MAX_GRAMMAR_DEPTH",
    "MAX_JSON_WHITESPACE",
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
# Of a grammar's source, or of its choices together.
MAX_GRAMMAR_CHARACTERS = 256 * 1024
MAX_GRAMMAR_CHOICES = 1024
# Of arrays and objects that lie in each other, so of schemas too.
MAX_GRAMMAR_DEPTH = 64
# In a row between tokens of JSON that follows a schema: as json.dumps writes it, or more tightly. A model that wavers
# would write blanks until its answer's length is used up, and one that indents pays for each line's.
MAX_JSON_WHITESPACE = 1
# Blocks that another engine computes are waited for so long at most.
MAX_BLOCKS_WITHIN_S = 600.0
# Either sign.
MAX_PRIORITY = 1000
