"""The search: from a region's reference muGraph to ranked candidate muGraphs, and a report of what was looked at.

Reference -> normal forms of its outputs -> variants (the region itself; each reduced axis split over the grid) ->
plans of every variant, best lower bound first -> priced, extracted, ranked. Two families of candidates:

* `kernels`: graph-defined kernels with their block graphs (GPU);
* `algebra`: the cheapest operator DAG as library operators (every backend): re-association, distribution, common
  factors.

Nothing is verified, compiled or measured here; candidates are tried in order by `api`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from itertools import product

from mirage_jax.errors import UnsupportedError
from mirage_jax.mugraph.graph import Axis, KernelGraph, KernelSchedule, Schedule, Tensor, origin
from mirage_jax.mugraph.operators import operator
from mirage_jax.search.axioms import PART, Axioms, Step
from mirage_jax.search.cost import Model, Priced
from mirage_jax.search.devices import Device
from mirage_jax.search.extract import Extractor, Root, block_plan, common, library_plan
from mirage_jax.search.frontier import EMPTY, BudgetExceeded, Dag, Frontiers, Leaves, Space
from mirage_jax.search.grading import Grading
from mirage_jax.search.normal_form import Expressions, NormalFormDomain, Poly
from mirage_jax.search.plans import Plan, Plans
from mirage_jax.search.structures import PARTS, Candidate
from mirage_jax.search.windows import Window, divisions, replace_windows

log = logging.getLogger("mirage_jax")
WIDTHS = {"bool": 1, "f16": 2, "bf16": 2, "f32": 4, "i32": 4, "f64": 8}
DEFAULT_SPACE = Space()
TELL_SECONDS = 0.2
type Notify = Callable[[int, float | None, float], None]
FAMILIES = ("algebra", "kernels")
MAX_CLASSES = 100
ALGEBRA_STATES = 12_000
MAX_TERMS = 64  # a sum of more products than this is not searched


class StopReason(Enum):
    """Why a search ended."""

    EXHAUSTED = "exhausted the space"
    SECONDS = "time budget used up"
    STATES = "state budget used up"
    ALGEBRA = "common subexpressions of the algebra not exhausted (state limit)"
    PLANS = "plan limit reached"
    INTERRUPTED = "interrupted; best so far kept"


@dataclass
class SearchReport:
    """What was looked at: printed by explain() and by the benchmark."""

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

    def add(self, other: SearchReport) -> None:
        """Add the report of a search over one window."""
        for name in ("seconds", "classes", "states", "steps", "plans", "structures", "priced"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dropped, self.pruned, self.fired = (
            self.dropped + other.dropped,
            self.pruned + other.pruned,
            self.fired + other.fired,
        )
        if other.stop is not StopReason.EXHAUSTED:
            self.stop = other.stop

    def __str__(self) -> str:
        lines = [
            f"{self.stop.value} in {self.seconds:.2f} s: {self.classes} classes, {self.states} states,"
            f" {self.steps} steps,"
            f" {self.plans} plans standing for {self.structures:.3g} structures, {self.priced} priced"
        ]
        if self.stop is StopReason.EXHAUSTED:
            lines.append(
                f"exhaustive {self.space}" + (f", in each of {self.windows} windows" if self.windows > 1 else "")
            )
        lines.append("pruned: " + (", ".join(f"{k} {v}" for k, v in sorted(self.pruned.items())) or "nothing"))
        lines.append("axioms: " + ", ".join(f"{k} {v}" for k, v in sorted(self.fired.items())))
        if self.dropped:
            lines.append("plans not expressible: " + ", ".join(f"{k} {v}" for k, v in sorted(self.dropped.items())))
        return "\n".join(lines)


@dataclass
class _Clock:
    """Counts states and time against the budget."""

    seconds: float
    states: int
    began: float = field(default_factory=time.monotonic)
    ticks: int = 0
    tell: Callable[[int, float], None] | None = None
    told: float = 0.0

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks > self.states:
            raise BudgetExceeded(StopReason.STATES)
        if self.ticks % 64 == 0:
            self.check()

    def limited(self, states: int, reason: StopReason) -> Callable[[], None]:
        """A tick that also stops after so many more states, for that reason."""
        end = self.ticks + states

        def tick() -> None:
            self.tick()
            if self.ticks > end:
                raise BudgetExceeded(reason)

        return tick

    def check(self) -> None:
        elapsed = time.monotonic() - self.began
        if self.tell is not None and elapsed > self.told + TELL_SECONDS:
            self.told = elapsed
            self.tell(self.ticks, elapsed)
        if elapsed > self.seconds:
            raise BudgetExceeded(StopReason.SECONDS)


def express(reference: KernelGraph, e: Expressions) -> dict[str, Poly]:
    """Normal form of every tensor of a graph of library operators."""
    domain = NormalFormDomain(e)
    known = {t.name: e.atom(t.name, t.axes) for t in reference.inputs}
    for k in reference.kernels:
        values = {
            load.name: e.rename(
                known[load.tensor], dict(zip(reference.tensors[load.tensor].axes, load.axes, strict=True))
            )
            for load in k.loads
        }
        for op in k.ops:
            p = operator(op.op).meaning(domain, *(values[a] for a in op.args), **op.attributes)
            if len(e.poly(p)) > MAX_TERMS:
                raise UnsupportedError(f"a value expands to a sum of more than {MAX_TERMS} products")
            values[op.name] = p
        for s in k.stores:
            known[s.tensor.name] = values[s.value]
    return known


def batch_axes(reference: KernelGraph, roots: list[Poly], axioms: Axioms, reduced: frozenset[Axis]) -> frozenset[Axis]:
    """Axes that tiles have one element of: in every output, never reduced, and in every large input or needed to
    bound the rank.
    """
    e = axioms.e
    candidates = frozenset[Axis].intersection(*(e.axes(r) for r in roots)) - reduced
    shapes = [frozenset(t.axes) for t in reference.inputs if len(t.axes) > 1] + [e.axes(r) for r in roots]
    big = [s for s in shapes if len(s) > 2]
    batch = frozenset(a for a in candidates if big and all(a in s for s in big))
    for s in sorted(shapes, key=lambda s: (-len(s), sorted(s))):
        while len(s - batch) > 2 and (s - batch) & candidates:
            batch |= {min((s - batch) & candidates, key=lambda a: (reference.extent(a), a))}
    return batch


def search(
    reference: KernelGraph,
    device: Device,
    space: Space,
    seconds: float,
    states: int = 2_000_000,
    families: Sequence[str] = FAMILIES,
    notify: Notify | None = None,
) -> tuple[list[Candidate], SearchReport]:
    """Ranked candidates for a region, and what was looked at. A region too wide to exhaust is searched window by
    window.
    """
    parts = _narrow_windows(reference, device, space)
    if len(parts) == 1:
        one = Search(reference, device, space, seconds, states, families, notify=notify)
        return one.run(), one.report
    report = SearchReport(space, windows=len(parts))
    found: dict[int, list[Candidate]] = {}
    until = time.monotonic() + seconds
    for n, w in enumerate(parts):
        one = Search(
            w.graph,
            device,
            space,
            max(0.5, (until - time.monotonic()) / (len(parts) - n)),
            states,
            families,
            notify=notify,
        )
        try:
            found[n] = one.run()
        except UnsupportedError as why:
            one.report.dropped[str(why)] += 1
        report.add(one.report)
    return _compose(reference, parts, found), report


def _narrow_windows(reference: KernelGraph, device: Device, space: Space) -> list[Window]:
    """The coarsest division into windows of at most `MAX_CLASSES` values each, else the finest."""
    parts: list[Window] = []
    for parts in divisions(reference):
        if all(_classes(w.graph, device, space) <= MAX_CLASSES for w in parts):
            break
    return parts


def _classes(graph: KernelGraph, device: Device, space: Space) -> int:
    """Number of values in the AND-OR graph, or more than the limit if it takes long to say."""
    probe = Search(graph, device, space, seconds=1.0)
    try:
        probe.start()
    except BudgetExceeded:
        return MAX_CLASSES + 1
    except UnsupportedError:
        return 0  # not searched at all
    return probe.report.classes


def _compose(reference: KernelGraph, parts: list[Window], found: dict[int, list[Candidate]]) -> list[Candidate]:
    """The reference with windows replaced: all by their best algebra, all by their best kernels, and each by each
    alone.
    """
    best: dict[str, dict[int, Candidate]] = {
        family: {
            n: c
            for n, cs in found.items()
            for c in [next((c for c in cs if c.family == family), None)]
            if c is not None
        }
        for family in ("kernels", "algebra")
    }
    choices = [best["kernels"], best["algebra"], best["algebra"] | best["kernels"]]
    choices += [{n: c} for chosen in best.values() for n, c in chosen.items()]
    out: dict[str, Candidate] = {}
    for chosen in choices:
        if chosen:
            graph, places = replace_windows(reference, {n: c.graph for n, c in chosen.items()}, parts)
            own = [chosen[n].schedule.kernels[i] if i >= 0 else KernelSchedule() for n, i in places]
            others = [chosen[n].alternatives[i] if i >= 0 and chosen[n].alternatives else () for n, i in places]
            split = tuple(sorted({p for c in chosen.values() for p in c.schedule.parts}))
            family = "kernels" if any(c.family == "kernels" for c in chosen.values()) else "algebra"
            if len({axis for axis, _ in split}) == len(split):  # an axis cannot be split into two numbers of parts
                rest = sum(cs[0].seconds for n, cs in found.items() if cs and n not in chosen)
                seconds = sum(c.seconds for c in chosen.values()) + rest
                single = tuple(sorted({a for c in chosen.values() for a in c.single}))
                out.setdefault(
                    str(graph), Candidate(graph, Schedule(tuple(own), split), seconds, family, tuple(others), single)
                )
    return sorted(out.values(), key=lambda c: c.seconds)


@dataclass
class Search:
    """One search over one region for one device. Call `run`; the report fills as it goes, so an interrupt keeps it."""

    reference: KernelGraph
    device: Device
    space: Space = DEFAULT_SPACE
    seconds: float = 30.0
    states: int = 2_000_000
    families: Sequence[str] = FAMILIES  # of candidates; kernels are for GPUs only
    max_plans: int = 20_000
    keep: int = 8  # candidates looked for
    notify: Notify | None = None  # told now and then: states, best estimate so far, seconds
    slack: float = 2.5  # plans whose bound exceeds the best estimate by this factor are not priced

    def __post_init__(self) -> None:
        self.report = SearchReport(self.space)
        self.clock = _Clock(self.seconds, self.states)
        self.wide = "f64" if any(t.dtype == "f64" for t in self.reference.inputs) else "f32"
        self.narrow = min(
            (t.dtype for t in self.reference.inputs if t.dtype not in ("bool", "i32")),
            key=lambda d: WIDTHS[d],
            default="f32",
        )

    def run(self) -> list[Candidate]:
        """Ranked candidates, best estimate first; raises `UnsupportedError` if the region has no useful normal form."""
        found: list[Candidate] = []

        def tell(states: int, elapsed: float) -> None:
            if self.notify is not None:
                self.notify(states, min((c.seconds for c in found), default=None), elapsed)

        self.clock = _Clock(self.seconds, self.states, tell=tell)
        try:
            self.start()
            if "algebra" in self.families:
                found.extend(self._algebra())
            if "kernels" in self.families and self.device.is_gpu:
                for c in self._kernels():
                    found.append(c)
        except BudgetExceeded as stop:
            self.report.stop = stop.args[0]
        except KeyboardInterrupt:
            self.report.stop = StopReason.INTERRUPTED
            log.warning("search interrupted: keeping the best of %d candidates", len(found))
        self._collect()
        unique = {(str(c.graph), c.schedule.parts): c for c in sorted(found, key=lambda c: -c.seconds)}
        return sorted(unique.values(), key=lambda c: c.seconds)

    def count(self) -> SearchReport:
        """Enumerate every plan of kernels within the space, price none: how large the space is, and how long looking
        at all of it takes.
        """
        self.clock = _Clock(self.seconds, self.states)
        try:
            self.start()
            for axis, roots in self._variants():
                plans = Plans(self._frontiers(roots, self.space, self.batch), frozenset(r.value for r in roots), axis)
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
        """Normal forms of the outputs, the values below them, and the region's batch axes."""
        r = self.reference
        self.e = Expressions(r.extent)
        known = express(r, self.e)
        self.axioms = Axioms(self.e)
        outs = [r.tensors[name] for name in dict.fromkeys(r.outputs)]
        self.native = {self.e.affine_parts(p)[0] for p in known.values()}
        self.roots = tuple(self._root(t, known[t.name]) for t in outs)
        values = [root.value for root in self.roots]
        grading = Grading(self.e, tuple(values))
        probe = Frontiers(self.axioms, grading, self.space, frozenset(), self.clock.tick)
        self.reduced = frozenset[Axis]().union(*(probe.reduced_axes(v) for v in values))
        self.batch = batch_axes(r, values, self.axioms, self.reduced)
        self.tables: list[Frontiers] = []
        self.report.classes = len(frozenset[Poly]().union(*(probe.reach(v) for v in values)))

    def _root(self, tensor: Tensor, p: Poly) -> Root:
        """An output as ``scale * value + offset``; an input that is only scaled is a value of its own."""
        value, scale, offset = self.e.affine_parts(p)
        if self.e.is_constant(value) or self.axioms.is_input(p):
            raise UnsupportedError(f"output {tensor.name} is an input or a constant")
        if self.axioms.is_input(value):
            value, scale, offset = p, Fraction(1), Fraction(0)
        return Root(tensor, value, scale, offset)

    def _frontiers(self, roots: tuple[Root, ...], space: Space, batch: frozenset[Axis]) -> Frontiers:
        f = Frontiers(self.axioms, Grading(self.e, tuple(r.value for r in roots)), space, batch, self.clock.tick)
        self.tables.append(f)
        return f

    def _collect(self) -> None:
        self.report.seconds = time.monotonic() - self.clock.began
        tables: list[Frontiers] = getattr(self, "tables", [])
        for f in tables:
            stats = Counter(f.stats)
            self.report.states += stats.pop("states", 0)
            self.report.steps += stats.pop("steps", 0)
            self.report.pruned += stats
        self.report.fired = Counter(getattr(self, "axioms", Axioms(Expressions(self.reference.extent))).fired)

    def _model(self, f: Frontiers, split: Axis | None = None, parts: int = 1) -> Model:
        widths = {t.name: WIDTHS[t.dtype] for t in self.reference.inputs}
        return Model(f, self.device, self.reference.sizes, widths, split, parts)

    # ------------------------------------------------------------------ algebra

    def _algebra(self) -> Iterator[Candidate]:
        """The cheapest DAGs of library operators: by the device's weights, by operation counts, and near to the
        program.

        The last prefers values that the program itself computes, at some cost: where the very cheapest order of
        evaluation loses too much accuracy, one with fewer new intermediates is often nearly as fast.
        """
        f = self._frontiers(self.roots, replace(self.space, max_rank=99), frozenset())
        model = self._model(f)
        outs = frozenset(r.value for r in self.roots)
        sizes = {a: self.reference.extent(a) for a in self.reference.sizes}

        def work(p: Poly, s: Step) -> float:
            return model.work(p, s, sizes) + 1e-12

        def near(p: Poly, s: Step) -> float:
            return model.library(p, s) * (0.2 if p in self.native else 1.0)

        weights = (model.library, work, near)

        def shared(outs: Leaves, weight: Callable[[Poly, Step], float]) -> Dag | None:
            return f.cheapest(outs, EMPTY, None, weight, self.clock.limited(ALGEBRA_STATES, StopReason.ALGEBRA))

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
                cuts = common(f, [(dag, EMPTY)])
                graph = library_plan(Extractor(f, self.reference, self.roots, cuts, self.narrow, self.wide), dag, outs)
            except UnsupportedError as why:
                self.report.dropped[str(why)] += 1
                continue
            schedule = Schedule((KernelSchedule(),) * len(graph.kernels))
            yield Candidate(graph, schedule, sum(model.library(p, s) for p, s in dag), "algebra")

    # ------------------------------------------------------------------ kernels

    def _variants(self) -> Iterator[tuple[Axis | None, tuple[Root, ...]]]:
        yield None, self.roots
        free = frozenset[Axis]().union(
            *(self.e.axes(r.value) for r in self.roots)
        )  # a free axis is divided over the grid as it is
        for axis in sorted(a for a in self.reduced - free if a == origin(a)):
            if self.reference.extent(axis) < 4 * PARTS[0]:
                continue
            split = tuple(replace(r, value=self.e.split(r.value, axis, (axis + PART, axis))) for r in self.roots)
            yield axis, split

    def _kernels(self) -> Iterator[Candidate]:
        """Plans of one kernel, then two, ...; each level best bound first, until no bound is near the best estimate."""
        variants = list(self._variants())
        plans = {
            axis: Plans(self._frontiers(roots, self.space, self.batch), frozenset(r.value for r in roots), axis)
            for axis, roots in variants
        }
        counts = {
            axis: [n for n in PARTS if self.reference.extent(axis) // n >= 16] if axis else [1] for axis, _ in variants
        }
        models = {(axis, n): self._model(plans[axis].frontiers, axis, n) for axis, _ in variants for n in counts[axis]}
        best: list[float] = []
        for level in range(1, self.space.max_kernels + 1):
            if best and level * (self.device.shortest + self.device.launch) > self.slack * best[0]:
                self.report.pruned["cost bound"] += 1
                return
            yield from self._level(level, variants, plans, counts, models, best)
            if level == 1 and not best:  # rows too long for a tile: one kernel with more passes over them
                more = self._frontiers(self.roots, replace(self.space, loops=self.space.loops + 1), self.batch)
                again: dict[Axis | None, Plans] = {None: Plans(more, frozenset(r.value for r in self.roots))}
                yield from self._level(1, variants[:1], again, counts, {(None, 1): self._model(more)}, best)

    def _level(
        self,
        level: int,
        variants: list[tuple[Axis | None, tuple[Root, ...]]],
        plans: Mapping[Axis | None, Plans],
        counts: Mapping[Axis | None, list[int]],
        models: Mapping[tuple[Axis | None, int], Model],
        best: list[float],
    ) -> Iterator[Candidate]:
        """Plans of exactly `level` kernels; `best` holds the best estimates so far, and is added to."""
        todo: list[tuple[float, int, Plan, Axis | None, int, tuple[Root, ...]]] = []
        for axis, roots in variants:
            for plan, structures in plans[axis].with_kernels(level):
                self.clock.check()
                self.report.plans += 1
                self.report.structures += structures
                for n in counts[axis]:
                    bound = sum(models[axis, n].bound(*cut) for cut in plan)
                    todo.append((bound, len(todo), plan, axis, n, roots))
                if self.report.plans >= self.max_plans:
                    self.report.stop = StopReason.PLANS
                    break
        todo.sort(key=lambda x: x[:2])
        for i, (bound, _, plan, axis, n, roots) in enumerate(todo):
            self.clock.check()
            # Exact for the model: no completion of the plan is cheaper than its bound.
            if best and (bound > self.slack * best[0] or (len(best) >= self.keep and bound >= best[self.keep - 1])):
                self.report.pruned["cost bound"] += len(todo) - i
                break
            self.report.priced += 1
            priced = [models[axis, n].kernel(*cut) for cut in plan]
            if any(k is None for k in priced):
                self.report.dropped["no tile fits"] += 1
                continue
            try:
                candidate = self._candidate(
                    models[axis, n], [k for k in reversed(priced) if k is not None], axis, n, roots
                )
            except UnsupportedError as why:
                self.report.dropped[str(why)] += 1
                continue
            best[:] = sorted([*best, candidate.seconds])[: self.keep]
            yield candidate

    def _candidate(
        self, model: Model, kernels: list[Priced], axis: Axis | None, parts: int, roots: tuple[Root, ...]
    ) -> Candidate:
        f = model.frontiers
        cuts = common(f, [(k.dag, k.leaves) for k in kernels])
        graph = block_plan(Extractor(f, self.reference, roots, cuts, self.narrow, self.wide), kernels)
        schedule = Schedule(tuple(k.schedule for k in kernels), ((axis, parts),) if axis else ())
        return Candidate(
            graph,
            schedule,
            sum(k.seconds for k in kernels),
            "kernels",
            tuple(tuple(t.schedule for t in k.tilings) for k in kernels),
            tuple(sorted(self.batch)),
        )
