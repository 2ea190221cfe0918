"""Run the steps of models: time per layer, memory, errors, and regions, per candidate.

A step runs again and again on its own donated state, as in training or decoding. A sample is a few calls in a row; on a
GPU it is their device time, each from its first kernel to its last. Errors cover everything that a first step returns,
relative to the largest value of its kind: outputs, losses, caches, weights, and the moments of AdamW, which after one
step are the gradients and their squares times constants. The reference is plain `jax.jit` with all data in float32 and
exact products.

Candidate `REMAT`, ours with ``remat="regions"``, is for training steps: other steps keep nothing for later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirage_jax import timing
from mirage_jax.bench.steps import ModelStep
from mirage_jax.bench.suite import (
    BASELINE,
    OURS,
    PlannedMemory,
    SuiteRow,
    Transform,
    bench_results,
    explained,
    recording,
)
from mirage_jax.timing import Timing

log = logging.getLogger("mirage_jax")

REMAT = f"{OURS} remat"
CALLS = 4  # steps in a row that are profiled together
VARIANTS = {  # of suite "whole": whatever the budget, no function may be slower than under plain jit
    f"{OURS} 2s/2s": {"remat": "regions", "budget": "2s/2s"},
    f"{OURS} 15s/40s": {"remat": "regions", "budget": "15s/40s"},
    f"{OURS} untuned": {"remat": "regions", "on_miss": "fallback"},
}
RECOMPUTING = {OURS: {"remat": "regions"}}  # of suites "fields" and "zoo"
NOTES = (
    "Steps as training and decoding run them, with donated state, each from its first kernel to its last. Errors are "
    "the largest of all arrays that a step returns (loss, moments of the gradients, weights, outputs, caches), "
    "relative to the largest of their kind, against float32. Memory is what XLA plans for intermediate results of a "
    "whole step. To prepare a step is to trace, tune and compile it. Regions: optimized ones of all."
)


class _Running:
    """A compiled step with the state that it has come to."""

    def __init__(self, compiled: Any, state: Any, batch: Any) -> None:
        self.compiled, self.state, self.batch = compiled, state, batch

    def __call__(self, calls: int) -> None:
        result: Any = None
        for _ in range(calls):
            self.state, result = self.compiled(self.state, self.batch)
        jax.block_until_ready((self.state, result))


def run_step(
    step: ModelStep, candidates: Mapping[str, Transform], *, rounds: int | None = None, seed: int = 0
) -> SuiteRow:
    """One row: every candidate's first step is checked, then all are timed."""
    state, batch = jax.jit(step.draw)(jax.random.key(seed))
    log.info("%s: reference in float32", step.name)
    reference = jax.block_until_ready(_in_float32(step, state, batch))
    running: dict[str, _Running] = {}
    fields: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for label, transform in candidates.items():
        if label == REMAT and not step.trains:
            continue
        log.info("%s: %s", step.name, label)
        with recording(failures, label):
            start = time.monotonic()
            # Without a backward pass nothing is made again, but a report would plan and tune one.
            forward = {} if step.trains or label == BASELINE else {"remat": None}
            function: Any = transform(step.fn, donate_argnums=0, **forward)
            compiled = function.lower(state, batch).compile()
            preparation = time.monotonic() - start
            first = compiled(jax.tree.map(jnp.copy, state), batch)
            error, error_rms = worst_error(reference, first)
            fields[label] = {"error": error, "error_rms": error_rms, "memory": _memory(compiled)}
            fields[label] |= {"preparation": preparation} | explained(function, (state, batch))
            running[label] = _Running(compiled, first[0], batch)
    log.info("%s: timing", step.name)
    timings = {label: _per_layer(t, step.layers) for label, t in _time(running, rounds).items()}
    return SuiteRow(step.name, None, bench_results(timings, fields), failures)


def _in_float32(step: ModelStep, state: Any, batch: Any) -> Any:
    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)

    args = wide(state), wide(batch)
    with jax.default_matmul_precision("highest"):
        return jax.jit(step.fn).lower(*args).compile(compiler_options=timing.ONCE)(*args)


def worst_error(reference: Any, found: Any) -> tuple[float, float]:
    """Measure the largest error of any array of a tree, and the largest root mean square; infinite if not finite.

    Errors are relative to the largest value of all arrays of a kind: some gradients are zero but for rounding, such as
    those of a bias that a softmax cancels.
    """
    kinds = [path[:2] for path, _ in jax.tree.leaves_with_path(reference)]
    measured = np.array(jax.device_get(_errors(jax.tree.leaves(reference), jax.tree.leaves(found))), np.float64)
    largest: dict[Any, float] = {}
    for kind, scale in zip(kinds, measured[:, 0], strict=True):
        largest[kind] = max(largest.get(kind, 0.0), scale)
    scales = np.array([largest[kind] or 1.0 for kind in kinds])
    error, rms = (measured[:, 1:] / scales[:, None]).max(axis=0)
    return float(error), float(rms)


@jax.jit
def _errors(reference: Sequence[jax.Array], found: Sequence[jax.Array]) -> list[tuple[jax.Array, ...]]:
    """For each array: the largest value of the reference, the largest error and its root mean square, in float32.

    A device compares hundreds of millions of numbers at once.
    """

    def one(wanted: jax.Array, got: jax.Array) -> tuple[jax.Array, ...]:
        wanted = wanted.astype(jnp.float32)
        error = jnp.abs(got.astype(jnp.float32) - wanted)
        measures = jnp.max(error), jnp.sqrt(jnp.mean(error**2))
        return jnp.max(jnp.abs(wanted)), *(jnp.where(jnp.isfinite(error).all(), m, jnp.inf) for m in measures)

    return [one(wanted, got) for wanted, got in zip(reference, found, strict=True)]


def _memory(compiled: Any) -> PlannedMemory:
    plan = compiled.memory_analysis()
    return PlannedMemory(plan.temp_size_in_bytes, plan.peak_memory_in_bytes)


def _time(running: Mapping[str, _Running], rounds: int | None) -> dict[str, Timing]:
    if jax.devices()[0].platform == "gpu":
        calls = {label: lambda r=r: r(CALLS) for label, r in running.items()}
        return timing.time_steps(calls, CALLS, rounds or 6)
    return timing.time_wall({label: lambda r=r: r(1) for label, r in running.items()}, rounds or 10)


def _per_layer(t: Timing, layers: int) -> Timing:
    return Timing(tuple(s / layers for s in t.samples), None if t.launches is None else t.launches / layers)
