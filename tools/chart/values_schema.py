"""Keeps the chart's `settings` in step with the services: writes the settings classes into values.schema.json.

    python -m tools.chart.values_schema            # writes
    python -m tools.chart.values_schema --check    # says whether it is up to date

A setting of a service is either a value under `settings`, which the schema then knows with its type, bounds and
description, or it is told by a template (addresses, files, the model, what is secret), or by nobody who deploys.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from katydid_engine.settings import EngineSettings
from katydid_gateway.settings import GatewaySettings
from katydid_kvcache.settings import KvCacheSettings
from katydid_runtime.settings import ServiceSettings

__all__ = ["CHART", "NOT_TOLD", "SCHEMA", "SERVICES", "TOLD_BY_TEMPLATES", "settings_schema"]

CHART = Path(__file__).resolve().parents[2] / "helm" / "katydid"
SCHEMA = CHART / "values.schema.json"
SERVICES: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "engine": EngineSettings,
    "kvcache": KvCacheSettings,
}

_EVERYWHERE = {
    *("listen", "http_listen", "tls_cert_file", "tls_key_file", "tls_client_ca_file", "tls_ca_file"),
    "kvcache_token_file",
}
TOLD_BY_TEMPLATES: dict[str, set[str]] = {
    "gateway": _EVERYWHERE
    | {"probe_listen", "model", "engines", "kvcache_address", "api_keys_file", "cache_salt_secret"}
    | {"admin_listen", "replicas"},
    "engine": _EVERYWHERE
    | {"model", "role", "device", "kvcache_address", "kvcache_instances"}
    | {"nodes", "node_rank", "rendezvous"},
    "kvcache": _EVERYWHERE
    | {"admin_listen", "peer_listen", "peer_address", "lane_listen", "pull_from"}
    | {"tokens_file", "policy_file", "disk_path", "shared_url"},
}
NOT_TOLD = {
    "fault_delays",  # for tests
    "process_pipe",  # a parent process tells its children
}


def settings_schema(service: str) -> dict[str, Any]:
    """Closed JSON schema of `service`'s settings in the chart's values."""
    fields = SERVICES[service].model_json_schema()["properties"]
    told = TOLD_BY_TEMPLATES[service] | NOT_TOLD
    values = {name: _value(field) for name, field in fields.items() if name not in told}
    return {"type": "object", "additionalProperties": False, "properties": values}


def _value(field: dict[str, Any]) -> dict[str, Any]:
    """Of one field: what a value may be. What may be unset is left out of the values then."""
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    kind = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    kept = {name: kind[name] for name in _KEYWORDS if name in kind}
    return kept | {"description": field.get("description", "")}


_KEYWORDS = (
    *("type", "enum", "const", "anyOf", "items", "pattern"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength"),
)


def schema() -> str:
    """The whole file's text, with what it says of settings made anew."""
    content = json.loads(SCHEMA.read_text())
    for service in SERVICES:
        content["$defs"][f"{service}Settings"] = settings_schema(service)
    return json.dumps(content, indent=2) + "\n"


def main() -> int:
    text = schema()
    if "--check" not in sys.argv[1:]:
        SCHEMA.write_text(text)
    elif SCHEMA.read_text() != text:
        print(f"{SCHEMA.name} is out of date: run python -m tools.chart.values_schema", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
