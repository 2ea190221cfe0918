"""Time the check of its rows that a kernel makes before it skips for sentinels (`mugraph.passes.sentinels`).

Each program masks with the most negative float. Its best kernels are timed together with the same kernels with minus
infinity in place of the sentinels, which check nothing. If rows are as low as the sentinel, a kernel runs all of its
steps: that is timed too, on inputs with a few such rows.

The row "tuned" is what a user pays: the kernel is tuned with the check and without it, and the two winners are timed
together. Single variants differ by more, in both directions, because the compiler orders other code otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from rich.console import Console

from mirage_jax.bench.suite import microseconds
from mirage_jax.bench.tables import Cells, TableReport, provenance
from mirage_jax.compiler import tuning
from mirage_jax.compiler.specialization import specialized
from mirage_jax.compiler.tuning_session import TuningSession
from mirage_jax.compiler.winner import Winner
from mirage_jax.config import Options
from mirage_jax.errors import UsageError
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.mugraph.passes.sentinels import guarded, usual
from mirage_jax.search.candidates import Candidate
from mirage_jax.search.driver import search

LOW = -3e38  # as a product with anything of size one, no sentinel is higher
SECONDS = 20.0  # of search per program
ROUNDS = 5
STRUCTURES, VARIANTS = 1, 2  # muGraphs per program, and sizes of each


def _causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _window(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(1023, 0))


def _gradient(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
    return jax.vjp(_causal, q, k, v)[1](g)


PROGRAMS: Mapping[str, tuple[Callable[..., Any], tuple[int, ...], int]] = {  # function, shape of an array, arrays
    "causal_128": (_causal, (1, 4096, 32, 128), 3),
    "causal_64": (_causal, (2, 4096, 16, 64), 3),
    "causal_short": (_causal, (8, 1024, 16, 64), 3),
    "window_1024": (_window, (1, 8192, 32, 128), 3),
    "gradient_64": (_gradient, (2, 4096, 16, 64), 4),
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

    @property
    def figures(self) -> list[str]:
        """Cells of the table: times in microseconds, the ratio, and the error."""
        if self.failure:
            return [self.failure, "", "", "", ""]
        before, after, low = map(microseconds, (self.unchecked, self.checked, self.low))
        return [before, after, f"{self.cost:.3f}", low, f"{self.error:.1e}"]

    @property
    def cost(self) -> float:
        """How many times as long the kernel takes with a check."""
        return self.checked / self.unchecked if self.unchecked else 0.0


@dataclass
class SentinelResult(TableReport):
    """The rows of a run of the suite."""

    date: str
    device: str
    versions: dict[str, str]
    rows: list[SentinelRow]

    title: str = "Checks of rows before kernels skip for sentinels"
    method: ClassVar = "Microseconds of a kernel, and how many times as long it takes with a check."
    words = 2

    def cells(self) -> Cells:
        """Header and rows of the table."""
        header = ("program", "kernel", "unchecked", "checked", "ratio", "with low rows", "error there")
        return header, [[r.program, r.kernel, *r.figures] for r in self.rows]


class LowRows(TuningSession):
    """A region whose inputs make some rows of logits as low as sentinels: queries that are, and keys above zero."""

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Draw inputs, and lower some rows."""
        q, k, *rest = super().inputs(seed)
        return (q.at[:, 100:110].set(LOW), jnp.abs(k), *rest)


def run_sentinel_suite(
    names: Sequence[str] = (), rounds: int = ROUNDS, console: Console | None = None
) -> SentinelResult:
    """Time kernels of each program on the GPU of this machine. An interrupt ends the suite and keeps the rows.

    Raises `UsageError` for an unknown program.
    """
    if unknown := set(names) - PROGRAMS.keys():
        raise UsageError(f"programs: found {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    result = SentinelResult(rows=[], **provenance())
    try:
        for row in itertools.chain.from_iterable(_rows(name, rounds) for name in names or PROGRAMS):
            result.rows.append(row)
            if console is not None:
                console.print(f"{row.program}, {row.kernel}: {row.failure or f'{row.cost:.3f}'}", highlight=False)
    except KeyboardInterrupt:
        result.title += f", interrupted after {len(result.rows)} rows"
    return result


def _rows(name: str, rounds: int) -> Iterator[SentinelRow]:
    fn, shape, count = PROGRAMS[name]
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * count
    (region, *_) = analyse(jax.make_jaxpr(fn)(*types)).regions
    device = jax.devices()[0]
    plain, low = (kind(region, "cuda", device, Options()) for kind in (TuningSession, LowRows))
    for label, checked, unchecked in _pairs(plain):
        yield _timed(SentinelRow(name, label), plain, low, checked, unchecked, rounds)


def _pairs(session: TuningSession) -> Iterator[tuple[str, Winner, Winner]]:
    """Guarded kernels of a program with the check and without it: as tuned, then at sizes tried first."""
    found, _ = search(session.reference, session.description, session.space, SECONDS, families=("kernels",))
    for n, c in enumerate(itertools.islice((c for c in found if any(map(guarded, c.graph))), STRUCTURES)):
        bare = replace(c, graph=usual(c.graph))
        tuned = [_fastest(session, candidate) for candidate in (c, bare)]
        yield f"{n}, tuned", tuned[0], tuned[1]
        special = specialized(c.graph, c.schedule, session.description, VARIANTS)
        for kind, schedules in {"tiles": tuning.tile_variants(c, VARIANTS), "specialized": special}.items():
            for i, schedule in enumerate(itertools.islice(schedules, VARIANTS)):
                checked, unchecked = (session.winner(x.graph, schedule, "kernels") for x in (c, bare))
                yield f"{n}, {kind} {i}", checked, unchecked


def _fastest(session: TuningSession, candidate: Candidate) -> Winner:
    """The fastest variant of a candidate that the tuner finds."""
    return tuning.compare(session, [candidate], session.precisions[0]).faster[0][0]


def _timed(
    row: SentinelRow, plain: TuningSession, low: TuningSession, checked: Winner, unchecked: Winner, rounds: int
) -> SentinelRow:
    functions = {"unchecked": plain.ours(unchecked), "checked": plain.ours(checked)}
    times = plain.timings(functions, rounds)
    if len(times) == 2:
        row.unchecked, row.checked = times["unchecked"].seconds, times["checked"].seconds
        row.low = low.timings({"low": functions["checked"]}, 2)["low"].seconds
        row.error = _error(jax.jit(functions["checked"])(*low.inputs(0)), jax.jit(low.xla)(*low.inputs(0)))
    else:
        row.failure = "does not compile"
    return row


def _error(have: Sequence[jax.Array], want: Sequence[jax.Array]) -> float:
    wide = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(have, want, strict=True)]
    return max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in wide)
