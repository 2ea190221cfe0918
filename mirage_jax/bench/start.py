"""Cold start: how much later a fresh process has its first result with the optimizer, if decisions are stored.

Each sample is a new process, plain and optimized in turn. *First call* is the time of tracing, compiling and running;
*process* is everything from the start of the interpreter, and for the optimizer its import. Bytecode is cached, as for
an installed package.
"""

from __future__ import annotations

import gc
import json
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
from rich.console import Console

import mirage_jax
from mirage_jax import children, timing
from mirage_jax.bench import programs
from mirage_jax.bench.tables import Cells, TableReport, provenance
from mirage_jax.errors import UsageError
from mirage_jax.timing import Ratio, Timing

PROGRAMS = ("lora_b1", "gqa_b1", "linear_attention", "abv")
LABELS = ("xla", "mirage")
ROUNDS = 6
MAX_RATIO = 1.25  # times as long as plain jit

CHILD = """
import sys, time
import jax, jax.numpy
ready = time.time()
import mirage_jax
mirage_jax.optimize  # which loads it
imported = time.time()
from mirage_jax.bench import start
start.child(sys.argv[1], sys.argv[2], sys.argv[3] == "small", float(sys.argv[4]), ready, imported)
"""


def child(label: str, name: str, small: bool, started: float, ready: float, imported: float) -> None:
    """Print one sample as JSON: seconds of the first call, and of the process until its end. Takes times of day.

    Work for this benchmark alone is in neither; the optimizer's import is in the optimized process.
    """
    program = programs.program(name, small)
    if label == "xla":  # whose process would not have the optimizer's objects for the garbage collector to visit
        gc.freeze()
    begin = time.time()
    args = jax.block_until_ready(program.draw())
    function = jax.jit(program.fn) if label == "xla" else mirage_jax.optimize(program.fn, on_miss="error")
    called = time.time()
    jax.block_until_ready(function(*args))
    end = time.time()
    process = (ready - started) + (end - begin) + (0.0 if label == "xla" else imported - ready)
    print(json.dumps({"call": end - called, "process": process}))


@dataclass(frozen=True)
class StartRow:
    """Seconds until the first result, by label, and how many times as long the optimized program takes."""

    program: str
    call: Mapping[str, float]
    call_ratio: Ratio
    process: Mapping[str, float]
    process_ratio: Ratio


@dataclass(frozen=True)
class StartResult(TableReport):
    """The rows of a run of the suite."""

    date: str
    device: str
    versions: dict[str, str]
    rows: tuple[StartRow, ...]

    title: ClassVar = "cold start"
    method: ClassVar = (
        f"Milliseconds with stored decisions, median of interleaved processes; the bar is {MAX_RATIO} times plain jit."
    )

    def cells(self) -> Cells:
        """Header and rows of the table."""

        def one(times: Mapping[str, float], ratio: Ratio) -> list[str]:
            return [*(f"{times[n] * 1e3:,.0f}" for n in LABELS), str(ratio)]

        header = ("program", *(f"{what} {n}" for what in ("first call", "process") for n in (*LABELS, "ratio")))
        return header, [[r.program, *one(r.call, r.call_ratio), *one(r.process, r.process_ratio)] for r in self.rows]


def run_start_suite(
    names: Iterable[str] = PROGRAMS, *, small: bool = False, rounds: int = ROUNDS, console: Console | None = None
) -> StartResult:
    """Decide each program once, in a cache of its own, then start processes."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="mirage_jax") as folder:
        environment = children.environment({"MIRAGE_JAX_CACHE_DIR": folder, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
        if environment.pop("PYTHONDONTWRITEBYTECODE", None):
            environment["PYTHONPYCACHEPREFIX"] = f"{folder}/bytecode"
        for name in names:
            program = programs.program(name, small)
            mirage_jax.tune(mirage_jax.optimize(program.fn, cache_dir=folder), *program.inputs)
            rows.append(_row(name, small, rounds, environment))
            if console is not None:
                console.print(f"{name}: {rows[-1].call_ratio}, process {rows[-1].process_ratio}", highlight=False)
    return StartResult(rows=tuple(rows), **provenance())


def _row(name: str, small: bool, rounds: int, environment: Mapping[str, str]) -> StartRow:
    samples: dict[str, list[dict[str, float]]] = {label: [] for label in LABELS}
    for n in range(rounds + 1):
        for label in LABELS if n % 2 else reversed(LABELS):
            samples[label].append(_sample(label, name, small, environment))

    def timings(what: str) -> tuple[dict[str, float], Ratio]:
        """Medians, and how many times as long ours takes, without the first sample, which wrote bytecode."""
        times = {label: Timing(tuple(sample[what] for sample in samples[label][1:])) for label in LABELS}
        return {label: t.seconds for label, t in times.items()}, timing.ratio(times["mirage"], times["xla"])

    return StartRow(name, *timings("call"), *timings("process"))


def _sample(label: str, name: str, small: bool, environment: Mapping[str, str]) -> dict[str, float]:
    command = children.python(CHILD, label, name, "small" if small else "full", str(time.time()))
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error: " in line] or ["no message"]
        raise UsageError(f"{name}, {label}: the process ended with code {done.returncode}: {lines[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
