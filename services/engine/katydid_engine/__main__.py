"""Starts an engine: `python -m katydid_engine --model FOLDER`; settings are in `katydid_engine.settings`."""

from __future__ import annotations


def main() -> None:
    from katydid_runtime.process import run_service

    from katydid_engine.engine import serve
    from katydid_engine.settings import EngineSettings

    run_service("engine", EngineSettings, serve)


if __name__ == "__main__":
    main()
