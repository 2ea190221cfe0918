"""Run the steps of models: time per layer, memory, errors, and what became of the regions, per candidate.

A step runs again and again on its own donated state, as in training or decoding: a sample is a few calls in a row, on a
GPU the device time of these, each from its first kernel to its last. Errors are of everything that a first step
returns, relative to the largest value of its kind: outputs, losses, caches, weights, and the moments of AdamW, which
after one step are the gradients and their squares times constants. The reference is plain `jax.jit` with all data in
float32 and exact products.

Candidate `REMAT`, ours with ``remat="regions"``, is for training steps: where nothing is kept, nothing is made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirage_jax import timing
from mirage_jax.bench.steps import Step
from mirage_jax.bench.suite import BASELINE, OURS, Memory, Result, Row, Transform, errors_against, explained
from mirage_jax.timing import Timing

REMAT = f"{OURS} remat"
CALLS = 4  # steps in a row that are profiled together
NOTES = (
    "Steps as training and decoding run them, with donated state, each from its first kernel to its last. Errors are "
    "the largest of all arrays that a step returns (loss, moments of the gradients, weights, outputs, caches), "
    "relative to the largest of their kind, against float32. Memory is what XLA plans for intermediate results of a "
    "whole step. Regions: optimized ones of all."
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


def run_step(step: Step, candidates: Mapping[str, Transform], *, rounds: int | None = None, seed: int = 0) -> Row:
    """One row: every candidate's first step is checked, then all are timed."""
    state, batch = jax.jit(step.draw)(jax.random.key(seed))
    reference = _in_float32(step, state, batch)
    running: dict[str, _Running] = {}
    fields: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for label, transform in candidates.items():
        if label == REMAT and not step.trains:
            continue
        try:
            function: Any = transform(step.fn, donate_argnums=0)
            compiled = function.lower(state, batch).compile()
            first = compiled(jax.tree.map(jnp.copy, state), batch)
            error, error_rms = worst_error(reference, first)
            fields[label] = {"error": error, "error_rms": error_rms, "memory": _memory(compiled)}
            fields[label] |= explained(function, (state, batch))
            running[label] = _Running(compiled, first[0], batch)
        except Exception as why:  # whatever a candidate raises is a result of the benchmark
            failures[label] = f"{type(why).__name__}: {why}".splitlines()[0]
    timings = {label: _per_layer(t, step.layers) for label, t in _time(running, rounds).items()}
    results = {
        label: Result(
            seconds=t.seconds,
            interval=t.interval,
            launches=t.launches,
            ratio=None if label == BASELINE or BASELINE not in timings else timing.ratio(timings[BASELINE], t),
            **fields[label],
        )
        for label, t in timings.items()
    }
    return Row(step.name, None, results, failures)


def _in_float32(step: Step, state: Any, batch: Any) -> Any:
    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)

    with jax.default_matmul_precision("highest"):
        return jax.tree.map(np.asarray, jax.jit(step.fn)(wide(state), wide(batch)))


def worst_error(reference: Any, found: Any) -> tuple[float, float]:
    """The largest error of any array of a tree, and the largest root mean square.

    Relative to the largest value of all arrays of its kind: some gradients are zero but for rounding (of a bias that
    a softmax cancels).
    """
    wanted = [(path[:2], np.asarray(x, np.float64)) for path, x in jax.tree.leaves_with_path(reference)]
    largest: dict[Any, float] = {}
    for kind, x in wanted:
        largest[kind] = max(largest.get(kind, 0.0), float(np.abs(x).max()))
    worst = worst_rms = 0.0
    for (kind, x), y in zip(wanted, jax.tree.leaves(found), strict=True):
        error, error_rms = errors_against(x, np.asarray(y), largest[kind])
        worst, worst_rms = max(worst, error), max(worst_rms, error_rms)
    return worst, worst_rms


def _memory(compiled: Any) -> Memory:
    plan = compiled.memory_analysis()
    return Memory(plan.temp_size_in_bytes, plan.peak_memory_in_bytes)


def _time(running: Mapping[str, _Running], rounds: int | None) -> dict[str, Timing]:
    if jax.devices()[0].platform == "gpu":
        calls = {label: lambda r=r: r(CALLS) for label, r in running.items()}
        return timing.time_device(calls, CALLS, rounds or 6, partial(timing.profile, steps=CALLS))
    return timing.time_wall({label: lambda r=r: r(1) for label, r in running.items()}, rounds or 10)


def _per_layer(t: Timing, layers: int) -> Timing:
    return Timing(tuple(s / layers for s in t.samples), None if t.launches is None else t.launches / layers)
