"""Other vendors' clients, unchanged, against a fleet that serves hy3-tiny.

`make clients` runs them; each is installed into a temporary folder at the versions checked in here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import Fleet, running_fleet

pytestmark = pytest.mark.clients

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "models" / "hy3-tiny"
INSTALL_TIMEOUT_S = 600
CALL = {"name": "get_weather", "args": {"city": "Paris"}}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(MODEL, tmp_path_factory.mktemp("fleet"), engine_options=("--kv-pages", "256")) as running:
        yield running


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not on this machine")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "openai_node.mjs"):
        shutil.copy(HERE / name, folder)
    run("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment that holds requirements.txt."""
    folder = tmp_path_factory.mktemp("python")
    run(sys.executable, "-m", "venv", str(folder))
    interpreter = str(folder / "bin" / "python")
    run(interpreter, "-m", "pip", "install", "-q", "-r", str(HERE / "requirements.txt"))
    return interpreter


def run(*command: str, cwd: Path = HERE, timeout_s: float = INSTALL_TIMEOUT_S) -> str:
    # Without it litellm asks the network for a list of prices, several times.
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def seen_by(fleet: Fleet, *command: str, cwd: Path = HERE) -> dict[str, Any]:
    """What the client's program printed last."""
    printed = run(*command, fleet.base_url, MODEL.name, cwd=cwd).splitlines()[-1]
    print(printed)
    seen: dict[str, Any] = json.loads(printed)
    return seen


def test_npm_openai(fleet: Fleet, node_folder: Path) -> None:
    seen = seen_by(fleet, "node", "openai_node.mjs", cwd=node_folder)
    assert seen["models"] == [MODEL.name]
    whole, streamed = seen["whole"], seen["streamed"]
    assert "Paris" in whole["text"] == streamed["text"]
    assert whole["finish"] == streamed["finish"] == "stop"
    assert whole["usage"]["completion_tokens"] == streamed["usage"]["completion_tokens"] > 1
    assert streamed["chunks"] >= 4, "it is streamed, not sent at once"
    assert seen["tool"]["name"] == CALL["name"]
    assert json.loads(seen["tool"]["arguments"]) == CALL["args"]
    assert seen["tool_finish"] == "tool_calls"
    assert seen["tool_result"] == "sunny in Paris, 21 degrees"
    assert seen["after_tool"]
    assert len(seen["choices"]) == 2
    assert {count for choice in seen["choices"] for count in choice} == {3}
    assert seen["completion"]
    assert seen["errors"] == {
        "model": {
            "type": "NotFoundError",
            "known": True,
            "status": 404,
            "code": "model_not_found",
            "param": "model",
        },
        "temperature": {
            "type": "BadRequestError",
            "known": True,
            "status": 400,
            "code": "invalid_request",
            "param": "temperature",
        },
    }


def test_langchain_openai(fleet: Fleet, python: str) -> None:
    seen = seen_by(fleet, python, "with_langchain.py")
    assert "Paris" in seen["whole"]["text"] == seen["streamed"]["text"]
    assert seen["whole"]["finish"] == "stop"
    assert seen["whole"]["usage"]["output_tokens"] == seen["streamed"]["usage"]["output_tokens"] > 1
    assert seen["streamed"]["chunks"] >= 4
    assert seen["together"] == [seen["streamed"]["text"]] * 3
    assert seen["tool"] == seen["streamed_tool"] == CALL
    assert seen["after_tool"]
    assert set(seen["logprobs"]) == {2}
    assert seen["errors"]["model"]["code"] == "model_not_found"
    assert seen["errors"]["temperature"]["param"] == "temperature"


def test_litellm(fleet: Fleet, python: str) -> None:
    seen = seen_by(fleet, python, "with_litellm.py")
    assert "Paris" in seen["whole"]["text"] == seen["streamed"]["text"]
    assert seen["whole"]["finish"] == "stop"
    assert seen["whole"]["usage"] == seen["streamed"]["usage"]
    assert seen["tool"] == seen["streamed_tool"] == CALL
    assert seen["tool_finish"] == "tool_calls"
    assert seen["errors"] == {
        "model": {"type": "NotFoundError", "status": 404},
        "temperature": {"type": "BadRequestError", "status": 400},
        "context": {"type": "ContextWindowExceededError", "status": 400},
    }
