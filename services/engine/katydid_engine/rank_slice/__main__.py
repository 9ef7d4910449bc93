"""``python -m katydid_engine.rank_slice``, which `katydid bench slice` and `bench workload` hand their words to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from katydid_runtime.errors import KatydidError, SettingsError

from katydid_engine.rank_slice.command import add_slice_arguments, run_slice
from katydid_engine.rank_slice.workload import add_workload_arguments, run_workload

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """0 done; 1 it did not work; 2 it was asked for wrongly."""
    parser = argparse.ArgumentParser(prog="katydid bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add_slice_arguments(commands.add_parser("slice", help="time one rank of a plan alone"))
    add_workload_arguments(commands.add_parser("workload", help="replay agents on one rank of a plan"))
    arguments = parser.parse_args(argv)
    try:
        (run_slice if arguments.command == "slice" else run_workload)(arguments)
    except KatydidError as error:
        print(f"katydid: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
