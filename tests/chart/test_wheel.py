"""What the images run, without the images: a built wheel in an environment of its own for each service.

Each is told what compose.yaml and the chart's CPU demo tell it, at addresses of this machine; then they go through the
conversation of `helm test`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.certificates import make_certificate, needs_openssl
from tests.chart.rendered import pods
from tests.chart.test_images import composed, instructions

pytestmark = pytest.mark.chart

ROOT = Path(__file__).resolve().parents[2]
CONVERSATION = ROOT / "helm" / "katydid" / "checks" / "conversation.py"
# The CPU's build is what the Makefile installs.
TORCH = re.search(r"^TORCH\s*\?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
START_S = 300


def pip(python: Path, *words: str) -> None:
    subprocess.run([str(python), "-m", "pip", "install", "-q", *words], check=True, cwd=ROOT)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    (built,) = folder.glob("katydid-*.whl")
    return built


@pytest.fixture(scope="module")
def environments(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A Python by service, with the extras that its recipe installs and nothing else."""
    folder = tmp_path_factory.mktemp("environments")
    found = {}
    for service in ("gateway", "kvcache", "engine"):
        recipe = " ".join(words for _, words in instructions(f"{service}.Dockerfile"))
        extras = re.search(r"katydid-\*\.whl\)\[([a-z,]+)\]", recipe)
        assert extras is not None
        subprocess.run([sys.executable, "-m", "venv", str(folder / service)], check=True)
        python = folder / service / "bin" / "python"
        if service == "engine":
            assert TORCH is not None
            pip(python, TORCH[1])
        pip(python, "-c", "constraints.txt", f"{wheel}[{extras[1]}]")
        found[service] = python
    yield found
    shutil.rmtree(folder)


@pytest.mark.parametrize("service", ["gateway", "kvcache"])
def test_no_torch_comes_along(environments: dict[str, Path], service: str) -> None:
    listed = subprocess.run(
        [str(environments[service]), "-m", "pip", "list", "--format", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert "katydid" in names
    assert not {"torch", "triton", "transformers"} & names


@contextmanager
def service(python: Path, name: str, environment: dict[str, str], ready: str) -> Iterator[None]:
    """The image's own command; it has to end by itself and with 0 when it is told to."""
    (entry,) = [words for instruction, words in instructions(f"{name}.Dockerfile") if instruction == "ENTRYPOINT"]
    command = [str(python), *json.loads(entry)[1:]]
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ.get("TMPDIR", "/tmp"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=clean | environment, cwd="/", stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_S
        while not answers(ready):
            assert process.poll() is None, f"{name} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"{name} is not ready"
            time.sleep(0.1)
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def of_compose() -> dict[str, dict[str, str]]:
    services = composed("compose.yaml")["services"]
    return {name: {key: str(value) for key, value in services[name]["environment"].items()} for name in services}


def of_chart(configuration: str = "cpu-demo") -> dict[str, dict[str, str]]:
    return {pod.component.partition("-")[0]: pod.environment for pod in pods(configuration) if pod.component != "test"}


def of_chart_with_tls() -> dict[str, dict[str, str]]:
    return of_chart("cpu demo with TLS")


@pytest.mark.parametrize("told", [of_compose, of_chart, pytest.param(of_chart_with_tls, marks=needs_openssl)])
def test_the_services_hold_a_conversation(
    environments: dict[str, Path], tmp_path: Path, told: Callable[[], dict[str, dict[str, str]]]
) -> None:
    everything = told()
    names = ("kvcache", "engine", "gateway")
    secret = tmp_path / "tls"
    encrypted = told is of_chart_with_tls
    if encrypted:
        # One for all, its own authority, of "localhost".
        secret.mkdir()
        made = make_certificate(tmp_path)
        for source, name in ((made.cert_file, "tls.crt"), (made.cert_file, "ca.crt"), (made.key_file, "tls.key")):
            shutil.copy(source, secret / name)
    used = sorted({int(port) for each in everything.values() for port in re.findall(r":(\d{4})\b", str(each))})
    ports = dict(zip(used, free_ports(len(used)), strict=True))

    def here(value: str) -> str:
        value = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)
        value = value.replace("/run/katydid", str(tmp_path)).replace("/var/lib/katydid", str(tmp_path / "blocks"))
        value = value.replace("/opt/katydid/models", str(ROOT / "models")).replace("/etc/katydid/tls", str(secret))
        for port, free in ports.items():
            value = re.sub(rf"\b(0\.0\.0\.0|127\.0\.0\.1):{port}\b", f"127.0.0.1:{free}", value)
            value = re.sub(rf"(?<![\w.-])[\w.-]*[a-z][\w.-]*:{port}\b", f"localhost:{free}", value)
        return value

    def probed(name: str) -> str:
        """Where the service's /readyz is."""
        address = everything[name].get(f"KATYDID_{name.upper()}_PROBE_LISTEN")
        return f"http://{here(address or everything[name][f'KATYDID_{name.upper()}_HTTP_LISTEN'])}/readyz"

    with ExitStack() as running:
        for name in names:
            environment = {key: here(value) for key, value in everything[name].items()}
            running.enter_context(service(environments[name], name, environment, probed(name)))
        gateway = here(everything["gateway"]["KATYDID_GATEWAY_HTTP_LISTEN"]).replace("127.0.0.1", "localhost")
        done = subprocess.run(
            [str(environments["gateway"]), str(CONVERSATION)],
            env={"GATEWAY_URL": f"https://{gateway}", "TLS_FOLDER": str(secret)}
            if encrypted
            else {"GATEWAY_URL": f"http://{gateway}"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert "model hy3-tiny" in done.stdout
        assert "streamed" in done.stdout
        # What the operator's page tells to ask a cache's pod.
        asked = [
            "-m",
            "katydid_cli",
            "cache",
            "stats",
            "--address",
            here(everything["kvcache"]["KATYDID_KVCACHE_LISTEN"]),
        ]
        subprocess.run([str(environments["kvcache"]), *asked], check=True, timeout=60)
