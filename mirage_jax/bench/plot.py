"""Draw a suite's table: how many times as fast as XLA, with the best peer, and how far from the hardware's limit.

Takes the JSON that `bench.suite` writes, so that a stored table can be drawn at any time; writes SVG. matplotlib is
imported on first use: it is an extra of the package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirage_jax.bench.suite import BASELINE, OURS
from mirage_jax.errors import UnsupportedError, UsageError

INK, XLA, PEER = "#1f4e79", "#b0b0b0", "#d9822b"
WIDTH = 0.38  # of a bar, where programs are 1 apart


@dataclass(frozen=True)
class Bar:
    """One program: seconds of ours, of XLA and of the best peer, and of the limit of the hardware."""

    program: str
    speedup: float  # of ours over XLA, in the median of rounds
    ours: float
    xla: float
    peer: tuple[str, float] | None
    limit: float | None


def load(file: Path) -> dict[str, Any]:
    """Load a stored table. Raises `UsageError` for any other file."""
    try:
        table = json.loads(file.read_text())
        bars(table)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise UsageError(f"--plot: {str(file)!r} is not a table that `bench --json` wrote ({found})") from None
    return table


def bars(table: Mapping[str, Any]) -> list[Bar]:
    """Collect the programs for which XLA and we have a time."""
    rows = [row for row in table["rows"] if {BASELINE, OURS} <= row["results"].keys()]
    return [_bar(row, table.get("peers", ())) for row in rows]


def _bar(row: Mapping[str, Any], peers: Sequence[str]) -> Bar:
    seconds = {label: float(r["seconds"]) for label, r in row["results"].items()}
    best = min(((p, seconds[p]) for p in peers if p in seconds), key=lambda item: item[1], default=None)
    speedup, limit = float(row["results"][OURS]["ratio"]["value"]), row["limit"]
    if not all(0 < x < math.inf for x in (speedup, *seconds.values(), limit or 1.0)):
        raise ValueError(f"{row['program']} has a time or ratio that is no positive number")
    return Bar(row["program"], speedup, seconds[OURS], seconds[BASELINE], best, limit)


def draw(table: Mapping[str, Any], file: Path) -> Path:
    """Draw a table next to `file`; returns the picture's path. Raises `UnsupportedError` if it cannot be drawn."""
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UnsupportedError("matplotlib is not installed: pip install 'mirage-jax[plot]'") from None
    found = bars(table)
    if not found:
        raise UnsupportedError("no program has times of XLA and ours")
    limited = [b for b in found if b.limit]
    panels = 2 if limited else 1
    figure = Figure(figsize=(max(6.0, 2.0 + 0.55 * len(found)), 3.6 * panels), layout="constrained")
    figure.suptitle(f"{table['title']}: {table['device']}, {table['date'][:10]}", fontsize=11)
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    _speedups(axes[0], found)
    if limited:
        _roofline(axes[1], limited)
    picture = file.with_suffix(".svg")
    figure.savefig(picture, metadata={"Date": None})
    return picture


def geometric_mean(ratios: Sequence[float]) -> float:
    """Compute the geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _speedups(axes: Any, found: Sequence[Bar]) -> None:
    peers = [(i + WIDTH / 2, b.xla / b.peer[1], b.peer[0]) for i, b in enumerate(found) if b.peer]
    places = [i - (WIDTH / 2 if peers else 0.0) for i in range(len(found))]
    label = f"ours (geometric mean {geometric_mean([b.speedup for b in found]):.2f}x)"
    ours = axes.bar(places, [b.speedup for b in found], WIDTH, color=INK, label=label)
    axes.bar_label(ours, fmt="%.2f", fontsize=7, padding=2)
    if peers:
        at, heights, names = zip(*peers, strict=True)
        theirs = axes.bar(at, heights, WIDTH, color=PEER, label="best peer")
        axes.bar_label(theirs, labels=names, fontsize=6, padding=2, rotation=90)
        axes.margins(y=0.2)
    axes.axhline(1.0, color=XLA, linewidth=1)
    axes.set_ylabel("times as fast as XLA")
    _finish(axes, found)


def _roofline(axes: Any, found: Sequence[Bar]) -> None:
    """Draw times over the limit: 1 is the hardware's."""
    limits = [(place, b, b.limit) for place, b in enumerate(found) if b.limit]
    series = {
        "XLA": (XLA, "s", [(place, b.xla / limit) for place, b, limit in limits]),
        "best peer": (PEER, "D", [(place, b.peer[1] / limit) for place, b, limit in limits if b.peer]),
        "ours": (INK, "o", [(place, b.ours / limit) for place, b, limit in limits]),
    }
    for label, (color, marker, points) in series.items():
        if points:
            axes.scatter(*zip(*points, strict=True), color=color, marker=marker, label=label)
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=":")
    axes.set_yscale("log")
    axes.set_ylabel("time over the hardware's limit")
    _finish(axes, found)


def _finish(axes: Any, found: Sequence[Bar]) -> None:
    axes.set_xticks(range(len(found)), [b.program for b in found], rotation=35, ha="right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
