"""What it costs a kernel to look at its rows before it skips for sentinels (`mugraph.passes.sentinels`).

Each program masks with the most negative float. Its best kernels, as they are, are timed beside the same kernels with
minus infinity in place of the sentinels, which check nothing, in one run. Where rows are as low as the sentinel a
kernel runs all of its steps: that is timed too, on inputs of which a few rows are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from mirage_jax.bench.suite import microseconds
from mirage_jax.cache import versions
from mirage_jax.compiler import tuning
from mirage_jax.compiler.specialization import specialized
from mirage_jax.compiler.tuning_session import TuningSession
from mirage_jax.config import Options
from mirage_jax.errors import UsageError
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.mugraph.graph import KernelGraph, Schedule
from mirage_jax.mugraph.passes.sentinels import guarded, skipping
from mirage_jax.report import write_beside
from mirage_jax.search.driver import search

HEADER = ("program", "kernel", "unchecked", "checked", "ratio", "with low rows", "error there")
LOW = -3e38  # as a product with anything of size one, no sentinel is higher
SECONDS = 20.0  # of search per program
STRUCTURES, VARIANTS = 1, 4  # muGraphs per program, and sizes of each


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def window(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(1023, 0))


def gradient(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
    return jax.vjp(causal, q, k, v)[1](g)


PROGRAMS: Mapping[str, tuple[Callable[..., Any], tuple[int, ...], int]] = {  # function, shape of an array, arrays
    "causal_128": (causal, (1, 4096, 32, 128), 3),
    "causal_64": (causal, (2, 4096, 16, 64), 3),
    "causal_short": (causal, (8, 1024, 16, 64), 3),
    "window_1024": (window, (1, 8192, 32, 128), 3),
    "gradient_64": (gradient, (2, 4096, 16, 64), 4),
}


@dataclass
class SentinelRow:
    """Seconds of one kernel: without a check, with one, and where rows are low; or why there are none."""

    program: str
    kernel: str
    unchecked: float = 0.0
    checked: float = 0.0
    low: float = 0.0
    error: float = 0.0  # where rows are low, against XLA: the largest, over the largest value
    failure: str = ""

    def figures(self) -> list[str]:
        if self.failure:
            return [self.failure, "", "", "", ""]
        before, after, low = map(microseconds, (self.unchecked, self.checked, self.low))
        return [before, after, f"{self.cost:.3f}", low, f"{self.error:.1e}"]

    @property
    def cost(self) -> float:
        return self.checked / self.unchecked if self.unchecked else 0.0


@dataclass
class SentinelResult:
    rows: list[SentinelRow] = field(default_factory=list)

    def cells(self) -> list[list[str]]:
        """Body of the table, as text."""
        return [[r.program, r.kernel, *r.figures()] for r in self.rows]

    def table(self) -> Table:
        out = Table(*HEADER)
        for cells in self.cells():
            out.add_row(*cells)
        return out

    def write(self, file: Path) -> Path:
        """Write the JSON to `file` and Markdown beside it; the Markdown's path."""
        about = {"date": f"{date.today()}", "device": jax.devices()[0].device_kind, "versions": dict(versions())}
        body = [f"| {' | '.join(cells)} |" for cells in (list(HEADER), ["---"] * len(HEADER), *self.cells())]
        title = ["# Checks of rows before kernels skip for sentinels", "", f"{about['date']}, {about['device']}.", ""]
        text = json.dumps(about | {"rows": list(map(asdict, self.rows))}, indent=1)
        return write_beside(file, text, "\n".join((*title, *body, "")))


class LowRows(TuningSession):
    """A region whose inputs make some rows of logits as low as sentinels: queries that are, and keys above zero."""

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        q, k, *rest = super().inputs(seed)
        return (q.at[:, 100:110].set(LOW), jnp.abs(k), *rest)


def run_sentinel_suite(names: Sequence[str] = (), rounds: int = 5, console: Console | None = None) -> SentinelResult:
    """Time kernels of each program on the GPU that is here. Raises `UsageError` for a program that there is not."""
    if unknown := set(names) - PROGRAMS.keys():
        raise UsageError(f"programs: found {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    result = SentinelResult()
    for name in names or PROGRAMS:
        fn, shape, count = PROGRAMS[name]
        types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * count
        (region, *_) = analyse(jax.make_jaxpr(fn)(*types)).regions
        device = jax.devices()[0]
        plain, low = (kind(region, "cuda", device, Options()) for kind in (TuningSession, LowRows))
        for label, graph, schedule in _variants(plain):
            row = _timed(SentinelRow(name, label), plain, low, graph, schedule, rounds)
            result.rows.append(row)
            if console is not None:
                console.print(f"{name}, {label}: {row.failure or f'{row.cost:.3f}'}", highlight=False)
    return result


def _variants(attempt: TuningSession) -> Iterator[tuple[str, KernelGraph, Schedule]]:
    """Guarded kernels of a program, at sizes that tuning would try first."""
    found, _ = search(attempt.reference, attempt.description, attempt.space, SECONDS, families=("kernels",))
    for n, c in enumerate(islice((c for c in found if any(map(guarded, c.graph))), STRUCTURES)):
        for i, schedule in enumerate(islice(tuning.tile_variants(c, VARIANTS), VARIANTS)):
            yield f"{n}, tiles {i}", c.graph, schedule
        for i, schedule in enumerate(specialized(c.graph, c.schedule, attempt.description)[:VARIANTS]):
            yield f"{n}, specialized {i}", c.graph, schedule


def _timed(
    row: SentinelRow, plain: TuningSession, low: TuningSession, graph: KernelGraph, schedule: Schedule, rounds: int
) -> SentinelRow:
    checked = plain.ours(plain.winner(graph, schedule, "kernels"))
    unchecked = plain.ours(plain.winner(skipping(graph), schedule, "kernels"))
    times = plain.timings({"unchecked": unchecked, "checked": checked}, rounds)
    if len(times) == 2:
        row.unchecked, row.checked = times["unchecked"].seconds, times["checked"].seconds
        row.low = low.timings({"low": checked}, 2)["low"].seconds
        row.error = _error(jax.jit(checked)(*low.inputs(0)), jax.jit(low.xla)(*low.inputs(0)))
    else:
        row.failure = "does not compile"
    return row


def _error(have: Sequence[jax.Array], want: Sequence[jax.Array]) -> float:
    wide = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(have, want, strict=True)]
    return max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in wide)
