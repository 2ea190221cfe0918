"""Windows of nodes: a part of a result is computed from the parts of the operands that it needs, down to the inputs.

A slice is no operator of a muGraph. `restrict` makes a node over a new, shorter axis instead: pointwise operators,
contractions and reductions over other axes go through, an index gets an offset, and an input becomes another input,
which is a window of the same JAX value (`NodeBuilder.windows`). Windows that overlap are independent inputs for the
search and the verifier: an equality that holds for any values of both holds for these.

A concatenation is a placeholder (`Concat`) until its windows are made; concatenation.py resolves the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from mirage_jax.jaxpr_frontend.partition.reasons import Code, NotExpressible
from mirage_jax.jaxpr_frontend.translate.axes import AxisKey
from mirage_jax.jaxpr_frontend.translate.builder import (
    AxisValue,
    Concat,
    ConcatSegment,
    InputSlice,
    Node,
    NodeBuilder,
    Use,
)

type Keys = tuple[AxisKey, ...]


def sliced(b: NodeBuilder, x: AxisValue, dimension: int, start: int, size: int) -> AxisValue:
    """``x[.., start : start + size, ..]``."""
    dims = list(b.dims(x))
    node, group = narrowed(b, x.node, dims[dimension], start, size)
    dims = list(b.axes.resolve_dims(tuple(dims)))
    dims[dimension] = ()
    # Axes along which x is broadcast may have become the window's since; they get other names.
    own = {*group, *(b.axes.resolve(b.nodes[node].axes) if node is not None else ())}
    dims = [tuple(b.axes.copy_of(k, own) if k in group else k for k in dim) for dim in dims]
    dims[dimension] = group
    b.axes.keep_apart(itertools.chain(*dims))
    return replace(x, dims=tuple(dims), node=node)


def narrowed(b: NodeBuilder, node: int | None, group: Keys, start: int, size: int) -> tuple[int | None, Keys]:
    """A node restricted to a range of the index that the axes `group` form, major first; the group afterwards."""
    group = b.axes.resolve(group)
    if size == _extent(b, group):
        return node, group
    first, *rest = group
    stride = _extent(b, rest)
    is_whole = start % stride == 0 and size % stride == 0
    if not is_whole and start // stride != (start + size - 1) // stride:
        sizes = " x ".join(str(b.axes.extent(k)) for k in group)
        raise NotExpressible(Code.LAYOUT, f"the range {start}:{start + size} does not divide along {sizes}")
    begin, length = start // stride, max(size // stride, 1)
    if node is not None and first in b.axes.resolve(b.nodes[node].axes):
        node, window = restrict(b, node, first, begin, length)
    else:
        window = b.axes.dimension(length)
    if is_whole:
        return node, b.axes.resolve((*window, *rest))
    return narrowed(b, node, tuple(rest), start % stride, size)


def restrict(b: NodeBuilder, n: int, key: AxisKey, start: int, size: int) -> tuple[int, Keys]:
    """Node n restricted to a range of one of its axes, and the axis that it has instead (none for one element)."""
    known = b.versions.setdefault((n, start, size), [])
    for axis, node, window in known:
        if b.axes.resolve((axis,)) == (key,):
            return node, b.axes.resolve(window)
    node, window = _restricted(b, n, key, start, size)
    known.append((key, node, window))
    b.origins.setdefault(node, b.origins.get(n, n))
    b.asked_by.setdefault(node, b.equation)
    return node, b.axes.resolve(window)


def _restricted(b: NodeBuilder, n: int, key: AxisKey, start: int, size: int) -> tuple[int, Keys]:
    node = b.nodes[n]
    if n in b.concats:
        return _restricted_concat(b, n, key, start, size)
    if node.op == "input":
        return _restricted_input(b, n, key, start, size)
    if node.op == "iota":
        return _restricted_iota(b, n, key, start, size)
    window = b.axes.dimension(size)
    uses = seen(b, node.uses, key, start, size, window)
    return b.append(node.op, uses, b.axes.resolve(node.over), node.dtype, **dict(node.attrs)), window


def seen(b: NodeBuilder, uses: Sequence[Use], key: AxisKey, start: int, size: int, window: Keys) -> tuple[Use, ...]:
    """Restrict the operands of one operator along an axis, which is called `window` from then on."""
    names = dict.fromkeys(itertools.chain(*(b.axes.resolve(use.axes) for use in uses)))
    b.axes.keep_apart((*(k for k in names if k != key), *window))
    restricted = [_seen(b, use, key, start, size, window) for use in uses]
    return tuple(replace(use, axes=b.axes.resolve(use.axes)) for use in restricted)


def _seen(b: NodeBuilder, use: Use, key: AxisKey, start: int, size: int, window: Keys) -> Use:
    axes = b.axes.resolve(use.axes)
    if key not in axes:
        return use
    stored = b.nodes[use.node].axes
    node, inner = restrict(b, use.node, b.axes.resolve(stored)[axes.index(key)], start, size)
    view = b.axes.unify([window], [inner])
    inner = b.axes.resolve(inner)
    names = dict(zip(b.axes.resolve(stored), b.axes.resolve(use.axes), strict=True))
    renamed = (view.get(k, k) if k in inner else names[k] for k in b.axes.resolve(b.nodes[node].axes))
    return Use(node, tuple(renamed), use.dtype)


def alias(b: NodeBuilder, use: Use) -> int:
    """Make a node that is another one under other names; concatenation.py sees through it."""
    b.axes.keep_apart(use.axes)
    return b.append("affine", (use,), (), use.dtype)


def _restricted_input(b: NodeBuilder, n: int, key: AxisKey, start: int, size: int) -> tuple[int, Keys]:
    node = b.nodes[n]
    axes, window = b.axes.resolve(node.axes), b.axes.dimension(size)
    shape = tuple(map(b.axes.extent, axes))
    starts = tuple(start if k == key else 0 for k in axes)
    sizes = tuple(size if k == key else extent for k, extent in zip(axes, shape, strict=True))
    kept = tuple(itertools.chain(*(window if k == key else (k,) for k in axes)))
    b.axes.keep_apart(kept)
    b.nodes.append(Node("input", (), kept, (), (), node.dtype))
    b.windows[len(b.nodes) - 1] = InputSlice(n, shape, starts, sizes)
    return len(b.nodes) - 1, window


def _restricted_iota(b: NodeBuilder, n: int, key: AxisKey, start: int, size: int) -> tuple[int, Keys]:
    node = b.nodes[n]
    major, *minor = b.axes.resolve(node.over)
    if minor:  # i = stride * i0 + i1
        parts = [b.append("iota", (), keys, node.dtype) for keys in ((major,), tuple(minor))]
        uses = Use(parts[0], (major,), node.dtype), Use(parts[1], tuple(minor), node.dtype)
        total = b.append("add", uses, (), node.dtype, ca=Fraction(_extent(b, minor)))
        return restrict(b, total, key, start, size)
    if size == 1:
        return b.append("const", (), (), node.dtype, value=Fraction(start)), ()
    window = b.axes.dimension(size)
    index = b.append("iota", (), window, node.dtype)
    if start:
        index = b.append("affine", (Use(index, window, node.dtype),), (), node.dtype, offset=Fraction(start))
    return index, window


# --- concatenations


def concatenated(b: NodeBuilder, values: Sequence[AxisValue], dimension: int, dtype: str) -> AxisValue:
    """Values one after the other along a dimension; they have the same shape otherwise."""
    values = list(map(b.materialize, values))
    common = list(b.dims(values[0]))
    groups, views = [common[dimension]], [{}]
    for v in values[1:]:
        common[dimension] = ()
        views.append(b.join(common, v.dims))
        groups.append(common[dimension])
    uses = [b.use(v, b.axes.resolve_view(view)) for v, view in zip(values, views, strict=True)]
    groups = [b.axes.resolve(group) for group in groups]
    sizes = [_extent(b, group) for group in groups]
    parts = tuple(ConcatSegment(alias(b, u), g, n) for u, g, n in zip(uses, groups, sizes, strict=True))
    axis = (b.axes.fresh(sum(sizes)),)
    common[dimension] = axis
    return b.value(b.axes.resolve_dims(tuple(common)), dtype, add_concat(b, Concat(axis, parts, b.equation), dtype))


def add_concat(b: NodeBuilder, concat: Concat, dtype: str) -> int:
    """A placeholder for a concatenation."""
    others: dict[AxisKey, None] = {}
    for part in concat.parts:
        group = b.axes.resolve(part.group)
        b.axes.keep_apart(dict.fromkeys((*b.axes.resolve(b.nodes[part.node].axes), *group)))
        others |= dict.fromkeys(k for k in b.axes.resolve(b.nodes[part.node].axes) if k not in group)
    axes = (*others, *(k for k in b.axes.resolve(concat.axis) if k not in others))
    b.axes.keep_apart(axes)
    b.nodes.append(Node("concat", (), axes, (), (), dtype))
    b.concats[len(b.nodes) - 1] = concat
    return len(b.nodes) - 1


def aligned(b: NodeBuilder, n: int) -> Concat:
    """Align a concatenation: if its axis was divided, divide the axes of its parts.

    Afterwards the group of every part ends with the minor axes of the concatenation.
    """
    while True:
        concat = b.concats[n]
        major, *minor = b.axes.resolve(concat.axis)
        if not minor:
            return concat
        stride = _extent(b, minor)
        if any(part.size % stride for part in concat.parts):
            sizes = ", ".join(str(part.size) for part in concat.parts)
            why = f"a concatenation of {sizes} is divided into rows of {stride}"
            raise NotExpressible(Code.LAYOUT, why, concat.equation)
        parts = tuple(_aligned(b, part, tuple(minor), part.size // stride) for part in concat.parts)
        b.concats[n] = replace(concat, parts=parts)
        if b.axes.resolve(concat.axis) == (major, *minor):
            return b.concats[n]


def _aligned(b: NodeBuilder, part: ConcatSegment, minor: Keys, size: int) -> ConcatSegment:
    group = b.axes.resolve(part.group)
    if group[-len(minor) :] == minor:
        return part
    major = b.axes.dimension(size)
    stored = b.nodes[part.node].axes
    b.axes.keep_apart((*(k for k in b.axes.resolve(stored) if k not in group), *major, *minor))
    view = b.axes.unify([(*major, *minor)], [group])
    own = b.axes.resolve(stored)
    node = alias(b, Use(part.node, tuple(view.get(k, k) for k in own), b.nodes[part.node].dtype))
    return ConcatSegment(node, b.axes.resolve((*major, *minor)), part.size)


def _restricted_concat(b: NodeBuilder, n: int, key: AxisKey, start: int, size: int) -> tuple[int, Keys]:
    concat, dtype = aligned(b, n), b.nodes[n].dtype
    major, *minor = b.axes.resolve(concat.axis)
    if key == major:
        return _picked(b, concat, tuple(minor), start, size, dtype)
    window, extent = b.axes.dimension(size), b.axes.extent(key)
    axis = tuple(itertools.chain(*(window if k == key else (k,) for k in (major, *minor))))
    parts: list[ConcatSegment] = []
    for part in concat.parts:
        own = b.axes.resolve(b.nodes[part.node].axes)
        (use,) = seen(b, [Use(part.node, own, dtype)], key, start, size, window)
        group = b.axes.resolve(part.group)
        kept = tuple(itertools.chain(*(window if k == key else (k,) for k in group)))
        length = part.size // extent * size if key in group else part.size
        parts.append(ConcatSegment(alias(b, use), kept, length))
    return add_concat(b, Concat(axis, tuple(parts), concat.equation), dtype), window


def _picked(b: NodeBuilder, concat: Concat, minor: Keys, start: int, size: int, dtype: str) -> tuple[int, Keys]:
    """The parts, or the part, that a range of the axis falls on."""
    stride, at = _extent(b, minor), 0
    parts: list[ConcatSegment] = []
    for part in concat.parts:
        length = part.size // stride
        low, high = max(start - at, 0), min(start + size - at, length)
        at += length
        if low < high:
            node, group = narrowed(b, part.node, part.group, low * stride, (high - low) * stride)
            assert node is not None
            parts.append(ConcatSegment(node, group, (high - low) * stride))
    if len(parts) == 1:
        (part,) = parts
        group = b.axes.resolve(part.group)
        return part.node, group[: len(group) - len(b.axes.resolve(minor))]
    window = b.axes.dimension(size)
    return add_concat(b, Concat((*window, *minor), tuple(parts), concat.equation), dtype), window


def _extent(b: NodeBuilder, keys: Sequence[AxisKey]) -> int:
    return math.prod(map(b.axes.extent, b.axes.resolve(keys)))
