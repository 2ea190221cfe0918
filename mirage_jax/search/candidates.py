"""Candidates of a search, and structures: muGraphs without sizes, so that a result for one shape serves every shape.

A structure is the text of a candidate in which sizes are symbols: extents, and the scales of operators that equal the
extent of an axis or its reciprocal (1/4096 of a mean over k is ``1/|k|``). `restore` puts in the sizes of another shape
and chooses tiles, without a search. Where a scale equals a size by accident, the restored graph is another program,
which its certificate will refuse: a lost opportunity, never a wrong result.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any

from mirage_jax.cost.outline import outline
from mirage_jax.cost.roofline import PricedKernels, estimate, extents_inside, library_estimate
from mirage_jax.cost.tilings import KnownTilings, Tiled, known_tilings
from mirage_jax.errors import GraphError, ParseError
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.limits import MAX_PARTS
from mirage_jax.mugraph.graph import (
    Attr,
    Axis,
    BlockGraph,
    KernelGraph,
    KernelSchedule,
    Library,
    Op,
    Schedule,
    is_part,
)
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes import exponents, log_sum_exp
from mirage_jax.mugraph.passes.float16_range import in_range

SPLIT_COUNTS = (2, 4, 8, 16, 32)
MIN_SPLIT_ELEMENTS = 16  # in one part
TILE_PARTS = (256, 128)  # elements in one part of an axis that is too long for those counts: a tile, without a loop
USUAL_WARPS = 4
MAX_ALIKE = 8  # candidates with the same grids and loops: a few may lose digits, or be refused
LOOKALIKE_PENALTY = 1.5  # of the second of similar candidates, relative to its estimate
MIN_GAIN_BY_LOSS = 1.5  # times as fast has to be what loses digits: the float gate refuses most of that
SIZE = re.compile(r"(1/)?\|([a-z]\w*)\|")
SCALES = ("scale", "ca", "cb", "offset")


def parts_of(extent: int) -> list[int]:
    """List the numbers of parts into which an axis may be split, without empty parts.

    A long axis is also split into tiles: so a kernel of a product reduces each tile of the product, and a second one
    reduces what comes of that. A loop over the axis would need the product's other operand in one tile.
    """
    counts = [*SPLIT_COUNTS, *(n for size in TILE_PARTS if (n := -(-extent // size)) > SPLIT_COUNTS[-1])]
    return [
        n for n in counts if extent // n >= MIN_SPLIT_ELEMENTS and (n - 1) * -(-extent // n) < extent and n <= MAX_PARTS
    ]


@dataclass(frozen=True)
class Candidate:
    """A muGraph that should compute the region, with sizes to start tuning from, and the model's estimate."""

    graph: KernelGraph
    schedule: Schedule
    seconds: float
    family: str  # "kernels" | "algebra"
    alternatives: tuple[tuple[KernelSchedule, ...], ...] = ()  # per kernel: other sizes, best first
    single: tuple[Axis, ...] = ()  # axes whose tiles have one element
    loses_digits: bool = False  # that the program keeps (`search.forward_error`)

    def alternatives_of(self, kernel: int) -> tuple[KernelSchedule, ...]:
        """Other sizes of one kernel, by position, best first."""
        return self.alternatives[kernel] if self.alternatives else ()


def keeping_digits(found: Sequence[Candidate]) -> list[Candidate]:
    """Without candidates that lose digits, unless they are much faster than all that lose none."""
    others = min((c.seconds for c in found if not c.loses_digits), default=math.inf)
    return [c for c in found if not c.loses_digits or c.seconds * MIN_GAIN_BY_LOSS <= others]


def kind(c: Candidate) -> tuple[bool, bool]:
    """Does a candidate split an axis over the grid, and does it loop? The kind that suits one window suits others."""
    return bool(c.graph.split_axes), any(isinstance(k, BlockGraph) and k.loop for k in c.graph.kernels)


def structure(graph: KernelGraph) -> str:
    """Write a graph as text with symbols for sizes."""
    sizes = {n: a for a, n in sorted(graph.extents, reverse=True)}  # of equal extents, the first name

    def op(x: Op) -> Op:
        """The operator with its scales as symbols."""
        return replace(x, attrs=tuple((k, _symbol(v, sizes) if k in SCALES else v) for k, v in x.attrs))

    kernels = [
        replace(k, op=op(k.op)) if isinstance(k, Library) else replace(k, ops=tuple(map(op, k.ops)))
        for k in graph.kernels
    ]
    text = str(replace(graph, kernels=tuple(kernels)))
    axes = " ".join(a for a, _ in graph.extents)
    return re.sub(r"extents .*", f"extents {axes}", text, count=1)


def _symbol(value: Attr, sizes: Mapping[int, Axis]) -> Attr:
    """A scale as the size of an axis or its reciprocal, if it equals one; `sizes` gives axes by extent."""
    if not isinstance(value, Fraction | int) or abs(value) == 1 or value == 0:
        return value
    f, sign = Fraction(value), "-" if value < 0 else ""
    if abs(f.numerator) == 1 and f.denominator in sizes:
        return f"{sign}1/|{sizes[f.denominator]}|"
    if f.denominator == 1 and abs(f.numerator) in sizes:
        return f"{sign}|{sizes[abs(f.numerator)]}|"
    return value


def with_sizes(text: str, extents: Mapping[Axis, int]) -> KernelGraph:
    """Read a structure at given extents.

    Raises `ParseError` or `GraphError` if the text is not a structure over these axes.
    """

    def number(m: re.Match[str]) -> str:
        """A symbol's size."""
        if m[2] not in extents:
            raise GraphError(f"the structure has a size |{m[2]}|, which is no axis here")
        return f"{m[1] or ''}{extents[m[2]]}"

    head = re.search(r"extents (.*)", text)
    if head is None or set(head[1].split()) != set(extents):
        raise ParseError(f"not a structure over the axes {', '.join(sorted(extents))}")
    sized = text.replace(head[0], "extents " + " ".join(f"{a}={n}" for a, n in sorted(extents.items())), 1)
    return parse(SIZE.sub(number, sized))


def tiled(
    graph: KernelGraph, family: str, single: Sequence[Axis], device: DeviceModel, known: KnownTilings | None = None
) -> Candidate | None:
    """Choose the model's best tiles for every kernel and the best number of parts; None if no tile fits.

    `known` keeps what kernels get, for other graphs of the same extents and device that have them too.
    """
    known = {} if known is None else known
    best: Candidate | None = None
    split = graph.split_axes
    for parts in product(*(parts_of(graph.extent(a)) for a in split)):
        counts = dict(zip(split, parts, strict=True))
        found = [_kernel_tilings(k, graph, counts, single, device, known) for k in graph.kernels]
        if not all(found):
            continue
        seconds = sum(x[0].seconds for x in found)
        if best is None or seconds < best.seconds:
            schedule = Schedule(tuple(x[0].schedule for x in found), tuple(counts.items()))
            others = tuple(tuple(t.schedule for t in x) for x in found)
            best = Candidate(graph, schedule, seconds, family, others, tuple(single))
    return best


def ranged(
    reference: KernelGraph, found: Iterable[Candidate], device: DeviceModel, known: KnownTilings | None = None
) -> Iterator[Candidate]:
    """Keep values in float16 only where the program has them or a bound of theirs fits; others become float32, which
    takes other tiles. `known` as for `tiled`.
    """
    for c in found:
        graph = in_range(reference, c.graph)
        if graph is c.graph:
            yield c
        elif c.family == "algebra":
            yield replace(c, graph=graph)
        elif (wide := tiled(graph, c.family, c.single, device, known)) is not None:
            yield wide


def in_one_launch(graph: KernelGraph, schedule: Schedule) -> Iterator[Schedule]:
    """Schedules with independent kernels in one launch, if there are such kernels.

    One has as many warps as the widest kernel, one as many as most kernels: blocks that share a launch need fewer.
    """
    if any(len(wave) > 1 for wave in graph.waves) and not any(k.specialized for k in schedule.kernels):
        usual = tuple(replace(k, num_warps=USUAL_WARPS) for k in schedule.kernels)
        wide = as_wide(graph, replace(schedule, joint=True))
        yield from dict.fromkeys((wide, replace(wide, kernels=usual)))


def as_wide(graph: KernelGraph, schedule: Schedule) -> Schedule:
    """Give all kernels of a launch the warps of the widest one, as they are launched."""
    kernels = list(schedule.kernels)
    for wave in schedule.waves(graph):
        warps = max(kernels[n].num_warps for n in wave)
        for n in wave:
            kernels[n] = replace(kernels[n], num_warps=warps)
    return replace(schedule, kernels=tuple(kernels))


def together(c: Candidate, device: DeviceModel) -> Schedule | None:
    """Put a candidate's independent kernels in one launch, in the alternative sizes that the model likes there: kernels
    of few blocks are slow alone, and fill the device together. None if no kernels are independent.
    """
    best = next(in_one_launch(c.graph, c.schedule), None)
    if best is None:
        return None
    known = PricedKernels()
    seconds = estimate(c.graph, best, device, known)
    for n in (n for wave in c.graph.waves if len(wave) > 1 for n in wave):
        for sizes in c.alternatives_of(n):
            changed = as_wide(c.graph, replace(best, kernels=(*best.kernels[:n], sizes, *best.kernels[n + 1 :])))
            if (other := estimate(c.graph, changed, device, known)) < seconds:
                best, seconds = changed, other
    return best


def as_launched(c: Candidate, device: DeviceModel) -> Candidate:
    """Estimate the candidate in as few launches as possible, if that is faster."""
    launches = together(c, device)
    return c if launches is None else replace(c, seconds=min(c.seconds, estimate(c.graph, launches, device)))


def in_order(c: Candidate, program: KernelGraph) -> Candidate:
    """The candidate with subtractions in the order in which they round well: logarithms in the program's
    (`mugraph.passes.log_sum_exp`), and in exponents of rounded numbers (`mugraph.passes.exponents`).
    """
    graph = exponents.with_rounded_exponents(log_sum_exp.differences_first(c.graph, program))
    names, now = ([k.name for k in g.kernels] for g in (c.graph, graph))
    if names == now:
        return replace(c, graph=graph)
    sizes = dict(zip(names, c.schedule.kernels, strict=True))  # operators of XLA's that are new have none
    others = dict(zip(names, c.alternatives, strict=False))
    schedule = replace(c.schedule, kernels=tuple(sizes.get(name, KernelSchedule()) for name in now))
    alternatives = tuple(others.get(name, ()) for name in now) if others else ()
    return replace(c, graph=graph, schedule=schedule, alternatives=alternatives)


def _kernel_tilings(
    kernel: Library | BlockGraph,
    graph: KernelGraph,
    parts: Mapping[Axis, int],
    single: Sequence[Axis],
    device: DeviceModel,
    known: KnownTilings,
) -> Sequence[Tiled]:
    key = kernel, tuple(graph.tensors[load.tensor] for load in kernel.loads), tuple(parts.items()), tuple(single)
    if key not in known:
        if isinstance(kernel, Library):
            known[key] = [Tiled(library_estimate(kernel, graph, device), KernelSchedule())]
        else:
            inside, own = extents_inside(kernel, graph, parts), outline(kernel, graph)
            found = [t for axes in _singles(kernel, single) for t in known_tilings(own, inside, axes, device, known)]
            known[key] = sorted(found, key=lambda t: t.seconds)
    return known[key]


def _singles(kernel: BlockGraph, single: Sequence[Axis]) -> Iterator[frozenset[Axis]]:
    """Choices of as many axes whose tiles have one element: batch axes of a product have to be among them, and without
    a product any axis of the grid serves.
    """
    yield frozenset(single)
    if not any(op.op == "dot" for op in kernel.ops):
        on_grid = {a for a in kernel.grid if not is_part(a)}
        for a, b in product(sorted(on_grid.intersection(single)), sorted(on_grid.difference(single))):
            yield frozenset(single) - {a} | {b}


def diverse(found: Iterable[Candidate]) -> Iterator[Candidate]:
    """Rank candidates, at most two of the same grids and loops, the second as if it were slower: near the top most
    candidates hardly differ.
    """
    seen: Counter[object] = Counter()
    ranked: list[tuple[float, int, Candidate]] = []
    for n, c in enumerate(found):
        seen[like := _like(c)] += 1
        if seen[like] <= 2:
            ranked.append((c.seconds * (LOOKALIKE_PENALTY if seen[like] == 2 else 1.0), n, c))
    return iter(c for *_, c in sorted(ranked, key=lambda row: row[:2]))


def best_in_range(reference: KernelGraph, found: Iterable[Candidate], device: DeviceModel) -> list[Candidate]:
    """Candidates as `ranged` makes them, best estimate first; of those with the same grids and loops the best few, for
    others are never tried. What it makes is no faster, so those that are too slow already need not be asked.
    """
    seconds: defaultdict[object, list[float]] = defaultdict(list)  # by what is alike
    kept: list[Candidate] = []
    tilings: KnownTilings = {}
    for c in sorted(found, key=lambda c: c.seconds):
        known = seconds[_like(c), tuple(map(len, c.graph.waves))]  # a wave may become one launch
        if c.family == "algebra" or sum(s <= c.seconds for s in known) < MAX_ALIKE:
            made = list(ranged(reference, [c], device, tilings))
            known += [x.seconds for x in made]
            kept += made
    return sorted(kept, key=lambda c: c.seconds)


def _like(c: Candidate) -> object:
    """What is equal for candidates that hardly differ."""
    return c.family if c.family == "algebra" else grids_and_loops(c.graph.kernels)


def grids_and_loops(kernels: Iterable[Any]) -> object:
    """What is equal for kernels of plans that hardly differ."""
    return tuple((k.grid, k.loop) for k in kernels)


def to_json(candidates: Sequence[Candidate]) -> list[Any]:
    """Write structures of candidates, to be stored."""
    return [{"structure": structure(c.graph), "family": c.family, "single": list(c.single)} for c in candidates]


def restore(stored: Any, reference: KernelGraph, device: DeviceModel) -> list[Candidate]:
    """Read candidates for a region from stored structures, best estimate first; skips those that do not fit."""
    out: list[Candidate] = []
    entries: list[Any] = stored if isinstance(stored, list) else []  # pyright: ignore[reportUnknownVariableType]
    for entry in entries:
        try:
            graph = with_sizes(str(entry["structure"]), reference.sizes)
            candidate = tiled(graph, str(entry["family"]), [str(a) for a in entry["single"]], device)
        except (GraphError, ParseError, KeyError, TypeError):
            continue
        if candidate is not None:
            out.append(candidate)
    return sorted(ranged(reference, out, device), key=lambda c: c.seconds)
