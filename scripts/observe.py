"""Rules and dashboards in a real Prometheus over a running fleet: `katydid up` with traffic is scraped for two minutes,
every alert's expression must evaluate, every panel must have answered, and some are drawn as Grafana would.

    python scripts/observe.py [--seconds 120] [--pictures docs/images]      writes bench/results/observability.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from katydid_cli.fleet.plan import free_ports, free_run
from katydid_client import AsyncKatydid, KatydidError

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "helm" / "katydid" / "files"
RESULTS = ROOT / "bench" / "results" / "observability.json"
HOST = "127.0.0.1"
SCRAPE_S = 2
AT_ONCE = 3
START_TIMEOUT_S = 180.0
# Panels of what this machine has not, and of what happens only when something goes wrong.
ABSENT = "GPU", "tenant"
TROUBLE = {
    *("Refused before any work", "Refused", "Writes given up"),
    *("Failed by engine", "Answers that went on elsewhere", "Parity refusals"),
}
DRAWN = {"katydid-overview": "dashboard-overview", "katydid-ttft": "dashboard-ttft", "katydid-cache": "dashboard-cache"}
SYSTEM = "You answer questions about insects that sing, at length and with examples. " * 12
QUESTIONS = ("What sings at night?", "Who hears it?", "How far does it carry?", "Does rain end it?", "Tell more.")


@dataclass(frozen=True)
class Running:
    """Ports of the fleet and of Prometheus."""

    http: int
    grpc: int
    metrics: int
    prometheus: int

    @property
    def targets(self) -> dict[str, list[int]]:
        return {"gateway": [self.http], "kvcache": [self.metrics], "engine": [self.metrics + 1, self.metrics + 2]}


@contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child that writes to `log` and is told to end with the block."""
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as child:
        try:
            yield child
        finally:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()


def wait_for(what: str, ready: Any, child: subprocess.Popen[bytes], log: Path) -> None:
    """Raises SystemExit with the child's log when it ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        if child.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{what} did not start:\n{log.read_text()}")
        time.sleep(0.2)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).is_success
    except httpx.HTTPError:
        return False


def prometheus_config(folder: Path, running: Running) -> Path:
    """A scrape configuration with the chart's rules."""
    jobs = [
        {
            "job_name": job,
            "static_configs": [{"targets": [f"{HOST}:{p}" for p in ports], "labels": {"namespace": "demo"}}],
        }
        for job, ports in running.targets.items()
    ]
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(FILES / "rules" / "*.yaml")],
        "scrape_configs": jobs,
    }
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


async def traffic(running: Running, until: float) -> int:
    """Conversations that grow, a few at once; returns how many answers came."""

    async def talk(client: AsyncKatydid, number: int) -> int:
        come = 0
        while time.monotonic() < until:
            messages = [{"role": "system", "content": f"{number}. {SYSTEM}"}]
            for question in QUESTIONS:
                messages.append({"role": "user", "content": question})
                try:
                    answer = await client.chat(messages, max_tokens=24, temperature=0.8)
                except KatydidError as error:
                    print(f"  {error}", file=sys.stderr)
                    await asyncio.sleep(1)
                    break
                messages.append({"role": "assistant", "content": answer.text})
                come += 1
                if time.monotonic() > until:
                    break
        return come

    async with AsyncKatydid(f"{HOST}:{running.grpc}", timeout=60) as client:
        return sum(await asyncio.gather(*(talk(client, number) for number in range(AT_ONCE))))


class Prometheus:
    """Questions to a server."""

    def __init__(self, port: int) -> None:
        self._client = httpx.Client(base_url=f"http://{HOST}:{port}/api/v1", timeout=30)

    def ask(self, path: str, **parameters: object) -> Any:
        """The answer's data; raises SystemExit with what the server says is wrong."""
        answer = self._client.get(path, params={name: str(value) for name, value in parameters.items()}).json()
        if answer["status"] != "success":
            raise SystemExit(f"{path} {parameters}: {answer['error']}")
        return answer["data"]

    def series(self, expression: str, start: float, end: float) -> list[dict[str, Any]]:
        """The series of a panel's expression over the run."""
        filled = expression.replace("$ns", ".*").replace("$w", "30s")
        found: list[dict[str, Any]] = self.ask("/query_range", query=filled, start=start, end=end, step=SCRAPE_S)[
            "result"
        ]
        return found


def check_rules(prometheus: Prometheus) -> dict[str, Any]:
    """State and health of every rule. Raises SystemExit for one that does not evaluate."""
    groups = prometheus.ask("/rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    sick = [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]
    if sick:
        raise SystemExit("rules do not evaluate:\n" + "\n".join(sick))
    alerts = {rule["name"]: rule["state"] for rule in rules if rule["type"] == "alerting"}
    for name in alerts:
        expression = next(rule["query"] for rule in rules if rule["name"] == name)
        prometheus.ask("/query", query=expression)
    return {"recording": len(rules) - len(alerts), "alerts": alerts}


def check_panels(prometheus: Prometheus, start: float, end: float) -> dict[str, dict[str, int]]:
    """Series by dashboard and panel. Raises SystemExit for a panel that has none and should have."""
    counts: dict[str, dict[str, int]] = {}
    empty = []
    for path in sorted((FILES / "dashboards").glob("*.json")):
        board = counts[path.stem] = {}
        for panel in json.loads(path.read_text())["panels"]:
            expressions = [target["expr"] for target in panel["targets"]]
            found = board[panel["title"]] = sum(len(prometheus.series(each, start, end)) for each in expressions)
            told = "".join(expressions) + panel["title"]
            if not found and panel["title"] not in TROUBLE and not any(word in told for word in ABSENT):
                empty.append(f"{path.stem}: {panel['title']}")
    if empty:
        raise SystemExit("panels without a series:\n  " + "\n  ".join(empty))
    return counts


def exemplars(prometheus: Prometheus, start: float, end: float) -> int:
    """Trace ids that buckets of the time to first token bear."""
    found = prometheus.ask("/query_exemplars", query="katydid_gateway_ttft_seconds_bucket", start=start, end=end)
    return len({one["labels"]["trace_id"] for series in found for one in series["exemplars"]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--pictures", type=Path, help="folder for pictures of dashboards")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    http, grpc, prometheus_port = free_ports(3)
    running = Running(http, grpc, free_run(3), prometheus_port)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        up = (
            *(sys.executable, "-m", "katydid_cli", "up", "--engines", "2", "--device", "cpu"),
            *("--port", str(running.http), "--grpc-port", str(running.grpc), "--metrics-port", str(running.metrics)),
            *("--kv-memory-mb", "256", "--kv-disk-dir", str(folder / "disk"), "--kv-disk-mb", "256"),
            *("--trace-file", str(folder / "trace.jsonl"), "--engine-option=--kv-pages=64"),
        )
        server = (
            *("prometheus", f"--config.file={prometheus_config(folder, running)}"),
            *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={HOST}:{running.prometheus}"),
            "--enable-feature=exemplar-storage",
        )
        logs = folder / "fleet.log", folder / "prometheus.log"
        with process(list(up), logs[0]) as fleet, process(list(server), logs[1]) as scraper:
            wait_for("katydid up", lambda: "is up on 2 engines" in logs[0].read_text(), fleet, logs[0])
            ready = f"http://{HOST}:{running.prometheus}/-/ready"
            wait_for("prometheus", lambda: answers(ready), scraper, logs[1])
            start = time.time()
            come = asyncio.run(traffic(running, time.monotonic() + options.seconds))
            time.sleep(2 * SCRAPE_S)
            prometheus, end = Prometheus(running.prometheus), time.time()
            targets = {t["labels"]["instance"]: t["health"] for t in prometheus.ask("/targets")["activeTargets"]}
            outcome = {
                "answers": come,
                "targets_up": sum(health == "up" for health in targets.values()),
                "rules": check_rules(prometheus),
                "exemplars": exemplars(prometheus, start, end),
                "series_by_panel": check_panels(prometheus, start, end),
            }
            if options.pictures is not None:
                draw(prometheus, options.pictures, start, end)
    options.output.write_text(json.dumps(outcome, indent=1) + "\n")
    print(json.dumps({key: value for key, value in outcome.items() if key != "series_by_panel"}, indent=1))


def draw(prometheus: Prometheus, folder: Path, start: float, end: float) -> None:
    """The chosen dashboards as pictures, with the panels that have series."""
    from dashboard_picture import draw_dashboard

    for name, picture in DRAWN.items():
        board = json.loads((FILES / "dashboards" / f"{name}.json").read_text())
        draw_dashboard(board, lambda expression: prometheus.series(expression, start, end), folder / f"{picture}.png")


if __name__ == "__main__":
    main()
