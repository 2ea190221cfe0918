"""One kernel: all operator DAGs that compute given outputs, counted and extracted by dynamic programming.

The *pending set* holds the values that still have to be made. Always the largest one is popped. Every consumer of this
value is already placed, so each DAG, with sharing, is generated exactly once, without a visited set and without
permutations. The popped value is either loaded (another kernel stores it) or made by one `Decomposition`. The memo maps
a pending set to {(loaded values, is the loop used?): histogram over the number of operators}: all kernel cuts and exact
counts come from one pass. Mirage (OSDI'25, sections 4.1 and 4.3) extends prefixes forwards and asks a solver whether
each is useful; backwards, every state is useful.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mirage_jax.mugraph.graph import Axis, origin
from mirage_jax.search.enumerate.axioms import LOOP, Axioms, Decomposition, kind, part_of
from mirage_jax.search.enumerate.normal_form import Poly, memo
from mirage_jax.search.enumerate.shift_degrees import ShiftDegrees

type Leaves = frozenset[Poly]
type Histogram = int  # number of DAGs with n operators, in bits n * LANE_BITS and up: fast to add and to shift
type Dag = tuple[tuple[Poly, Decomposition], ...]  # values with the step that makes each, operands first
type _Chain = tuple[tuple[Poly, Decomposition], _Chain] | None  # the same, results first
type PendingSet = tuple[int, ...]  # orders of values, shifted to make room for their passes; the largest is the last
type Counts = dict[tuple[Leaves, bool], Histogram]  # by loaded values, and whether a loop is used
type Counted = dict[PendingSet, Counts]
type _Needs = tuple[tuple[int, bool], ...]  # (entry of a pending set without passes, is it in a loop's body?)
type _Made = tuple[Decomposition, _Needs]
type _Step = tuple[Decomposition, float, _Needs]  # with its cost in one loop
type Weight = Callable[[Poly, Decomposition], float]
# passes: the loops in which a value is needed, bit n for the one that n more may precede; outputs have REQUIRED set
PASSES_BITS, VALUE_BITS = 8, 32  # of an entry: numbers hash and compare much faster than nested tuples
REQUIRED = 1 << PASSES_BITS - 1
PASSES, VALUE = (1 << PASSES_BITS) - 1, (1 << VALUE_BITS) - 1
EMPTY: Leaves = frozenset()
LANE_BITS = 128
UNCOUNTED_OPERATORS = frozenset({"affine", "const", "iota"})  # scalars ride for free


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


@dataclass(frozen=True)
class Cheapest:
    """What calls of `KernelTables.cheapest` that differ in `outs` only have in common."""

    dags: dict[PendingSet, dict[Leaves, tuple[float, _Chain]]] = field(
        default_factory=lambda: {(): {EMPTY: (0.0, None)}}
    )
    steps: dict[tuple[Poly, int], tuple[_Step, ...]] = field(
        default_factory=dict[tuple[Poly, int], tuple[_Step, ...]]
    )  # that may make a value, before a loop or not


class BudgetExceeded(Exception):
    """Raised inside the search when its budget is used up; never leaves the search."""


@dataclass(frozen=True)
class _Counting:
    """One count of kernels: part axes on the grid, tensors by their value inside the kernel, histograms so far, and how
    many tensors a kernel may load besides the region's inputs.
    """

    parts: frozenset[Axis]
    outside: dict[Poly, Poly]
    table: Counted
    max_loaded: int


@dataclass(frozen=True)
class _Pricing:
    """One search for the cheapest kernels; fields as in `KernelTables.cheapest`."""

    parts: frozenset[Axis]
    outside: dict[Poly, Poly]
    table: Cheapest
    weight: Weight
    max_loaded: int
    check: Callable[[], None]
    kept: frozenset[Axis]
    sets: dict[Leaves, Leaves] = field(default_factory=dict[Leaves, Leaves])  # equal ones are one object


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
    _counted: dict[tuple[Axis | None, frozenset[Axis], int], Counted] = field(
        default_factory=dict[tuple[Axis | None, frozenset[Axis], int], Counted]
    )
    # Equal keys and histograms are one object: tables have millions of entries, but few different cuts and histograms.
    _cuts: dict[tuple[Leaves, bool], tuple[Leaves, bool]] = field(
        default_factory=dict[tuple[Leaves, bool], tuple[Leaves, bool]]
    )
    _histograms: dict[Histogram, Histogram] = field(default_factory=dict[Histogram, Histogram])

    # ------------------------------------------------------------------ legality

    @memo
    def tile_axes(self, p: Poly) -> frozenset[Axis]:
        """Axes along which a tile of the value has more than one element."""
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
    def order(self, p: Poly) -> int:
        """Operands come strictly before the values made from them; c x has the size of x and comes after it.

        The lowest `VALUE_BITS` are the value's own number.
        """
        scaled = self.axioms.e.affine_parts(p)[0] != p
        return (2 * self.axioms.e.size(p) + scaled) << VALUE_BITS | p

    # ------------------------------------------------------------------ reachability

    @memo
    def reach(self, p: Poly, stop: Leaves = EMPTY) -> frozenset[Poly]:
        """List all values that some DAG for `p` may contain, not looking below `stop`."""
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
        for q in self.reach(p, stop) if stop else self.reach(p):  # the memo goes by arguments
            if q not in stop and not self.axioms.is_input(q):
                for s in self.axioms.steps(q):
                    out |= {origin(a) for a in s.reduced}
        return frozenset(out)

    def loops_for(self, outs: Leaves) -> tuple[Axis | None, ...]:
        """Axes that a kernel with these outputs may loop over: it reduces them. An output that has the axis is stored
        step by step.
        """
        inside = frozenset[Axis]().union(*(self.reduced_axes(o) for o in outs))
        return (None, *sorted(a for a in inside if kind(a) == "t"))

    @memo
    def loops_of(self, outs: Leaves, leaves: Leaves) -> tuple[Axis | None, ...]:
        """Axes that a kernel with this cut may loop over: a batch axis that it sums is taken one by one."""
        summed = self._summed_batch - self.free_axes(outs)
        if summed:
            summed &= frozenset[Axis]().union(*(self.reduced_axes(o, leaves) for o in outs))
        return tuple(x for x in self.loops_for(outs) if summed <= {x} and self.dags(outs, x, leaves))

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
        """Part axes on the grid of a kernel with these outputs: free in every output."""
        free = frozenset[Axis].intersection(*(self.axioms.e.axes(o) for o in outs))
        return frozenset(a for a in free if kind(a) == "g")

    @memo
    def _impossible(self, s: Decomposition, parts: frozenset[Axis]) -> str:
        """Why a kernel with these part axes on its grid may not take this step, or "". It reads region inputs along no
        other part axis, and loops over no copy of an axis.
        """
        if s.accumulates and s.reduced[0] != origin(s.reduced[0]):
            return "loop over a copy"
        inputs = (self.axioms.atom(o)[1] for o in s.args if self.axioms.is_input(o))
        read = {a for axes in inputs for a in axes if kind(a) == "g"}
        return "" if read <= parts else "part read outside of the grid"

    # ------------------------------------------------------------------ the dynamic programs

    def in_loop(self, p: Poly, loop: Axis | None) -> Poly:
        """Split the loop axis of a kernel-level value into (step, tile), as the kernel sees it."""
        return p if loop is None else self.axioms.e.split(p, loop, (loop + LOOP, loop))

    @memo
    def _outside(self, loop: Axis | None) -> dict[Poly, Poly]:
        """Values inside of a kernel -> the same as tensors."""
        return {self.in_loop(p, loop): p for o in self.shift_degrees.targets for p in self.reach(o)}

    def dags(self, outs: Leaves, loop: Axis | None, leaves: Leaves) -> Counter[int]:
        """{number of operators: number of DAGs} of the kernels with this cut."""
        found = self.kernels(outs, loop, self.space.max_loaded if leaves else 0)
        return found.get(leaves, Counter())

    @memo
    def kernels(self, outs: Leaves, loop: Axis | None, max_loaded: int) -> dict[Leaves, Counter[int]]:
        """{loaded values: {number of operators: number of DAGs}} over all kernels that compute `outs` and load at most
        `max_loaded` values besides the region's inputs. With 0 there are far fewer of them to tell apart.
        """
        parts = self.parts_of(outs)
        # Kernels with other outputs meet the same pending sets.
        table = self._counted.setdefault((loop, parts, max_loaded), {(): {(EMPTY, False): 1}})
        counting = _Counting(parts, self._outside(loop), table, max_loaded)
        found: dict[Leaves, Counter[int]] = {}
        for (loaded, used), h in self._count(self._start(outs, loop), counting).items():
            if used or loop is None:
                found.setdefault(loaded, Counter()).update(_unpacked(h))
        return found

    def _count(self, pending: PendingSet, at: _Counting) -> Counts:
        if pending in at.table:
            return at.table[pending]
        self.tick()
        self.stats["states"] += 1
        (top, passes), rest = _value_and_passes(pending[-1]), pending[:-1]
        out: Counts = {}
        whole, why_not = self._loadable_as(top, passes, at)
        if why_not:
            self.stats[why_not] += 1
        if whole is not None:
            for (loaded, used), h in self._count(rest, at).items():
                if len(loaded) < at.max_loaded:
                    key = self._interned((loaded | {whole}, used))
                    out[key] = out.get(key, 0) + h
        limit = (1 << LANE_BITS * (self.space.max_ops + 1)) - 1
        steps, refused = self._usable(top, bool(passes & 1), at.parts)
        for why, n in refused.items():
            self.stats[why] += n
        for s, needs in steps:
            shift = 0 if s.op in UNCOUNTED_OPERATORS else LANE_BITS
            for key, h in self._count(_extended(rest, needs, passes, s.accumulates), at).items():
                if more := h << shift & limit:
                    if s.accumulates and not key[1]:
                        key = self._interned((key[0], True))
                    out[key] = out.get(key, 0) + more
                else:
                    self.stats["operator limit"] += 1
        at.table[pending] = found = {key: self._histograms.setdefault(h, h) for key, h in out.items()}
        return found

    def _interned(self, key: tuple[Leaves, bool]) -> tuple[Leaves, bool]:
        return self._cuts.setdefault(key, key)

    def _loadable_as(self, p: Poly, passes: int, at: _Counting | _Pricing) -> tuple[Poly | None, str]:
        """The tensor that a kernel may load instead of making a value, or the rule that refuses it."""
        if passes & REQUIRED or not at.max_loaded:
            return None, ""
        whole = at.outside.get(p)
        why = "partial sum is not a tensor" if whole is None else self._unloadable(whole)
        return None if why else whole, why

    @memo
    def _usable(self, p: Poly, in_second: bool, parts: frozenset[Axis]) -> tuple[tuple[_Made, ...], Counter[str]]:
        """Steps that may make a value, `in_second` of two loops or not, and how many are refused by each rule."""
        refused: Counter[str] = Counter()
        if why := self._illegal(p):
            refused[why] += 1
            return (), refused
        found: list[_Made] = []
        for s in self.axioms.steps(p):
            refused["steps"] += 1
            why = "second loop" if s.accumulates and in_second else self._impossible(s, parts)
            if why:
                refused[why] += 1
            else:
                found.append((s, self._needs(s)))
        return tuple(found), refused

    def forget(self) -> None:
        """Free the memory of `kernels`; call it once no other outputs will be asked for."""
        self._counted.clear()

    def _start(self, outs: Leaves, loop: Axis | None) -> PendingSet:
        """The pending set of a kernel's outputs. One stored inside a loop leaves one loop less for its operands."""
        inside = [self.in_loop(o, loop) for o in outs]
        loops = [self.space.loops - self.in_body(p) if loop else 0 for p in inside]
        entries = (self.order(p) << PASSES_BITS | REQUIRED | 1 << n for p, n in zip(inside, loops, strict=True))
        return tuple(sorted(entries))

    @memo
    def _needs(self, s: Decomposition) -> _Needs:
        """Operands of a step that have to be made: their place in a pending set, and whether in a loop's body."""
        made = (o for o in s.args if not self.axioms.is_input(o))
        return tuple((self.order(o) << PASSES_BITS, self.in_body(o)) for o in made)

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
        """Find the cheapest DAG for `outs` for each set of loaded values; operands come first.

        Each operator costs `weight`. No operator reduces an axis in `kept`. `within` is called once per state, for a
        limit of its own. `table` is shared by calls that differ in `outs` only.
        """
        table, check = table or Cheapest(), within or self.tick
        at = _Pricing(self.parts_of(outs), self._outside(loop), table, weight, max_loaded, check, kept)
        return {loaded: _unchained(dag) for loaded, (_, dag) in self._price(self._start(outs, loop), at).items()}

    def _price(self, pending: PendingSet, at: _Pricing) -> dict[Leaves, tuple[float, _Chain]]:
        if pending in at.table.dags:
            return at.table.dags[pending]
        at.check()
        self.stats["states"] += 1
        (top, passes), rest = _value_and_passes(pending[-1]), pending[:-1]
        best: dict[Leaves, tuple[float, _Chain]] = {}
        whole = self._loadable_as(top, passes, at)[0]
        if whole is not None:
            for loaded, found in self._price(rest, at).items():
                if len(loaded) < at.max_loaded:
                    more = loaded | {whole}
                    best[at.sets.setdefault(more, more)] = found
        steps = self._costs(top, passes, at)
        self.stats["steps"] += len(steps)
        loops = (passes & ~REQUIRED).bit_count()  # each loop that needs it repeats it
        for s, seconds, needs in steps:
            cost = seconds * loops
            for loaded, (c, dag) in self._price(_extended(rest, needs, passes, s.accumulates), at).items():
                if loaded not in best or c + cost < best[loaded][0]:
                    best[loaded] = (c + cost, ((top, s), dag))
        at.table.dags[pending] = best
        return best

    def _costs(self, p: Poly, passes: int, at: _Pricing) -> tuple[_Step, ...]:
        """Steps that may make a value that is needed in `passes`."""
        key = p, passes & 1
        if key not in at.table.steps:
            steps, _ = self._usable(p, bool(passes & 1), at.parts)
            kept = (made for made in steps if at.kept.isdisjoint(map(origin, made[0].reduced)))
            at.table.steps[key] = tuple((s, at.weight(p, s), needs) for s, needs in kept)
        return at.table.steps[key]

    def cheapest_tree(self, outs: Leaves, weight: Weight) -> Dag | None:
        """Find a cheap DAG for `outs` without loads and loop, value by value as if no values were shared.

        Linear in the number of steps: the fallback when `cheapest` does not end within its budget.
        """
        best: dict[Poly, tuple[float, Decomposition] | None] = {}
        for p in sorted(frozenset[Poly]().union(*(self.reach(o) for o in outs)), key=self.order):
            self.tick()
            if not self.axioms.is_input(p):
                best[p] = self._cheapest_step(p, best, weight)
        dag: dict[Poly, Decomposition] = {}
        todo = list(outs)
        while todo:
            p = todo.pop()
            chosen = best.get(p)
            if chosen is None:
                return None
            if p not in dag:
                dag[p] = chosen[1]
                todo += self._made(chosen[1])
        return tuple(sorted(dag.items(), key=lambda x: self.order(x[0])))

    def _cheapest_step(
        self, p: Poly, best: Mapping[Poly, tuple[float, Decomposition] | None], weight: Weight
    ) -> tuple[float, Decomposition] | None:
        """(seconds, step) of the cheapest step whose operands can be made."""
        found: tuple[float, Decomposition] | None = None
        for s in self.axioms.steps(p) if self.legal(p) else ():
            made = [m for o in self._made(s) if (m := best.get(o)) is not None]
            if len(made) == len(self._made(s)):
                cost = weight(p, s) + sum(m[0] for m in made)
                if found is None or cost < found[0]:
                    found = (cost, s)
        return found

    def _made(self, s: Decomposition) -> list[Poly]:
        """Operands that are not region inputs."""
        return [o for o in s.args if not self.axioms.is_input(o)]


def _extended(rest: PendingSet, needs: _Needs, passes: int, accumulates: bool) -> PendingSet:
    """The pending set after a step whose result is needed in `passes`. A loop-invariant value is made once, before the
    first loop.
    """
    if not needs:
        return rest
    passes = _first(passes) >> 1 if accumulates else passes & ~REQUIRED
    out = [*rest]
    for entry, in_body in needs:
        place = bisect_left(out, entry)
        is_pending = place < len(out) and out[place] <= entry | PASSES
        here = passes | out[place] & PASSES if is_pending else passes
        out[place : place + is_pending] = [entry | (here if in_body else _first(here) | here & REQUIRED)]
    return tuple(out)


def _value_and_passes(entry: int) -> tuple[Poly, int]:
    return entry >> PASSES_BITS & VALUE, entry & PASSES


def _first(passes: int) -> int:
    """The first of several loops alone."""
    return passes & -passes & ~REQUIRED


def _unchained(chain: _Chain) -> Dag:
    out: list[tuple[Poly, Decomposition]] = []
    while chain is not None:
        out.append(chain[0])
        chain = chain[1]
    return tuple(reversed(out))


def _unpacked(h: Histogram) -> dict[int, int]:
    """{number of operators: number of DAGs}"""
    lanes = range(-(-h.bit_length() // LANE_BITS))
    return {n: c for n in lanes if (c := h >> n * LANE_BITS & ((1 << LANE_BITS) - 1))}
