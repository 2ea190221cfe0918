"""Loops that end early: the steps of a kernel in which everything that is summed is masked to zero need not run.

before -> after:  grid(i) loop(n): acc of exp(mask(n <= i, s))  ->  grid(i) loop(n in ..i+0): the same

Where all that a loop accumulates is zero unless a condition on indices holds (`mugraph.predicates`), and the condition
implies ``low <= n - i <= high`` for the loop's axis n and a grid axis i, steps outside of that band add nothing.
Nothing here is trusted: the verifier runs a kernel with its span against the program without.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mirage_jax.mugraph.graph import Axis, BlockGraph, Op, Span, is_part
from mirage_jax.mugraph.operators import operator
from mirage_jax.mugraph.predicates import Condition, Cut, Every, FactDomain, Known, Some, Zero

type Band = tuple[int | None, int | None]  # low <= n - i <= high
NOTHING: Band = (1, 0)


def with_span(kernel: BlockGraph) -> BlockGraph:
    """The kernel, its loop restricted to steps that add something."""
    if kernel.loop is None or any(kernel.stages[s.value].body for s in kernel.stores):
        return kernel
    span = span_of(kernel.ops, kernel.grid, kernel.loop)
    return kernel if span is None else replace(kernel, span=span)


def span_of(ops: Iterable[Op], grid: Iterable[Axis], loop: Axis) -> Span | None:
    """The span of a loop over `loop` with these operators, none of which is stored in each step."""
    domain = FactDomain()
    facts: dict[str, Known] = {}
    summed: list[Condition] = []
    shifts: set[str] = set()
    for op in ops:
        facts[op.name] = operator(op.op).meaning(domain, *(facts.get(a, Known()) for a in op.args), **op.attributes)
        if op.op == "shift":
            shifts.add(op.name)
        if op.op in ("acc", "accs"):
            fact = facts[op.name].fact
            summed.append(fact.unless if isinstance(fact, Zero) else None)
        elif op.op == "last" and op.args[0] not in shifts:
            return None
    for axis in grid:
        low, high = _either(_band(c, loop, axis) for c in summed) if not is_part(axis) else (None, None)
        bounded = low is not None or high is not None
        if bounded and (high is None or high >= max(low or 0, 0)):  # else the first rows are empty, or all
            return Span(axis, low, high)
    return None


def _band(c: Condition, n: Axis, i: Axis) -> Band:
    """The narrowest band that the condition implies."""
    match c:
        case Cut(form, bound) if dict(form) == {n: 1, i: -1}:
            return None, bound
        case Cut(form, bound) if dict(form) == {n: -1, i: 1}:
            return -bound, None
        case Every(parts):
            bands = [_band(part, n, i) for part in parts]
            lows, highs = [low for low, _ in bands if low is not None], [high for _, high in bands if high is not None]
            return max(lows, default=None), min(highs, default=None)
        case Some(parts):
            return _either(_band(part, n, i) for part in parts)
        case _:
            return None, None


def _either(bands: Iterable[Band]) -> Band:
    """The hull of several bands."""
    some = [b for b in bands if b[0] is None or b[1] is None or b[0] <= b[1]]
    if not some:
        return NOTHING
    lows, highs = [low for low, _ in some], [high for _, high in some]
    return (
        None if None in lows else min(x for x in lows if x is not None),
        None if None in highs else max(x for x in highs if x is not None),
    )
