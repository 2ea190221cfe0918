"""Structures: muGraphs without sizes, so that what was found for one shape serves every shape.

A structure is the text of a candidate in which sizes are symbols: extents, and the scales of operators that equal the
extent of an axis or its reciprocal (1/4096 of a mean over k is ``1/|k|``). `restore` puts the sizes of another shape
in and chooses tiles: no search. Where a scale equals a size by accident, the restored graph is another program, which
its certificate will refuse: a lost opportunity, never a wrong result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any

from mirage_jax.cost.outline import outline
from mirage_jax.cost.roofline import PricedKernels, estimate, extents_inside, library_estimate
from mirage_jax.cost.tilings import Tiled, tilings
from mirage_jax.errors import GraphError, ParseError
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.mugraph.graph import (
    Attr,
    Axis,
    BlockGraph,
    KernelGraph,
    KernelSchedule,
    Library,
    Op,
    Schedule,
)
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.float16_range import in_range

SPLIT_COUNTS = (2, 4, 8, 16, 32)
MIN_SPLIT_ELEMENTS = 16  # elements
USUAL_WARPS = 4
LOOKALIKE_PENALTY = 1.5  # how much slower than its estimate the second of candidates that are alike is taken to be
SIZE = re.compile(r"(1/)?\|([a-z]\w*)\|")
SCALES = ("scale", "ca", "cb", "offset")


def parts_of(extent: int) -> list[int]:
    """Into how many parts an axis may be split, none of them short or empty."""
    return [n for n in SPLIT_COUNTS if extent // n >= MIN_SPLIT_ELEMENTS and (n - 1) * -(-extent // n) < extent]


@dataclass(frozen=True)
class Candidate:
    """A muGraph that should compute the region, with sizes to start tuning from, and the model's estimate."""

    graph: KernelGraph
    schedule: Schedule
    seconds: float
    family: str  # "kernels" | "algebra"
    alternatives: tuple[tuple[KernelSchedule, ...], ...] = ()  # per kernel: other sizes, best first
    single: tuple[Axis, ...] = ()  # axes whose tiles have one element

    def alternatives_of(self, kernel: int) -> tuple[KernelSchedule, ...]:
        """Other sizes of one kernel, by position, best first."""
        return self.alternatives[kernel] if self.alternatives else ()


def kind(c: Candidate) -> tuple[bool, bool]:
    """Does a candidate split an axis over the grid, and does it loop? What suits one window suits others beside it."""
    return bool(c.graph.split_axes), any(isinstance(k, BlockGraph) and k.loop for k in c.graph.kernels)


def structure(graph: KernelGraph) -> str:
    """The text of a graph with symbols for sizes."""
    sizes = {n: a for a, n in sorted(graph.extents, reverse=True)}  # of equal extents, the first name

    def symbol(key: str, value: Attr) -> Attr:
        if key not in SCALES or not isinstance(value, Fraction | int) or abs(value) == 1 or value == 0:
            return value
        f = Fraction(value)
        sign = "-" if f < 0 else ""
        if abs(f.numerator) == 1 and f.denominator in sizes:
            return f"{sign}1/|{sizes[f.denominator]}|"
        if f.denominator == 1 and abs(f.numerator) in sizes:
            return f"{sign}|{sizes[abs(f.numerator)]}|"
        return value

    def op(x: Op) -> Op:
        return replace(x, attrs=tuple((k, symbol(k, v)) for k, v in x.attrs))

    kernels = [
        replace(k, op=op(k.op)) if isinstance(k, Library) else replace(k, ops=tuple(map(op, k.ops)))
        for k in graph.kernels
    ]
    text = str(replace(graph, kernels=tuple(kernels)))
    axes = " ".join(a for a, _ in graph.extents)
    return re.sub(r"extents .*", f"extents {axes}", text, count=1)


def with_sizes(text: str, extents: Mapping[Axis, int]) -> KernelGraph:
    """The graph of a structure at given extents. Raises `ParseError` or `GraphError` if the text is not a structure
    over these axes.
    """

    def number(m: re.Match[str]) -> str:
        if m[2] not in extents:
            raise GraphError(f"the structure has a size |{m[2]}|, which is no axis here")
        return f"{m[1] or ''}{extents[m[2]]}"

    head = re.search(r"extents (.*)", text)
    if head is None or set(head[1].split()) != set(extents):
        raise ParseError(f"not a structure over the axes {', '.join(sorted(extents))}")
    sized = text.replace(head[0], "extents " + " ".join(f"{a}={n}" for a, n in sorted(extents.items())), 1)
    return parse(SIZE.sub(number, sized))


def tiled(graph: KernelGraph, family: str, single: Sequence[Axis], device: DeviceModel) -> Candidate | None:
    """A candidate with the model's best tiles for every kernel and the best number of parts; None if no tile fits."""
    best: Candidate | None = None
    split = graph.split_axes
    for parts in product(*(parts_of(graph.extent(a)) for a in split)):
        counts = dict(zip(split, parts, strict=True))
        found = [_kernel_tilings(k, graph, counts, single, device) for k in graph.kernels]
        if not all(found):
            continue
        seconds = sum(x[0].seconds for x in found)
        if best is None or seconds < best.seconds:
            schedule = Schedule(tuple(x[0].schedule for x in found), tuple(counts.items()))
            others = tuple(tuple(t.schedule for t in x) for x in found)
            best = Candidate(graph, schedule, seconds, family, others, tuple(single))
    return best


def ranged(reference: KernelGraph, found: Iterable[Candidate], device: DeviceModel) -> Iterator[Candidate]:
    """Candidates in which no value that the program never had is float16 unless a bound of it fits: such values are
    float32, in other tiles.
    """
    for c in found:
        graph = in_range(reference, c.graph)
        if graph is c.graph:
            yield c
        elif c.family == "algebra":
            yield replace(c, graph=graph)
        elif (wide := tiled(graph, c.family, c.single, device)) is not None:
            yield wide


def in_one_launch(graph: KernelGraph, schedule: Schedule) -> Iterator[Schedule]:
    """The schedule with kernels that do not wait for each other in one launch, if there are such kernels: as wide as
    the widest of them, and as wide as most kernels like it (blocks beside each other need fewer warps each).
    """
    if any(len(wave) > 1 for wave in graph.waves) and not any(k.specialized for k in schedule.kernels):
        usual = tuple(replace(k, num_warps=USUAL_WARPS) for k in schedule.kernels)
        wide = as_wide(graph, replace(schedule, joint=True))
        yield from dict.fromkeys((wide, replace(wide, kernels=usual)))


def as_wide(graph: KernelGraph, schedule: Schedule) -> Schedule:
    """The schedule with all kernels of a launch as wide as the widest: that is how they are launched."""
    kernels = list(schedule.kernels)
    for wave in schedule.waves(graph):
        warps = max(kernels[n].num_warps for n in wave)
        for n in wave:
            kernels[n] = replace(kernels[n], num_warps=warps)
    return replace(schedule, kernels=tuple(kernels))


def together(c: Candidate, device: DeviceModel) -> Schedule | None:
    """A candidate's kernels that do not wait for each other in one launch, with those of their alternative sizes that
    the model likes beside each other: kernels of few blocks are slow alone and fill the device together.
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
    """The candidate with what it takes in as few launches as there can be, if that is less."""
    launches = together(c, device)
    return c if launches is None else replace(c, seconds=min(c.seconds, estimate(c.graph, launches, device)))


def _kernel_tilings(
    kernel: Library | BlockGraph,
    graph: KernelGraph,
    parts: Mapping[Axis, int],
    single: Sequence[Axis],
    device: DeviceModel,
) -> list[Tiled]:
    if isinstance(kernel, Library):
        return [Tiled(library_estimate(kernel, graph, device), KernelSchedule())]
    return tilings(outline(kernel, graph), extents_inside(kernel, graph, parts), frozenset(single), device)


def diverse(found: Iterable[Candidate]) -> Iterator[Candidate]:
    """At most two of the same grids and loops, the second as if it were slower: near the top of the ranking most
    candidates differ in next to nothing.
    """
    alike: Counter[object] = Counter()
    ranked: list[tuple[float, int, Candidate]] = []
    for n, c in enumerate(found):
        like = c.family if c.family == "algebra" else tuple((k.grid, k.loop) for k in c.graph.kernels)
        alike[like] += 1
        if alike[like] <= 2:
            ranked.append((c.seconds * (LOOKALIKE_PENALTY if alike[like] == 2 else 1.0), n, c))
    return iter(c for *_, c in sorted(ranked, key=lambda row: row[:2]))


def to_json(candidates: Sequence[Candidate]) -> list[Any]:
    """Structures of candidates, to be stored."""
    return [{"structure": structure(c.graph), "family": c.family, "single": list(c.single)} for c in candidates]


def restore(stored: Any, reference: KernelGraph, device: DeviceModel) -> list[Candidate]:
    """Candidates for a region from stored structures, best estimate first; what does not fit is left out."""
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
