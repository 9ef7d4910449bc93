"""Writes docs/settings.md out of the services' settings classes."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from katydid_engine.settings import EngineSettings
from katydid_gateway.settings import GatewaySettings
from katydid_kvcache.settings import KvCacheSettings
from katydid_runtime.settings import ServiceSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
SERVICES: tuple[tuple[str, type[ServiceSettings]], ...] = (
    ("gateway", GatewaySettings),
    ("engine", EngineSettings),
    ("kvcache", KvCacheSettings),
)
INTRODUCTION = """# Settings

Written by `python scripts/settings_page.py` out of the settings classes. A setting is an option of
`katydid serve-<service>` and an environment variable; the option wins. A variable with a service's prefix that names no
setting is an error, so pods need `enableServiceLinks: false`.
"""


def page() -> str:
    parts = [INTRODUCTION]
    for service, settings in SERVICES:
        parts.append(f"\n## {service}\n\n| option | variable | default | what it is |\n|---|---|---|---|\n")
        for name, field in settings.model_fields.items():
            default = "required" if field.is_required() else _code(field.get_default(call_default_factory=True))
            what = (field.description or "").replace("|", "\\|")
            parts.append(f"| `--{name.replace('_', '-')}` | `{settings.variable(name)}` | {default} | {what} |\n")
    return "".join(parts)


def _code(default: object) -> str:
    if default == Path(tempfile.gettempdir()):
        return "the system's folder for temporary files"
    return "-" if default in (None, "", (), {}) else f"`{default}`"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
