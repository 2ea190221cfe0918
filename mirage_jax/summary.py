"""Sums up a report in a few lines per region: the decision, the evidence, and the changed steps.

`report.Report` says everything; this gives the reader the essentials. Input: a report. Output: lines of text.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterator
from textwrap import indent

from mirage_jax.mugraph.chain import formula
from mirage_jax.mugraph.graph import KernelGraph, Library, Tensor
from mirage_jax.mugraph.matched_names import with_names_of
from mirage_jax.mugraph.operators import operator
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.merge_axes import merge_axes
from mirage_jax.report import RegionReport, Report, count_left_out, places


def summarize(report: Report) -> str:
    """Write a few lines per region, and count the reasons for equations left out."""
    count, optimized = len(report.regions), len(report.optimized)
    out = [f"{report.name}: {count} region{'s' * (count != 1)}, {optimized} optimized"]
    out += [] if report.whole is None else [f"whole function: {report.whole}"]
    out += [f"note: {note}" for note in report.notes]
    for i, region in enumerate(report.regions):
        out += [f"region {i}:", *(indent(line, "  ") for line in _region(region))]
    out += report.hints
    if report.left_out:
        reasons = Counter(str(x.code) for x in report.left_out)
        why = ", ".join(f"{code} {count}" for code, count in reasons.most_common())
        out.append(f"equations left to XLA: {count_left_out(report.left_out)} ({why})")
    return "\n".join(out)


def _region(region: RegionReport) -> Iterator[str]:
    d = region.decision
    times = f" ({region.occurrences} times)" if region.occurrences > 1 else ""
    yield f"{d.verdict}{times}: {d.why} [{d.source}]"
    yield from d.consequences
    first, *rest = places(region.where) or ["unknown"]
    yield f"source: {first}" + (f" and {len(rest)} more file{'s' * (len(rest) != 1)}" if rest else "")
    if d.winner is None:
        return
    program = merge_axes(parse(region.reference))
    graph = with_names_of(program, d.winner.graph)
    if d.before is not None and d.after is not None:
        yield f"before: {d.before}\nafter:  {d.after}"
    yield from region.closed_forms
    if d.timings:
        yield "measured: " + ", ".join(f"{k} {v * 1e6:,.1f} us" for k, v in d.timings.items())
    before, after = formula(program), formula(graph)
    if before and after and before != after:
        yield f"formula: {before} -> {after}"
    if sentence := never_formed(program, graph):
        yield f"algebra: {sentence}"
    yield "what changed (- the program, + what runs):"
    yield indent("\n".join(changes(program, graph)), "  ")
    if d.winner.together:
        yield f"in one launch each: {d.winner.together}"
    yield f"certificate: {d.certificate}"
    if d.exact:
        yield f"exact check: {d.exact}"
    yield f"float gate: {d.gate}"


def changes(program: KernelGraph, graph: KernelGraph) -> Iterator[str]:
    """The lines of kernels that only one of two graphs has, as in a diff; names are matched first."""
    both = program, with_names_of(program, graph)
    old, new = ([line for kernel in g for line in str(kernel).splitlines()] for g in both)
    for line in difflib.unified_diff(old, new, n=0, lineterm=""):
        if not line.startswith(("---", "+++", "@@")):
            yield f"{line[0]} {line[1:]}"


def never_formed(program: KernelGraph, graph: KernelGraph) -> str:
    """Say so, if the program's largest intermediate result is larger than any that the winner makes."""
    before, after = largest_intermediate(program), largest_intermediate(graph)
    if before is None or graph.split_axes:
        return ""
    have, most = _size(program, before), 0 if after is None else _size(graph, after)
    if have <= most:
        return ""
    rest = "" if after is None else f", and no intermediate result of more than {most:,} ({after})"
    return f"the program forms {before}, {have:,} numbers; the winner never does{rest}"


def largest_intermediate(graph: KernelGraph) -> Tensor | None:
    """Of what kernels write, outputs aside; pointwise library operators do not count, for XLA fuses them."""
    made = [
        store.tensor
        for kernel in graph
        if not (isinstance(kernel, Library) and operator(kernel.op.op).pointwise)
        for store in kernel.stores
        if store.tensor.name not in graph.outputs
    ]
    return max(made, key=lambda t: _size(graph, t), default=None) if not graph.split_axes else None


def _size(graph: KernelGraph, tensor: Tensor) -> int:
    return math.prod(graph.extent(a) for a in tensor.axes)
