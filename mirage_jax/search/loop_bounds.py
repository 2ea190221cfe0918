"""Loops that end early: the steps of a kernel in which everything that is summed is masked to zero need not run.

before -> after:  grid(i) loop(n): acc of exp(mask(n <= i, s))  ->  grid(i) loop(n in ..i+0): the same

Where all that a loop accumulates is zero unless a condition on indices holds (`mugraph.domains.index_facts`), and the
condition implies ``low <= n - i <= high`` for the loop's axis n and a grid axis i, steps outside of that band add
nothing. Nothing here is trusted: the verifier runs a kernel with its loop bounds against the program without. A
sentinel counts as minus infinity here, since the kernel runs all steps where it is not (`mugraph.passes.sentinels`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mirage_jax.mugraph.domains.index_facts import Condition, ZeroUnless, band, hull, known
from mirage_jax.mugraph.graph import Axis, BlockGraph, LoopBounds, Op, is_part
from mirage_jax.mugraph.passes.sentinels import masks_of


def with_loop_bounds(kernel: BlockGraph) -> BlockGraph:
    """The kernel, its loop restricted to steps that add something."""
    if kernel.loop is None or any(kernel.stages[s.value].body for s in kernel.stores):
        return kernel
    loop_bounds = loop_bounds_of(masks_of(kernel), kernel.grid, kernel.loop)
    return kernel if loop_bounds is None else replace(kernel, loop_bounds=loop_bounds)


def loop_bounds_of(ops: Iterable[Op], grid: Iterable[Axis], loop: Axis) -> LoopBounds | None:
    """The bounds of a loop over `loop` with these operators, none of which is stored in each step."""
    ops = tuple(ops)
    facts = known(ops)
    summed: list[Condition] = []
    shifts: set[str] = set()
    for op in ops:
        if op.op == "shift":
            shifts.add(op.name)
        if op.op in ("acc", "accs"):
            fact = facts[op.name].fact
            summed.append(fact.unless if isinstance(fact, ZeroUnless) else None)
        elif op.op == "last" and op.args[0] not in shifts:
            return None
    for axis in grid:
        low, high = hull(band(c, loop, axis) for c in summed) if not is_part(axis) else (None, None)
        bounded = low is not None or high is not None
        if bounded and (high is None or high >= max(low or 0, 0)):  # else the first rows are empty, or all
            return LoopBounds(axis, low, high)
    return None
