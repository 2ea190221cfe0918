"""One window: reference -> normal forms of its outputs -> variants -> plans, best bound first -> priced -> extracted.

This is the paper's generator (Mirage, OSDI'25, section 4). Variants are the region itself, and the region with each
reduced axis split over the grid. Two families of candidates:

* `kernels`: graph-defined kernels with their block graphs (GPU);
* `algebra`: the cheapest operator DAG as library operators (every backend): re-association, common factors, ...
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product
from typing import Any

from mirage_jax.cost.roofline import estimate, least_seconds
from mirage_jax.errors import UnsupportedError
from mirage_jax.gc_pause import no_collection
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.mugraph.dtypes import BYTES, FLOATS, SIXTEEN_BIT_FLOATS
from mirage_jax.mugraph.graph import (
    PART_SUFFIX,
    Axis,
    KernelGraph,
    KernelSchedule,
    Library,
    Schedule,
    Tensor,
    origin,
)
from mirage_jax.mugraph.passes.differences import with_differences_multiplied
from mirage_jax.search.candidates import MAX_ALIKE, Candidate, grids_and_loops, parts_of
from mirage_jax.search.enumerate.axioms import Axioms, Decomposition
from mirage_jax.search.enumerate.extract import (
    Cuts,
    Extractor,
    Scaling,
    Target,
    block_plan,
    common,
    library_plan,
    widened,
    with_libraries,
)
from mirage_jax.search.enumerate.kernels import EMPTY, BudgetExceeded, Dag, KernelTables, Leaves, Space, Weight
from mirage_jax.search.enumerate.normal_form import Expressions, Poly
from mirage_jax.search.enumerate.plans import Plan, Plans
from mirage_jax.search.enumerate.pricing import PREFERRED_COST, Model, Priced
from mirage_jax.search.enumerate.shift_degrees import ShiftDegrees
from mirage_jax.search.enumerate.targets import batch_axes, express
from mirage_jax.search.forward_error import ForwardError
from mirage_jax.search.report import Clock, Notify, SearchReport, StopReason

log = logging.getLogger("mirage_jax.search")
DEFAULT_SPACE = Space()
FAMILIES = ("algebra", "kernels")
SHIFTING = frozenset({"max", "maximum", "logs", "lesslogs"})  # operators of programs that keep exponentials in range
LIBRARY_TIE_FRACTION = 1e-3  # the model prices a library's product as our own; at a tie ours is tried first
MAX_ALGEBRA_STATES = 12_000  # of the search for shared algebra, which is a luxury
MAX_ALIKE_FOUND = 2 * MAX_ALIKE  # with the same grids and loops; whether their waves are the same is not known yet
MAX_WRITTEN = 300  # candidates; after these, one must be among the best few of its variant
MAX_LOSSY = 4  # times as many candidates that lose digits as others


@dataclass
class _Best:
    """The best few estimates so far of each variant: at a tie, one variant must not crowd out another.

    Candidates that lose digits crowd out no other one either, until there are `MAX_LOSSY` times as many.
    """

    keep: int
    kept: dict[Axis | None, list[float]] = field(default_factory=dict[Axis | None, list[float]])
    good: dict[Axis | None, list[float]] = field(default_factory=dict[Axis | None, list[float]])

    count: int = 0  # of all that were added

    @property
    def seconds(self) -> float:
        """The best estimate of all."""
        return min((x[0] for x in self.kept.values()), default=math.inf)

    def takes(self, axis: Axis | None, seconds: float) -> bool:
        """Could a plan that takes at least so long be among the best?"""
        limits = ((self.good, self.keep), (self.kept, self.keep * MAX_LOSSY))
        return all(len(known := of.get(axis, [])) < n or seconds < known[-1] for of, n in limits)

    def add(self, axis: Axis | None, seconds: float, is_lossy: bool) -> None:
        """Take in an estimate of a variant."""
        self.count += 1
        self.kept[axis] = sorted([*self.kept.get(axis, []), seconds])[: self.keep * MAX_LOSSY]
        if not is_lossy:
            self.good[axis] = sorted([*self.good.get(axis, []), seconds])[: self.keep]


@dataclass
class Search:
    """One search over one region for one device. Call `run`; the report fills as it goes, so an interrupt keeps it."""

    reference: KernelGraph
    device: DeviceModel
    space: Space = DEFAULT_SPACE
    seconds: float = 30.0
    states: int = 2_000_000
    families: Sequence[str] = FAMILIES  # of candidates; kernels are for GPUs only
    max_plans: int = 50_000
    keep: int = 8  # candidates looked for
    notify: Notify | None = None  # called now and then
    terms: float = math.inf  # of normal forms, that may be looked at
    # Plans whose bound exceeds the best estimate by this factor are not priced; of those whose own estimate does, and
    # after `MAX_WRITTEN` candidates, only the `keep` best so far of a variant are written.
    slack: float = 2.5
    whole: KernelGraph | None = None  # the region of which this is a part
    patience: float = math.inf  # seconds after which it ends if it has found no kernel

    def __post_init__(self) -> None:
        self.report = SearchReport(self.space)
        self.clock = Clock(self.seconds, self.states, self.terms)
        self.targets: tuple[Target, ...] = ()
        self.forward_error = ForwardError(self.reference, self.whole)
        self._own_models: dict[tuple[Axis | None, int], Model] = {}
        self._good: defaultdict[object, list[float]] = defaultdict(list)  # seconds, by what is alike
        self.batch = self.reduced = frozenset[Axis]()
        self.wide = "f64" if any(t.dtype == "f64" for t in self.reference.inputs) else "f32"
        self.narrow = min(
            (t.dtype for t in self.reference.inputs if t.dtype in FLOATS), key=lambda d: BYTES[d], default="f32"
        )

    @no_collection()
    def run(self) -> list[Candidate]:
        """Find candidates, best estimate first, but those that lose digits after all others.

        Raises `UnsupportedError` if the region has no useful normal form.
        """
        found: list[Candidate] = []

        def notify(states: int, elapsed: float) -> None:
            """Add the best estimate so far."""
            if self.notify is not None:
                self.notify(states, min((c.seconds for c in found), default=None), elapsed)

        self.clock = Clock(self.seconds, self.states, self.terms, notify=notify, patience=self.patience)
        try:
            self.start()
            if "algebra" in self.families:
                found.extend(self._algebra())
            if "kernels" in self.families and self.device.is_gpu:
                for c in self._kernels():
                    found.append(c)
                    self.clock.patience = math.inf
        except BudgetExceeded as stop:
            self.report.stop = stop.args[0]
        except KeyboardInterrupt:
            self.report.stop = StopReason.INTERRUPTED
            log.warning("search interrupted: keeping the best of %d candidates", len(found))
        self._collect()
        self.clock.notify = None  # refers back to this search, whose millions of tuples are to be freed with it
        unique = {(str(c.graph), c.schedule.parts): c for c in sorted(found, key=lambda c: -c.seconds)}
        marked = (replace(c, loses_digits=self.forward_error.is_larger(c.graph)) for c in unique.values())
        return sorted(marked, key=lambda c: (c.loses_digits, c.seconds))

    @no_collection()
    def count(self) -> SearchReport:
        """Enumerate every plan of kernels within the space, and price none, to measure the space and the time."""
        self.clock = Clock(self.seconds, self.states, self.terms)
        try:
            self.start()
            for axis, targets in self._variants():
                plans = Plans(
                    self._kernel_tables(targets, self.space, self.batch), frozenset(r.value for r in targets), axis
                )
                for level in range(1, self.space.max_kernels + 1):
                    for _, structures in plans.with_kernels(level):
                        self.clock.check()
                        self.report.plans += 1
                        self.report.structures += structures
        except BudgetExceeded as stop:
            self.report.stop = stop.args[0]
        self._collect()
        return self.report

    # ------------------------------------------------------------------ preparation

    def start(self) -> None:
        """Compute normal forms of the outputs, the values below them, and the region's batch axes."""
        r = self.reference
        outs = [r.tensors[name] for name in dict.fromkeys(r.outputs)]
        self.e, known = self._expressed(outs)
        self.axioms = Axioms(self.e)
        self.native = {self.e.affine_parts(p)[0] for p in known.values()}
        self.halves = {
            known[k.name] for k in r.kernels if k.name in known and r.tensors[k.name].dtype in SIXTEEN_BIT_FLOATS
        }
        maxima = (known[k.name] for k in r.kernels if isinstance(k, Library) and k.op.op == "max")
        self.maxima = self._scalings_of_maxima(maxima)
        self.targets = tuple(self._target(t, known[t.name]) for t in outs)
        values = [target.value for target in self.targets]
        shift_degrees = self._shift_degrees(self.e, values)
        self.axioms.refused = shift_degrees.splits_a_group
        probe = KernelTables(self.axioms, shift_degrees, self.space, frozenset(), self.clock.tick)
        self.reduced = frozenset[Axis]().union(*(probe.reduced_axes(v) for v in values))
        self.batch = batch_axes(r, values, self.axioms, self.reduced)
        self.tables: list[KernelTables] = []
        self.report.classes = len(frozenset[Poly]().union(*(probe.reach(v) for v in values)))

    def _expressed(self, outs: Sequence[Tensor]) -> tuple[Expressions, dict[str, Poly]]:
        """The normal forms of all tensors, in which more exponentials may be shifted.

        A softmax cancels a factor of its row, and the logarithm of its sum does not: the sums in them are two. Where
        the factor leaves the logarithm, they are one sum, which may be shifted.
        """
        tried: list[tuple[int, Expressions, dict[str, Poly]]] = []
        for leave in (False, True):
            e = Expressions(self.reference.extent, self.clock.look, leave)
            known = express(self.reference, e)
            degrees = self._shift_degrees(e, [e.affine_parts(known[t.name])[0] for t in outs])
            tried.append((len(degrees.plain), e, known))
            if not (degrees.may_shift and degrees.plain):
                break
        _, e, known = min(tried, key=lambda x: x[0])
        return e, known

    def _shift_degrees(self, e: Expressions, values: Sequence[Poly]) -> ShiftDegrees:
        """The shifts of exponentials, if the program has any."""
        ops = {k.op.op for k in self.reference.kernels if isinstance(k, Library)}
        return ShiftDegrees(e, tuple(values), not ops.isdisjoint(SHIFTING))

    def count_legal(self) -> int:
        """Count the values that may be in a kernel, after `start`: most others have too many axes."""
        values = [target.value for target in self.targets]
        tables = KernelTables(self.axioms, self._shift_degrees(self.e, values), self.space, self.batch)
        return sum(map(tables.legal, frozenset[Poly]().union(*map(tables.reach, values))))

    def _scalings_of_maxima(self, known: Iterable[Poly]) -> dict[Poly, Scaling]:
        """By what the search takes maxima of, how the program scales it."""
        found: dict[Poly, Scaling] = {}
        for value, scale, offset in map(self.e.affine_parts, known):
            match self.e.only_base(value):
                case ("f", "max", (inner,), _) if (scale, offset) != (1, 0) and scale > 0:
                    found.setdefault(inner, Scaling(scale, offset))
                case _:
                    pass
        return found

    def _extractor(
        self, f: KernelTables, targets: tuple[Target, ...], cuts: Cuts, split: Axis | None = None
    ) -> Extractor:
        """What writes kernels of a search variant."""
        known = [self._as_split([p], split) for p in self.maxima]
        maxima = {p: scaling for (p,), scaling in zip(known, self.maxima.values(), strict=True)}
        return Extractor(f, self.reference, targets, cuts, self.narrow, self.wide, maxima)

    def _target(self, tensor: Tensor, p: Poly) -> Target:
        """An output as ``scale * value + offset``; an input that is only scaled is a value of its own."""
        value, scale, offset = self.e.affine_parts(p)
        if self.e.is_constant(value) or self.axioms.is_input(p):
            raise UnsupportedError(f"output {tensor.name} is an input or a constant")
        if lost := set(tensor.axes) - self.e.axes(value):  # a v / a over [i,k]: no operator of ours repeats a value
            raise UnsupportedError(f"output {tensor.name} is the same all along {', '.join(sorted(lost))}")
        if self.axioms.is_input(value):
            value, scale, offset = p, Fraction(1), Fraction(0)
        return Target(tensor, value, scale, offset)

    def _kernel_tables(self, targets: tuple[Target, ...], space: Space, batch: frozenset[Axis]) -> KernelTables:
        shift_degrees = self._shift_degrees(self.e, [r.value for r in targets])
        f = KernelTables(self.axioms, shift_degrees, space, batch, self.clock.tick)
        self.tables.append(f)
        return f

    def _collect(self) -> None:
        self.report.seconds = time.monotonic() - self.clock.began
        tables: list[KernelTables] = getattr(self, "tables", [])
        for f in tables:
            stats = Counter(f.stats)
            self.report.states += stats.pop("states", 0)
            self.report.steps += stats.pop("steps", 0)
            self.report.pruned += stats
        self.report.fired = Counter(getattr(self, "axioms", Axioms(Expressions(self.reference.extent))).fired)

    def _model(self, f: KernelTables, split: Axis | None = None) -> Model:
        widths = {t.name: BYTES[t.dtype] for t in self.reference.inputs}
        return Model(f, self.device, self.reference.sizes, widths, self._as_split(self.halves, split), split=split)

    def _as_split(self, values: Iterable[Poly], split: Axis | None) -> frozenset[Poly]:
        """Values of the program, as a variant has them."""
        return frozenset(p if split is None else self.e.split(p, split, (split + PART_SUFFIX, split)) for p in values)

    def _preferring_own(self, model: Model, axis: Axis | None, parts: int) -> Model:
        """The same, but values that the program itself computes cost less."""
        if (axis, parts) not in self._own_models:
            own = replace(model, preferred=self._as_split(self.native, axis), dags={}, cheapest={}, outlines={})
            self._own_models[axis, parts] = own
        return self._own_models[axis, parts]

    # ------------------------------------------------------------------ algebra

    def _algebra(self) -> Iterator[Candidate]:
        """The cheapest DAGs of library operators: by the device's weights, by operation counts, and near to the
        program.

        The last prefers values that the program itself computes, at some cost: where the very cheapest order of
        evaluation loses too much accuracy, one with fewer new intermediates is often nearly as fast.
        """
        f = self._kernel_tables(self.targets, replace(self.space, max_rank=99), frozenset())
        model = self._model(f)
        outs = frozenset(r.value for r in self.targets)
        sizes = {a: self.reference.extent(a) for a in self.reference.sizes}

        def work(p: Poly, s: Decomposition) -> float:
            """Weigh operations."""
            return model.work(p, s, sizes) + 1e-12

        def near(p: Poly, s: Decomposition) -> float:
            """Weigh values of the program less."""
            return model.library(p, s) * (PREFERRED_COST if p in self.native else 1.0)

        weights = (model.library, work, near)

        def shared(outs: Leaves, weight: Weight) -> Dag | None:
            """Find the cheapest DAG with sharing, within a limit on states."""
            within = self.clock.limited(MAX_ALGEBRA_STATES, StopReason.ALGEBRA)
            return f.cheapest(outs, None, weight, max_loaded=0, within=within).get(EMPTY)

        searches = (f.cheapest_tree, shared)
        for find, weight in product(searches, weights):
            try:
                dag = find(outs, weight)
            except BudgetExceeded as stop:
                if stop.args[0] is not StopReason.ALGEBRA:
                    raise
                self.report.stop = StopReason.ALGEBRA
                continue
            if dag is None:
                continue
            try:
                cuts = common(f, [(dag, outs, EMPTY)])
                graph = library_plan(self._extractor(f, self.targets, cuts), dag, outs)
            except UnsupportedError as why:
                self.report.dropped[str(why)] += 1
                continue
            schedule = Schedule((KernelSchedule(),) * len(graph.kernels))
            yield Candidate(graph, schedule, sum(model.library(p, s) for p, s in dag), "algebra")

    # ------------------------------------------------------------------ kernels

    def _variants(self) -> Iterator[tuple[Axis | None, tuple[Target, ...]]]:
        yield None, self.targets
        if not self.space.splits:
            return
        free = frozenset[Axis]().union(
            *(self.e.axes(r.value) for r in self.targets)
        )  # a free axis is divided over the grid as it is
        for axis in sorted(a for a in self.reduced - free if a == origin(a)):
            if not parts_of(self.reference.extent(axis)):
                continue
            split = tuple(
                replace(r, value=self.e.split(r.value, axis, (axis + PART_SUFFIX, axis))) for r in self.targets
            )
            yield axis, split

    def _kernels(self) -> Iterator[Candidate]:
        """Plans of the space. If none has a kernel that fits, again with one more axis in a tile: squared distances sum
        over coordinates, a third axis of their tile.
        """
        best = _Best(self.keep)
        yield from self._plans(self.space, best)
        if not best.kept:
            self.report.space = replace(self.space, max_rank=self.space.max_rank + 1)
            yield from self._plans(self.report.space, best)

    def _plans(self, space: Space, best: _Best) -> Iterator[Candidate]:
        """Plans of one kernel, then two, ...; each level best bound first, until no bound is near the best estimate.
        `best` holds the best estimates so far, and is added to.
        """
        variants = list(self._variants())
        plans = {
            axis: Plans(self._kernel_tables(targets, space, self.batch), frozenset(r.value for r in targets), axis)
            for axis, targets in variants
        }
        counts = {axis: parts_of(self.reference.extent(axis)) if axis else [1] for axis, _ in variants}
        models: dict[tuple[Axis | None, int], Model] = {}
        for axis, _ in variants:
            first = self._model(plans[axis].tables, axis)
            models |= {(axis, n): replace(first, parts=n) for n in counts[axis]}
        for level in range(1, space.max_kernels + 1):
            if level * least_seconds(0, 1, self.device) > self.slack * best.seconds:
                self.report.pruned["cost bound"] += 1
                return
            yield from self._level(level, variants, plans, counts, models, best)
            if level == 1 and not best.kept:  # rows too long for a tile: one kernel with more passes over them
                more = self._kernel_tables(self.targets, replace(space, loops=space.loops + 1), self.batch)
                again: dict[Axis | None, Plans] = {None: Plans(more, frozenset(r.value for r in self.targets))}
                yield from self._level(1, variants[:1], again, counts, {(None, 1): self._model(more)}, best)

    def _level(
        self,
        level: int,
        variants: list[tuple[Axis | None, tuple[Target, ...]]],
        plans: Mapping[Axis | None, Plans],
        counts: Mapping[Axis | None, list[int]],
        models: Mapping[tuple[Axis | None, int], Model],
        best: _Best,
    ) -> Iterator[Candidate]:
        """Plans of exactly `level` kernels."""
        todo: list[tuple[float, int, Plan, Axis | None, int, tuple[Target, ...]]] = []
        for axis, targets in variants:
            for plan, structures in plans[axis].with_kernels(level):
                self.clock.check()
                self.report.plans += 1
                self.report.structures += structures
                for n in counts[axis]:
                    bound = sum(models[axis, n].bound(*cut) for cut in plan)
                    todo.append((bound, len(todo), plan, axis, n, targets))
                if self.report.plans >= self.max_plans:
                    self.report.stop = StopReason.PLANS
                    break
        if level == self.space.max_kernels:
            for p in plans.values():
                p.tables.forget()
        todo.sort(key=lambda x: x[:2])
        for i, (bound, _, plan, axis, n, targets) in enumerate(todo):
            self.clock.check()
            # Exact for the model: no completion of the plan is cheaper than its bound.
            if bound > self.slack * best.seconds:
                self.report.pruned["cost bound"] += len(todo) - i
                break
            if not best.takes(axis, bound):
                self.report.pruned["cost bound"] += 1
                continue
            self.report.priced += 1
            for found in self._of_plan(models[axis, n], plan, axis, n, targets, best):
                candidate = replace(found, graph=with_differences_multiplied(found.graph))
                best.add(axis, candidate.seconds, self.forward_error.is_larger(candidate.graph))
                yield candidate
                mixed = with_libraries(candidate.graph)
                if mixed is not None:  # large matrix products are what XLA's libraries are best at
                    yield replace(candidate, graph=mixed, seconds=candidate.seconds * (1 + LIBRARY_TIE_FRACTION))

    def _of_plan(
        self,
        model: Model,
        plan: Plan,
        axis: Axis | None,
        parts: int,
        targets: tuple[Target, ...],
        best: _Best,
    ) -> Iterator[Candidate]:
        """The cheapest candidate of a plan. If that loses digits or cannot be written, also one with more of the
        program's own values.
        """
        for chosen in (model, self._preferring_own(model, axis, parts)):
            priced = self._priced(chosen, plan, axis, best)
            if priced is None:
                return  # the other one does no less work
            if not priced:
                continue
            if self._is_one_of_many(priced):
                return
            try:
                candidate = self._candidate(chosen, priced, axis, parts, targets)
            except UnsupportedError as why:
                self.report.dropped[str(why)] += 1
                continue
            yield candidate
            if not self.forward_error.is_larger(candidate.graph):
                self._good[grids_and_loops(priced)].append(sum(k.seconds for k in priced))
                return

    def _is_one_of_many(self, kernels: Sequence[Priced]) -> bool:
        """Have candidates with these grids and loops been found that are no slower, and more than are ever tried?"""
        seconds = sum(k.seconds for k in kernels)
        return sum(s <= seconds for s in self._good[grids_and_loops(kernels)]) >= MAX_ALIKE_FOUND

    def _priced(self, model: Model, plan: Plan, axis: Axis | None, best: _Best) -> list[Priced] | None:
        """The kernels of a plan; none of them if one has no tile, and None if all together take too long."""
        least = [model.known_or_bound(*cut) for cut in plan]
        kernels: list[Priced] = []
        for n in reversed(range(len(plan))):
            if math.inf not in least and self._takes_too_long(sum(least), axis, best):
                return None
            kernel = model.kernel(*plan[n])
            if kernel is None:
                self.report.dropped["no tile fits"] += 1
                return []
            kernels.append(kernel)
            least[n] = kernel.seconds
        return None if self._takes_too_long(sum(least), axis, best) else kernels

    def _takes_too_long(self, seconds: float, axis: Axis | None, best: _Best) -> bool:
        """Is a plan far from the best estimate, or one of very many, and far from the few best of its variant?"""
        is_far = seconds > self.slack * best.seconds or best.count >= MAX_WRITTEN
        found = is_far and not best.takes(axis, seconds)
        self.report.pruned["estimate"] += found
        return found

    def _candidate(
        self, model: Model, kernels: list[Priced], axis: Axis | None, parts: int, targets: tuple[Target, ...]
    ) -> Candidate:
        f = model.tables
        cuts = common(f, [(k.dag, k.outs, k.leaves) for k in kernels])
        plan = block_plan(self._extractor(f, targets, cuts, axis), kernels)
        graph = widened(plan, self.narrow, self.wide)
        schedule = Schedule(tuple(k.schedule for k in kernels), ((axis, parts),) if axis else ())
        return Candidate(
            graph,
            schedule,
            estimate(graph, schedule, self.device),
            "kernels",
            tuple(tuple(t.schedule for t in k.tilings) for k in kernels),
            tuple(sorted(self.batch)),
        )


@no_collection()
def searched(*args: Any, **options: Any) -> tuple[list[Candidate], SearchReport]:
    """Run a `Search` of these arguments. Its tables are gone before the garbage collector is back, which would walk
    over them.
    """
    one = Search(*args, **options)
    return one.run(), one.report
