"""Campaigns against stored decisions: damage by disks, other processes, signals and other people.

In each case a program runs, and three things count: a crash (an exception, or the end of a process that was not asked
for), a wrong result, and lines of log beyond one. `RUNS` has the campaigns by name; each starts from a seed.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Concatenate

import jax
import jax.numpy as jnp
import numpy as np

from mirage_jax import timing
from mirage_jax.audit.report import CampaignReport
from mirage_jax.cache import Cache, CacheKey, Entry
from mirage_jax.compiler import Compiler
from mirage_jax.compiler.tuning import Comparison
from mirage_jax.compiler.tuning_session import TuningSession
from mirage_jax.config import Budget, Options
from mirage_jax.errors import in_one_line
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.mugraph.graph import Precision
from mirage_jax.progress import Say, silent
from mirage_jax.report import Decision
from mirage_jax.search.candidates import Candidate

MAX_RATIO = 8.0  # of errors, a result's over XLA's, beyond which the result is wrong
MAX_PROBLEMS = 5  # of a kind that are shown


@dataclass
class Tally:
    """Cases of one kind."""

    what: str
    cases: int = 0
    used: int = 0  # cases that found a stored winner
    crashes: int = 0
    wrong: int = 0
    lines: int = 0  # of log, the most of one case
    slowest: float = 0.0  # seconds, where time is the matter
    limit: float | None = None  # seconds that a case may take
    problems: list[str] = field(default_factory=list)

    def add(self, *, used: bool, lines: int, problem: str = "", seconds: float = 0.0, crashed: bool = False) -> None:
        """Count one more case, with its problem if there is one."""
        self.cases += 1
        self.used += used
        self.lines = max(self.lines, lines)
        self.slowest = max(self.slowest, seconds)
        self.crashes += crashed
        self.wrong += bool(problem) and not crashed
        if problem:
            self.note(problem)

    def note(self, problem: str) -> None:
        """Add to the problems that are shown."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


@dataclass
class Stress(CampaignReport):
    """Tallies of a campaign."""

    kind: str
    seed: int
    table_rows: list[Tally] = field(default_factory=list)
    user: str = field(default_factory=lambda: "root" if _user() == 0 else "a user that is not root")

    title: ClassVar[str] = "Stored decisions under stress"
    header: ClassVar[tuple[str, ...]] = ("", "cases", "used", "crashes", "wrong", "lines of log at most", "slowest, s")

    def row(self, what: str) -> Tally:
        """Find the row of that name, or add one."""
        for row in self.table_rows:
            if row.what == what:
                return row
        self.table_rows.append(Tally(what))
        return self.table_rows[-1]

    def attempt(self, what: str, lines: Lines, case: Callable[[], tuple[bool, str]]) -> None:
        """Run a case and count it; it returns whether it used a decision, and its problem if there is one."""
        lines.take()
        try:
            (used, problem), crashed = case(), False
        except Exception as why:
            used, problem, crashed = False, in_one_line(why), True
        self.row(what).add(used=used, lines=lines.take(), problem=problem, crashed=crashed)
        if len(lines.last) > 1:
            self.row(what).note(f"{len(lines.last)} lines: {lines.last}")

    def rows(self) -> list[list[str]]:
        """Counts by kind of case."""
        return [
            [r.what, f"{r.cases:,}", f"{r.used:,}", str(r.crashes), str(r.wrong), str(r.lines), f"{r.slowest:.2f}"]
            for r in sorted(self.table_rows, key=lambda r: r.what)
        ]

    def findings(self) -> list[str]:
        """Some problems of each kind."""
        return [f"{r.what}: {problem}" for r in self.table_rows for problem in r.problems]

    def summary(self) -> str:
        """Sum the campaign up in one sentence."""
        cases, crashes, wrong = (sum(getattr(r, n) for r in self.table_rows) for n in ("cases", "crashes", "wrong"))
        lines = max((r.lines for r in self.table_rows), default=0)
        head = f"{self.kind}: {cases:,} cases, seed {self.seed}, as {self.user}, {self.date}, {self.seconds:,.0f} s"
        return f"{head}: {crashes} crashes, {wrong} wrong, at most {lines} line{'s' * (lines != 1)} of log each"

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        late = any(r.limit is not None and r.slowest > r.limit for r in self.table_rows)
        return not late and not any(r.crashes or r.wrong or r.lines > 1 for r in self.table_rows)


def stress_campaign[**P](kind: str) -> Callable[[Callable[Concatenate[Stress, Path, int, Say, P], None]], Any]:
    """Make a campaign of a function ``body(found, folder, count, say)``, which counts cases in `found`.

    The campaign is ``run(count, seed, say)``. `folder` is temporary.
    """

    def decorate(body: Callable[Concatenate[Stress, Path, int, Say, P], None]) -> Callable[..., Stress]:
        @functools.wraps(body)
        def run(count: int, seed: int, say: Say = silent, *args: P.args, **options: P.kwargs) -> Stress:
            found = Stress(kind, seed)
            with found.timed(), tempfile.TemporaryDirectory(prefix="mirage_jax") as folder:
                body(found, Path(folder), count, say, *args, **options)
            return found

        return run

    return decorate


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else -1


class Fast(Compiler):
    """A compiler that takes every proven candidate for twice as fast."""

    def compare(self, attempt: TuningSession, finalists: Sequence[Candidate], precise: Precision) -> Comparison:
        del precise
        slow, fast = timing.Timing((2e-5,) * 6), timing.Timing((1e-5,) * 6)
        ratio = timing.ratio(slow, fast)
        faster = tuple((attempt.winner(c.graph, c.schedule, c.family), fast, ratio) for c in finalists)
        return Comparison(slow, faster, (fast, ratio) if faster else None)


def options(directory: Path, on_miss: str = "fallback") -> Options:
    """Make the options of a campaign: a small search, in this process."""
    return Options(on_miss, Budget(20.0, 20_000, workers=1), "jax", str(directory))


@dataclass
class Case:
    """A program of one region, which algebra shortens."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"

    @cached_property
    def arguments(self) -> list[jax.Array]:
        """Normal numbers."""
        rng = np.random.default_rng(len(self.name))
        return [jnp.asarray(rng.normal(size=shape), self.dtype) for shape in self.shapes]

    @cached_property
    def region(self) -> Region:
        """The one region of the program."""
        (region,) = analyse(jax.make_jaxpr(self.function)(*self.arguments)).regions
        return region

    @cached_property
    def exact(self) -> np.ndarray:
        """The result in float64."""
        return np.asarray(self.function(*(np.asarray(x, np.float64) for x in self.arguments)))

    @cached_property
    def xla_error(self) -> float:
        """The error of XLA's result."""
        return self._error(jax.jit(self.function)(*self.arguments))

    def _error(self, result: Any) -> float:
        found = np.abs(np.asarray(result, np.float64) - self.exact).max()
        return float(found) if np.isfinite(found) else float("inf")

    def problem(self, result: Any) -> str:
        """Say how a result is wrong; empty if it is right."""
        error, allowed = self._error(result), MAX_RATIO * self.xla_error
        return "" if error <= allowed else f"{self.name}: error {error:.1e}, allowed is {allowed:.1e}"

    def run(self, decision: Decision) -> Any:
        """Compute the result that a program has with this decision."""
        ranks = sorted(b.value for b in self.region.inputs)  # arguments have the first numbers, in order
        given = [self.arguments[ranks.index(b.value)] for b in self.region.inputs]
        winner = decision.winner
        if winner is None:
            return self.region.reference(*given)[0]
        values = self.region.prepare(given, winner.in_place)
        return self.region.finish(jax.jit(winner.run)(*values))[0]

    def decide(self, compiler: Compiler) -> Decision:
        """Decide the region."""
        return compiler.decide(self.region, "cpu")

    def store(self, directory: Path) -> tuple[CacheKey, Entry]:
        """Decide it, and store the decision in a cache; returns its key and entry."""
        keys: list[CacheKey] = []
        compiler = Fast(options(directory, "search"))

        class Watched(Cache):
            def put(self, key: CacheKey, entry: Entry, kernels: str | None = None) -> Path | None:
                keys.append(key)
                return super().put(key, entry, kernels)

        compiler.cache = Watched(directory)
        decision = self.decide(compiler)
        entry = compiler.cache.get(keys[-1]) if keys else None
        if decision.winner is None or entry is None:
            raise AssertionError(f"{self.name}: nothing to attack: {decision.why}")
        return keys[-1], entry


N = 48
CASES = (
    Case("a chain of products", lambda a, b, v: (a @ b) @ v, ((N, N), (N, N), (N,))),
    Case("linear attention", lambda q, k, v: (q @ k.T) @ v, ((N, 8), (N, 8), (N, 8))),
    Case("a scaled chain", lambda a, b, v: ((a @ b) * 0.25 + 0.0) @ v, ((N, N), (N, N), (N, 2)), "bfloat16"),
)


class Lines(logging.Handler):
    """Counts the lines that a user would see: warnings of ours, and of libraries."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts, self.last = list[str](), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Collect the text."""
        self.texts.append(record.getMessage())

    def take(self) -> int:
        """Count the lines since the last call, which are then in `last`."""
        count, self.last, self.texts = len(self.texts), self.texts, []
        return count


@contextmanager
def listening() -> Iterator[Lines]:
    """Collect lines of log while the block runs, and show none."""
    lines, logger = Lines(), logging.getLogger("mirage_jax")
    kept, logger.propagate = logger.propagate, False
    logger.addHandler(lines)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, **__: lines.texts.append(f"warning: {message}")
            yield lines
    finally:
        logger.removeHandler(lines)
        logger.propagate = kept
