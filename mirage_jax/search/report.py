"""Reports of a search: counts, the reason for its end, and the clock that ends it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from mirage_jax.search.enumerate.kernels import BudgetExceeded, Space

PROGRESS_SECONDS = 0.2  # between two notes on the progress of a search

type Notify = Callable[[int, float | None, float], None]
"""Called now and then with states, best estimate so far, seconds."""


class StopReason(Enum):
    """Why a search ended."""

    EXHAUSTED = "exhausted the space"
    SECONDS = "time budget used up"
    STATES = "state budget used up"
    TERMS = "normal forms have more terms than were asked for"
    ALGEBRA = "common subexpressions of the algebra not exhausted (state limit)"
    PLANS = "plan limit reached"
    INTERRUPTED = "interrupted; best so far kept"


@dataclass
class SearchReport:
    """Counts of one search, printed by explain() and by the benchmark."""

    space: Space
    stop: StopReason = StopReason.EXHAUSTED
    seconds: float = 0.0
    classes: int = 0
    states: int = 0
    steps: int = 0
    plans: int = 0
    structures: int = 0
    priced: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])  # plans that could not be written, by reason
    pruned: Counter[str] = field(default_factory=Counter[str])  # states and steps not followed, by rule
    fired: Counter[str] = field(default_factory=Counter[str])  # steps made, by axiom
    windows: int = 1
    output_slices: int = 0

    def add(self, other: SearchReport) -> None:
        """Add the report of a search over one window."""
        for name in ("seconds", "classes", "states", "steps", "plans", "structures", "priced"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dropped, self.pruned, self.fired = (
            self.dropped + other.dropped,
            self.pruned + other.pruned,
            self.fired + other.fired,
        )
        if other.stop is not StopReason.EXHAUSTED and self.stop is not StopReason.INTERRUPTED:
            self.stop = other.stop

    def __str__(self) -> str:
        lines = [
            f"{self.stop.value} in {self.seconds:.2f} s: {self.classes} classes, {self.states} states,"
            f" {self.steps} steps,"
            f" {self.plans} plans standing for {self.structures:.3g} structures, {self.priced} priced"
        ]
        if self.stop is StopReason.EXHAUSTED:
            lines.append(
                f"exhaustive {self.space}"
                + (f", in each of {self.windows} windows" if self.windows > 1 else "")
                + (
                    f", and of plans of few kernels for each of {self.output_slices} outputs"
                    if self.output_slices
                    else ""
                )
            )
        lines.append("pruned: " + (", ".join(f"{k} {v}" for k, v in sorted(self.pruned.items())) or "nothing"))
        lines.append("axioms: " + ", ".join(f"{k} {v}" for k, v in sorted(self.fired.items())))
        if self.dropped:
            lines.append("plans not expressible: " + ", ".join(f"{k} {v}" for k, v in sorted(self.dropped.items())))
        return "\n".join(lines)


@dataclass
class Clock:
    """Counts states, terms of normal forms, and time against the budget."""

    seconds: float
    states: int
    terms: float = math.inf  # of normal forms, that may be looked at: about 20,000 a second
    seen: int = 0
    began: float = field(default_factory=time.monotonic)
    ticks: int = 0
    notify: Callable[[int, float], None] | None = None
    notified: float = 0.0
    patience: float = math.inf  # seconds, of a search that has found nothing yet

    def tick(self) -> None:
        """Count a state. Raises `BudgetExceeded` when states or seconds are used up."""
        self.ticks += 1
        if self.ticks > self.states:
            raise BudgetExceeded(StopReason.STATES)
        if self.ticks % 64 == 0:
            self.check()

    def look(self, terms: int) -> None:
        """Count terms of normal forms before they are looked at. Raises `BudgetExceeded`."""
        before = self.seen // 64
        self.seen += terms
        if self.seen > self.terms:
            raise BudgetExceeded(StopReason.TERMS)
        if self.seen // 64 > before:
            self.check()

    def limited(self, states: int, reason: StopReason) -> Callable[[], None]:
        """Make a tick that also stops after so many more states, for that reason."""
        end = self.ticks + states

        def tick() -> None:
            """Count a state."""
            self.tick()
            if self.ticks > end:
                raise BudgetExceeded(reason)

        return tick

    def check(self) -> None:
        """Notify now and then. Raises `BudgetExceeded` when the seconds are used up, or patience is."""
        elapsed = time.monotonic() - self.began
        if self.notify is not None and elapsed > self.notified + PROGRESS_SECONDS:
            self.notified = elapsed
            self.notify(self.ticks, elapsed)
        if elapsed > min(self.seconds, self.patience):
            raise BudgetExceeded(StopReason.SECONDS)
