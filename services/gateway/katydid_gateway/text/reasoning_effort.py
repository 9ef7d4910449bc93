"""One scale of effort for every model: OpenAI's and Anthropic's words in those a chat template knows."""

from __future__ import annotations

__all__ = ["effort_options"]

_HY3 = {"none": "no_think", "minimal": "no_think", "medium": "high", "xhigh": "high", "max": "high"}
_NO_THOUGHT = frozenset({"none", "minimal", "no_think"})


def effort_options(effort: str, template: str) -> dict[str, object]:
    """Variables for a template with this source. Hy3's knows no_think, low and high; Qwen3's and its kin a switch,
    enable_thinking; others get the word as it is."""
    options: dict[str, object] = {"reasoning_effort": effort}
    if "no_think" in template:
        options["reasoning_effort"] = _HY3.get(effort, effort)
    if "enable_thinking" in template:
        options["enable_thinking"] = effort not in _NO_THOUGHT
    return options
