"""Compare the cost model's order of kernels with measured times, and say which of them tuning would need.

Stored measurements are lines of JSON, one per scheduled graph that ran on a GPU: the program it computes, the graph's
text, its schedule, and the median seconds of each of its kernels (from a profile, one launch alone). They hold nothing
that the model made, so a changed model is judged by the same times.

    python -m mirage_jax.bench.calibration results/kernels-h200-2026-11-22.jsonl.gz
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from mirage_jax.cost.residuals import Residuals, first_of_each, kind
from mirage_jax.cost.roofline import estimate, kernel_estimate
from mirage_jax.hardware.device_model import DEVICES, DeviceModel
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.schedule_json import schedule_from_json
from mirage_jax.report import rank_correlation


@dataclass(frozen=True)
class Measured:
    """A scheduled graph, and seconds of the kernels that were seen in the profile, by name."""

    program: str
    graph: KernelGraph
    schedule: Schedule
    seconds: dict[str, float]


def load(file: Path) -> Iterator[Measured]:
    """Read the measurements of a file."""
    graphs: dict[str, KernelGraph] = {}
    with gzip.open(file, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            text = row["graph"]
            graphs[text] = graphs.get(text) or parse(text)
            yield Measured(row["program"], graphs[text], schedule_from_json(row["schedule"]), row["seconds"])


def pairs(rows: Iterable[Measured], device: DeviceModel) -> dict[str, list[tuple[float, float]]]:
    """Collect, by program, the model's seconds and the measured seconds of every kernel."""
    out: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for kernel, sizes in zip(row.graph, row.schedule.kernels, strict=True):
            if isinstance(kernel, BlockGraph) and kernel.name in row.seconds:
                price = kernel_estimate(kernel, row.graph, sizes, row.schedule.part_counts, device)
                out.setdefault(row.program, []).append((price, row.seconds[kernel.name]))
    return out


def table(found: dict[str, list[tuple[float, float]]]) -> Table:
    """Draw a table of rank correlations and spreads of errors, by program."""
    out = Table("program", "kernels", "rank correlation", "measured over model: median", "10%", "90%")
    for program, values in found.items():
        ratio = np.array([measured / model for model, measured in values])
        spread = [f"{np.percentile(ratio, p):.2f}" for p in (50, 10, 90)]
        out.add_row(program, str(len(values)), f"{rank_correlation(values) or 0:.2f}", *spread)
    return out


@dataclass(frozen=True)
class Screening:
    """How tuning would do with stored measurements: variants, those that it would time, the fastest of these over the
    fastest of all, and the model's first choice over the fastest of all.
    """

    variants: int
    timed: int
    found: float
    first: float


def screened(rows: Iterable[Measured], device: DeviceModel) -> dict[str, Screening]:
    """Time the variants of each program one by one, as a `Screen` does, by stored times. Those with a kernel of XLA's,
    whose time is not stored, are left out.
    """
    programs: dict[str, list[tuple[Hashable, float, float]]] = {}
    for row in rows:
        if all(isinstance(k, BlockGraph) and k.name in row.seconds for k in row.graph):
            price = estimate(row.graph, row.schedule, device)
            seconds = sum(row.seconds.values())
            programs.setdefault(row.program, []).append((kind(row.graph, row.schedule), price, seconds))
    return {program: _screening(sorted(found, key=lambda v: v[1])) for program, found in programs.items()}


def _screening(variants: Sequence[tuple[Hashable, float, float]]) -> Screening:
    residuals = Residuals()
    timed = 0
    positions = range(len(variants))
    first_ones = first_of_each(positions, lambda n: variants[n][0])
    for n in dict.fromkeys((*first_ones, *positions)):
        its_kind, price, seconds = variants[n]
        if not residuals.is_slow(its_kind, price):
            residuals.learn(its_kind, n, price, seconds)
            timed += 1
    fastest = min(seconds for _, _, seconds in variants)
    found, first = residuals.best / fastest, variants[0][2] / fastest
    return Screening(len(variants), timed, found, first)


def screening_table(found: dict[str, Screening]) -> Table:
    """Draw a table of what tuning would time and find, by program."""
    out = Table("program", "variants", "timed", "fastest timed over fastest", "first choice over fastest")
    for program, s in found.items():
        out.add_row(program, str(s.variants), str(s.timed), f"{s.found:.2f}", f"{s.first:.2f}")
    return out


def mean_rank(found: dict[str, list[tuple[float, float]]]) -> float:
    """Average the programs' rank correlations."""
    return float(np.mean([rank_correlation(values) or 0.0 for values in found.values()]))


if __name__ == "__main__":
    rows, model = list(load(Path(sys.argv[1]))), DEVICES[sys.argv[2] if len(sys.argv) > 2 else "H200"]
    found, screenings = pairs(rows, model), screened(rows, model)
    Console().print(table(found))
    Console().print(f"mean rank correlation {mean_rank(found):.3f}")
    Console().print(screening_table(screenings))
    share = sum(s.timed for s in screenings.values()) / sum(s.variants for s in screenings.values())
    first = np.exp(-np.mean([np.log(s.first) for s in screenings.values()]))
    Console().print(f"timed {share:.0%}; the first choice has {first:.2f} of the fastest one's speed (geometric mean)")
