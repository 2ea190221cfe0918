"""Convex clusters: equations that can be taken out of a program together, and their division into small clusters.

A set of equations can become one step only if no path leaves it and comes back. Clusters are grown over
producer-consumer edges and two are joined unless a path between them runs through anything else, so an unrelated
equation that merely stands in between in the text separates nothing. All clusters together, each taken as one step,
stay acyclic.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter

from mirage_jax.jaxpr_frontend.partition.program import FlatProgram

CUT_COST_BYTES = 1 << 20  # bytes: what one more kernel launch is worth


@dataclass(frozen=True)
class Dependencies:
    """Equations by position: who must come before whom. Effects stay in their order."""

    before: tuple[frozenset[int], ...]

    @classmethod
    def of(cls, program: FlatProgram) -> Dependencies:
        """Find the dependencies of a program's equations."""
        made = program.producers
        before = [{made[v] for v in (*eqn.reads, *eqn.after) if v in made} for eqn in program.eqns]
        with_effects = [n for n, eqn in enumerate(program.eqns) if eqn.has_effects]
        for first, then in itertools.pairwise(with_effects):
            before[then].add(first)
        return cls(tuple(map(frozenset, before)))

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """The other way around: more than the readers of an equation's results, for some only wait for them."""
        after: list[list[int]] = [[] for _ in self.before]
        for n, earlier in enumerate(self.before):
            for p in earlier:
                after[p].append(n)
        return tuple(map(tuple, after))


def convex_clusters(
    dependencies: Dependencies,
    members: Collection[int],
    scopes: Sequence[int] = (),
    apart: Iterable[tuple[int, int]] = (),
) -> list[tuple[int, ...]]:
    """Join `members` greedily into clusters as large as possible, in order of their first equation.

    Equations of different scopes are in different clusters, and so are the two of each pair of `apart`.
    """
    steps = _Steps(dependencies, apart)
    members = set(members)
    for n, before in enumerate(dependencies.before):
        steps.add(n, n in members)
        if n in members:
            for producer in sorted(before & members, reverse=True):
                if not scopes or scopes[producer] == scopes[n]:
                    steps.join(producer, n)
    clusters: dict[int, list[int]] = {}
    for n in sorted(members):
        clusters.setdefault(steps.find(n), []).append(n)
    return [tuple(c) for c in clusters.values()]


def in_order(dependencies: Dependencies, clusters: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """Order all equations, each in its cluster or alone, by their dependencies, and then as the program does.

    Raises:
        graphlib.CycleError: clusters, each taken as one step, depend on each other in a circle.
    """
    steps = {c[0]: tuple(c) for c in clusters}
    head = {n: c[0] for c in steps.values() for n in c}
    for n in range(len(dependencies.before)):
        if n not in head:
            head[n], steps[n] = n, (n,)
    before: dict[int, set[int]] = {n: set() for n in steps}
    for n, earlier in enumerate(dependencies.before):
        before[head[n]] |= {head[p] for p in earlier} - {head[n]}
    sorter = TopologicalSorter(before)
    sorter.prepare()
    ready: list[int] = []
    order: list[tuple[int, ...]] = []
    while sorter.is_active():
        for n in sorter.get_ready():
            heapq.heappush(ready, n)
        first = heapq.heappop(ready)
        order.append(steps[first])
        sorter.done(first)
    return order


class _Steps:
    """Equations contracted into steps: union-find that also keeps the edges between steps.

    Every step has a higher level than the steps before it, so that a search for a path between two steps stays between
    their levels. A step that depends on no member has level 0, and no edges: it is on no path.
    """

    def __init__(self, dependencies: Dependencies, apart: Iterable[tuple[int, int]] = ()):
        self.dependencies = dependencies
        count = len(dependencies.before)
        self.apart: dict[int, set[int]] = {}  # of a step: equations that may not be in it
        for a, b in apart:
            self.apart.setdefault(a, set()).add(b)
            self.apart.setdefault(b, set()).add(a)
        self.parent = list(range(count))
        self.before: list[set[int]] = [set() for _ in range(count)]
        self.after: list[set[int]] = [set() for _ in range(count)]
        self.level = [0] * count

    def add(self, n: int, is_member: bool) -> None:
        """The next equation, as a step of its own."""
        before = {m for p in self.dependencies.before[n] if self.level[m := self.find(p)]}
        if before or is_member:
            self.before[n] = before
            self.level[n] = 1 + max((self.level[m] for m in before), default=0)
        for m in before:
            self.after[m].add(n)

    def find(self, n: int) -> int:
        """Find the step that an equation is in, by its first equation."""
        while self.parent[n] != n:
            self.parent[n] = n = self.parent[self.parent[n]]
        return n

    def join(self, a: int, b: int) -> bool:
        """Join a step and its reader, unless they are to be apart or a third step would be before and after them."""
        a, b = self.find(a), self.find(b)
        if a == b:
            return True
        others = self._neighbours(self.after, a) - {b} if len(self.after[a]) > 1 else set[int]()
        if (a in self.apart and any(self.find(n) == b for n in self.apart[a])) or (others and self._has_detour(a, b)):
            return False
        self.parent[b] = a
        if b in self.apart:
            self.apart.setdefault(a, set()).update(self.apart.pop(b))
        self.before[a] |= self.before[b]
        self.after[a] = others | self.after[b]
        self.before[b], self.after[b] = set(), set()
        if others:
            self._raise(a, self.level[b])
        else:
            self.level[a] = self.level[b]  # what is after them is after that one, and high enough
        return True

    def _neighbours(self, edges: list[set[int]], n: int) -> set[int]:
        found = edges[n] = {self.find(m) for m in edges[n]} - {n}
        return found

    def _has_detour(self, a: int, b: int) -> bool:
        """Whether some path from a to b passes through a third step."""
        above, level = self.level[a], self.level
        todo = [n for n in self._neighbours(self.before, b) if level[n] > above]
        seen = set(todo)
        while todo:
            for n in self._neighbours(self.before, todo.pop()):
                if n == a:
                    return True
                if n not in seen and level[n] > above:
                    seen.add(n)
                    todo.append(n)
        return False

    def _raise(self, step: int, level: int) -> None:
        """Give a step a level, and those after it higher ones where they have none."""
        todo = [(step, level)]
        while todo:
            n, level = todo.pop()
            self.level[n] = max(level, self.level[n])
            todo += [(m, level + 1) for m in self._neighbours(self.after, n) if self.level[m] <= level]


def divide(
    order: Sequence[Sequence[int]],
    weights: Sequence[int],
    crossing: Sequence[int],
    max_weight: int,
    apart: Iterable[tuple[int, int]] = (),
) -> list[tuple[int, ...]]:
    """Contiguous segments of `order` of at most `max_weight`, such that the fewest bytes cross the cuts.

    `order` is a topological order of groups that are not cut, of these `weights`; `crossing[p]` are the bytes alive
    between groups p-1 and p. `apart`: pairs of groups, the earlier first, that may not be in one segment.
    """
    first = [0] * (len(order) + 1)  # group with which a segment may begin that ends before a group
    for a, b in apart:
        first[b + 1] = max(first[b + 1], a + 1)
    first = list(itertools.accumulate(first, max))
    cut: list[float] = [0]  # bytes that cross cuts of the first p groups, and one after them
    starts = [0]  # of the last segment of the first p groups
    for end in range(1, len(order) + 1):
        total, cost, best = 0, math.inf, 0
        for start in range(end - 1, min(first[end], end - 1) - 1, -1):
            total += weights[start]
            if total > max_weight and start < end - 1:
                break
            if cut[start] < cost:  # at a tie the later cut: what an operator makes is stored, not its operands
                cost, best = cut[start], start
        cut.append(cost + crossing[end] + CUT_COST_BYTES if end < len(order) else cost)
        starts.append(best)
    segments: list[tuple[int, ...]] = []
    end = len(order)
    while end:
        start = starts[end]
        segments.append(tuple(n for group in order[start:end] for n in group))
        end = start
    return segments[::-1]
