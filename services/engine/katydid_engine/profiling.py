"""A torch profile of some steps, written as a Chrome trace."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["StepProfiler"]


class StepProfiler:
    """Records one profile at a time; costs nothing while none is recorded."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._left = 0
        self._path = ""

    def start(self, steps: int, path: str) -> None:
        """Records the next ``steps`` steps into ``path``. Raises RuntimeError while another profile is recorded."""
        if self._profile is not None:
            raise RuntimeError(f"a profile is being recorded to {self._path}, {self._left} steps are left")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._left, self._path = steps, path
        self._profile = profile(activities=activities)
        self._profile.start()

    def step_done(self) -> bool:
        """To be called after every step; True when that one completed a profile and the file is written."""
        if self._profile is None:
            return False
        self._left -= 1
        if self._left:
            return False
        self._profile.stop()
        self._profile.export_chrome_trace(self._path)
        self._profile = None
        return True
