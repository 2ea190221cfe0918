"""One element of every row, at an index that is data: `take_along_axis` of logits at their labels, and its transpose.

    x[label]                     ->  sum over n of where(n == label, x[n], 0)
    zeros.at[label].add(y)       ->  where(n == label, y, 0)

The sum is taken as far up as possible: pointwise operators are applied to the element that it picks. So of
``log_softmax(h @ w)`` only a logit is picked, in the loop that makes logits anyway. An index out of range picks zero:
what JAX fills in there instead is put in outside of the region (`jax_compat.as_fill_apart`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.partition.reasons import Code, NotExpressible
from mirage_jax.jaxpr_frontend.translate.axes import AxisKey
from mirage_jax.jaxpr_frontend.translate.builder import AxisValue, NodeBuilder, Use
from mirage_jax.jaxpr_frontend.translate.slicing import sliced

type Keys = tuple[AxisKey, ...]
type Places = list[tuple[int | None, int | None]]  # for each dimension of a result one of the operand, of the indices


def picked(b: NodeBuilder, params: Mapping[str, Any], x: AxisValue, index: AxisValue, rank: int) -> AxisValue:
    """`gather` of few elements of every row, or of the same one of all rows if the index is a literal."""
    if index.is_constant and b.axes.size(index.dims) == (1,):
        return _slice(b, params, x, int(index.offset))
    if params["mode"].name == "FILL_OR_DROP":
        raise NotExpressible(Code.NON_FINITE, "an index out of range would pick NaN")
    shape = b.axes.size(x.dims)
    axis, places = _places(b, params, shape, index)
    windows = [d for d, n in places if d is not None and n is None]
    if x.node is None or b.nodes[x.node].op == "input" or _are_cut(params, shape, windows):
        raise NotExpressible(Code.UNSUPPORTED_PRIMITIVE, "an index into data")
    index = b.materialize(_in_range(b, params, index, shape[axis]))
    together = _paired(places)
    view = b.axes.unify([x.dims[d] for d in together], [index.dims[n] for n in together.values()])
    label, dims, seen = b.use(index, view), b.dims(x), b.axes.resolve_dims(index.dims)
    out = tuple(dims[d] if d is not None else seen[n or 0] for d, n in places)
    b.axes.keep_apart(dict.fromkeys(itertools.chain(*dims, *out)))
    return replace(x, dims=out, node=_picked(b, x.node, dims[axis], label))


def put(
    b: NodeBuilder, params: Mapping[str, Any], x: AxisValue, index: AxisValue, y: AxisValue, dtype: str
) -> AxisValue:
    """`scatter-add` of one element into every row."""
    dimensions, shape = jax_compat.indexed(params), b.axes.size(x.dims)
    is_first = index.is_constant and index.offset == 0 and b.axes.size(index.dims) == (1,)
    if is_first and all(shape[d] == 1 for d in dimensions.collapsed):
        return b.add(x, replace(y, dims=_inserted(y.dims, dimensions.collapsed, len(shape))), dtype)
    axis, places = _places(b, params, shape, index)
    updates = {d: o for o, (d, _) in enumerate(places) if d is not None}
    _check_one_element(b, y, updates, shape)
    label = _like(_in_range(b, params, index, shape[axis]), _paired(places), len(shape))
    y = _like(y, updates, len(shape))
    here = b.plain("eq", (_position(b, shape, axis), label), "bool")
    added = b.plain("where", (here, y, b.constant(Fraction(0), dtype)), dtype)
    return added if x.is_constant and x.offset == 0 else b.add(x, added, dtype)


def _check_one_element(b: NodeBuilder, y: AxisValue, updates: Mapping[int, int], shape: tuple[int, ...]) -> None:
    """Refuse updates of several elements of a row, or of less than all rows."""
    is_several = any(dim for o, dim in enumerate(y.dims) if o not in updates.values())
    if is_several or any(b.axes.size(y.dims)[o] != shape[d] for d, o in updates.items()):
        raise NotExpressible(Code.PARAMETERS, "several elements of a row")


def _paired(places: Places) -> dict[int, int]:
    """Dimensions of the operand that go with one of the indices."""
    return {d: n for d, n in places if d is not None and n is not None}


def _are_cut(params: Mapping[str, Any], shape: tuple[int, ...], windows: Sequence[int]) -> bool:
    """Whether less than all of some of these dimensions is read."""
    return any(params["slice_sizes"][d] != shape[d] for d in windows)


def _like(v: AxisValue, of: Mapping[int, int], rank: int) -> AxisValue:
    """A value with the dimensions of the operand: number d is its own dimension `of[d]`, or new."""
    return replace(v, dims=tuple(v.dims[of[d]] if d in of else () for d in range(rank)))


def _position(b: NodeBuilder, shape: tuple[int, ...], axis: int) -> AxisValue:
    """The index along one dimension."""
    dims = tuple(b.axes.dimension(n) if d == axis else () for d, n in enumerate(shape))
    return b.iota(dims, axis, "i32") if dims[axis] else b.constant(Fraction(0), "i32", dims)


def _places(b: NodeBuilder, params: Mapping[str, Any], shape: tuple[int, ...], index: AxisValue) -> tuple[int, Places]:
    """The axis that is indexed, and where dimensions come from. Refuses any other index than one into every row."""
    dimensions, index_shape = jax_compat.indexed(params), b.axes.size(index.dims)
    if not dimensions.is_few(shape, index_shape):
        raise NotExpressible(Code.UNSUPPORTED_PRIMITIVE, "an index into data")
    return dimensions.mapped[0], dimensions.places(len(shape), len(index_shape))


def _in_range(b: NodeBuilder, params: Mapping[str, Any], index: AxisValue, extent: int) -> AxisValue:
    if params["mode"].name != "CLIP":
        return index  # or it is said to be in range, or nothing is added outside of it
    index = b.plain("maximum", (index, b.constant(Fraction(0), index.dtype)), index.dtype)
    return b.plain("minimum", (index, b.constant(Fraction(extent - 1), index.dtype)), index.dtype)


def _slice(b: NodeBuilder, params: Mapping[str, Any], x: AxisValue, at: int) -> AxisValue:
    """The same element of all rows."""
    dimensions, shape = jax_compat.indexed(params), b.axes.size(x.dims)
    axis, *_ = dimensions.collapsed
    is_row = tuple(dimensions.collapsed) == tuple(dimensions.mapped) == (axis,)
    if not is_row or _without(params["slice_sizes"], axis) != _without(shape, axis) or not 0 <= at < shape[axis]:
        raise NotExpressible(Code.PARAMETERS, "a slice that is no whole row, or is out of range")
    row = sliced(b, x, axis, at, 1)
    return replace(row, dims=_without(row.dims, axis))


def _without[T](items: Sequence[T], n: int) -> tuple[T, ...]:
    return (*items[:n], *items[n + 1 :])


def _inserted(dims: tuple[Keys, ...], places: tuple[int, ...], rank: int) -> tuple[Keys, ...]:
    rest = iter(dims)
    return tuple(() if d in places else next(rest) for d in range(rank))


def _picked(b: NodeBuilder, n: int, group: Keys, label: Use) -> int:
    """Node n at index `label` along the axes `group`."""
    node, axes = b.nodes[n], b.axes.resolve(b.nodes[n].axes)
    if not set(group) & set(axes):
        return n
    if node.op == "iota" and b.axes.resolve(node.over) == group:
        return b.append("affine", (label,), (), node.dtype)
    if node.uses and not node.over and all(_goes_through(b, use, group) for use in node.uses):
        uses = tuple(_use(b, _picked(b, use.node, group, label), use.dtype) for use in node.uses)
        return b.append(node.op, uses, (), node.dtype, **dict(node.attrs))
    index, zero = b.append("iota", (), group, "i32"), b.append("const", (), (), node.dtype, value=Fraction(0))
    here = b.append("eq", (Use(index, group, "i32"), label), (), "bool")
    operands = _use(b, here, "bool"), Use(n, axes, node.dtype), Use(zero, (), node.dtype)
    kept = b.append("where", operands, (), node.dtype)
    return b.append("sum", (_use(b, kept, node.dtype),), group, node.dtype)


def _use(b: NodeBuilder, n: int, dtype: str) -> Use:
    return Use(n, b.axes.resolve(b.nodes[n].axes), dtype)


def _goes_through(b: NodeBuilder, use: Use, group: Keys) -> bool:
    """Whether an operand has all axes of the group or none, under its own names."""
    own = b.axes.resolve(b.nodes[use.node].axes)
    return own == b.axes.resolve(use.axes) and len(set(group) & set(own)) in (0, len(group))
