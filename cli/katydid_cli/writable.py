"""Finds out before the work whether its result can be written: a run of hours must not end in "No such file"."""

from __future__ import annotations

from pathlib import Path

from katydid_runtime.errors import SettingsError

__all__ = ["check_writable_file", "check_writable_folder"]


def check_writable_file(option: str, path: Path) -> None:
    """Raises SettingsError when `path` is a folder, or when its folder takes no new file."""
    if path.is_dir():
        raise SettingsError(f"{option}: {path} is a folder", value=str(path))
    check_writable_folder(option, path.parent)


def check_writable_folder(option: str, folder: Path) -> None:
    """Make the folder and a file in it, because permissions alone do not tell (read-only mounts, a file in the way).

    Raises SettingsError.
    """
    probe = folder / ".katydid-write-test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SettingsError(f"{option}: cannot write to {folder}: {error.strerror}", value=str(folder)) from error
