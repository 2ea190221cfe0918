"""Finds the best muGraphs of one function, within the user's hints: `superoptimize`, as Mirage has it.

The function is captured as one region and searched. Candidates within the hints pass the same gates as in `optimize`
and are timed. Unlike `optimize`, the fastest one is the answer even if XLA is faster, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any

import jax
import jax.numpy as jnp

from mirage_jax import progress
from mirage_jax.compiler import tuning
from mirage_jax.compiler.absent_gpu import described_gpu
from mirage_jax.compiler.decide import Decider, chosen_devices
from mirage_jax.compiler.region import as_asked
from mirage_jax.compiler.threads import apart, unchecked
from mirage_jax.compiler.tuning_session import TuningSession, space_for
from mirage_jax.compiler.winner import Winner
from mirage_jax.config import Budget, Options
from mirage_jax.cost.roofline import estimate, fused_estimate
from mirage_jax.errors import UnsupportedError, UsageError
from mirage_jax.hardware.device_model import DeviceModel, device_for
from mirage_jax.jaxpr_frontend.jax_compat import default_platform
from mirage_jax.jaxpr_frontend.partition.one_graph import Captured, captured_whole
from mirage_jax.limits import MAX_KERNELS, brief
from mirage_jax.mugraph.dtypes import numpy_dtype
from mirage_jax.mugraph.graph import (
    Axis,
    BlockGraph,
    KernelGraph,
    KernelSchedule,
    Precision,
    Schedule,
    origin,
    split_axis,
)
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.report import Decision, RegionReport, Report, Variant
from mirage_jax.search.candidates import Candidate
from mirage_jax.search.enumerate.kernels import Space
from mirage_jax.why_not import us
from mirage_jax.written_graph import MuGraph, Spec, check_arrays, spec_of


@dataclass(frozen=True)
class Hints:
    """Limits of a search, checked against the axes of a program.

    grid: axes that kernels may divide over their blocks. tiles: allowed tile sizes in elements, by axis. kernels: the
    most library operators and kernels of a muGraph.
    """

    grid: frozenset[Axis] = frozenset()
    tiles: Mapping[Axis, frozenset[int]] = field(default_factory=dict)
    kernels: int = MAX_KERNELS

    @classmethod
    def of(cls, grid: Any, tiles: Any, kernels: Any, program: KernelGraph) -> Hints:
        """Check the hints of a user.

        Raises:
            UsageError: one is malformed, or names an axis that the program does not have.
        """
        grid = program.sizes.keys() if grid is None else _axes("grid", grid, program)
        return cls(frozenset(grid), _tiles(tiles, program), MAX_KERNELS if kernels is None else _count(kernels))

    def allow(self, graph: KernelGraph) -> bool:
        """Whether a muGraph is within the limits, apart from its tiles."""
        divided = {split_axis(origin(a)) for k in graph.kernels if isinstance(k, BlockGraph) for a in k.grid}
        return len(graph.kernels) <= self.kernels and divided <= self.grid

    def allow_tiles(self, sizes: KernelSchedule) -> bool:
        """Whether the tiles of a kernel are within the limits."""
        return all(n in self.tiles.get(a, (n,)) for a, n in sizes.tiles)

    def space(self, space: Space) -> Space:
        """Limit the space of a search, as far as it can express that."""
        return replace(space, max_kernels=min(self.kernels, space.max_kernels))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(given: Any) -> int:
    if not _is_count(given) or given < 1:
        raise UsageError(f"kernels: found {brief(given)}; allowed is a whole number from 1 on")
    return given


def _tiles(given: Any, program: KernelGraph) -> dict[Axis, frozenset[int]]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(f"tiles: found {brief(given)}; allowed are sizes by axis, such as {{'i': (32, 64)}}")
    return {a: _sizes(a, given[a]) for a in _axes("tiles", tuple(given), program)}


def _axes(hint: str, given: Any, program: KernelGraph) -> Collection[Axis]:
    """Axes of the program, from one name or several."""
    names = (given,) if isinstance(given, str) else given
    if isinstance(names, tuple | list | set | frozenset) and all(a in list(program.sizes) for a in names):
        return names
    known = ", ".join(f"{a}={n}" for a, n in program.extents)
    raise UsageError(f"{hint}: found {brief(given)}; allowed are axes of the program: {known}")


def _sizes(axis: Axis, given: Any) -> frozenset[int]:
    sizes = (given,) if _is_count(given) else given
    if not isinstance(sizes, tuple | list | set | frozenset) or not all(_is_count(n) and n > 0 for n in sizes):
        raise UsageError(f"tiles of {axis}: found {brief(given)}; allowed are one or several sizes, such as (32, 64)")
    return frozenset(sizes)


@dataclass
class HintedSession(TuningSession):
    """A search within hints, for a device that need not be here."""

    hints: Hints = field(default_factory=Hints)
    model: DeviceModel | None = None  # of a device that is not here

    @property
    def description(self) -> DeviceModel:
        """The device, as the cost model describes it."""
        return as_asked(self.region, self.model or device_for(self.device))

    @cached_property
    def space(self) -> Space:
        """The limits of the search."""
        return self.hints.space(space_for(self.region))

    def within(self, found: Sequence[Candidate]) -> Iterator[Candidate]:
        """Candidates within the hints, with the sizes that are; the program itself is one of them."""
        for c in chain(found, [self.program]):
            sizes = [self._allowed(s, c.alternatives_of(n)) for n, s in enumerate(c.schedule.kernels)]
            if self.hints.allow(c.graph) and all(sizes):
                schedule = replace(c.schedule, kernels=tuple(first for first, *_ in sizes))
                seconds = estimate(c.graph, schedule, self.description)
                yield replace(c, schedule=schedule, seconds=seconds, alternatives=tuple(sizes))

    def _allowed(self, first: KernelSchedule, others: Sequence[KernelSchedule]) -> tuple[KernelSchedule, ...]:
        return tuple(dict.fromkeys(filter(self.hints.allow_tiles, (first, *others))))

    @property
    def program(self) -> Candidate:
        """The program as it was written, as a candidate."""
        sizes = Schedule((KernelSchedule(),) * len(self.reference.kernels))
        return Candidate(self.reference, sizes, estimate(self.reference, sizes, self.description), "algebra")


@dataclass(frozen=True, eq=False, repr=False)
class Superoptimized:
    """The best muGraph that was found for a function: call it as the function. It runs under `jax.jit`.

    graph: with its tile sizes; ``region.pin`` of the same function takes it. certificate: the proof that it is the
    function. report: the evidence, with the generated kernels; ``report.save("report.html")`` writes it as a page.
    function: the muGraph as a function under `jax.jit`.
    """

    name: str
    graph: MuGraph
    report: Report
    function: Callable[..., Any]

    @property
    def decision(self) -> Decision:
        """The evidence, without the program."""
        return self.report.regions[0].decision

    def __call__(self, *args: Any) -> Any:
        """Run the muGraph on arrays of the shapes and types that were given."""
        return self.function(*args)

    @property
    def certificate(self) -> Any:
        """The proof, with the probability that it is wrong."""
        return self.decision.certificate

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The muGraphs that were timed, or that the cost model likes best, best first."""
        return self.decision.variants

    @property
    def speedup(self) -> float | None:
        """XLA's time over the muGraph's; None if nothing was measured."""
        return self.decision.speedup

    def __str__(self) -> str:
        d = self.decision
        checks = {"certificate": d.certificate, "exact check": d.exact, "float gate": d.gate, "search": d.search}
        lines = [f"{what}: {text}" for what, text in checks.items() if text]
        return "\n".join([f"{self.name}: {d.why}", *lines, str(self.graph)])

    def __repr__(self) -> str:
        return f"<mirage_jax superoptimized: {self.name}, {self.decision.why}>"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def superoptimize(
    f: Callable[..., Any],
    /,
    *shapes: Any,
    grid: Sequence[str] | str | None = None,
    tiles: Mapping[str, int | Sequence[int]] | None = None,
    kernels: int | None = None,
    budget: Budget | str | float | None = None,
    device: str | None = None,
) -> Superoptimized:
    """Find the best muGraph for a function, within hints that restrict the search.

    Every gate of `optimize` is passed, but XLA may be faster: `speedup` says so. Nothing is stored.

    Args:
        f: a function of arrays that is one muGraph: no control flow, and arrays as results.
        shapes: its arguments: arrays, `jax.ShapeDtypeStruct`s, or tuples of sizes, which mean float32.
        grid: axes that kernels may divide over their blocks. A wrong name is an error that lists the program's axes.
        tiles: allowed tile sizes of kernels, in elements, by axis.
        kernels: the most library operators and kernels of a muGraph.
        budget: seconds for the search, as in `optimize`.
        device: a GPU that need not be here, such as "H200". Its kernels are chosen by the cost model and not measured,
            and here the graph runs as plain JAX.

    Raises:
        UsageError: `f` is not one muGraph of such arguments, a hint is malformed, or nothing within the hints passes
            every gate.
    """
    if not callable(f):
        raise UsageError(f"superoptimize: found {brief(f)}; it takes a function and the shapes of its arguments")
    specs = [spec_of("superoptimize", x, "f32") for x in shapes]
    found = captured_whole(f, specs, "given")
    hints = Hints.of(grid, tiles, kernels, simplify_axes(found.region.graph))
    session = _session(found, Options.make({"budget": budget}), hints, device)
    decider, x64 = Decider(session.options), jax.config.jax_enable_x64
    decision = apart(lambda: _best(session, decider, x64))
    if decision.winner is None:
        last = f"; the last one: {decision.gate}" if decision.gate else ""
        raise UsageError(f"superoptimize: no muGraph within the hints passed every gate: {decision.why}{last}")
    winner: Winner = decision.winner
    graph = MuGraph(winner.graph, winner.schedule if winner.has_kernels else None)
    name = getattr(f, "__qualname__", type(f).__qualname__)
    decision = replace(decision, after=winner.footprint)
    report = Report(name, (RegionReport(tuple(found.region.where), str(session.reference), decision),))
    return Superoptimized(name, graph, report, _function(f, found, session, winner, specs))


def _session(found: Captured, options: Options, hints: Hints, device: str | None) -> HintedSession:
    """A search for the first device here, or for a GPU by name, whose kernels run here as plain JAX."""
    platform = "cpu" if device is not None else default_platform()
    platform = "cuda" if platform == "gpu" else platform
    here = chosen_devices(jax.local_devices(backend=platform), options.devices)
    model = None if device is None else described_gpu(device)
    return HintedSession(found.region, platform, here[0], options, devices=here, hints=hints, model=model)


def _best(session: HintedSession, decider: Decider, x64: bool) -> Decision:
    """Search, time, and take the first that passes every gate."""
    is_here = session.model is None
    with (
        unchecked(x64),
        progress.line() as notify,
        decider.trials(session) if is_here else nullcontext() as trials,
    ):
        session.try_in(trials, notify)
        try:
            found, report = session.searched(session.families, session.options.budget.seconds, notify)
        except UnsupportedError as why:  # the program itself is left
            found, report = [], why
        within = sorted(session.within(session.ranked(found)), key=lambda c: c.seconds)
        finalists = list(islice(session.verified(tuning.diverse(within)), tuning.FINALISTS))
        base = Decision(None, "", "search", session.platform, before=session.before, search=str(report))
        base = replace(base, tried=session.tried, variants=tuple(Variant.of(c.graph, c.schedule) for c in finalists))
        if not finalists:
            return replace(base, why=f"{session.tried['found']} candidates were found, and none is within the hints")
        decision = base
        for precise in session.precisions if is_here else session.precisions[:1]:  # plain JAX has one precision
            winners = [w for c in finalists for w in _variants(session, c, precise)]
            decision = _first_accepted(session, decider, base, winners)
            if decision.winner is not None or not any(w.has_kernels for w in winners):
                break
        return decision


def _variants(session: HintedSession, c: Candidate, precise: Precision) -> Iterator[Winner]:
    """A candidate at the tile sizes that the model likes, within the hints."""
    for schedule in tuning.tile_variants(c, tuning.TILINGS_PER_FINALIST[0]):
        yield session.winner(c.graph, tuning.as_precise(schedule, precise), c.family)


def _first_accepted(session: HintedSession, decider: Decider, base: Decision, winners: Sequence[Winner]) -> Decision:
    """Take the fastest that passes every gate; for a device that is not here, the one that the model likes best."""
    if session.model is not None:
        decision = decider.accepted(session, base, winners)
        return decision if decision.winner is None else replace(decision, why=_estimated(session, decision.winner))
    screen = tuning.Screen(session)
    screen(winners)
    best = screen.leaders(tuning.FINALISTS)
    functions = {"xla": session.xla, **{str(i): session.ours(w) for i, w in enumerate(best)}}
    timed = session.timings(functions, tuning.ROUNDS)
    seconds = {w: timed[str(i)].seconds for i, w in enumerate(best) if str(i) in timed}
    ranked = sorted(seconds, key=seconds.__getitem__)
    base = replace(base, variants=tuple(Variant.of(w.graph, w.schedule, seconds[w]) for w in ranked))
    decision = decider.accepted(session, base, ranked)
    if decision.winner is None or "xla" not in timed:
        return decision
    taken, xla = seconds[decision.winner], timed["xla"].seconds
    return replace(decision, why=f"{xla / taken:.2f}x over XLA", timings={"xla": xla, "mirage": taken})


def _estimated(session: HintedSession, winner: Winner) -> str:
    ours = estimate(winner.graph, winner.schedule, session.description)
    xla = fused_estimate(session.reference, session.description)
    return f"the model's first choice, not measured: it is estimated at {us(ours)}, and XLA's code at {us(xla)}"


def _function(
    f: Callable[..., Any], found: Captured, session: HintedSession, winner: Winner, specs: Sequence[Spec]
) -> Callable[..., Any]:
    """Make the function of arrays that runs a winner."""
    shapes = [jax.ShapeDtypeStruct(shape, numpy_dtype(dtype)) for shape, dtype in specs]
    tree = jax.tree.structure(jax.eval_shape(f, *shapes))
    ours = session.ours(winner)

    def run(*arrays: Any) -> Any:
        """Run the muGraph."""
        check_arrays("superoptimize", arrays, specs)
        values = [jnp.asarray(arrays[n]) for n in found.read_order]
        return jax.tree.unflatten(tree, ours(*values))

    return jax.jit(run)
