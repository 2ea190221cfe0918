"""Run a suite: every program under every candidate, interleaved in one process, with errors against float64.

A candidate is a way to run a function: "xla", plain `jax.jit`, is the baseline. Peers (`bench.peers`) run programs of
some kinds in their own way, and stand in the same table; one column compares ours with the best of all others. A
failure has a row that says so. "Model rank" is Spearman's correlation of the cost model's estimates with the measured
times of variants. Results are printed as a table, and written as JSON and Markdown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from rich.console import Console

from mirage_jax import timing
from mirage_jax.bench.peers import Peer
from mirage_jax.bench.peers import versions as peer_versions
from mirage_jax.bench.programs import BenchProgram
from mirage_jax.bench.tables import Cells, TableReport, provenance
from mirage_jax.compiler.float_check import same_bits
from mirage_jax.errors import in_one_line
from mirage_jax.hardware.gpus import GPUS
from mirage_jax.report import Report, rank_correlation
from mirage_jax.timing import Ratio, Timing

type Transform = Callable[..., Callable[..., Any]]  # of a function, and of jit's options by name
type Cell = Callable[[SuiteRow, str], str]  # of a row, for a candidate

# Devices for which the rates of copies and of large 16-bit products were measured.
MEASURED = {"NVIDIA H200": GPUS["H200"]}

BASELINE, OURS = "xla", "mirage"
REPEATS = 100  # runs of ours that have to be equal bit for bit
MIN_RATIO = 0.98  # of plain jit's speed, that no function may fall below


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes that XLA has planned: for intermediate results, and at the peak with arguments and results."""

    temporary: int
    peak: int


@dataclass(frozen=True)
class Regions:
    """How many regions of a program a candidate took and refused, and equations outside of regions, by reason."""

    taken: int
    refused: int
    left_out: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.taken} of {self.taken + self.refused}"


@dataclass(frozen=True)
class BenchResult:
    """One candidate on one program. `error` is the largest absolute error over the largest absolute reference value."""

    seconds: float
    interval: tuple[float, float]
    launches: float | None = None
    error: float | None = None
    error_rms: float | None = None
    ratio: Ratio | None = None
    report: str | None = None
    repeats: int | None = None  # further runs on the same inputs, all equal to the first bit for bit; None: not run
    model: float | None = None  # rank correlation of the cost model with the times of the variants that were tried
    memory: PlannedMemory | None = None
    regions: Regions | None = None
    whole: str | None = None  # the optimizer's decision on the function as a whole
    preparation: float | None = None  # seconds to trace, tune and compile


class NotRun(Exception):
    """A program cannot run here, which is nobody's failure: its library is missing, say."""


@dataclass(frozen=True)
class SuiteRow:
    """Results and failures of one program, by candidate; `limit` are the seconds that the hardware needs.

    `not_run` is the reason why no candidate ran, or empty.
    """

    program: str
    limit: float | None
    results: Mapping[str, BenchResult]
    failures: Mapping[str, str]
    not_run: str = ""

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest of all others, and how many times as fast as that ours is."""
        if OURS not in self.results:
            return None
        right = {n: r for n, r in self.results.items() if r.error is None or math.isfinite(r.error)}
        others = [(r.seconds, label) for label, r in right.items() if label != OURS]
        return (min(others)[1], min(others)[0] / self.results[OURS].seconds) if others else None


@dataclass(frozen=True)
class SuiteResult(TableReport):
    """The rows of a suite. `peers` are labels of candidates that are not ours to choose from."""

    title: str
    date: str
    device: str
    versions: dict[str, str]
    method: str
    rows: tuple[SuiteRow, ...]
    peers: tuple[str, ...] = ()

    def cells(self) -> Cells:
        """Header and rows of the table, without columns in which no row has anything."""
        labels = list(dict.fromkeys(label for row in self.rows for label in (*row.results, *row.failures)))
        groups = {
            "all": labels,
            "others": [label for label in labels if label not in (BASELINE, *self.peers)],
            "ours": [OURS],
            "ours with peers": [OURS] if self.peers else [],
        }
        table = {
            heading.format(label): [cell(row, label) for row in self.rows]
            for heading, cell, group in COLUMNS
            for label in groups[group]
        }
        shown = {name: cells for name, cells in table.items() if any(cells)}
        return list(shown), [list(cells) for cells in zip(*shown.values(), strict=True)]

    @property
    def lowest(self) -> tuple[Ratio, str, str] | None:
        """The lowest ratio of a function over plain jit, its program, and the candidate of ours."""
        found = [
            (result.ratio, row.program, label)
            for row in self.rows
            for label, result in row.results.items()
            if result.ratio is not None and label not in self.peers
        ]
        return min(found, key=lambda one: one[0].value, default=None)

    @property
    def is_slower(self) -> bool:
        """Whether some function is slower than plain jit, beyond noise."""
        return self.lowest is not None and self.lowest[0].value < MIN_RATIO and self.lowest[0].high < 1.0

    @property
    def failures(self) -> list[tuple[str, str, str]]:
        """Program, label and reason of each candidate or peer that failed."""
        return [(row.program, label, why) for row in self.rows for label, why in row.failures.items()]

    def details(self) -> list[str]:
        """Why programs did not run, and why candidates failed."""
        skipped = [f"{row.program}: not run: {row.not_run}" for row in self.rows if row.not_run]
        return skipped + [f"{program}, {label}: {why}" for program, label, why in self.failures]


def microseconds(seconds: float) -> str:
    """Write seconds as microseconds."""
    return f"{seconds * 1e6:,.1f}"


def _absent(row: SuiteRow, label: str) -> str:
    return "failed" if label in row.failures else "-"


def _time_cell(row: SuiteRow, label: str) -> str:
    result = row.results.get(label)
    if result is None:
        return _absent(row, label)
    launches = "" if result.launches is None else f" ({result.launches:.0f})"
    return microseconds(result.seconds) + launches


def _best_cell(row: SuiteRow, _: str) -> str:
    return f"{row.best[1]:.2f}x ({row.best[0]})" if row.best else ""


def _error_cell(row: SuiteRow, label: str) -> str:
    result = row.results.get(label)
    if result is None:
        return _absent(row, label)
    return "" if result.error is None else f"{result.error:.1e}"


def _cell(field: str, text: Callable[[Any], str] = str) -> Cell:
    """A field of a result, where there is one."""

    def cell(row: SuiteRow, label: str) -> str:
        value = getattr(row.results.get(label), field, None)
        return "" if value is None else text(value)

    return cell


COLUMNS: tuple[tuple[str, Cell, str], ...] = (  # heading with a place for the label, cell, and the labels
    ("program", lambda row, _: row.program, "ours"),
    ("limit", lambda row, _: "" if row.limit is None else microseconds(row.limit), "ours"),
    ("{}", _time_cell, "all"),
    (f"{{}} over {BASELINE}", _cell("ratio"), "others"),
    ("{} over the best other", _best_cell, "ours with peers"),
    ("error {}", _error_cell, "all"),
    ("equal runs", _cell("repeats"), "ours"),
    ("temp MB {}", _cell("memory", lambda m: f"{m.temporary / 1e6:,.1f}"), "all"),
    ("seconds to prepare {}", _cell("preparation", "{:,.1f}".format), "all"),
    ("regions {}", _cell("regions"), "others"),
    ("whole {}", _cell("whole"), "others"),
    ("model rank {}", _cell("model", "{:.2f}".format), "others"),
)


@contextmanager
def recording(failures: dict[str, str], label: str) -> Iterator[None]:
    """Make whatever the block raises a failure of a candidate, and go on."""
    try:
        yield
    except Exception as error:  # whatever a candidate raises is a result of the benchmark
        failures[label] = in_one_line(error)


def bench_results(timings: Mapping[str, Timing], fields: Mapping[str, Mapping[str, Any]]) -> dict[str, BenchResult]:
    """Combine times, ratios over the baseline and further `fields`, all by candidate."""

    def ratio(label: str) -> Ratio | None:
        return None if label == BASELINE or BASELINE not in timings else timing.ratio(timings[BASELINE], timings[label])

    return {
        label: BenchResult(t.seconds, t.interval, t.launches, ratio=ratio(label), **fields.get(label, {}))
        for label, t in timings.items()
    }


def run_program(
    program: BenchProgram,
    candidates: Mapping[str, Transform],
    peers: Mapping[str, Peer] | None = None,
    *,
    rounds: int | None = None,
    seed: int = 0,
    repeats: int | None = None,
) -> SuiteRow:
    """Check every candidate's and peer's result, then time those that gave one.

    `repeats`: how often ours has to give the same bits again; by default only kernels on a GPU have to.
    """
    device = jax.devices()[0]
    repeats = (REPEATS if device.platform == "gpu" else 0) if repeats is None else repeats
    args = program.draw(seed)
    reference = program.in_float64(args)
    functions: dict[str, Callable[..., jax.Array]] = {}
    fields: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}

    def check(label: str, result: np.ndarray) -> None:
        """Compare a result with the reference."""
        fields[label] = dict(zip(("error", "error_rms"), errors_against(reference, result), strict=True))

    for label, transform in candidates.items():
        with recording(failures, label):
            function = transform(program.fn)
            check(label, np.asarray(function(*args)))
            functions[label] = function
    runnable: dict[str, Peer] = {}
    for label, peer in (peers or {}).items():
        if peer.serves(program):
            with recording(failures, label):
                check(label, peer.result(program, args))
                runnable[label] = peer
    timings = _time(program, functions, runnable, failures, rounds, seed)
    for label in timings.keys() & functions.keys():
        fields[label] |= explained(functions[label], args)
    if repeats and OURS in timings:
        fields[OURS]["repeats"] = equal_runs(functions[OURS], args, repeats)
    gpu = MEASURED.get(device.device_kind)
    return SuiteRow(program.name, None if gpu is None else program.limit(gpu), bench_results(timings, fields), failures)


def errors_against(reference: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """Measure the largest and the root-mean-square error, relative to the reference; infinite if not all is finite."""
    difference = np.abs(found.astype(np.float64) - reference)
    if not np.isfinite(difference).all():
        return float("inf"), float("inf")
    scale, mean = np.abs(reference).max(), np.sqrt(np.mean(reference**2))
    return float(difference.max() / (scale or 1.0)), float(np.sqrt(np.mean(difference**2)) / (mean or 1.0))


def equal_runs(function: Callable[..., jax.Array], args: Sequence[jax.Array], repeats: int) -> int:
    """Count the runs in a row, at most `repeats`, that are equal to the first bit for bit."""
    first = function(*args)
    for n in range(repeats):
        if not same_bits(first, function(*args)):
            return n
    return repeats


def _time(
    program: BenchProgram,
    functions: Mapping[str, Callable[..., jax.Array]],
    peers: Mapping[str, Peer],
    failures: dict[str, str],
    rounds: int | None,
    seed: int,
) -> dict[str, Timing]:
    """Time all in turns; a candidate that cannot be timed becomes a failure."""
    on_gpu = jax.devices()[0].platform == "gpu"
    sets = timing.sets_for(program.bytes) if on_gpu else 1
    all_args = [program.draw(seed + i) for i in range(sets)]

    def call_of(f: Callable[..., jax.Array]) -> timing.Call:
        return timing.in_turn(jax.jit(f).lower(*all_args[0]).compile() if on_gpu else f, all_args)

    makers = {label: partial(call_of, f) for label, f in functions.items()}
    makers |= {label: partial(peer.call, program, all_args) for label, peer in peers.items()}
    calls: dict[str, timing.Call] = {}
    for label, make in makers.items():
        with recording(failures, label):  # for lack of memory, say
            call = make()
            call()
            calls[label] = call
    return timing.time_steps(calls, sets, rounds or 6) if on_gpu else timing.time_wall(calls, rounds or 10)


def explained(function: object, args: Iterable[object]) -> dict[str, Any]:
    """Read the candidate's report on itself, if it has one, into fields of a `BenchResult`."""
    explain = getattr(function, "explain", None)
    if explain is None:
        return {}
    try:
        report: object = explain(*args)
        if not isinstance(report, Report):
            return {"report": str(report)}
        variants = [pair for r in report.regions for pair in r.decision.measured]
        taken = sum(r.occurrences for r in report.optimized)
        refused = sum(r.occurrences for r in report.regions) - taken
        left_out = Counter(str(x.code) for x in report.left_out)
        return {
            "report": str(report),
            "whole": None if report.whole is None else report.whole.brief,
            "model": rank_correlation(variants),
            "regions": Regions(taken, refused, dict(left_out.most_common())),
        }
    except Exception as error:  # a benchmark's figures must not depend on a report
        return {"report": f"no report: {type(error).__name__}: {error}"}


class Named(Protocol):
    """A program or step with a name."""

    @property
    def name(self) -> str:
        """The name in the table."""
        ...


def run_suite[P: Named](
    programs: Iterable[P],
    candidates: Mapping[str, Transform],
    peers: Mapping[str, Peer] | None = None,
    *,
    run: Callable[..., SuiteRow] = run_program,
    unit: str = "program",
    host_clock: str = "",
    notes: str = "",
    title: str = "benchmark",
    rounds: int | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> SuiteResult:
    """Run every program by ``run(program, candidates, rounds=, seed=)``, with a line of progress to `console`.

    A time is per `unit`. `host_clock`: the clock of the host that takes the times even if there is a GPU. `notes` go
    under the table. An interrupt ends the suite and keeps the complete rows.
    """
    programs = list(programs)
    rows: list[SuiteRow] = []
    for i, program in enumerate(programs, 1):
        failures: dict[str, str] = {}
        row = SuiteRow(program.name, None, {}, failures)
        try:
            row = run(program, candidates, rounds=rounds, seed=seed, **({"peers": peers} if peers else {}))
        except KeyboardInterrupt:
            title = f"{title}, interrupted after {len(rows)} of {len(programs)}"
            break
        except NotRun as why:
            row = replace(row, not_run=str(why))
        except Exception as error:  # while it was timed: the rows before it are not lost
            failures.update(dict.fromkeys(candidates, in_one_line(error)))
        rows.append(row)
        if console is not None:
            line = f"{i}/{len(programs)} {program.name}: {_summary(row)}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    about = provenance()
    about["versions"] |= peer_versions() if peers else {}
    method = f"{_method(unit, host_clock)} {notes}".strip()
    return SuiteResult(title, method=method, rows=tuple(rows), peers=tuple(peers or ()), **about)


def _method(unit: str, host_clock: str) -> str:
    if jax.devices()[0].platform == "gpu" and not host_clock:
        return f"Device time per {unit} in microseconds (kernel launches), median of interleaved profiles."
    clock = host_clock or "Wall-clock"
    return f"{clock} time per {unit} in microseconds, median of interleaved rounds."


def _summary(row: SuiteRow) -> str:
    if row.not_run:
        return f"not run: {row.not_run}"
    parts = [
        f"{label} {microseconds(r.seconds)} us" + (f" ({r.ratio})" if r.ratio else "")
        for label, r in row.results.items()
    ]
    return ", ".join((*parts, *(f"{label} failed: {why}" for label, why in row.failures.items())))
