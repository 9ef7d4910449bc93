"""Typed access to the fields of a model folder's JSON files; an error names file, field, value and what is allowed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from katydid_runtime.errors import ModelFolderError

__all__ = ["ConfigFields", "read_json_object"]


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file of a model folder. Raises ModelFolderError where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFolderError(f"{path}: no such file; expected a Hugging Face model folder", field="model") from None
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path}: not readable as JSON: {error}", field="model") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path}: expected a JSON object, found {type(value).__name__}", field="model")
    return value


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """A JSON object; ``null`` counts as absent, ``prefix`` is where it stands in its file. All methods raise
    ModelFolderError."""

    path: Path
    values: dict[str, Any]
    prefix: str = ""

    def wrong(self, name: str, allowed: str) -> ModelFolderError:
        """The error to raise for a field, with its value and what is allowed in its place."""
        value = self.values.get(name)
        found = "is missing" if value is None else f"is {value!r}"
        field = self.prefix + name
        return ModelFolderError(
            f"{self.path}: {field} {found}, expected {allowed}", field=field, value=value, allowed=allowed
        )

    def object(self, name: str) -> ConfigFields:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return ConfigFields(self.path, value, prefix=f"{self.prefix}{name}.")

    def choice(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        value = self.values.get(name)
        value = default if value is None else value
        if value not in allowed:
            raise self.wrong(name, f"one of {', '.join(allowed)}")
        return str(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        return float(value)

    def optional_count(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.count(name, None)

    def count(self, name: str, default: int | None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(name, "an integer >= 0")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.count(name, default)
        if value == 0:
            raise self.wrong(name, "an integer >= 1")
        return value
