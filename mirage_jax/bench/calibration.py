"""Compare the cost model's order of kernels with measured times.

Stored measurements are lines of JSON, one per scheduled graph that ran on a GPU: the program it computes, the graph's
text, its schedule, and the median seconds of each of its kernels (from a profile, one launch alone). They hold nothing
that the model made, so a changed model is judged by the same times.

    python -m mirage_jax.bench.calibration results/kernels-h200-2026-11-22.jsonl.gz
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from mirage_jax.cost.roofline import kernel_estimate
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
                estimate = kernel_estimate(kernel, row.graph, sizes, row.schedule.part_counts, device)
                out.setdefault(row.program, []).append((estimate, row.seconds[kernel.name]))
    return out


def table(found: dict[str, list[tuple[float, float]]]) -> Table:
    """Draw a table of rank correlations and spreads of errors, by program."""
    out = Table("program", "kernels", "rank correlation", "measured over model: median", "10%", "90%")
    for program, values in found.items():
        ratio = np.array([measured / model for model, measured in values])
        spread = [f"{np.percentile(ratio, p):.2f}" for p in (50, 10, 90)]
        out.add_row(program, str(len(values)), f"{rank_correlation(values) or 0:.2f}", *spread)
    return out


def mean_rank(found: dict[str, list[tuple[float, float]]]) -> float:
    """Average the programs' rank correlations."""
    return float(np.mean([rank_correlation(values) or 0.0 for values in found.values()]))


if __name__ == "__main__":
    found = pairs(load(Path(sys.argv[1])), DEVICES[sys.argv[2] if len(sys.argv) > 2 else "H200"])
    Console().print(table(found))
    Console().print(f"mean rank correlation {mean_rank(found):.3f}")
