"""What was found, refused and decided: the text that `explain` prints and the benchmark stores.

A `Decision` is made once per region by `compiler`; a `Report` collects the decisions of one function with what the capture left to XLA.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import indent
from typing import Any

from mirage_jax.mugraph.footprint import Footprint


_COLUMN = re.compile(r"(:\d+):\d+(?=\s|$)")  # file.py:12:34 (f) -> file.py:12 (f)


@dataclass(frozen=True)
class Decision:
    """Who computes a region, why, and the evidence. `winner` is None where XLA's own code stays."""

    winner: Any  # compiler.Winner | None
    why: str
    source: str  # "search" | "cache" | "memo" | "policy"
    platform: str
    key: str = ""
    before: Footprint | None = None
    after: Footprint | None = None
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds; "xla" and one per candidate measured
    certificate: Any = None
    gate: str = ""
    search: str = ""
    tried: Counter[str] = field(default_factory=Counter)  # what happened to the candidates
    kernels: str = ""  # path of the readable kernels

    @property
    def speedup(self) -> float | None:
        """XLA's time over the winner's, where both were measured."""
        if self.winner is None or not {"xla", "mirage"} <= self.timings.keys():
            return None
        return self.timings["xla"] / self.timings["mirage"]


@dataclass(frozen=True)
class RegionReport:
    """One region of a function: where it is in the user's source and what was decided."""

    where: tuple[str, ...]
    reference: str  # the region's own muGraph, text form
    decision: Decision
    occurrences: int = 1

    def __str__(self) -> str:
        d = self.decision
        times = f" ({self.occurrences} times)" if self.occurrences > 1 else ""
        verdict = "optimized" if d.winner is not None else "left to XLA"
        out = [f"{verdict}{times}: {d.why} [{d.source}]"]
        out += [f"source: {line}" for line in dict.fromkeys(_COLUMN.sub(r"\1", line) for line in self.where)]
        if d.before is not None:
            out.append(f"before: {d.before}")
        if d.after is not None:
            out.append(f"after:  {d.after}")
        if d.timings:
            out.append("measured: " + ", ".join(f"{k} {v * 1e6:,.1f} us" for k, v in d.timings.items()))
        if d.tried:
            out.append("candidates: " + ", ".join(f"{k} {v}" for k, v in d.tried.items()))
        if d.search:
            out += ["search: " + d.search.replace("\n", "\n        ")]
        if d.certificate is not None:
            out.append(f"certificate: {d.certificate}")
        if d.gate:
            out.append(f"float gate: {d.gate}")
        if d.key:
            out.append(f"cache key: {d.key}")
        if d.kernels:
            out.append(f"kernels to read: {d.kernels}")
        out += ["the program:", indent(self.reference, "  ")]
        if d.winner is not None:
            out += ["runs as:", indent(str(d.winner.graph), "  ")]
        return "\n".join(out)


@dataclass(frozen=True)
class Report:
    """Everything `mirage_jax` did with one function at given argument shapes; `str()` is for people."""

    name: str
    regions: tuple[RegionReport, ...]
    left_out: tuple[Any, ...] = ()  # jaxpr_frontend.reasons.LeftOut
    notes: tuple[str, ...] = ()

    @property
    def optimized(self) -> tuple[RegionReport, ...]:
        return tuple(r for r in self.regions if r.decision.winner is not None)

    def __str__(self) -> str:
        n = len(self.regions)
        out = [f"{self.name}: {n} region{'s' * (n != 1)}, {len(self.optimized)} optimized"]
        out += [f"note: {note}" for note in self.notes]
        for i, r in enumerate(self.regions):
            out += [f"region {i}:", indent(str(r), "  ")]
        if self.left_out:
            out.append(f"equations left to XLA: {len(self.left_out)}")
            out += [f"  {line}" + (f" ({count} times)" if count > 1 else "") for line, count in _counted(self.left_out)]
        return "\n".join(out)


def _counted(lines: Sequence[Any]) -> list[tuple[str, int]]:
    return list(Counter(map(str, lines)).items())
