"""The host that runs this process."""

from __future__ import annotations

import os


def processors() -> int:
    """Count the processors that this process may use: a container, or a batch system, may leave it a few of many."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS or Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
