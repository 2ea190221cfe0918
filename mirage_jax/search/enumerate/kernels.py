"""One kernel: all operator DAGs that compute given outputs, counted and extracted by dynamic programming over
tables.

A *pending* is the set of values that still have to be made. Always the largest one is popped: every consumer of it
is already placed, so each DAG, with sharing, is generated exactly once, without a visited set and without
permutations. The popped value is either loaded (it is materialized, by another kernel) or made by one `Decomposition`.
The memo maps a pending to {(loaded values, is the loop used?): histogram over the number of operators}: all kernel
cuts and exact counts come from one pass. Mirage extends prefixes forwards and asks a solver whether each is useful;
backwards, every state is useful.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from mirage_jax.mugraph.graph import Axis, origin
from mirage_jax.search.enumerate.axioms import LOOP, Axioms, Decomposition, kind, part_of
from mirage_jax.search.enumerate.normal_form import Poly, memo
from mirage_jax.search.enumerate.shift_degrees import ShiftDegrees

type Leaves = frozenset[Poly]
type Histogram = (
    int  # number of DAGs with n operators, in bits n * LANE and up: adding and shifting are one operation each
)
type Dag = tuple[tuple[Poly, Decomposition], ...]  # values with the step that makes each, operands first
type _Chain = tuple[tuple[Poly, Decomposition], _Chain] | None  # the same, results first
type PendingSet = tuple[tuple[tuple[int, int], Poly, int], ...]  # (order, value, passes) by falling order
type Counted = dict[PendingSet, dict[tuple[Leaves, bool], Histogram]]
type Weight = Callable[[Poly, Decomposition], float]
type Cheapest = dict[PendingSet, dict[Leaves, tuple[float, _Chain]]]
# passes: the loops in which a value is needed, bit n for the one that n more may precede; MUST is set for outputs
REQUIRED_TILE_LIMIT = 1 << 16
EMPTY: Leaves = frozenset()
LANE_ELEMENTS = 128
UNCOUNTED_OPERATORS = frozenset({"affine", "const", "iota"})  # scalars ride for free: not counted as operators


@dataclass(frozen=True)
class Space:
    """Bounds of the searched space; "exhaustive" always means: within these."""

    max_ops: int = 11  # elementary operators per kernel
    max_kernels: int = 3
    max_loaded: int = 2  # intermediates loaded by one kernel (region inputs are not counted)
    max_outputs: int = 2
    max_rank: int = 2  # axes of a tile, batch axes not counted
    loops: int = 2  # passes over the loop axis, one after the other, inside one kernel
    splits: bool = True  # whether what is summed may be split over the grid

    def __str__(self) -> str:
        return (
            f"up to {self.max_ops} operators per kernel, {self.max_kernels} kernels,"
            f" {self.max_loaded} loaded intermediates,"
            f" tiles of rank {self.max_rank}, {self.loops} loops in sequence{'' if self.splits else ', no split sums'}"
        )


class BudgetExceeded(Exception):
    """Raised inside the search when its budget is used up; never leaves the search."""


@dataclass
class KernelTables:
    """Tables of one search variant (a region, or the region with one axis split)."""

    axioms: Axioms
    shift_degrees: ShiftDegrees
    space: Space
    batch: frozenset[Axis]
    tick: Callable[[], None] = lambda: None  # called once per state: budget check
    stats: Counter[str] = field(default_factory=Counter[str])
    _memo: defaultdict[str, dict[object, object]] = field(default_factory=lambda: defaultdict(dict))
    _counted: dict[tuple[Axis | None, frozenset[Axis]], Counted] = field(
        default_factory=dict[tuple[Axis | None, frozenset[Axis]], Counted]
    )
    # Equal ones are one object: tables have millions of entries, of few different cuts and histograms.
    _cuts: dict[tuple[Leaves, bool], tuple[Leaves, bool]] = field(
        default_factory=dict[tuple[Leaves, bool], tuple[Leaves, bool]]
    )
    _histograms: dict[Histogram, Histogram] = field(default_factory=dict[Histogram, Histogram])

    # ------------------------------------------------------------------ legality

    @memo
    def tile_axes(self, p: Poly) -> frozenset[Axis]:
        return frozenset(a for a in self.axioms.e.axes(p) if kind(a) == "t" and origin(a) not in self.batch)

    def legal(self, p: Poly) -> bool:
        """May this value exist inside a kernel? Each refusal is counted under its rule's name."""
        why = self._illegal(p)
        if why:
            self.stats[why] += 1
        return not why

    @memo
    def _illegal(self, p: Poly) -> str:
        if len(self.tile_axes(p)) > self.space.max_rank:
            return "rank"
        if self.shift_degrees.splits_a_group(p):
            return "exp group split"
        return "inhomogeneous exp" if self.shift_degrees.degree(p) is None else ""

    @memo
    def order(self, p: Poly) -> tuple[int, int]:
        """Operands come strictly before the values made from them; c x has the size of x and comes after it."""
        scaled = self.axioms.e.affine_parts(p)[0] != p
        return (2 * self.axioms.e.size(p) + scaled, p)

    # ------------------------------------------------------------------ reachability

    @memo
    def reach(self, p: Poly, stop: Leaves = EMPTY) -> frozenset[Poly]:
        """All values that some DAG for `p` may contain, not looking below `stop`."""
        seen, todo = {p}, [p]
        while todo:
            q = todo.pop()
            if q in stop or self.axioms.is_input(q):
                continue
            self.tick()
            for s in self.axioms.steps(q):
                for o in s.args:
                    if o not in seen:
                        seen.add(o)
                        todo.append(o)
        return frozenset(seen)

    @memo
    def reduced_axes(self, p: Poly, stop: Leaves = EMPTY) -> frozenset[Axis]:
        """Axes reduced somewhere below `p` and above `stop`."""
        out: set[Axis] = set()
        for q in self.reach(p, stop) if stop else self.reach(p):  # as others ask for it: the table goes by arguments
            if q not in stop and not self.axioms.is_input(q):
                for s in self.axioms.steps(q):
                    out |= {origin(a) for a in s.reduced}
        return frozenset(out)

    def loops_for(self, outs: Leaves) -> tuple[Axis | None, ...]:
        """Axes that a kernel with these outputs may loop over: those reduced inside. An output that has the axis is
        stored step by step.
        """
        inside = frozenset[Axis]().union(*(self.reduced_axes(o) for o in outs))
        return (None, *sorted(a for a in inside if kind(a) == "t"))

    @memo
    def loops_of(self, outs: Leaves, leaves: Leaves) -> tuple[Axis | None, ...]:
        """Of these the ones that a kernel with this cut may have: a batch axis that it sums is taken one by one."""
        summed = self._summed_batch - self.free_axes(outs)
        if summed:
            summed &= frozenset[Axis]().union(*(self.reduced_axes(o, leaves) for o in outs))
        return tuple(x for x in self.loops_for(outs) if summed <= {x} and leaves in self.kernels(outs, x))

    @cached_property
    def _summed_batch(self) -> frozenset[Axis]:
        """Batch axes that are reduced somewhere."""
        return self.batch & frozenset[Axis]().union(*(self.reduced_axes(o) for o in self.shift_degrees.targets))

    def grid_for(self, outs: Leaves, leaves: Leaves) -> tuple[frozenset[Axis], frozenset[Axis]]:
        """(mandatory, optional) grid axes: free in every output and reduced nowhere above the loads."""
        inside = frozenset[Axis]().union(*(self.reduced_axes(o, leaves) for o in outs))
        ok = self.free_axes(outs) - inside
        parts = frozenset(a for a in ok if kind(a) == "g")
        return parts, ok - parts

    @memo
    def free_axes(self, outs: Leaves) -> frozenset[Axis]:
        """Axes that every store of a kernel with these outputs has: on the grid unless the kernel reduces them."""
        free = frozenset[Axis].intersection(*(self.axioms.e.axes(o) for o in outs))
        for o in outs:
            if self.shift_degrees.degree(o):  # its shift is stored too
                free &= frozenset[Axis].intersection(*self.shift_degrees.group_axes(o).values())
        return frozenset(a for a in free if a == origin(a))

    @memo
    def _unloadable(self, p: Poly) -> str:
        """Why this value may not be a device tensor, or "". One with both halves of a split axis repeats an unsplit
        plan.
        """
        axes = self.axioms.e.axes(p)
        if len(self.tile_axes(p)) > self.space.max_rank:
            return "rank"
        if self.axioms.e.is_constant(p) or any(kind(a) == "t" and part_of(a) in axes for a in axes):
            return "both halves of a split axis"
        return ""

    def parts_of(self, outs: Leaves) -> frozenset[Axis]:
        """Part axes on the grid of a kernel with these outputs: those free in all of them."""
        return frozenset(
            a for a in frozenset[Axis].intersection(*(self.axioms.e.axes(o) for o in outs)) if kind(a) == "g"
        )

    def possible(self, s: Decomposition, parts: frozenset[Axis]) -> bool:
        """A region input is read along a part axis only by kernels that have it on their grid; a loop runs over no
        copy of an axis.
        """
        why = self._impossible(s, parts)
        if why:
            self.stats[why] += 1
        return not why

    @memo
    def _impossible(self, s: Decomposition, parts: frozenset[Axis]) -> str:
        if s.accumulates and s.reduced[0] != origin(s.reduced[0]):
            return "loop over a copy"
        inputs = (self.axioms.atom(o)[1] for o in s.args if self.axioms.is_input(o))
        read = {a for axes in inputs for a in axes if kind(a) == "g"}
        return "" if read <= parts else "part read outside of the grid"

    # ------------------------------------------------------------------ the dynamic programs

    def in_loop(self, p: Poly, loop: Axis | None) -> Poly:
        """A kernel-level value as seen inside the kernel: its loop axis split into (step, tile)."""
        return p if loop is None else self.axioms.e.split(p, loop, (loop + LOOP, loop))

    @memo
    def _outside(self, loop: Axis | None) -> dict[Poly, Poly]:
        """Values inside of a kernel -> the same as tensors."""
        return {self.in_loop(p, loop): p for o in self.shift_degrees.targets for p in self.reach(o)}

    @memo
    def kernels(self, outs: Leaves, loop: Axis | None) -> dict[Leaves, Counter[int]]:
        """{loaded values: {number of operators: number of DAGs}} over all kernels that compute `outs`."""
        space, stats = self.space, self.stats
        parts = self.parts_of(outs)
        outside = self._outside(loop)
        table = self._counted.setdefault((loop, parts), {})  # kernels with other outputs meet the same pending sets
        limit = (1 << LANE_ELEMENTS * (space.max_ops + 1)) - 1
        cuts, counts = self._cuts, self._histograms

        def solve(pending: PendingSet) -> dict[tuple[Leaves, bool], Histogram]:
            if not pending:
                return {(EMPTY, False): 1}
            if pending in table:
                return table[pending]
            self.tick()
            stats["states"] += 1
            (_, top, passes), rest = pending[0], pending[1:]
            out: dict[tuple[Leaves, bool], Histogram] = {}

            if not passes & REQUIRED_TILE_LIMIT:
                whole = outside.get(top)
                why = "partial sum is not a tensor" if whole is None else self._unloadable(whole)
                if whole is None or why:
                    stats[why] += 1
                else:
                    for (loaded, used), h in solve(rest).items():
                        if len(loaded) < space.max_loaded:
                            key = (loaded | {whole}, used)
                            key = cuts.setdefault(key, key)
                            out[key] = out.get(key, 0) + h
            if self.legal(top):
                for s in self.axioms.steps(top):
                    stats["steps"] += 1
                    if s.accumulates and passes & 1:
                        stats["second loop"] += 1
                        continue
                    if not self.possible(s, parts):
                        continue
                    shift = 0 if s.op in UNCOUNTED_OPERATORS else LANE_ELEMENTS
                    for key, h in solve(self._extend(rest, s, passes)).items():
                        if more := h << shift & limit:
                            if s.accumulates and not key[1]:
                                key = (key[0], True)
                                key = cuts.setdefault(key, key)
                            out[key] = out.get(key, 0) + more
                        else:
                            stats["operator limit"] += 1
            table[pending] = {key: counts.setdefault(h, h) for key, h in out.items()}
            return table[pending]

        found: dict[Leaves, Counter[int]] = {}
        for (loaded, used), h in solve(self._start(outs, loop)).items():
            if used or loop is None:
                found.setdefault(loaded, Counter()).update(_unpacked(h))
        return found

    def forget(self) -> None:
        """Give back the memory of `kernels`, which is not asked about other outputs any more."""
        self._counted.clear()

    def _start(self, outs: Leaves, loop: Axis | None) -> PendingSet:
        """The pending that a kernel begins with. An output stored inside a loop leaves one loop less for what it
        needs.
        """

        def entry(o: Poly) -> tuple[tuple[int, int], Poly, int]:
            p = self.in_loop(o, loop)
            streamed = self.in_body(p)
            return (self.order(p), p, REQUIRED_TILE_LIMIT | 1 << (self.space.loops - streamed if loop else 0))

        return tuple(sorted(map(entry, outs), reverse=True))

    def _extend(self, rest: PendingSet, s: Decomposition, passes: int) -> PendingSet:
        """What is still to be made after a step whose result is needed in `passes`. What does not change in a loop is
        made once, before the first of them.
        """
        passes = _first(passes) >> 1 if s.accumulates else passes & ~REQUIRED_TILE_LIMIT
        needs = self._needs(s)
        if not needs:
            return rest
        nxt = {entry[1]: entry for entry in rest}
        for order, o, in_body in needs:
            here = passes | nxt[o][2] if o in nxt else passes
            nxt[o] = (order, o, here if in_body else _first(here) | here & REQUIRED_TILE_LIMIT)
        return tuple(sorted(nxt.values(), reverse=True))

    @memo
    def _needs(self, s: Decomposition) -> tuple[tuple[tuple[int, int], Poly, bool], ...]:
        """Operands of a step that have to be made: their place in a pending, and whether in a loop's body."""
        return tuple((self.order(o), o, self.in_body(o)) for o in s.args if not self.axioms.is_input(o))

    @memo
    def in_body(self, p: Poly) -> bool:
        """Does a value differ from loop step to loop step?"""
        return any(kind(a) == "l" for a in self.axioms.e.axes(p))

    def cheapest(
        self,
        outs: Leaves,
        loop: Axis | None,
        weight: Weight,
        max_loaded: int,
        within: Callable[[], None] | None = None,
        kept: frozenset[Axis] = frozenset(),
        table: Cheapest | None = None,
    ) -> dict[Leaves, Dag]:
        """{loaded values: the cheapest DAG for `outs` that loads them}, each operator costing `weight`; operands first.

        No operator reduces an axis in `kept`. `within` is called once per state, for a limit of its own. `table` is
        shared by calls that differ in `outs` only.
        """
        check = within or self.tick
        parts = self.parts_of(outs)
        outside = self._outside(loop)
        known: Cheapest = {} if table is None else table
        sets: dict[Leaves, Leaves] = {}

        def solve(pending: PendingSet) -> dict[Leaves, tuple[float, _Chain]]:
            if not pending:
                return {EMPTY: (0.0, None)}
            if pending in known:
                return known[pending]
            check()
            self.stats["states"] += 1
            (_, top, passes), rest = pending[0], pending[1:]
            best: dict[Leaves, tuple[float, _Chain]] = {}
            whole = outside.get(top)
            if max_loaded and whole is not None and not passes & REQUIRED_TILE_LIMIT and not self._unloadable(whole):
                for loaded, found in solve(rest).items():
                    if len(loaded) < max_loaded:
                        more = loaded | {whole}
                        best[sets.setdefault(more, more)] = found
            if self.legal(top):
                for s in self.axioms.steps(top):
                    if (s.accumulates and passes & 1) or not self.possible(s, parts):
                        continue
                    if kept and not kept.isdisjoint(map(origin, s.reduced)):
                        continue
                    self.stats["steps"] += 1
                    cost = (
                        weight(top, s) * (passes & ~REQUIRED_TILE_LIMIT).bit_count()
                    )  # made anew in each loop that needs it
                    for loaded, (c, dag) in solve(self._extend(rest, s, passes)).items():
                        if loaded not in best or c + cost < best[loaded][0]:
                            best[loaded] = (c + cost, ((top, s), dag))
            known[pending] = best
            return best

        return {loaded: _unchained(dag) for loaded, (_, dag) in solve(self._start(outs, loop)).items()}

    def cheapest_tree(self, outs: Leaves, weight: Weight) -> Dag | None:
        """A cheap DAG for `outs` without loads and loop, found value by value as if nothing were shared.

        Linear in the number of steps: what there is when `cheapest` does not end within its budget.
        """
        best: dict[Poly, tuple[float, Decomposition] | None] = {}
        for p in sorted(frozenset[Poly]().union(*(self.reach(o) for o in outs)), key=self.order):
            self.tick()
            if self.axioms.is_input(p):
                continue
            found: tuple[float, Decomposition] | None = None
            for s in self.axioms.steps(p) if self.legal(p) else ():
                made = [best.get(o) for o in s.args if not self.axioms.is_input(o)]
                if all(m is not None for m in made):
                    cost = weight(p, s) + sum(m[0] for m in made if m is not None)
                    if found is None or cost < found[0]:
                        found = (cost, s)
            best[p] = found
        dag: dict[Poly, Decomposition] = {}
        todo = list(outs)
        while todo:
            p = todo.pop()
            chosen = best.get(p)
            if chosen is None:
                return None
            if p not in dag:
                dag[p] = chosen[1]
                todo += [o for o in chosen[1].args if not self.axioms.is_input(o)]
        return tuple(sorted(dag.items(), key=lambda x: self.order(x[0])))


def _first(passes: int) -> int:
    """The first of several loops alone."""
    return passes & -passes & ~REQUIRED_TILE_LIMIT


def _unchained(chain: _Chain) -> Dag:
    out: list[tuple[Poly, Decomposition]] = []
    while chain is not None:
        out.append(chain[0])
        chain = chain[1]
    return tuple(reversed(out))


def _unpacked(h: Histogram) -> dict[int, int]:
    """{number of operators: number of DAGs}"""
    lanes = range(-(-h.bit_length() // LANE_ELEMENTS))
    return {n: c for n in lanes if (c := h >> n * LANE_ELEMENTS & ((1 << LANE_ELEMENTS) - 1))}
