"""How much of the time to first token no phase explains: sequential requests over three real processes, traced.

    python bench/trace_rest.py [--requests 500] [--model models/hy3-tiny] [--output bench/results/trace_rest.json]

Prints median, p90, p99 and maximum of every phase in milliseconds; exits with 1 when the rest's p99 is over 2 ms. Every
prompt is new and ends in the middle of a block, so each request queues, looks its blocks up and computes. How busy the
machine was is part of the result: waiting for a CPU counts in the phase in which it happens.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from katydid_cli.fleet.plan import free_ports

ROOT = Path(__file__).resolve().parent.parent
KATYDID = Path(sys.executable).parent / "katydid"
LIMIT_MS = 2.0
START_TIMEOUT_S = 120
WARM_UP = 20


def wait_ready(port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"no engine is ready after {START_TIMEOUT_S} s")


def ask(connection: http.client.HTTPConnection, number: int) -> dict[str, Any]:
    """The timing of one request over a connection that is kept."""
    text = f"Request {number}. " + "The quick brown fox jumps over the lazy dog. " * 20
    body = {"prompt": text, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    timing: dict[str, Any] = json.loads(connection.getresponse().read())["timing"]
    return timing


def summary(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 3), "p90": round(cuts[89], 3), "p99": round(cuts[98], 3), "max": max(values)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "hy3-tiny")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "trace_rest.json")
    options = parser.parse_args()
    http_port, grpc_port = free_ports(2)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(KATYDID), "up", "--model", str(options.model), "--trace-file", f"{folder}/trace.jsonl"]
        fleet = subprocess.Popen([*command, "--port", str(http_port), "--grpc-port", str(grpc_port)])
        try:
            wait_ready(http_port)
            connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=60)
            timings = [ask(connection, number) for number in range(WARM_UP + options.requests)][WARM_UP:]
        finally:
            fleet.send_signal(signal.SIGINT)
            fleet.wait(60)
    phases = {name: summary([timing["phases_ms"][name] for timing in timings]) for name in timings[0]["phases_ms"]}
    phases["ttft"] = summary([timing["ttft_ms"] for timing in timings])
    print(f"{'ms':<12}{'p50':>9}{'p90':>9}{'p99':>9}{'max':>9}")
    for name, figures in phases.items():
        print(f"{name:<12}" + "".join(f"{value:9.3f}" for value in figures.values()))
    met = phases["rest"]["p99"] <= LIMIT_MS
    result = {
        "command": "python bench/trace_rest.py",
        "model": options.model.name,
        "requests": options.requests,
        "cores": os.cpu_count(),
        "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "rest_p99_limit_ms": LIMIT_MS,
        "met": met,
        "milliseconds": phases,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
