"""The campaigns against stored decisions, by name, each with the number of cases that was published."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mirage_jax.audit import cache_entries, crowds, faults, interrupts
from mirage_jax.audit.stress import Stress
from mirage_jax.progress import Say

type Run = Callable[[int, int, Say], Stress]

RUNS: Mapping[str, tuple[Run, int]] = {
    "entries": (cache_entries.campaign, 40_000),
    "faults": (faults.campaign, 500),
    "processes": (crowds.processes, 200),  # rounds of each
    "threads": (crowds.threads, 200),
    "interrupts": (interrupts.interrupts, 200),
    "kills": (interrupts.kills, 60),
}
