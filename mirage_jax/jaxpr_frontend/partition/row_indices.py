"""Indices of which all columns but one count rows: ``x[arange(n), label]`` as one index into every row.

    gather x[n, v] at (0, label[0]), (1, label[1]), ..  ->  gather x[n, v] at label[n] in row n

JAX writes the first for `x[jnp.arange(n), label]` and for `jnp.diagonal`, and the second for `take_along_axis`. Both
pick the same elements. The second says so in its dimension numbers, and translation looks at nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.jax_compat import JaxprEqn, Literal

type Operands = tuple[int | Literal, ...]
type Makers = Mapping[int, tuple[JaxprEqn, Operands]]  # by value: the equation that makes it, and what that reads


def into_every_row(eqn: JaxprEqn, operands: Operands, makers: Makers) -> tuple[JaxprEqn, Operands] | None:
    """Give a gather or scatter-add one column of indices, as it and its operands; None if it is of another kind."""
    dimensions = jax_compat.indexed(eqn.params)
    if dimensions.mapped != dimensions.collapsed:
        return None
    columns = dict(zip(dimensions.mapped, _columns(operands, makers), strict=False))
    rows = _rows(eqn, columns, makers)
    labels = columns.keys() - rows.keys()
    if len(columns) < 2 or len(labels) != 1:
        return None
    (label,) = labels
    (maker, _) = _made(columns[label], makers)
    if maker is None:
        return None
    new = jax_compat.indexed_by_row(eqn, maker.outvars[0].aval, label, sorted(rows.items()))
    return new, (operands[0], columns[label], *operands[2:])


def _made(value: int | Literal, makers: Makers) -> tuple[JaxprEqn | None, Operands]:
    """The equation that makes a value, and its operands, if there is one."""
    return makers.get(value, (None, ())) if isinstance(value, int) else (None, ())


def _columns(operands: Operands, makers: Makers) -> Operands:
    """The columns that the indices of a gather or scatter are put together from, each of one number a row."""
    eqn, columns = _made(operands[1], makers)
    if eqn is None or eqn.primitive.name != "concatenate":
        return ()
    shapes = list(map(_shape, eqn.invars))
    is_last = eqn.params["dimension"] == len(shapes[0]) - 1
    return columns if is_last and {shape[-1] for shape in shapes} == {1} else ()


def _rows(eqn: JaxprEqn, columns: Mapping[int, int | Literal], makers: Makers) -> dict[int, int]:
    """Dimensions of the operand of which every row has an index, and those of the indices that go with them: some are
    named as such already (by `vmap`), of others the index counts.

    Of a diagonal all columns count; the last one is the label.
    """
    shape, index_shape = map(_shape, eqn.invars[:2])
    dimensions = jax_compat.indexed(eqn.params)
    rows = dict(zip(dimensions.batch, dimensions.index_batch, strict=True))
    for d, column in columns.items():
        along = counted_along(column, makers)
        if along is not None and along not in rows.values() and shape[d] == index_shape[along]:
            rows[d] = along
    return rows


def counted_along(value: int | Literal, makers: Makers) -> int | None:
    """The dimension along which integers count 0, 1, 2, ..; None if they do not."""
    eqn, operands = _made(value, makers)
    if eqn is None:
        return None
    match eqn.primitive.name:
        case "iota":
            return eqn.params["dimension"]
        case "convert_element_type":
            return counted_along(operands[0], makers)
        case "reshape":
            return _reshaped(eqn, counted_along(operands[0], makers))
        case "broadcast_in_dim":
            return _broadcast(eqn, counted_along(operands[0], makers))
        case _:
            return None


def _reshaped(eqn: JaxprEqn, along: int | None) -> int | None:
    """Where a dimension is after a reshape; None if it was put together with others, or taken apart."""
    if along is None:
        return None
    old, new = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    same = (d for d, n in enumerate(new) if n == old[along] and math.prod(new[:d]) == math.prod(old[:along]))
    return next(same, None)


def _broadcast(eqn: JaxprEqn, along: int | None) -> int | None:
    """Where a dimension is after a broadcast; None if it was repeated."""
    if along is None:
        return None
    place = eqn.params["broadcast_dimensions"][along]
    return place if _shape(eqn.invars[0])[along] == eqn.params["shape"][place] else None


def is_below_zero(value: int | Literal, makers: Makers) -> bool:
    """Whether a condition asks if counted numbers are below zero: it never holds. JAX asks, to wrap indices around."""
    eqn, operands = _made(value, makers)
    zero = operands[1] if eqn is not None and eqn.primitive.name == "lt" else None
    return isinstance(zero, Literal) and not np.any(zero.val) and counted_along(operands[0], makers) is not None


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape
