"""Run a suite: every program under every candidate, interleaved in one process, with errors against float64.

A candidate is a way to run a function: "xla", plain `jax.jit`, is what the others are compared with. Peers
(`bench.peers`) run programs of some kinds their own way; they stand in the same table, and the best of all others,
XLA included, beside ours. Who fails is a row that says so. "Model rank" is Spearman's correlation of the cost model's
estimates with the times of the variants that were measured on the way. Results print as a table and are written as
JSON, with the same as Markdown beside it.
"""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import mirage_jax
from mirage_jax import timing
from mirage_jax.bench.peers import Peer
from mirage_jax.bench.peers import versions as peer_versions
from mirage_jax.bench.programs import BenchProgram
from mirage_jax.cache import versions
from mirage_jax.compiler.float_check import same_bits
from mirage_jax.errors import in_one_line
from mirage_jax.hardware.gpus import GPUS
from mirage_jax.report import Report, rank_correlation, write_beside
from mirage_jax.timing import Ratio, Timing

type Transform = Callable[..., Callable[..., Any]]  # of a function, and of jit's options by name
type Cell = Callable[[SuiteRow, str], str]  # of a row, for a candidate

# Devices of which it is measured what copies and large products of 16 bits reach.
MEASURED = {"NVIDIA H200": GPUS["H200"]}

BASELINE, OURS = "xla", "mirage"
REPEATS = 100  # runs of ours that have to be equal bit for bit


def default_candidates() -> dict[str, Transform]:
    return {BASELINE: jax.jit, OURS: mirage_jax.optimize}


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes that XLA has planned: for intermediate results, and at the peak with arguments and results."""

    temporary: int
    peak: int


@dataclass(frozen=True)
class Regions:
    """What a candidate made of a program's regions, and how many equations are in none, by reason."""

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
    whole: str | None = None  # what the optimizer says of the function as a whole


LEAST_RATIO = 0.98  # of plain jit's speed, that no function may fall below


@dataclass(frozen=True)
class SuiteRow:
    program: str
    limit: float | None
    results: Mapping[str, BenchResult]
    failures: Mapping[str, str]

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest of all others, and how many times as fast as that ours is."""
        if OURS not in self.results:
            return None
        right = {n: r for n, r in self.results.items() if r.error is None or math.isfinite(r.error)}
        others = [(r.seconds, label) for label, r in right.items() if label != OURS]
        return (min(others)[1], min(others)[0] / self.results[OURS].seconds) if others else None


@dataclass(frozen=True)
class SuiteResult:
    title: str
    date: str
    device: str
    versions: Mapping[str, str]
    method: str
    rows: tuple[SuiteRow, ...]
    peers: tuple[str, ...] = ()  # labels of candidates that are not ours to choose from

    def to_json(self) -> str:
        return json.dumps(_finite(asdict(self)), indent=1, sort_keys=True, allow_nan=False)

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Header and body of the table, as text."""
        labels = list(dict.fromkeys(label for row in self.rows for label in (*row.results, *row.failures)))
        others = [label for label in labels if label != BASELINE and label not in self.peers]
        columns: list[tuple[str, Cell, str]] = [
            *((name, _time_cell, name) for name in labels),
            *((f"{o} over {BASELINE}", _cell("ratio"), o) for o in others),
            *([(f"{OURS} over the best other", _best_cell, OURS)] if self.peers else []),
            *((f"error {name}", _error_cell, name) for name in labels),
            ("equal runs", _cell("repeats"), OURS),
            *((f"temp MB {name}", _cell("memory", lambda m: f"{m.temporary / 1e6:,.1f}"), name) for name in labels),
            *((f"regions {o}", _cell("regions"), o) for o in others),
            *((f"whole {o}", _cell("whole"), o) for o in others),
            *((f"model rank {o}", _cell("model", "{:.2f}".format), o) for o in others),
        ]
        table = {
            "program": [row.program for row in self.rows],
            "limit": ["" if row.limit is None else microseconds(row.limit) for row in self.rows],
        }
        for name, cell, label in columns:
            table[name] = [cell(row, label) for row in self.rows]
        shown = {name: cells for name, cells in table.items() if any(cells)}
        return list(shown), [list(cells) for cells in zip(*shown.values(), strict=True)]

    @property
    def lowest(self) -> tuple[Ratio, str, str] | None:
        """The lowest ratio of a function over plain jit, of which program, and of which candidate of ours."""
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
        return self.lowest is not None and self.lowest[0].value < LEAST_RATIO and self.lowest[0].high < 1.0

    def to_markdown(self) -> str:
        header, body = self.cells()
        lines = [f"# {self.title}", "", f"{self.date}, {self.device}. {self.method}", ""]
        lines += [", ".join(f"{name} {version}" for name, version in self.versions.items() if version) + ".", ""]
        lines += [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        lines += [f"| {' | '.join(cells)} |" for cells in body]
        lines += [f"\n{row.program}, {label}: {why}" for row in self.rows for label, why in row.failures.items()]
        return "\n".join(lines) + "\n"

    def write(self, file: Path) -> Path:
        """Write the JSON to `file` and the Markdown beside it; the Markdown's path."""
        return write_beside(file, self.to_json(), self.to_markdown())

    def table(self) -> Table:
        header, body = self.cells()
        table = Table(title=self.title, caption=self.method)
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i == 0)
        for cells in body:
            table.add_row(*cells)
        return table


def _finite(value: object) -> object:
    """JSON has no infinity: null stands for it."""
    match value:
        case dict():
            return {k: _finite(v) for k, v in value.items()}
        case list() | tuple():
            return [_finite(v) for v in value]
        case float() if not math.isfinite(value):
            return None
    return value


def microseconds(seconds: float) -> str:
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


def run_program(
    program: BenchProgram,
    candidates: Mapping[str, Transform],
    peers: Mapping[str, Peer] | None = None,
    *,
    rounds: int | None = None,
    seed: int = 0,
    repeats: int | None = None,
) -> SuiteRow:
    """One row: check every candidate's and peer's result, then time those that gave one. `repeats`: how often ours has
    to give the same bits again; by default only kernels on a GPU have to.
    """
    device = jax.devices()[0]
    repeats = (REPEATS if device.platform == "gpu" else 0) if repeats is None else repeats
    args = program.draw(seed)
    reference = program.in_float64(args)
    functions: dict[str, Callable[..., jax.Array]] = {}
    errors: dict[str, tuple[float, float]] = {}
    failures: dict[str, str] = {}
    for label, transform in candidates.items():
        try:
            function = transform(program.fn)
            errors[label] = errors_against(reference, np.asarray(function(*args)))
            functions[label] = function
        except Exception as error:  # whatever a candidate raises is a result of the benchmark
            failures[label] = in_one_line(error)
    runnable: dict[str, Peer] = {}
    for label, peer in (peers or {}).items():
        if not peer.serves(program):
            continue
        try:
            errors[label] = errors_against(reference, peer.result(program, args))
            runnable[label] = peer
        except Exception as error:  # so is what a peer raises
            failures[label] = in_one_line(error)
    timings = _time(program, functions, runnable, failures, rounds, seed)
    gpu = MEASURED.get(device.device_kind)
    results = {
        label: BenchResult(
            t.seconds,
            t.interval,
            t.launches,
            error=errors[label][0],
            error_rms=errors[label][1],
            ratio=None if label == BASELINE or BASELINE not in timings else timing.ratio(timings[BASELINE], t),
            repeats=equal_runs(functions[label], args, repeats) if label == OURS and repeats else None,
            **explained(functions.get(label), args),
        )
        for label, t in timings.items()
    }
    return SuiteRow(program.name, None if gpu is None else program.limit(gpu), results, failures)


def errors_against(reference: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """Largest and root-mean-square error, relative to the same of the reference; infinite where found is not finite."""
    difference = np.abs(found.astype(np.float64) - reference)
    if not np.isfinite(difference).all():
        return float("inf"), float("inf")
    scale, mean = np.abs(reference).max(), np.sqrt(np.mean(reference**2))
    return float(difference.max() / (scale or 1.0)), float(np.sqrt(np.mean(difference**2)) / (mean or 1.0))


def equal_runs(function: Callable[..., jax.Array], args: Sequence[jax.Array], repeats: int) -> int:
    """How many runs on the same inputs in a row are equal to the first, bit for bit, of at most `repeats`."""

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
    """Interleaved times of all; what cannot be timed becomes a failure."""
    on_gpu = jax.devices()[0].platform == "gpu"
    sets = timing.sets_for(program.bytes) if on_gpu else 1
    all_args = [program.draw(seed + i) for i in range(sets)]

    def waiting(function: Callable[..., object], *args: object) -> timing.Call:
        return lambda: jax.block_until_ready(function(*args))

    def call_of(f: Callable[..., jax.Array]) -> timing.Call:
        return waiting(timing.chain(f), all_args) if on_gpu else waiting(f, *all_args[0])

    makers = {label: partial(call_of, f) for label, f in functions.items()}
    makers |= {label: partial(peer.call, program, all_args) for label, peer in peers.items()}
    calls: dict[str, timing.Call] = {}
    for label, make in makers.items():
        try:
            call = make()
            call()
            calls[label] = call
        except Exception as error:  # for lack of memory, say
            failures[label] = in_one_line(error)
    return timing.time_device(calls, sets, rounds or 6) if on_gpu else timing.time_wall(calls, rounds or 10)


def explained(function: object, args: Iterable[object]) -> dict[str, Any]:
    """What the candidate says about itself, if it can: fields of a `BenchResult`."""
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


class NamedRow(Protocol):
    """What a row of a suite is about."""

    @property
    def name(self) -> str: ...


def run_suite[P: NamedRow](
    programs: Iterable[P],
    candidates: Mapping[str, Transform] | None = None,
    peers: Mapping[str, Peer] | None = None,
    *,
    run: Callable[..., SuiteRow] = run_program,
    unit: str = "program",
    on_host: bool = False,
    clock: str = "Wall-clock",
    notes: str = "",
    title: str = "benchmark",
    rounds: int | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> SuiteResult:
    """Every program in turn by ``run(program, candidates, rounds=, seed=)``, with a line of progress to `console`.

    `unit` is what a time is the time of. With `on_host` it is always of the host's clock, which `clock` names. `notes`
    go under the table. An interrupt ends the suite and keeps the rows that are complete.
    """
    programs = list(programs)
    candidates = default_candidates() if candidates is None else candidates
    device = jax.devices()[0]
    method = (
        f"Device time per {unit} in microseconds (kernel launches), median of interleaved profiles."
        if device.platform == "gpu" and not on_host
        else f"{clock} time per {unit} in microseconds, median of interleaved rounds."
    )
    rows: list[SuiteRow] = []
    for i, program in enumerate(programs, 1):
        try:
            row = run(program, candidates, rounds=rounds, seed=seed, **({"peers": peers} if peers else {}))
        except KeyboardInterrupt:
            title = f"{title}, interrupted after {len(rows)} of {len(programs)}"
            break
        except Exception as error:  # while it was timed: the rows before it are not lost
            why = in_one_line(error)
            row = SuiteRow(program.name, None, {}, dict.fromkeys(candidates, why))
        rows.append(row)
        if console is not None:
            console.print(
                f"{i}/{len(programs)} {program.name}: {_summary(row)}", highlight=False, markup=False, soft_wrap=True
            )
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    where = f"{device.platform}: {device.device_kind}"
    installed = dict(versions()) | (peer_versions() if peers else {})
    return SuiteResult(title, now, where, installed, f"{method} {notes}".strip(), tuple(rows), tuple(peers or ()))


def _summary(row: SuiteRow) -> str:
    parts = [
        f"{label} {microseconds(r.seconds)} us" + (f" ({r.ratio})" if r.ratio else "")
        for label, r in row.results.items()
    ]
    return ", ".join((*parts, *(f"{label} failed: {why}" for label, why in row.failures.items())))
