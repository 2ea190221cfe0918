"""Finds the fastest variant: a candidate with tile sizes, warps and stages.

1. Screen: time the tile sizes that the model likes, once each. Two of each muGraph come first. They show how far the
   model is off for it, and what will not be the fastest is left out.
2. Climb: try neighbours of the best variants of the best few muGraphs, as long as that helps. The model knows a device
   only roughly, and muGraphs like different launches.
3. After each round, put together the best sizes of each kernel, lend the fastest variant's sizes to other muGraphs,
   and try independent kernels in one launch.
4. Time the best few against XLA, interleaved. A winner is faster beyond noise.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from mirage_jax import timing
from mirage_jax.compiler.isolation.parent import SLOW
from mirage_jax.compiler.specialization import is_written, specialized
from mirage_jax.compiler.tuning_session import TuningSession, kind_of
from mirage_jax.compiler.winner import KERNEL_EMIT_OPTIONS, Winner
from mirage_jax.compiler.winner import as_precise as as_precise
from mirage_jax.cost.residuals import Residuals, first_of_each
from mirage_jax.cost.roofline import estimate, register_pressure
from mirage_jax.errors import LoweringError, UnsupportedError
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.lower.runtime import launch
from mirage_jax.mugraph.dtypes import BYTES
from mirage_jax.mugraph.graph import (
    Axis,
    BlockGraph,
    KernelGraph,
    KernelSchedule,
    Library,
    Precision,
    Schedule,
    is_part,
    part_axis,
)
from mirage_jax.search.candidates import USUAL_WARPS, Candidate, as_wide, in_one_launch, parts_of, together
from mirage_jax.search.candidates import diverse as diverse

log = logging.getLogger("mirage_jax.timing")

MIN_SPEEDUP = 1.03  # lower 95% bound of XLA's time over ours, below which XLA stays
TILINGS_PER_FINALIST = (6, 4, 3, 2, 2, 2, 2, 2, 2)  # tile sizes per kernel tried for the first, second, ... finalist
FINALISTS = len(TILINGS_PER_FINALIST)
SCREEN_SURVIVORS = 3  # variants that survive a screen
MAX_VARIANTS = 72  # variants compiled in one screen: graphs of several large kernels have more
MAX_CLIMB_STEPS = 6
MAX_CLIMB_SECONDS = 120.0  # seconds of climbing after which there is no further step
MAX_STEP_TIME_RATIO = 0.98  # of the best time before a step: where other regions wait, one that gains less is the last
CLIMB_ORIGINS = 3  # variants from which the climb starts; later steps start from two
MAX_NEIGHBOR_COST_RATIO = 1.6  # estimate of a neighbour over its origin's, up to which it is tried
MAX_REGISTER_PRESSURE = 2.0  # above it kernels spill thousands of bytes, and take the compilers three times as long
WARPS, STAGES = (2, 4, 8), range(2, 7)
ROUNDS = 10  # of the comparison with XLA


@dataclass(frozen=True)
class Comparison:
    """Times of XLA and of the best variants; `faster` are those that beat XLA beyond noise, fastest first. `others` are
    the best variants of slower muGraphs, not compared yet: the gates may refuse all that are faster.
    """

    xla: timing.Timing | None
    faster: tuple[tuple[Winner, timing.Timing, timing.Ratio], ...]
    best: tuple[timing.Timing, timing.Ratio] | None
    others: tuple[Winner, ...] = ()


def compare(session: TuningSession, finalists: Sequence[Candidate], precise: Precision) -> Comparison:
    """Screen all variants of the finalists, then time the best few against XLA, with all kernels as `precise`."""
    screen = Screen(session)
    variants = [
        session.winner(c.graph, s, c.family)
        for c, first in _first_schedules(session, finalists)
        for s in _as_precise_variants(c.graph, first, precise)
    ]
    if len(variants) > MAX_VARIANTS:  # do not let the model choose: it does not know which of XLA's products are slow
        screen(first_of_each(variants, kind_of))
    screen(variants)
    best = _climb(screen, screen.recombine())
    # One variant of each muGraph too: the float gate may refuse all variants of a muGraph.
    leaders = screen.leaders(FINALISTS)
    found = against_xla(session, list(dict.fromkeys((*best, *leaders[:SCREEN_SURVIVORS]))))
    return replace(found, others=tuple(leaders[SCREEN_SURVIVORS:]))


def _first_schedules(session: TuningSession, finalists: Sequence[Candidate]) -> Iterator[tuple[Candidate, Schedule]]:
    """Schedules that the model likes: tile sizes for all finalists, then specialized warps, then joint launches."""
    for c, n in zip(finalists, TILINGS_PER_FINALIST, strict=False):
        yield from ((c, s) for s in tile_variants(c, n))
    for c, n in zip(finalists, TILINGS_PER_FINALIST, strict=False):
        yield from ((c, s) for s in specialized(c.graph, c.schedule, session.description, most=n))
        if (launches := together(c, session.description)) is not None:
            yield from ((c, s) for s in in_one_launch(c.graph, launches))


def _climb(screen: Screen, best: list[Winner]) -> list[Winner]:
    """Try neighbours of the best variants, step by step, as long as that helps; return the fastest few."""
    session = screen.session
    origins = screen.origins(CLIMB_ORIGINS)
    until = min(time.monotonic() + MAX_CLIMB_SECONDS, session.until)
    is_limited = session.until < math.inf  # other regions wait
    for _ in range(MAX_CLIMB_STEPS):
        if time.monotonic() > until:
            break
        before = screen.best
        screen(replace(w, schedule=s) for w in origins for s in neighboring_schedules(w, session.description))
        best = screen.recombine()
        if screen.best >= (MAX_STEP_TIME_RATIO if is_limited else 1.0) * before:
            break
        origins = screen.origins(2)
    return best


def against_xla(session: TuningSession, best: Sequence[Winner]) -> Comparison:
    """Time variants and XLA's code, interleaved."""
    functions = {"xla": session.xla, **{str(i): session.ours(w) for i, w in enumerate(best)}}
    timed = session.timings(functions, ROUNDS, unsure)
    xla = timed.get("xla")
    if xla is None:
        return Comparison(None, (), None)
    times = [(w, timed[str(i)]) for i, w in enumerate(best) if str(i) in timed]
    session.record(times)
    rows = sorted(((w, t, timing.ratio(xla, t)) for w, t in times), key=lambda row: -row[2].value)
    return Comparison(xla, tuple(row for row in rows if row[2].low >= MIN_SPEEDUP), rows[0][1:] if rows else None)


def unsure(timed: Mapping[str, timing.Timing]) -> Sequence[str]:
    """Name the times that need more rounds: a variant's gain is enough, but may be noise, and XLA's with them."""
    if (xla := timed.get("xla")) is None:
        return ()
    ratios = {name: timing.ratio(xla, t) for name, t in timed.items() if name != "xla"}
    if max((r.low for r in ratios.values()), default=0.0) >= MIN_SPEEDUP:
        return ()
    enough = [name for name, r in ratios.items() if r.value >= MIN_SPEEDUP]
    return ["xla", *enough] if enough else ()


def _as_precise_variants(graph: KernelGraph, schedule: Schedule, precise: Precision) -> Iterator[Schedule]:
    """The schedule as precise as that, and with the fewest stages: split operands of float32 take twice the memory."""
    yield (same := as_precise(schedule, precise))
    loads = (x.tensor for k in graph.kernels if isinstance(k, BlockGraph) for x in k.loads)
    if precise >= Precision.SPLIT_FLOAT32_RESULTS and all(BYTES[graph.tensors[x].dtype] != 2 for x in loads):
        few = tuple(replace(k, num_stages=min(k.num_stages, STAGES.start)) for k in same.kernels)
        if few != same.kernels:
            yield replace(same, kernels=few)


def precisions(c: Candidate, allowed: Sequence[Precision]) -> list[Precision]:
    """The precisions, of those that are allowed, that give a candidate different kernels; the first is one."""
    found: dict[tuple[str, ...], Precision] = {}
    for precise in allowed if c.family == "kernels" else ():
        try:
            sources = launch.sources(c.graph, as_precise(c.schedule, precise), KERNEL_EMIT_OPTIONS)
        except (LoweringError, UnsupportedError):
            break
        found.setdefault(tuple(source.text if source else "" for source in sources), precise)
    return list(found.values()) or [allowed[0]]


def _without_many_registers(variants: list[Winner]) -> list[Winner]:
    """Leave out kernels that would spill, unless all would."""
    few = [w for w in variants if register_pressure(w.graph, w.schedule) <= MAX_REGISTER_PRESSURE]
    return few or variants


@dataclass
class Screen:
    """Times variants once each and remembers them all."""

    session: TuningSession
    seconds: dict[Winner, float] = field(default_factory=dict)
    residuals: Residuals = field(default_factory=Residuals)

    def __call__(self, variants: Iterable[Winner]) -> list[Winner]:
        """Time new variants, the likely ones if there are too many; return the fastest few so far."""
        fits = lambda w: not self.session.refused_kernels.why(w)  # noqa: E731
        asked = _without_many_registers([w for w in dict.fromkeys(variants) if w not in self.seconds and fits(w)])
        self._learn({w: t.seconds for w in asked if (t := self.session.timed.get(w)) is not None})
        if self.session.is_late and self.best < math.inf:
            return self._ranked()[:SCREEN_SURVIVORS]
        new = self._likely(self._unless_slow([w for w in asked if w not in self.seconds]))
        if self._runs_here and len(new) + len(self.seconds) <= SCREEN_SURVIVORS:
            self.seconds |= dict.fromkeys(new, 0.0)  # few enough to be compared with XLA at once
        elif new:
            self._time(new)
        return self._ranked()[:SCREEN_SURVIVORS]

    @property
    def _runs_here(self) -> bool:
        return self.session.platform == "cpu" and self.session.trials is None

    def _learn(self, seconds: Mapping[Winner, float]) -> None:
        self.seconds |= seconds
        for w, s in seconds.items():
            self.residuals.learn(kind_of(w), w, self.session.estimate(w), s)

    def _unless_slow(self, new: Sequence[Winner]) -> list[Winner]:
        """Leave out variants that will not be the fastest, for good."""
        slow = [w for w in new if self.residuals.is_slow(kind_of(w), self.session.estimate(w))]
        if slow:
            self.session.tried[SLOW.kind] += len(slow)
            self.seconds |= dict.fromkeys(slow, math.inf)
        return [w for w in new if w not in self.seconds]

    def _time(self, variants: Sequence[Winner]) -> None:
        new = list(dict.fromkeys((*first_of_each(variants, kind_of), *variants)))
        log.info("compiling and timing %d variants", len(new))
        timed = self.session.screen(new, self.residuals)
        self.session.tried["timed"] += len(timed)
        self.session.record((new[i], t) for i, t in timed.items())
        self._learn({w: timed[i].seconds if i in timed else math.inf for i, w in enumerate(new)})

    def _likely(self, new: list[Winner]) -> list[Winner]:
        """The `MAX_VARIANTS` that the model likes best, and one of each muGraph."""
        if len(new) <= MAX_VARIANTS:
            return new
        first = {w.graph: w for w in reversed(new)}
        price = {w: self.session.estimate(w) for w in new}
        return list(dict.fromkeys((*first.values(), *sorted(new, key=price.__getitem__))))[:MAX_VARIANTS]

    def recombine(self) -> list[Winner]:
        """Time the best sizes of each kernel together, then in other muGraphs, then kernels in one launch; return the
        fastest few so far.
        """
        self(self.composed())
        self(self.borrowed())
        return self(self.joint())

    def composed(self) -> Iterator[Winner]:
        """For each of the best muGraphs, put the sizes together that seem best for each kernel.

        Launches run one after the other, so a variant's time is a sum over kernels and their sizes (least squares).
        """
        for best in self.leaders(CLIMB_ORIGINS):
            fastest = self._fastest_sizes(self._comparable(best))
            schedule = replace(best.schedule, kernels=tuple(fastest[i] for i in range(len(fastest))))
            yield replace(best, schedule=as_wide(best.graph, schedule))

    def _fastest_sizes(self, timed: Sequence[Winner]) -> dict[int, KernelSchedule]:
        """The sizes of each kernel whose share of the measured times is the smallest."""
        uses = [set(enumerate(w.schedule.kernels)) for w in timed]
        columns = list(dict.fromkeys(use for w in timed for use in enumerate(w.schedule.kernels)))
        rows = np.array([[column in use for column in columns] for use in uses], np.float64)
        parts = np.linalg.lstsq(rows, np.array([self.seconds[w] for w in timed]))[0]
        return dict(columns[i] for i in np.argsort(-parts))  # later ones replace earlier ones

    def _comparable(self, best: Winner) -> list[Winner]:
        """The timed variants of one muGraph with the same launches and parts."""
        like = (best.graph, best.schedule.joint, best.schedule.parts)
        return [w for w in self._ranked() if (w.graph, w.schedule.joint, w.schedule.parts) == like]

    def borrowed(self) -> Iterator[Winner]:
        """Give the other muGraphs the sizes of the fastest variant, for one kernel with the same grid and loop.

        muGraphs often differ only in what follows a loop. A loop likes the same sizes in each of them, and the climb
        reaches these in one muGraph and not in another.
        """
        leaders = self.leaders(FINALISTS)
        for w in leaders[1:]:
            yield from (replace(w, schedule=s) for s in _with_sizes_of(leaders[0], w))

    def joint(self) -> Iterator[Winner]:
        """Put kernels that do not wait for each other into one launch; slow ones may run well with others."""
        for best in self.leaders(FINALISTS):
            yield from (replace(best, schedule=s) for s in in_one_launch(best.graph, best.schedule))

    def leaders(self, n: int) -> list[Winner]:
        """The fastest variant of each of the n best muGraphs so far."""
        return self._fastest(n, lambda w: w.graph)

    def origins(self, n: int) -> list[Winner]:
        """The same, but muGraphs count twice, with specialized warps and without: neither likes the sizes of the other,
        and no small change leads from one to the other.
        """
        return self._fastest(n, kind_of)

    def _fastest(self, n: int, kind: Callable[[Winner], Hashable]) -> list[Winner]:
        fastest: dict[Hashable, Winner] = {}
        for w in self._ranked():
            fastest.setdefault(kind(w), w)
        return list(fastest.values())[:n]

    @property
    def best(self) -> float:
        """Seconds of the fastest variant so far."""
        return min(self.seconds.values(), default=math.inf)

    def _ranked(self) -> list[Winner]:
        return sorted((w for w, s in self.seconds.items() if s < math.inf), key=self.seconds.__getitem__)


def tile_variants(c: Candidate, n: int) -> Iterator[Schedule]:
    """The model's first choice, then other tile sizes, one kernel at a time; each as the model would launch it, and
    once more as most kernels like it.
    """
    seen: set[Schedule] = set()
    for i, alternatives in enumerate(c.alternatives or ((),)):
        for tiles in (*c.schedule.kernels[i : i + 1], *alternatives[:n]):
            for sizes in (tiles, replace(tiles, num_warps=USUAL_WARPS, num_stages=min(tiles.num_stages, 3))):
                changed = _with(c.schedule, {i: sizes})
                if changed not in seen:
                    seen.add(changed)
                    yield changed
    if not seen:
        yield c.schedule


def neighboring_schedules(w: Winner, device: DeviceModel) -> Iterator[Schedule]:
    """Schedules that differ from the winner's in one knob of one kernel, or of all loops of a launch.

    Knobs: warps; persistence; stages (1 or 2 more or fewer); a tile doubled, halved, or moved to another axis; a block
    and its steps doubled or halved together; blocks doubled or halved with their warps; parts of a split axis doubled
    or halved. Drops schedules that the cost model puts above `MAX_NEIGHBOR_COST_RATIO` times the current estimate.
    """
    now = estimate(w.graph, w.schedule, device)
    changed = (
        *_one_changed(w.graph, w.schedule, device),
        *_parts_changed(w.graph, w.schedule),
        *_loops_changed(w.graph, w.schedule),
    )
    for schedule in changed:
        if estimate(w.graph, schedule, device) <= MAX_NEIGHBOR_COST_RATIO * now and _is_written(w, schedule):
            yield schedule


def _with_sizes_of(lender: Winner, w: Winner) -> Iterator[Schedule]:
    """Schedules of `w` in which one kernel has the sizes of a kernel of the lender with the same grid and loop."""
    if lender.schedule.parts != w.schedule.parts:
        return
    lent = zip(lender.graph.kernels, lender.schedule.kernels, strict=True)
    for (theirs, sizes), (n, own) in product(lent, enumerate(w.graph.kernels)):
        if isinstance(theirs, BlockGraph) and isinstance(own, BlockGraph) and _has_same_loop(theirs, own):
            changed = _one_with(w.graph, w.schedule, n, sizes)
            if _is_written(w, changed):
                yield changed


def _has_same_loop(one: BlockGraph, other: BlockGraph) -> bool:
    return one.loop is not None and one.loop == other.loop and set(one.grid) == set(other.grid)


def _is_written(w: Winner, changed: Schedule) -> bool:
    """Whether the emitter can write all specialized kernels whose sizes changed."""
    same = changed.parts == w.schedule.parts
    return all(
        isinstance(kernel, Library)
        or not new.specialized
        or (same and new == old)
        or is_written(kernel, w.graph, new, changed)
        for kernel, old, new in zip(w.graph.kernels, w.schedule.kernels, changed.kernels, strict=True)
    )


def _one_changed(graph: KernelGraph, schedule: Schedule, device: DeviceModel) -> Iterator[Schedule]:
    for i, kernel in enumerate(graph.kernels):
        if isinstance(kernel, BlockGraph):
            sizes = schedule.kernels[i]
            for changed in (*_launches(kernel, sizes, device), *_tiles(kernel, graph, sizes)):
                yield _one_with(graph, schedule, i, changed)
            yield from _blocks_changed(graph, schedule, i)


def _parts_changed(graph: KernelGraph, schedule: Schedule) -> Iterator[Schedule]:
    """Change parts alone, and together with blocks: more parts go with smaller blocks, and neither may pay alone."""
    for n, (axis, count) in enumerate(schedule.parts):
        for other in {2 * count, count // 2}.intersection(parts_of(graph.extent(axis))):
            parts = (*schedule.parts[:n], (axis, other), *schedule.parts[n + 1 :])
            yield (changed := replace(schedule, parts=parts))
            for i, kernel in enumerate(graph.kernels):
                if isinstance(kernel, BlockGraph) and part_axis(axis) in kernel.grid:
                    yield from _blocks_changed(graph, changed, i)


def _blocks_changed(graph: KernelGraph, schedule: Schedule, i: int) -> Iterator[Schedule]:
    """Blocks of half or twice the size along an axis, with half or twice the warps."""
    sizes = schedule.kernels[i]
    tiles = [(axis, tile) for axis, tile in sizes.tiles if tile > 1 and axis in graph.kernels[i].grid]
    for (axis, tile), (up, down) in product(tiles, ((1, 2), (2, 1))):
        size, warps = tile * up // down, sizes.num_warps * up // down
        if size < 2 * graph.extent(axis) and warps in WARPS:
            yield _one_with(graph, schedule, i, replace(_with_tile(sizes, axis, size), num_warps=warps))


def _loops_changed(graph: KernelGraph, schedule: Schedule) -> Iterator[Schedule]:
    """Change all loops of a launch together: the same stages, or steps of half or twice the length.

    One kernel alone would not do: the kernel that holds the most memory says how many blocks run at a time.
    """
    for wave in schedule.waves(graph):
        loops = {n: k.loop for n in wave if isinstance(k := graph.kernels[n], BlockGraph) and k.loop}
        if len(loops) > 1:
            yield from (_with_loops(schedule, loops, lambda k, _, s=s: replace(k, num_stages=s)) for s in STAGES)
            for up, down in ((2, 1), (1, 2)):
                yield _with_loops(
                    schedule, loops, lambda k, a, up=up, down=down: _with_tile(k, a, max(1, k.tile(a) * up // down))
                )


def _with_loops(
    schedule: Schedule, loops: Mapping[int, Axis], change: Callable[[KernelSchedule, Axis], KernelSchedule]
) -> Schedule:
    """The schedule with a change to each kernel that has a loop."""
    return _with(schedule, {n: change(schedule.kernels[n], axis) for n, axis in loops.items()})


def _one_with(graph: KernelGraph, schedule: Schedule, i: int, sizes: KernelSchedule) -> Schedule:
    """The schedule with other sizes of kernel i, and their warps in all kernels of its launch."""
    (wave,) = (wave for wave in schedule.waves(graph) if i in wave)
    return _with_warps(_with(schedule, {i: sizes}), wave, sizes.num_warps)


def _with(schedule: Schedule, sizes: Mapping[int, KernelSchedule]) -> Schedule:
    """The schedule with other sizes of some kernels, by number."""
    return replace(schedule, kernels=tuple(sizes.get(n, k) for n, k in enumerate(schedule.kernels)))


def _with_warps(schedule: Schedule, wave: Sequence[int], warps: int) -> Schedule:
    """The schedule with so many warps in each kernel of a launch."""
    return _with(schedule, {n: replace(schedule.kernels[n], num_warps=warps) for n in wave})


def _with_tile(sizes: KernelSchedule, axis: Axis, tile: int) -> KernelSchedule:
    """The sizes with another tile along an axis."""
    return replace(sizes, tiles=tuple((a, tile if a == axis else t) for a, t in sizes.tiles))


def _launches(kernel: BlockGraph, sizes: KernelSchedule, device: DeviceModel) -> Iterator[KernelSchedule]:
    """One change to how a kernel is launched: persistent programs or warps, then stages."""
    if sizes.specialized:
        yield replace(sizes, programs=0 if sizes.programs else device.blocks)
    else:
        yield from (replace(sizes, num_warps=warps) for warps in WARPS if warps != sizes.num_warps)
    if kernel.loop:
        yield from _with_stages(sizes)


def _with_stages(sizes: KernelSchedule) -> Iterator[KernelSchedule]:
    for more in (-2, -1, 1, 2):
        if (stages := sizes.num_stages + more) in STAGES:
            yield replace(sizes, num_stages=stages)


def _tiles(kernel: BlockGraph, graph: KernelGraph, sizes: KernelSchedule) -> Iterator[KernelSchedule]:
    for change in _factors(kernel, [a for a, n in sizes.tiles if n > 1]):
        tiles = tuple((a, int(n * change.get(a, 1))) for a, n in sizes.tiles)
        if all(is_part(a) or 0 < n < 2 * graph.extent(a) for a, n in tiles):
            yield replace(sizes, tiles=tiles)


def _factors(kernel: BlockGraph, axes: Sequence[Axis]) -> Iterator[Mapping[Axis | None, float]]:
    """Factors of one tile or of two: opposite ones, or the same for a block and its steps.

    A smaller block with steps as long as before may be slower, and shorter steps alone may be slower too.
    """
    for up, down in product((None, *axes), repeat=2):
        if up != down:
            yield {up: 2.0, down: 0.5}
    if kernel.loop in axes:
        for axis, factor in product(kernel.grid, (0.5, 2.0)):
            if axis in axes:
                yield {axis: factor, kernel.loop: factor}
