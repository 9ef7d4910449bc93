"""The resource pool that a plan is chosen for, as a file tells it.

gpu: h200
gpus: {min: 8, max: 32}
memory: 96GB            # of a GPU that may be used; by default all it has
network: 400Gbps        # of each GPU to other hosts
gpus_per_host: 8
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from katydid_runtime.errors import SettingsError

from katydid_engine.planning.measured import GPUS

__all__ = ["Pool", "parse_bytes", "read_pool"]

# Above zero, and few enough digits for a float.
_NUMBER = r"(?=[\d.]*[1-9])(\d{1,9}(?:\.\d{1,9})?)"
_SIZE = re.compile(_NUMBER + r"\s*(GB|GiB|TB)")
_RATE = re.compile(_NUMBER + r"\s*Gbps")
_UNITS = {"GB": 10**9, "GiB": 1 << 30, "TB": 10**12}
_KEYS = ("gpu", "gpus", "memory", "network", "gpus_per_host")


@dataclass(frozen=True, slots=True)
class Pool:
    """GPUs to plan for.

    Attributes:
        memory_bytes: of a GPU that may be used; None for all.
        network_bytes_per_s: of a GPU to other hosts; None for what is assumed of this kind.
    """

    gpu: str = "h200"
    min_gpus: int = 1
    max_gpus: int = 8
    memory_bytes: int | None = None
    network_bytes_per_s: float | None = None
    gpus_per_host: int = 8


def read_pool(path: Path) -> Pool:
    """Raises SettingsError naming the key that is missing, unknown or wrong."""
    try:
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}", field="pool", value=str(path)) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{path} is no YAML: {error}", field="pool", value=str(path)) from error
    if not isinstance(told, Mapping):
        raise _wrong("pool", told, f"a mapping with {', '.join(_KEYS)}")
    for key in told:
        if key not in _KEYS:
            raise _wrong(str(key), told[key], f"one of {', '.join(_KEYS)}")
    gpus = told.get("gpus", {})
    if not isinstance(gpus, Mapping) or not set(gpus) <= {"min", "max"}:
        raise _wrong("gpus", gpus, "{min: N, max: N}")
    most = _count(gpus, "max", 8)
    least = _count(gpus, "min", 1)
    if least > most:
        raise _wrong("gpus.min", least, f"at most gpus.max={most}")
    gpu = told.get("gpu", "h200")
    if gpu not in GPUS:
        raise _wrong("gpu", gpu, ", ".join(GPUS))
    network = told.get("network")
    rate = None if network is None else _RATE.fullmatch(str(network))
    if network is not None and rate is None:
        raise _wrong("network", network, "a rate like 400Gbps")
    return Pool(
        gpu,
        least,
        most,
        parse_bytes("memory", str(told["memory"])) if "memory" in told else None,
        None if rate is None else float(rate[1]) * 1e9 / 8,
        _count(told, "gpus_per_host", 8),
    )


def parse_bytes(field: str, text: str) -> int:
    """ "96GB" and the like. Raises SettingsError."""
    size = _SIZE.fullmatch(text)
    if size is None:
        raise _wrong(field, text, "a size like 96GB, 141GB or 80GiB")
    return int(float(size[1]) * _UNITS[size[2]])


def _count(told: Mapping[str, Any], key: str, default: int) -> int:
    value = told.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(key, value, "an integer >= 1")
    return value


def _wrong(field: str, value: object, allowed: str) -> SettingsError:
    return SettingsError(f"pool: {field}={value!r}, expected {allowed}", field=field, value=value, allowed=allowed)
