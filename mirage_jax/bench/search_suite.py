"""Measure the size of the search space, the time to enumerate it, and the worth of each pruning rule, on any machine.

Per program: values, states, plans and structures with up to n operators per kernel for growing n, and the time to
enumerate them all; then the same search with one rule taken away. Compare with Table 5 of the paper (RMSNorm, 11
operators: 28 s with 8 threads; without abstract expressions more than 10 hours).
"""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
from rich.console import Console

from mirage_jax.bench.programs import BenchProgram
from mirage_jax.bench.tables import Cells, TableReport, markdown_table, provenance
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.search.candidates import structure
from mirage_jax.search.driver import is_narrow, search
from mirage_jax.search.enumerate.kernels import Space
from mirage_jax.search.enumerate.window_search import Search
from mirage_jax.search.report import StopReason

LIMITS = (5, 7, 9, 11, 14)  # operators per kernel
SPACE = Space()
CUT = 60.0  # seconds after which a count is given up, and printed as such
DEVICE = "H200"
RULES = {  # name -> the space without it
    "rank": lambda space: replace(space, max_rank=99),
    "second loop": lambda space: replace(space, loops=3),
    "loaded intermediates": lambda space: replace(space, max_loaded=3),
}


@dataclass(frozen=True)
class Count:
    """One enumeration of a space."""

    program: str
    what: str  # "5", "7", ...: operators per kernel; "without RULE"
    stop: str
    seconds: float
    classes: int
    states: int
    plans: int
    structures: int
    pruned: dict[str, int]

    @property
    def cells(self) -> list[str]:
        """The row of the table."""
        cut = "" if self.stop == StopReason.EXHAUSTED.value else " (cut)"
        pruned = ", ".join(f"{k} {v}" for k, v in sorted(self.pruned.items(), key=lambda x: -x[1])[:4])
        numbers = map(str, (self.classes, self.states, self.plans))
        return [self.program, self.what, *numbers, f"{self.structures:.3g}", f"{self.seconds:.2f}{cut}", pruned]


@dataclass(frozen=True)
class Whole:
    """One search as the optimizer runs it."""

    seconds: float
    stop: str
    windows: int
    output_slices: int


@dataclass(frozen=True)
class SearchResult(TableReport):
    """All counts, and the time of a whole search (priced and extracted) per program."""

    date: str
    machine: str
    versions: dict[str, str]
    counts: tuple[Count, ...]
    searches: dict[str, Whole]
    peak_mib: float

    title: ClassVar = "Search"
    words = 2

    @property
    def caption(self) -> str:
        """When and where it ran."""
        peak = f"peak memory {self.peak_mib:.0f} MiB"
        return f"{self.date}, {self.machine}, one process, {peak}; enumerations over {CUT:g} s are cut"

    def cells(self) -> Cells:
        """Header and rows of the table: by program, one row for each limit and for each rule that is left out."""
        header = ("program", "space", "values", "states", "plans", "structures", "seconds", "pruned")
        return header, [count.cells for count in self.counts]

    def details(self) -> list[str]:
        """A second table: whole searches."""
        rows = [[n, f"{w.seconds:.2f}", str(w.windows), str(w.output_slices), w.stop] for n, w in self.searches.items()]
        return [
            "Whole searches, with pricing and extraction, as the optimizer runs them. A region too wide to exhaust as"
            " one is searched in windows, and each of its outputs alone (output slices):",
            markdown_table(("program", "seconds", "windows", "output slices", ""), rows),
        ]


def _regions(programs: Iterable[BenchProgram]) -> dict[str, KernelGraph]:
    """The region of each program, programs of one structure once."""
    found: dict[str, KernelGraph] = {}
    seen: set[str] = set()
    for p in programs:
        for n, region in enumerate(analyse(jax.make_jaxpr(p.fn)(*p.inputs)).regions):
            graph = simplify_axes(region.graph)
            if (text := structure(graph)) not in seen:
                seen.add(text)
                found[f"{p.name}.{n}" if n else p.name] = graph
    return found


def run_search_suite(
    programs: Iterable[BenchProgram], space: Space = SPACE, console: Console | None = None
) -> SearchResult:
    """Count the space of every program, without each rule, and time whole searches."""
    counts: list[Count] = []
    searches: dict[str, Whole] = {}
    for name, graph in _regions(programs).items():
        if console is not None:
            console.print(f"search: {name}", highlight=False)
        full = replace(space, max_ops=14)
        if is_narrow(graph, DEVICES[DEVICE], full):
            counts += _counts(name, graph, space)
        began = time.perf_counter()
        _, report = search(graph, DEVICES[DEVICE], full, seconds=CUT)
        searches[name] = Whole(time.perf_counter() - began, report.stop.value, report.windows, report.output_slices)
    about = provenance()
    return SearchResult(
        about["date"],
        f"{platform.machine()}, {DEVICE} cost model",
        about["versions"],
        tuple(counts),
        searches,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def _counts(name: str, graph: KernelGraph, space: Space) -> list[Count]:
    counts: list[Count] = []
    for limit in LIMITS:
        counts.append(_count(name, str(limit), graph, replace(space, max_ops=limit)))
        if counts[-1].seconds >= CUT:
            break
    for rule, without in RULES.items():
        counts.append(_count(name, f"11, without {rule}", graph, without(replace(space, max_ops=11))))
    return counts


def _count(program: str, what: str, graph: KernelGraph, space: Space) -> Count:
    r = Search(graph, DEVICES[DEVICE], space, seconds=CUT, states=1 << 62).count()
    return Count(program, what, r.stop.value, r.seconds, r.classes, r.states, r.plans, r.structures, dict(r.pruned))
