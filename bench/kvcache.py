"""The KV-cache service against its bars and its peers: real processes on loopback, interleaved in one run.

    python bench/kvcache.py --peers FOLDER                  # everything; peers as kvcache_services says
    python bench/kvcache.py --only memory                   # a part: memory, lookups, disk, restart, reuse, ...

In a round every contender makes its pass in turn, so that a busy moment of the machine hits all: medians of `--rounds`
rounds. Pools are warm on all sides: the first round does not count. GB/s are 1e9 bytes. Writes each figure with its bar
into `--output` and leaves the rows of parts that were not run as they are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kvcache_cases as cases
import kvcache_lanes
import kvcache_reuse
import kvcache_stream_limit
from kvcache_elsewhere import elsewhere
from kvcache_services import HERE, LmCache, Passes, mooncake, redis, service

MIB = 1 << 20
PARTS = ("memory", "lookups", "hashing", "disk", "restart", "reuse", "lanes", "limits", "elsewhere")
SHARED_MEMORY, STREAM = "same host, 8 x 2 MiB a call", "stream, 2 MiB blocks"
LANE = "bulk lanes over TCP, 2 MiB blocks"

Row = dict[str, Any]


def row(figure: str, value: float | None, unit: str, bar: float | None, *, lower: bool = False, **more: Any) -> Row:
    """One figure; `bar` is met by at least it, or with `lower` by at most it."""
    met = None if bar is None or value is None else (value <= bar if lower else value >= bar)
    return {
        "figure": figure,
        "value": None if value is None else round(value, 3),
        "unit": unit,
        "bar": bar,
        "met": met,
    } | more


def memory(rounds: int, peers: Path) -> list[Row]:
    """Blocks in memory: in place and in streams, with and without checksums, against plain copies and peers."""
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        contenders: dict[str, Passes | LmCache | None] = {
            "redis": redis(stack, peers),
            "mooncake": mooncake(stack, peers),
            "lmcache": LmCache.start(stack, peers),
        }
        program = str(HERE / "kvcache_pass.py")
        for checked in (True, False):
            suffix = "" if checked else " off"
            listen = f"unix:{folder}/cache{suffix.strip()}.sock"
            options = ("--memory-bytes", str(768 * MIB))
            address, _ = stack.enter_context(service(*options, listen=listen, checked=checked))
            flags = () if checked else ("--unchecked",)
            contenders[f"place{suffix}"] = Passes(stack, sys.executable, program, address, "--arena", *flags)
            contenders[f"stream{suffix}"] = Passes(stack, sys.executable, program, address, *flags)
        address, _ = stack.enter_context(service("--memory-bytes", str(768 * MIB), "--lane-listen", "127.0.0.1:0"))
        contenders["lane"] = Passes(stack, sys.executable, program, address, "--lanes", "2")
        for number in range(rounds + 2):
            for name, contender in contenders.items():
                if contender is None:
                    continue
                for figure, value in contender.next().items():
                    if number >= 2:
                        figures[name][figure].append(value)
    medians = {
        name: {figure: statistics.median(values) for figure, values in of.items()} for name, of in figures.items()
    }
    print(json.dumps(medians, indent=1), file=sys.stderr)
    return [row for way in ("put", "get") for row in memory_rows(medians, figures, way)]


def memory_rows(
    medians: dict[str, dict[str, float]], figures: dict[str, dict[str, list[float]]], way: str
) -> list[Row]:
    """The rows of one direction. Shares and costs are medians over rounds of what one round gave."""
    copy = "copy_in" if way == "put" else "copy_out"
    peers: dict[str, float] = {name: medians[name][way] for name in ("redis", "mooncake", "lmcache") if name in medians}
    best = max(peers, key=lambda name: peers[name], default=None)

    def beside(name: str | None) -> Row:
        all_peers = {peer: round(value, 3) for peer, value in peers.items()}
        return {"peer": name if name in peers else None, "peer_value": all_peers.get(name or ""), "peers": all_peers}

    rows = []
    for name, switch, least in (("place off", "off", 90), ("place", "on", 80)):
        value = medians[name][way]
        share = 100 * ratio(figures[name][way], figures[name][copy])
        rows += [
            row(f"{SHARED_MEMORY}, {way}, checksums {switch}", value, "GB/s", 6, **beside(best)),
            row(f"{SHARED_MEMORY}, {way}, checksums {switch}: share of memcpy", share, "%", least)
            | {"memcpy": round(medians[name][copy], 3)},
        ]
    if best is not None:
        times = medians["place"][way] / peers[best]
        rows.append(row(f"{SHARED_MEMORY}, {way}: times the fastest peer", times, "x", 1, **beside(best)))
    rows.append(row(f"{STREAM}, {way}", medians["stream"][way], "GB/s", 1.5, **beside("redis")))
    if "redis" in peers:
        times = medians["stream"][way] / peers["redis"]
        rows.append(row(f"{STREAM}, {way}: times Redis", times, "x", 2 if way == "get" else 1, **beside("redis")))
    if way == "get":
        lane = medians["lane"][way]
        rows.append(row(f"{LANE}, {way}", lane, "GB/s", 2.5, **beside("redis")))
        if "redis" in peers:
            times = lane / peers["redis"]
            rows.append(row(f"{LANE}, {way}: times the fastest peer over a socket", times, "x", 1, **beside("redis")))
    for name, figure, most in (("place", SHARED_MEMORY, 15), ("stream", STREAM, 5)):
        cost = 100 * (1 - ratio(figures[name][way], figures[f"{name} off"][way]))
        rows.append(row(f"{figure}, {way}: cost of checksums", cost, "%", most, lower=True))
    return rows


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(value / other for value, other in zip(values, others, strict=True))


def lookups(rounds: int) -> list[Row]:
    rows = []
    loads = {"alone": None, "under full put load in place": ("--arena",), "under full put load in streams": ()}
    for told, options in loads.items():
        ran = [asyncio.run(cases.lookups(options)) for _ in range(rounds)]
        puts = {"put_gb_s": round(statistics.median(one["put"] for one in ran), 3)}
        for name, bar in (("p50", 2), ("p99", 10)):
            figure = f"lookup + lease of 4,096 blocks, one call, {told}: {name}"
            rows.append(row(figure, statistics.median(one[name] for one in ran), "ms", bar, lower=True) | puts)
    return rows


def hashing(_rounds: int) -> list[Row]:
    return [row("hashing 128K tokens into the chain", cases.hashing(), "ms", 2, lower=True)]


def disk(rounds: int, folder: Path) -> list[Row]:
    ran = [asyncio.run(cases.disk(folder)) for _ in range(rounds)]
    rows = []
    for way in ("write", "read"):
        speeds = [ours[way] for ours, _ in ran]
        shares = [100 * ours[way] / fio for ours, beside in ran if (fio := beside[way]) is not None]
        value = statistics.median(speeds)
        share = statistics.median(shares) if shares else None
        rows += [
            row(f"disk tier, cold {way}, 2 MiB blocks", value, "GB/s", None),
            row(f"disk tier, cold {way}, 2 MiB blocks: share of fio", share, "%", 80),
        ]
    return rows


def restart(rounds: int, folder: Path) -> list[Row]:
    ran = [asyncio.run(cases.restart(folder)) for _ in range(rounds)]
    return [
        row(f"warm restart with 100K blocks: {told}", statistics.median(one[name] for one in ran), "s", 3, lower=True)
        for name, told in (("ready_s", "ready"), ("hit_s", "first block read"))
    ]


def reuse(model: Path) -> list[Row]:
    lost = kvcache_reuse.cost(model)
    known = {"interval": lost.counted_interval, "two_fleets": round(lost.compared, 2)}
    known["two_fleets_interval"] = lost.compared_interval
    return [row("workload without reuse: engine time lost with the cache", lost.counted, "%", 1, lower=True, **known)]


def write(path: Path, parts: dict[str, list[Row]], rounds: int, load: tuple[float, float]) -> None:
    """Replaces the rows of `parts` in the file; a note that someone wrote into it stays."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {"commit": head.stdout.strip(), "rounds": rounds, "load": [round(value, 1) for value in load]}
    none = {"floor": None, "peer": None, "peer_value": None}
    before = json.loads(path.read_text()) if path.exists() else {"rows": []}
    rows = [row for row in before["rows"] if row.get("part") not in parts]
    # What was measured elsewhere has its commit and load there.
    rows += [
        {"part": part} | none | row | ({} if part == "elsewhere" else about)
        for part, measured in parts.items()
        for row in measured
    ]
    content = {"command": "python bench/kvcache.py --peers FOLDER", "cores": os.cpu_count()}
    content |= {"note": note} if (note := before.get("note")) else {}
    path.write_text(json.dumps(content | {"rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts: {', '.join(PARTS)}")
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="folder with the peers' environments")
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="where the disk tier's folder is made")
    parser.add_argument("--model", type=Path, default=HERE.parent / "models" / "hy3-tiny", help="of part reuse")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "kvcache.json")
    options = parser.parse_args()
    parts: dict[str, list[Row]] = {}
    before = os.getloadavg()[0]
    for part in options.only.split(","):
        match part:
            case "memory":
                parts[part] = memory(options.rounds, options.peers.resolve())
            case "lookups":
                parts[part] = lookups(options.rounds)
            case "hashing":
                parts[part] = hashing(options.rounds)
            case "disk":
                parts[part] = disk(options.rounds, options.disk)
            case "restart":
                parts[part] = restart(options.rounds, options.disk)
            case "reuse":
                parts[part] = reuse(options.model)
            case "lanes":
                parts[part] = asyncio.run(kvcache_lanes.rows((1, 2), (4, 8), rounds=options.rounds))
            case "limits":
                parts[part] = kvcache_stream_limit.rows()
            case "elsewhere":
                parts[part] = elsewhere()
            case _:
                parser.error(f"no part {part!r}; there are {', '.join(PARTS)}")
        for measured in parts[part]:
            met = {True: "met", False: "NOT met", None: ""}[measured["met"]]
            print(f"{measured['figure']:80} {measured['value']} {measured['unit']}  {measured['bar'] or ''} {met}")
    write(options.output, parts, options.rounds, (before, os.getloadavg()[0]))


if __name__ == "__main__":
    main()
