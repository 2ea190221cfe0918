"""Which values must not be made twice, because their digits are on both sides of a comparison.

    t = x @ w;  m = max(t);  t == m

Made again in another region, t may be rounded in another way, and its maximum equals no element. So the region after
the cut reads t. (Inside of a region `mugraph.comparisons` sees to it.)
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.partition.program import FlatEqn, FlatProgram
from mirage_jax.jaxpr_frontend.translate import rules

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
KEEPS_DIGITS = frozenset(
    {"max", "min", "reduce_max", "reduce_min", "select_n", "abs", "neg", "clamp", "cummax", "sort"}
)
SCALES = frozenset({"add", "sub", "mul", "div"})  # by a literal: rounded, but from the same digits


def compared(program: FlatProgram) -> frozenset[int]:
    """Find the values of a program that must not be made twice."""
    variable = _variable(program)
    found = set[int]()
    for eqn in program.eqns:
        sides = _floats(program, eqn)
        if eqn.primitive in COMPARISONS and len(sides) == 2 and _are_related(program, sides, variable):
            found.update(_digits_of(program, sides))
    return frozenset(found)


def _are_related(program: FlatProgram, sides: list[int], variable: set[int]) -> bool:
    """Whether both sides are made of one value that depends on the program's arguments."""
    above = [set(program.upstream([side])) for side in sides]
    return not variable.isdisjoint(program.made_by(set.intersection(*above)))


def _variable(program: FlatProgram) -> set[int]:
    """Values that depend on the program's arguments."""
    found = {*program.inputs, *program.constants}
    for eqn in program.eqns:
        if not found.isdisjoint(eqn.reads):
            found.update(eqn.outputs)
    return found


def _digits_of(program: FlatProgram, values: list[int]) -> Iterator[int]:
    """Values whose digits others have, and those others on the way."""
    todo, seen = list(values), set[int]()
    while todo:
        n = program.producers.get(v := todo.pop())
        if n is None or v in seen:
            continue
        seen.add(v)
        eqn = program.eqns[n]
        if eqn.primitive not in rules.LAYOUT_PRIMITIVES:
            yield v
        if _passes_digits(eqn):
            todo += _floats(program, eqn)


def _passes_digits(eqn: FlatEqn) -> bool:
    name = eqn.primitive
    return name in rules.LAYOUT_PRIMITIVES or name in KEEPS_DIGITS or (name in SCALES and len(set(eqn.reads)) == 1)


def _floats(program: FlatProgram, eqn: FlatEqn) -> list[int]:
    """The operands of an equation that are floats, without literals."""
    operands = {v: program.avals[v] for v in eqn.reads}
    arrays = {v: aval for v, aval in operands.items() if isinstance(aval, jax_compat.ShapedArray)}
    return [v for v, aval in arrays.items() if jnp.issubdtype(aval.dtype, jnp.inexact)]
