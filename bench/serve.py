"""Serving figures of the whole suite on this machine: `katydid up` with the embedded model, loaded by `katydid bench`.

    python bench/serve.py [--engines 2] [--rate 2] [--requests 64] [--output bench/results/serve.json]

Two workloads in one run: prompts without a common prefix, and four system prompts shared by all requests. What the
second gains over the first is what the prefix caches and the routing are worth.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from katydid_cli.fleet.plan import free_ports

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 120


def wait_ready(http_port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/readyz", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"no engine is ready after {START_TIMEOUT_S} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "serve.json")
    options = parser.parse_args()
    http_port, grpc_port = free_ports(2)
    up = [str(BIN / "katydid"), "up", "--engines", str(options.engines)]
    fleet = subprocess.Popen([*up, "--port", str(http_port), "--grpc-port", str(grpc_port)])
    reports = {}
    try:
        wait_ready(http_port)
        for workload in ("random", "shared-prefix"):
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                load = [str(BIN / "katydid"), "bench", "--address", f"127.0.0.1:{grpc_port}", "--workload", workload]
                load += ["--rate", str(options.rate), "--requests", str(options.requests), "--output", file.name]
                print(f"\n{workload}", flush=True)
                subprocess.run(load, check=True)
                reports[workload] = json.loads(Path(file.name).read_text())["report"]
    finally:
        fleet.send_signal(signal.SIGINT)
        fleet.wait(60)
    result = {"cores": os.cpu_count(), "command": "python bench/serve.py", "reports": reports}
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
