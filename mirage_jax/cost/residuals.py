"""How far the cost model is off in one region, learned while its variants are timed.

The model is off by about the same factor for all variants of a muGraph, and by other factors for other muGraphs. Two
times of each tell most of it. What would be slow at its muGraph's best factor need not be compiled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from mirage_jax.mugraph.graph import KernelGraph, Schedule

FIRST = 2  # variants of each kind that are timed in any case
MARGIN = 1.6  # of the fastest time, up to which a variant may take by the best factor of its kind


@dataclass
class Residuals:
    """Measured times over the model's, by kind of variant. `best`: seconds of the fastest variant so far."""

    best: float = math.inf
    _factors: dict[Hashable, dict[Hashable, float]] = field(default_factory=dict[Hashable, dict[Hashable, float]])

    def learn(self, kind: Hashable, variant: Hashable, estimate: float, seconds: float) -> None:
        """Add the time of a variant, or replace it. Times of 0, and infinite ones, say nothing."""
        if 0 < estimate < math.inf and 0 < seconds < math.inf:
            self._factors.setdefault(kind, {})[variant] = seconds / estimate
            self.best = min(self.best, seconds)

    def at_best(self, kind: Hashable, estimate: float) -> float:
        """Seconds that a variant takes by the best factor of its kind; 0 where too few are known."""
        known = self._factors.get(kind, {})
        return estimate * min(known.values()) if len(known) >= FIRST else 0.0

    def is_slow(self, kind: Hashable, estimate: float) -> bool:
        """Tell whether a variant will not be the fastest."""
        return self.at_best(kind, estimate) > MARGIN * self.best


def kind(graph: KernelGraph, schedule: Schedule) -> tuple[KernelGraph, int]:
    """The muGraph, and how many kernels are specialized: the cost model is off by the same factor for such variants."""
    return graph, sum(k.specialized for k in schedule.kernels)


def first_of_each[T](variants: Iterable[T], kind_of: Callable[[T], Hashable], n: int = FIRST) -> Iterator[T]:
    """The first n variants of each kind."""
    seen = Counter[Hashable]()
    for variant in variants:
        key = kind_of(variant)
        seen[key] += 1
        if seen[key] <= n:
            yield variant
