"""JSON that came as text within a request: calls' arguments, and over gRPC schemas and template options."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["read_json"]


def read_json(text: str) -> Any:
    """Raises ValueError for what is no JSON, or holds half a surrogate pair, which JSON can escape and no text has;
    RecursionError for what is nested without end."""
    value = json.loads(text)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value
