"""Rates, lengths and times that make nothing are refused before the work: it would divide by 0, or never end."""

from __future__ import annotations

import math

from katydid_runtime.errors import SettingsError

__all__ = ["check_more_than_0"]


def check_more_than_0(option: str, value: float) -> None:
    """Raises SettingsError naming `option` unless `value` is a finite number above 0."""
    if not 0 < value < math.inf:
        finite = " and finite" if value == math.inf else ""
        name = option.removeprefix("--").replace("-", "_")
        raise SettingsError(f"{option}={value}: must be more than 0{finite}", field=name, value=value)
