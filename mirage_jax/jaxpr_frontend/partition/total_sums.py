"""Totals of large tensors that are made of small ones, as sums of row sums: an energy over all pairs of points, say.

    reduce_sum x[i,j]  ->  reduce_sum y[i]  with  y[i] = reduce_sum x[i,j]

A total is one number, so XLA makes it. With the sums of rows in its region, a kernel need not store the tensor. Where
XLA makes these, too, it sums over both axes at once: its simplifier merges a sum of sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.jax_compat import JaxprEqn
from mirage_jax.jaxpr_frontend.partition.row_indices import Makers, Operands
from mirage_jax.jaxpr_frontend.translate import rules

MIN_RATIO = 8  # of the tensor's elements over those of each value that it is made of
MIN_ROWS = 1024  # that are summed side by side, if there are as many
MAX_VALUES = 64  # that are looked at


def as_row_sums(
    eqn: JaxprEqn, operands: Operands, makers: Makers, avals: Mapping[int, Any]
) -> Sequence[JaxprEqn] | None:
    """Give a total as two sums; None if it is none, or if the tensor is not much larger than all it is made of."""
    aval: Any = eqn.invars[0].aval
    is_total = eqn.primitive.name == "reduce_sum" and len(eqn.params["axes"]) == len(aval.shape) > 1
    if not is_total or str(aval.dtype) not in ("float32", "float64") or not _is_of_small(operands[0], makers, avals):
        return None
    rows = next((n for n in range(1, aval.ndim) if math.prod(aval.shape[:n]) >= MIN_ROWS), aval.ndim - 1)
    return jax_compat.as_two_sums(eqn, rows)


def _is_of_small(total: Any, makers: Makers, avals: Mapping[int, Any]) -> bool:
    """Whether a value is made, by equations with a rule, of values that are much smaller."""
    most = _elements(avals[total]) // MIN_RATIO if isinstance(total, int) else 0
    todo, seen = [total] if most else [], set[int]()
    while todo:
        value = todo.pop()
        if not isinstance(value, int) or value in seen or 0 < _elements(avals[value]) <= most:
            continue
        eqn, operands = makers.get(value, (None, ()))
        if eqn is None or eqn.primitive.name not in rules.RULES or len(seen) == MAX_VALUES:
            return False
        seen.add(value)
        todo += operands
    return bool(seen)


def _elements(aval: Any) -> int:
    """The elements of an array; 0 if their number is unknown."""
    sizes = getattr(aval, "shape", ())
    return math.prod(sizes) if all(isinstance(n, int) for n in sizes) else 0
