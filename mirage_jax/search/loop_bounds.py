"""Loops that end early: steps of a kernel whose sums are all masked to zero need not run.

before -> after:  grid(i) loop(n): acc of exp(mask(n <= i, s))  ->  grid(i) loop(n in ..i+0): the same

All that a loop accumulates may be zero unless a condition on indices holds (`mugraph.domains.index_facts`). If the
condition implies ``low <= n - i <= high`` for the loop's axis n and a grid axis i, steps outside of that band add
nothing. Nothing here is trusted: the verifier runs a bounded kernel against the program without bounds. A sentinel
counts as minus infinity here, because the kernel runs all steps where it is not (`mugraph.passes.sentinels`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mirage_jax.mugraph.domains.index_facts import Condition, ZeroUnless, band, hull, known
from mirage_jax.mugraph.graph import Axis, BlockGraph, LoopBounds, Op, is_part
from mirage_jax.mugraph.passes.sentinels import masks_of


def with_loop_bounds(kernel: BlockGraph) -> BlockGraph:
    """Restrict the kernel's loop to steps that may add to its sums."""
    if kernel.loop is None or any(kernel.stages[s.value].body for s in kernel.stores):
        return kernel
    loop_bounds = loop_bounds_of(masks_of(kernel), kernel.grid, kernel.loop)
    return kernel if loop_bounds is None else replace(kernel, loop_bounds=loop_bounds)


def loop_bounds_of(ops: Iterable[Op], grid: Iterable[Axis], loop: Axis) -> LoopBounds | None:
    """Bounds of a loop with these operators, if no value is stored in each step; None if it has none."""
    summed = _conditions(tuple(ops))
    if summed is None:
        return None
    for axis in grid:
        low, high = hull(band(c, loop, axis) for c in summed) if not is_part(axis) else (None, None)
        bounded = low is not None or high is not None
        if bounded and (high is None or high >= max(low or 0, 0)):  # else the first rows are empty, or all
            return LoopBounds(axis, low, high)
    return None


def _conditions(ops: tuple[Op, ...]) -> list[Condition] | None:
    """For each sum of a loop, the condition without which it adds zero; None if the loop has another result."""
    facts = known(ops)
    shifts = {op.name for op in ops if op.op == "shift"}
    if any(op.op == "last" and op.args[0] not in shifts for op in ops):
        return None
    sums = [facts[op.name].fact for op in ops if op.op in ("acc", "accs")]
    return [fact.unless if isinstance(fact, ZeroUnless) else None for fact in sums]
