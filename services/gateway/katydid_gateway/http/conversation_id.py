"""What a caller groups its requests by, so that routing keeps a conversation where its beginning is cached."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["conversation_id"]

# As agent frameworks call it.
_NAMES = ("conversation_id", "session_id", "thread_id")


def conversation_id(prompt_cache_key: str | None, metadata: Mapping[str, object] | None) -> str:
    """OpenAI's `prompt_cache_key`, else an id that `metadata` has for the conversation; "" for neither."""
    if prompt_cache_key or not metadata:
        return prompt_cache_key or ""
    return next((value for name in _NAMES if isinstance(value := metadata.get(name), str) and value), "")
