"""A region of any size: divided into windows and into output_slices, each searched, and what was found put together again.

`search` is the way in: from a region's reference muGraph to ranked candidate muGraphs, and a report of what was
looked at. Nothing is verified, compiled or measured here; `compiler` tries candidates in order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from mirage_jax.cost.roofline import estimate
from mirage_jax.errors import UnsupportedError
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.mugraph.graph import KernelGraph, KernelSchedule, Schedule
from mirage_jax.mugraph.operators import operator
from mirage_jax.search.candidates import Candidate, kind, ranged, tiled
from mirage_jax.search.decompose.fusion import combined, inlined
from mirage_jax.search.decompose.output_slices import output_slice
from mirage_jax.search.decompose.subprocesses import SubSearch, search_parts
from mirage_jax.search.decompose.windows import KernelWindow, divide, replace_windows
from mirage_jax.search.enumerate.kernels import BudgetExceeded, Space
from mirage_jax.search.enumerate.window_search import FAMILIES, Search
from mirage_jax.search.report import Notify, SearchReport

# Terms of normal forms seen in looking at a window: one that takes more does not fit. (Not seconds: what is found is
# to be the same on a busy machine.)
MAX_PROBE_TERMS = 6_000
MAX_WINDOW_CLASSES = 100  # values in a window with one output: more are not exhausted in seconds
MAX_BLOCK_ELEMENTS = 8192  # elements of an output that one block makes, if there are many
MAX_OUTPUT_SLICE_TERMS = 60_000  # the same for a output_slice; there are few of them
MAX_OUTPUT_SLICE_CLASSES = (
    220  # in a output_slice, of which plans of two or three kernels are looked at: tens of seconds
)
MAX_WHOLE_REGION_CLASSES = (
    400  # in a region of which only one kernel that computes all of it is looked for: ten seconds
)


def search(
    reference: KernelGraph,
    device: DeviceModel,
    space: Space,
    seconds: float,
    states: int = 2_000_000,
    families: Sequence[str] = FAMILIES,
    notify: Notify | None = None,
    workers: int = 1,
) -> tuple[list[Candidate], SearchReport]:
    """Ranked candidates for a region, and what was looked at. A region too wide to exhaust is searched window by
    window, and output by output, in up to `workers` processes.
    """
    until = time.monotonic() + seconds
    parts = divide(reference, lambda graph: is_narrow(graph, device, space, MAX_WINDOW_CLASSES))
    if len(parts) == 1:
        one = Search(reference, device, space, seconds, states, families, notify=notify)
        return sorted(ranged(reference, one.run(), device), key=lambda c: c.seconds), one.report
    output_slices = _output_slices(reference, device, space) if "kernels" in families and device.is_gpu else []
    report = SearchReport(space, windows=len(parts), output_slices=len(output_slices))
    todo = [SubSearch(w.graph, device, space, states, families) for w in parts]
    todo += [SubSearch(c, device, own, states, families) for c, own in output_slices]
    found: list[list[Candidate]] = []
    for candidates, own in search_parts(todo, until - time.monotonic(), workers, notify):
        found.append(candidates)
        report.add(own)
    out = _compose(reference, parts, {n: cs for n, cs in enumerate(found[: len(parts)]) if cs}, device)
    whole = combined(reference, found[len(parts) :], device) if output_slices else []
    return sorted(ranged(reference, [*out, *whole], device), key=lambda c: c.seconds), report


def _output_slices(reference: KernelGraph, device: DeviceModel, space: Space) -> list[tuple[KernelGraph, Space]]:
    """The output_slices of all outputs, and what is searched of each; none if one is too wide."""
    pair = replace(space, max_kernels=min(2, space.max_kernels), splits=not _fills(reference, device))
    found: list[tuple[KernelGraph, Space]] = []
    outputs = dict.fromkeys(reference.outputs)
    for name in outputs:
        graph = output_slice(reference, name)
        if (probe := _probe(graph, device, pair, MAX_OUTPUT_SLICE_CLASSES, MAX_OUTPUT_SLICE_TERMS)) is not None:
            # Summing what tiles have one element of may take one more: gradients of keys that several heads share.
            more = bool(probe.batch & probe.reduced) and pair.max_kernels < space.max_kernels
            found.append((graph, replace(pair, max_kernels=pair.max_kernels + more)))
            continue
        whole = replace(space, max_kernels=1, splits=False)
        if len(outputs) > 1 or _probe(graph, device, whole, MAX_WHOLE_REGION_CLASSES, MAX_OUTPUT_SLICE_TERMS) is None:
            return []
        found.append((graph, whole))
    return found


def is_narrow(graph: KernelGraph, device: DeviceModel, space: Space, most: int = MAX_WINDOW_CLASSES) -> bool:
    """Are there few enough values in the AND-OR graph for an exhaustive search?"""
    return _probe(graph, device, space, most, MAX_PROBE_TERMS) is not None


def _probe(graph: KernelGraph, device: DeviceModel, space: Space, most: int, terms: int) -> Search | None:
    """A search that has found out which values there are, if they are few; outputs multiply tables."""
    weight = math.sqrt(len(set(graph.outputs)))
    # Each output looks at its own values, so what all have looked at is at most `weight ** 2` times the values.
    probe = Search(graph, device, space, math.inf, states=int(most * weight), terms=terms)
    try:
        probe.start()
    except BudgetExceeded:
        return None
    except UnsupportedError:
        pass  # not searched at all
    return probe if probe.report.classes * weight <= most else None


def _fills(reference: KernelGraph, device: DeviceModel) -> bool:
    """Are there blocks enough for the device without sums that are split over the grid, whatever the output?"""
    sizes = [math.prod(map(reference.extent, reference.tensors[name].axes)) for name in reference.outputs]
    return min(sizes) >= 2 * device.blocks * MAX_BLOCK_ELEMENTS


def _is_pointwise(graph: KernelGraph) -> bool:
    return all(operator(op.op).pointwise for k in graph.kernels for op in k.ops)


def _compose(
    reference: KernelGraph, parts: list[KernelWindow], found: dict[int, list[Candidate]], device: DeviceModel
) -> list[Candidate]:
    """The reference with windows replaced: all by their best algebra, all by their best kernels, by the best of each
    kind of kernels where they have one, and each window that is not only pointwise by each alone.
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
    kinds: dict[object, dict[int, Candidate]] = {}
    for n, cs in found.items():
        for c in reversed(cs):  # the best last
            if c.family == "kernels":
                kinds.setdefault(kind(c), {})[n] = c
    choices += [best["kernels"] | alike for alike in kinds.values()]
    choices += [{n: c} for chosen in best.values() for n, c in chosen.items() if not _is_pointwise(parts[n].graph)]
    kept = [estimate(w.graph, Schedule((KernelSchedule(),) * len(w.graph.kernels)), device) for w in parts]
    out: dict[str, Candidate] = {}
    for chosen in choices:
        if chosen:
            graph, places = replace_windows(reference, {n: c.graph for n, c in chosen.items()}, parts)
            own = [chosen[n].schedule.kernels[i] if i >= 0 else KernelSchedule() for n, i in places]
            others = [chosen[n].alternatives[i] if i >= 0 and chosen[n].alternatives else () for n, i in places]
            split = tuple(sorted({p for c in chosen.values() for p in c.schedule.parts}))
            family = "kernels" if any(c.family == "kernels" for c in chosen.values()) else "algebra"
            single = tuple(sorted({a for c in chosen.values() for a in c.single}))
            if len({axis for axis, _ in split}) < len(split):  # an axis cannot be split into two numbers of parts
                whole = tiled(graph, family, single, device)
            else:
                rest = sum(seconds for n, seconds in enumerate(kept) if n not in chosen)
                seconds = sum(c.seconds for c in chosen.values()) + rest
                whole = Candidate(graph, Schedule(tuple(own), split), seconds, family, tuple(others), single)
            if whole is not None:
                candidates = (whole, inlined(whole, device)) if whole.family == "kernels" else (whole,)
                out |= {str(c.graph): c for c in candidates if str(c.graph) not in out}
    return sorted(out.values(), key=lambda c: c.seconds)
