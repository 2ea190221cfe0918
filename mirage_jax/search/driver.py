"""The way in: searches a region of any size, divided into windows and output slices, and combines the results.

`search` goes from a region's reference muGraph to ranked candidate muGraphs and a report. Nothing is verified,
compiled or measured here; `compiler` tries candidates in order. Mirage's partitioner (OSDI'25, section 1) likewise
divides a program before its search.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain

from mirage_jax.cluster import Machine
from mirage_jax.cost.roofline import estimate, lower_limit
from mirage_jax.cost.tilings import KnownTilings
from mirage_jax.errors import UnsupportedError
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.mugraph.graph import KernelGraph, KernelSchedule, Schedule
from mirage_jax.mugraph.operators import operator
from mirage_jax.search.candidates import Candidate, best_in_range, kind, tiled
from mirage_jax.search.decompose.fusion import combined, inlined
from mirage_jax.search.decompose.output_slices import SUMS, followed, output_slice, shared_operands, waists
from mirage_jax.search.decompose.subprocesses import SubSearch, search_parts
from mirage_jax.search.decompose.windows import (
    KernelWindow,
    after_quotients,
    before_reductions,
    before_tail,
    divide,
    elements,
    replace_windows,
    with_copies,
)
from mirage_jax.search.enumerate.kernels import BudgetExceeded, Space
from mirage_jax.search.enumerate.window_search import FAMILIES, Search, searched
from mirage_jax.search.report import Notify, SearchReport, StopReason

# Terms of normal forms that may be seen in probing a window: one that takes more does not fit. (Not seconds: the result
# is to be the same on a busy machine.)
MAX_PROBE_TERMS = 6_000
MAX_WINDOW_CLASSES = 100  # values in a window with one output: more are not exhausted in seconds
MAX_BLOCK_ELEMENTS = 8192  # of an output that one block makes, if there are many
MAX_OUTPUT_SLICE_TERMS = 60_000  # the same for an output slice; there are few of these
MAX_OUTPUT_SLICE_CLASSES = 220  # values in an output slice searched for plans of two or three kernels: tens of seconds
MAX_WIDE_SLICE_CLASSES = 400  # the same, if few of these values may be in a kernel: most have too many axes
MAX_WIDE_SLICE_LEGAL = 64  # values that may
MAX_SMALL_SLICE_CLASSES = 40  # values in an output slice that is searched for plans of three kernels in any case
MAX_COMBINING_SHARE = 0.2  # of the time, on top of it, for trying what slices' candidates share
MAX_PATIENCE_SHARE = 0.5  # of the time, after which a region that has no kernel is searched in other ways
MAX_WHOLE_SHARE = 0.3  # of the time, for a region that may be sliced afterwards
NEAR_ROOFLINE = 2.0  # times the lower limit of a region: kernels that take longer leave something to look for
MAX_WHOLE_REGION_CLASSES = 400  # values in a region searched for one kernel only: ten seconds


def search(
    reference: KernelGraph,
    device: DeviceModel,
    space: Space,
    seconds: float,
    states: int = 2_000_000,
    families: Sequence[str] = FAMILIES,
    notify: Notify | None = None,
    workers: int = 1,
    machines: Sequence[Machine] = (),
) -> tuple[list[Candidate], SearchReport]:
    """Search a region within `seconds`; returns ranked candidates and a report.

    A region too wide to exhaust is searched window by window, and output by output, in up to `workers` processes, and
    on other machines. So is one of several outputs that has no kernel as a whole: sums over rows and over columns of
    one product, for instance. Where no kernel comes near the roofline, operands of several products or small products
    are stored, and what lies between them is searched. Where there is no kernel at all by half of the time, a pointwise
    end is left out, and small sums are stored, too; where there is none in the whole space, reductions at the end are
    left out. Quotients that are subtracted stay as they are, and what follows them is searched.
    """
    if windows := after_quotients(reference):
        quotients, rest = windows
        found, report = search(rest.graph, device, space, seconds, states, families, notify, workers, machines)
        small, _ = searched(quotients.graph, device, space, seconds, states, families)
        return best_in_range(reference, _with_quotients(reference, windows, small, found, device), device), report
    until = time.monotonic() + seconds
    narrow = cache(partial(is_narrow, device=device, space=space, most=MAX_WINDOW_CLASSES))  # asked again of windows
    reference, parts = _divided(reference, narrow)
    has_kernels = _has_kernels(families, device)
    shared, stored = shared_operands(reference), waists(reference)
    if len(parts) > 1:
        found, report = list[Candidate](), SearchReport(space, windows=len(parts))
        stops = [(), shared, stored, waists(reference, SUMS)]
    else:
        may_slice = has_kernels and (shared or stored or len(set(reference.outputs)) > 1)
        of_whole = seconds * (MAX_WHOLE_SHARE if may_slice else 1.0)
        patience = MAX_PATIENCE_SHARE * seconds if has_kernels else math.inf
        found, report = searched(reference, device, space, of_whole, states, families, notify=notify, patience=patience)
        parts = _parts_after(found, report, reference) if has_kernels else []
        stops = _stops_after(found, report, reference, device, shared or stored)
    slices = _first_slices(reference, device, space, stops if has_kernels else [])
    report.output_slices = len(slices)
    part = partial(SubSearch, device=device, states=states, families=families, whole=reference)
    todo = [part(w.graph, space=space, is_wide=slices != [] and not narrow(w.graph)) for w in parts]
    todo += [part(graph, space=its) for graph, its in slices]
    by_part: list[list[Candidate]] = []
    for candidates, part_report in search_parts(todo, until - time.monotonic(), workers, notify, machines):
        by_part.append(candidates)
        report.add(part_report)
    found += _put_together(reference, parts, by_part, device, until + MAX_COMBINING_SHARE * seconds)
    return best_in_range(reference, found, device), report


def _with_quotients(
    reference: KernelGraph,
    windows: list[KernelWindow],
    quotients: list[Candidate],
    found: Sequence[Candidate],
    device: DeviceModel,
) -> Iterator[Candidate]:
    """Candidates for the whole, from candidates for the window after its quotients."""
    kept, kernels = _kept_seconds(windows, device), _best({0: quotients}, "kernels")
    known: KnownTilings = {}
    for c in found:
        first = kernels if c.family == "kernels" else {}
        whole = _replaced(reference, windows, first | {1: c}, kept, device)
        if whole is not None:
            yield inlined(whole, device, known) if first else whole


def _divided(reference: KernelGraph, fits: Callable[[KernelGraph], bool]) -> tuple[KernelGraph, list[KernelWindow]]:
    """The graph that is divided, and its windows: with copies of cheap values, unless more are too wide then."""
    parts = divide(reference, fits)
    copied = with_copies(reference) if len(parts) > 1 else reference
    if copied is reference:
        return reference, parts
    again = divide(copied, fits)
    wide, wide_again = (sum(not fits(w.graph) for w in ws) for ws in (parts, again))
    return (copied, again) if wide_again <= wide else (reference, parts)


def _has_kernels(families: Sequence[str], device: DeviceModel) -> bool:
    return "kernels" in families and device.is_gpu


def _put_together(
    reference: KernelGraph,
    parts: list[KernelWindow],
    by_part: list[list[Candidate]],
    device: DeviceModel,
    late: float,
) -> list[Candidate]:
    """Candidates for the whole, from those of its windows and, after them, of its output slices. `late`: in seconds of
    `time.monotonic`, when slices' candidates are no longer combined.
    """
    of_parts, of_slices = by_part[: len(parts)], by_part[len(parts) :]
    composed = _compose(reference, parts, {n: cs for n, cs in enumerate(of_parts) if cs}, device) if parts else []
    return composed + (combined(reference, of_slices, device, late) if of_slices else [])


def _stops_after(
    found: Sequence[Candidate],
    report: SearchReport,
    reference: KernelGraph,
    device: DeviceModel,
    stored: tuple[str, ...],
) -> list[tuple[str, ...]]:
    """Where slices may stop, for a region that was searched as one: nowhere, if it has several outputs and no kernels,
    or time for a part of the space; at the waists `stored`, if no kernel comes near the roofline; at sums, if there is
    no kernel.
    """
    kernels = [c.seconds for c in found if c.family == "kernels"]
    is_known = kernels and report.stop is not StopReason.SECONDS
    nowhere = [()] if len(set(reference.outputs)) > 1 and not is_known else []
    is_far = min(kernels, default=math.inf) > NEAR_ROOFLINE * lower_limit(reference, device)
    at_sums = [waists(reference, SUMS)] if _is_stuck(found, report) else []
    return [*nowhere, *([stored] if stored and is_far else ()), *at_sums]


def _parts_after(found: Sequence[Candidate], report: SearchReport, reference: KernelGraph) -> list[KernelWindow]:
    """Parts to search after a region was searched as one; none if that has kernels."""
    if any(c.family == "kernels" for c in found):
        return []
    return before_tail(reference) if report.stop is StopReason.SECONDS else before_reductions(reference)


def _is_stuck(found: Sequence[Candidate], report: SearchReport) -> bool:
    """Did a search run out of time, or of patience, without a kernel?"""
    return report.stop is StopReason.SECONDS and not any(c.family == "kernels" for c in found)


def _first_slices(
    reference: KernelGraph, device: DeviceModel, space: Space, stops: Iterable[tuple[str, ...]]
) -> list[tuple[KernelGraph, Space]]:
    """The slices that stop at the first of these sets of tensors with which none is too wide; none if all are."""
    for at in dict.fromkeys(stops):
        if slices := _output_slices(reference, device, space, at):
            return slices
    return []


def _output_slices(
    reference: KernelGraph, device: DeviceModel, space: Space, stored: Sequence[str] = ()
) -> list[tuple[KernelGraph, Space]]:
    """The slices of all `stored` tensors and outputs, each with the space to search; none if one slice is too wide."""
    pair = replace(space, max_kernels=min(2, space.max_kernels), splits=not _fills(reference, device))
    found: list[tuple[KernelGraph, Space]] = []
    follow = followed(reference)
    made = {name: n for n, name in enumerate(reference.tensors)}  # a slice comes after those that it reads
    outputs = sorted({*stored, *chain(*follow.values()), *reference.outputs}, key=made.__getitem__)
    for name in outputs:
        graph = output_slice(reference, name, (*stored, *follow.get(name, ())))
        probe = _probe(graph, device, pair, MAX_WIDE_SLICE_CLASSES, MAX_OUTPUT_SLICE_TERMS)
        if probe is not None and _is_small_enough(probe):
            # A sum over an axis with tiles of one element may take one more: gradients of keys that heads share. So may
            # rows and columns of one product.
            is_small = probe.report.classes <= MAX_SMALL_SLICE_CLASSES
            more = (is_small or bool(probe.batch & probe.reduced)) and pair.max_kernels < space.max_kernels
            found.append((graph, replace(pair, max_kernels=pair.max_kernels + more)))
            continue
        whole = replace(space, max_kernels=1, splits=False)
        if len(outputs) > 1 or _probe(graph, device, whole, MAX_WHOLE_REGION_CLASSES, MAX_OUTPUT_SLICE_TERMS) is None:
            return []
        found.append((graph, whole))
    return found


def _is_small_enough(probe: Search) -> bool:
    """Has an output slice so few values that its search ends in tens of seconds? By a probe that has counted them."""
    classes = probe.report.classes
    return classes <= MAX_OUTPUT_SLICE_CLASSES or probe.count_legal() <= MAX_WIDE_SLICE_LEGAL


def is_narrow(graph: KernelGraph, device: DeviceModel, space: Space, most: int = MAX_WINDOW_CLASSES) -> bool:
    """Are there few enough values in the AND-OR graph for an exhaustive search?"""
    return _probe(graph, device, space, most, MAX_PROBE_TERMS) is not None


def _probe(graph: KernelGraph, device: DeviceModel, space: Space, most: int, terms: int) -> Search | None:
    """A search that has found out which values there are, if they are few; outputs multiply tables."""
    weight = math.sqrt(len(set(graph.outputs)))
    # Each output looks at its own values, so all together look at most at `weight ** 2` times the values.
    probe = Search(graph, device, space, math.inf, states=int(most * weight), terms=terms)
    try:
        probe.start()
    except BudgetExceeded:
        return None
    except UnsupportedError:
        pass  # not searched at all
    return probe if probe.report.classes * weight <= most else None


def _fills(reference: KernelGraph, device: DeviceModel) -> bool:
    """Are there enough blocks for the device, for every output, without splitting sums over the grid?"""
    return min(elements(reference, name) for name in reference.outputs) >= 2 * device.blocks * MAX_BLOCK_ELEMENTS


def _is_pointwise(graph: KernelGraph) -> bool:
    return all(operator(op.op).pointwise for k in graph.kernels for op in k.ops)


def _compose(
    reference: KernelGraph, parts: list[KernelWindow], found: dict[int, list[Candidate]], device: DeviceModel
) -> list[Candidate]:
    """Candidates for the whole reference: some or all windows replaced by theirs, best estimate first."""
    kept_seconds = _kept_seconds(parts, device)
    out: dict[str, Candidate] = {}
    known: KnownTilings = {}
    for chosen in filter(None, _choices(parts, found)):
        whole = _replaced(reference, parts, chosen, kept_seconds, device)
        if whole is not None:
            candidates = (whole, inlined(whole, device, known)) if whole.family == "kernels" else (whole,)
            for c in candidates:
                out.setdefault(str(c.graph), c)
    return sorted(out.values(), key=lambda c: c.seconds)


def _kept_seconds(parts: Sequence[KernelWindow], device: DeviceModel) -> list[float]:
    """What each window takes as it was written, by the model."""
    return [estimate(w.graph, Schedule((KernelSchedule(),) * len(w.graph.kernels)), device) for w in parts]


def _choices(parts: list[KernelWindow], found: dict[int, list[Candidate]]) -> list[dict[int, Candidate]]:
    """Choose candidates by window: all windows by their best algebra, by their best kernels, by the best of each kind
    of kernels where they have one; and each window that is not only pointwise alone.
    """
    kernels, algebra = (_best(found, family) for family in ("kernels", "algebra"))
    kinds: dict[object, dict[int, Candidate]] = {}
    for n, cs in found.items():
        for c in reversed(cs):  # the best last
            if c.family == "kernels":
                kinds.setdefault(kind(c), {})[n] = c
    choices = [kernels, algebra, algebra | kernels, *(kernels | like for like in kinds.values())]
    alone = [*kernels.items(), *algebra.items()]
    return choices + [{n: c} for n, c in alone if not _is_pointwise(parts[n].graph)]


def _best(found: dict[int, list[Candidate]], family: str) -> dict[int, Candidate]:
    """The best candidate of a family for each window that has one."""
    of_family = {n: [c for c in cs if c.family == family] for n, cs in found.items()}
    return {n: cs[0] for n, cs in of_family.items() if cs}


def _replaced(
    reference: KernelGraph,
    parts: list[KernelWindow],
    chosen: dict[int, Candidate],
    kept_seconds: list[float],
    device: DeviceModel,
) -> Candidate | None:
    """The reference with the chosen candidates in place of their windows; None if no tile fits."""
    graph, places = replace_windows(reference, {n: c.graph for n, c in chosen.items()}, parts)
    candidates = chosen.values()
    family = "kernels" if any(c.family == "kernels" for c in candidates) else "algebra"
    single = tuple(sorted({a for c in candidates for a in c.single}))
    split = tuple(sorted({p for c in candidates for p in c.schedule.parts}))
    if len(dict(split)) < len(split):  # an axis cannot be split into two numbers of parts
        return tiled(graph, family, single, device)
    sizes, others = _sizes(chosen, places)
    rest = sum(seconds for n, seconds in enumerate(kept_seconds) if n not in chosen)
    seconds = sum(c.seconds for c in candidates) + rest
    return Candidate(graph, Schedule(sizes, split), seconds, family, others, single)


def _sizes(
    chosen: dict[int, Candidate], places: list[tuple[int, int]]
) -> tuple[tuple[KernelSchedule, ...], tuple[tuple[KernelSchedule, ...], ...]]:
    """Sizes of each kernel, and its other sizes, by (window, position in the window's candidate)."""
    found = [(chosen[n], i) if i >= 0 else None for n, i in places]
    sizes = tuple(x[0].schedule.kernels[x[1]] if x else KernelSchedule() for x in found)
    return sizes, tuple(x[0].alternatives_of(x[1]) if x else () for x in found)
