"""Time tracing and lowering, for models of 32 equal layers in a Python loop, and for equations that all differ.

Both sides trace and lower the same function again each time, as the first call in a process does. Only JAX's traces of
its library functions stay and, for the optimizer, the decisions on disk. These are made before the clock starts; they
are proven again when they are read, which is part of the time. Nothing is compiled.

If nothing beats XLA, on a CPU mostly, a program is lowered as it was written. `replaced` is the other extreme: every
possible region is computed from its muGraph as plain JAX.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mirage_jax import timing
from mirage_jax.bench.steps import ModelStep
from mirage_jax.bench.suite import SuiteRow, Transform, bench_results, explained, recording
from mirage_jax.gc_pause import no_collection
from mirage_jax.jaxpr_frontend.capture.call_primitive import capture
from mirage_jax.jaxpr_frontend.capture.lowering import First, WholeProgram
from mirage_jax.jaxpr_frontend.jax_compat import LoweringTarget
from mirage_jax.jaxpr_frontend.partition.regions import MAX_REGION_OPERATORS
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.mugraph import evaluate
from mirage_jax.mugraph.graph import KernelGraph

REPLACED = "replaced"

NOTES = (
    "Tracing and lowering of 32 equal layers in a Python loop, with stored decisions; 0.67x is"
    " 1.5 times as long. Nothing is compiled or run. Replaced: with every region computed from its muGraph."
)


DIFFERENT = (
    "Tracing and lowering of programs with 100, 1,000 and 5,000 equations that all differ and are refused while their"
    " region is translated. Ours looks for a stored decision for every region, and searches for none. Nothing is"
    " compiled or run. Replaced: with every region computed from its muGraph."
)


def run_different(
    step: ModelStep, candidates: Mapping[str, Transform], *, rounds: int | None = None, seed: int = 0
) -> SuiteRow:
    """Measure the processor's seconds to trace and lower a program, once in a round.

    A program may take a minute, in which other processes would disturb a clock on the wall. No candidate explains
    thousands of regions.
    """
    args = jax.eval_shape(step.draw, jax.random.key(seed))
    transforms: dict[str, Transform] = {**candidates, REPLACED: replaced}
    samples: dict[str, list[float]] = {label: [] for label in transforms}
    for _ in range(rounds or 3):
        for label, transform in transforms.items():
            start = time.process_time()
            _lower(transform, step, args)
            samples[label].append(time.process_time() - start)
    timings = {label: timing.Timing(tuple(seconds)) for label, seconds in samples.items()}
    return SuiteRow(step.name, None, bench_results(timings, {}), {})


def run_compile(
    step: ModelStep, candidates: Mapping[str, Transform], *, rounds: int | None = None, seed: int = 0
) -> SuiteRow:
    """Measure the seconds to trace and lower a step, per candidate."""
    args = jax.eval_shape(step.draw, jax.random.key(seed))
    calls: dict[str, timing.Call] = {}
    reports: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for label, transform in {**candidates, REPLACED: replaced}.items():
        with recording(failures, label):
            reports[label] = explained(transform(_untraced(step.fn)), args)  # decides regions that are not decided yet
            calls[label] = lambda t=transform: _lower(t, step, args)
            calls[label]()
    timings = timing.time_wall(calls, rounds or 5)
    return SuiteRow(step.name, None, bench_results(timings, reports), failures)


def _lower(transform: Transform, step: ModelStep, args: Sequence[Any]) -> None:
    with no_collection():  # as in `timeit`: a collection visits all objects of the process, during some calls only
        transform(_untraced(step.fn), donate_argnums=0).lower(*args)


def _untraced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as an object that JAX has not traced."""
    return lambda *args: fn(*args)


@dataclass(frozen=True)
class Evaluated:
    """A region computed from its muGraph as plain JAX."""

    graph: KernelGraph
    in_place: tuple[str, ...] = ()
    cuda: None = None

    def portable(self, *tensors: jax.Array) -> list[jax.Array]:
        """Evaluate the graph on `jax.numpy`."""
        return evaluate.run(self.graph, tensors, xp=jnp, dtype=None)


@dataclass(frozen=True, eq=False)  # JAX keeps nothing of one for another
class ReplacesAll:
    """A compiler that has a replacement for every region."""

    strict: bool = True
    max_ops: int = MAX_REGION_OPERATORS
    checkpoints: bool = False
    platform: str = "cpu"
    exports_kernels: bool = False

    def recomputes(self, target: LoweringTarget) -> bool:
        """Recompute where gradients may."""
        return self.checkpoints

    def prepare(self, regions: Sequence[Region], target: LoweringTarget, again: bool = False) -> None:
        """Decide nothing."""

    def compile_region(self, region: Region, platforms: tuple[str, ...]) -> Evaluated:
        """Replace the region."""
        return Evaluated(region.graph)

    def known_region(self, region: Region, platforms: tuple[str, ...]) -> Evaluated:
        """Replace the region."""
        return self.compile_region(region, platforms)

    def choose(self, whole: WholeProgram) -> First:
        """Take the first variant of the whole program."""
        return First()

    def names_line_of(self, region: Region) -> tuple[str, ...]:
        """No option names lines."""
        return ()


def replaced(fn: Callable[..., Any], **jit_options: Any) -> Callable[..., Any]:
    """Compile a function with every region replaced, as `jax.jit` does."""
    return jax.jit(capture(fn, ReplacesAll()), **jit_options)
