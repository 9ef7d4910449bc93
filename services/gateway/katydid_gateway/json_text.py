"""JSON that came as text within a request: calls' arguments, and over gRPC schemas and template options."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["INVALID_JSON", "call_arguments", "read_json"]

INVALID_JSON = "INVALID_JSON"
"""Under this name stands what a model wrote as arguments, where that is no JSON object."""


def read_json(text: str) -> Any:
    """Raises ValueError for what is no JSON, or holds half a surrogate pair, which JSON can escape and no text has;
    RecursionError for what is nested without end."""
    value = json.loads(text)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def call_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call that was made, for a template to show: a model that wrote them wrongly, or was cut off,
    is to see that. Refusing them would end its conversation for good."""
    try:
        found = read_json(text or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {INVALID_JSON: text}
