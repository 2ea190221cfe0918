"""Resolves concatenations: results in segments, and reductions that are sums of segments.

A concatenation *cuts* its axis, and so do all results that have this axis. Where an axis that is cut is reduced, the
reduction is the sum of the reduced segments: ``[x, y] @ w -> x @ w[:k] + y @ w[k:]``. Where a result of the region has
such an axis, it leaves the region in segments, which the border joins. So no concatenation is left, and none of its
operands is copied. (A maximum over segments is refused: the search knows no online softmax with a maximum of maxima.)

Zeros in a segment (padding) are dropped: products with zeros and sums of zeros need no operators.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from mirage_jax.jaxpr_frontend.partition.reasons import Code, NotExpressible
from mirage_jax.jaxpr_frontend.translate.axes import AxisKey
from mirage_jax.jaxpr_frontend.translate.builder import ONE, ZERO, AxisValue, Node, NodeBuilder, Use
from mirage_jax.jaxpr_frontend.translate.slicing import aligned, restrict, seen
from mirage_jax.mugraph.graph import Attr

type Cuts = dict[AxisKey, frozenset[int]]  # axis -> where a new segment begins


@dataclass(frozen=True)
class Segments:
    """A value in segments, in row-major order of `grid`; dimensions of the segments are single axes of the value."""

    values: tuple[AxisValue, ...]
    grid: tuple[int, ...]


class Resolver:
    """Replaces the concatenations that values depend on, by new nodes."""

    def __init__(self, builder: NodeBuilder):
        self.b = builder
        self.known_cuts: dict[int, Cuts] = {}
        self.known: dict[int, Use] = {}

    def segments(self, value: AxisValue) -> Segments:
        """A value as segments that depend on no concatenation."""
        axes = tuple(itertools.chain(*self.b.dims(value)))
        start = replace(value, dims=tuple((k,) for k in axes))
        if value.node is None:
            return Segments((start,), (1,) * len(axes))
        cuts = self.cuts(value.node)
        axes = self.b.axes.resolve(axes)  # cuts may have divided some
        values, grid = [replace(value, dims=tuple((k,) for k in axes))], []
        for d, key in enumerate(axes):
            segments = _segments(cuts.get(key, frozenset()), self.b.axes.extent(key))
            values = [self._part(v, d, key, segment) for v in values for segment in segments]
            grid.append(len(segments))
        return Segments(tuple(map(self._resolved, values)), tuple(grid))

    def _part(self, value: AxisValue, d: int, key: AxisKey, segment: tuple[int, int]) -> AxisValue:
        start, size = segment
        if size == self.b.axes.extent(key):
            return value
        assert value.node is not None
        self.b.equation = self._to_blame(value.node, key)
        is_read = key in self.b.axes.resolve(self.b.nodes[value.node].axes)
        node, window = restrict(self.b, value.node, key, start, size)
        dims = list(self.b.dims(value))
        dims[d] = window
        taken = {k for e, dim in enumerate(dims) if (e == d) == is_read for k in dim}
        for e in (e for e in range(len(dims)) if (e == d) != is_read):  # the node does not read these, or not this one
            dims[e] = self._apart(dims[e], taken)
        self.b.axes.keep_apart(itertools.chain(*dims))
        return replace(value, node=node, dims=tuple(dims))

    def _apart(self, dim: Sequence[AxisKey], taken: set[AxisKey]) -> tuple[AxisKey, ...]:
        """A dimension along which a value is the same, under names that are not taken; they are taken then."""
        names: list[AxisKey] = []
        for key in dim:
            names.append(self.b.axes.copy_of(key, taken) if key in taken else key)
            taken.add(names[-1])
        return tuple(names)

    def _resolved(self, value: AxisValue) -> AxisValue:
        """The same value of a node that is no alias and depends on none."""
        assert value.node is not None
        b, use = self.b, self.node(value.node)
        names = dict(zip(b.axes.resolve(use.axes), b.axes.resolve(b.nodes[use.node].axes), strict=True))
        if (constant := _constant(b.nodes[use.node])) is not None:
            return b.constant(value.scale * constant + value.offset, value.dtype, b.dims(value))
        keys = list(itertools.chain(*b.dims(value)))
        if len({names.get(k, k) for k in keys}) < len(keys):  # a name of the node is one of a broadcast axis here
            return replace(value, node=b.append("affine", (use,), (), use.dtype))
        return replace(value, node=use.node, dims=tuple(tuple(names.get(k, k) for k in dim) for dim in b.dims(value)))

    # --- where axes are cut

    def cuts(self, n: int) -> Cuts:
        """Where the axes of a node are cut, under its own names."""
        if n not in self.known_cuts:
            self.known_cuts[n] = self._concat_cuts(n) if n in self.b.concats else self._cuts(self.b.nodes[n])
        out: Cuts = {}
        for key, bounds in self.known_cuts[n].items():
            major, *minor = self.b.axes.resolve((key,))
            stride = math.prod(map(self.b.axes.extent, minor))
            if any(at % stride for at in bounds):
                raise NotExpressible(Code.LAYOUT, f"segments of an axis begin inside of rows of {stride}")
            out[major] = out.get(major, frozenset()) | {at // stride for at in bounds}
        return out

    def _cuts(self, node: Node) -> Cuts:
        out = self._seen_cuts(node.uses)
        return {k: bounds for k, bounds in out.items() if k not in self.b.axes.resolve(node.over)}

    def _seen_cuts(self, uses: Sequence[Use]) -> Cuts:
        out: Cuts = {}
        self._settle([use.node for use in uses])
        for use in uses:
            cuts = self.cuts(use.node)
            axes = zip(self.b.axes.resolve(use.axes), self.b.axes.resolve(self.b.nodes[use.node].axes), strict=True)
            for name, own in axes:
                if own in cuts:
                    out[name] = out.get(name, frozenset()) | cuts[own]
        return out

    def _settle(self, nodes: Sequence[int]) -> bool:
        """Finds out where axes are cut, which may divide axes of other nodes; whether it did."""
        before = [self.b.axes.resolve(self.b.nodes[n].axes) for n in nodes]
        for n in nodes:
            self.cuts(n)
        return before != [self.b.axes.resolve(self.b.nodes[n].axes) for n in nodes]

    def _concat_cuts(self, n: int) -> Cuts:
        while self._settle([part.node for part in aligned(self.b, n).parts]):
            pass
        concat = self.b.concats[n]
        major, *minor = self.b.axes.resolve(concat.axis)
        stride, at = math.prod(map(self.b.axes.extent, minor)), 0
        out: Cuts = {}
        for part in concat.parts:
            group = self.b.axes.resolve(part.group)
            for key, bounds in self.cuts(part.node).items():
                if key not in group or key in minor:
                    out[key] = out.get(key, frozenset()) | bounds
                elif key == group[0]:
                    inner = math.prod(map(self.b.axes.extent, group[1 : len(group) - len(minor)]))
                    out[major] = out.get(major, frozenset()) | {at + bound * inner for bound in bounds}
                else:  # rows in segments: the concatenation is one of rows
                    row = math.prod(map(self.b.axes.extent, group[group.index(key) : len(group) - len(minor)]))
                    self.b.axes.split(major, self.b.axes.extent(major) // row)
                    return self._concat_cuts(n)
            if at:
                out[major] = out.get(major, frozenset()) | {at}
            at += part.size // stride
        return out

    def to_blame(self, value: AxisValue) -> int:
        """The last equation that cuts a value."""
        assert value.node is not None
        return max(self._to_blame(value.node, key) for key in self.cuts(value.node))

    def _to_blame(self, n: int, key: AxisKey) -> int:
        """The last equation that cuts an axis of a node, or one that it reduces; -1 for none."""
        if n in self.b.concats:
            concat = self.b.concats[n]
            if key in self.b.axes.resolve(concat.axis):
                return concat.equation
            return max(self._to_blame(part.node, key) for part in concat.parts)
        found = -1
        for use in self.b.nodes[n].uses:
            seen_as, own = self.b.axes.resolve(use.axes), self.b.axes.resolve(self.b.nodes[use.node].axes)
            if key in seen_as:
                found = max(found, self._to_blame(use.node, own[seen_as.index(key)]))
        return found

    # --- nodes without concatenations

    def node(self, n: int) -> Use:
        """Make a node without concatenations, under the names of n, whose axes must not be cut any more."""
        if n not in self.known:
            self.known[n] = self._node(n)
            self.b.origins.setdefault(self.known[n].node, self.b.origins.get(n, n))
        return self._renewed(self.known[n])

    def _node(self, n: int) -> Use:
        b, node = self.b, self.b.nodes[n]
        if n in b.concats:
            raise NotExpressible(Code.LAYOUT, "the axis of a concatenation is cut", b.concats[n].equation)
        own = Use(n, b.axes.resolve(node.axes), node.dtype)
        if not node.uses:
            return own
        cuts = self._seen_cuts(node.uses)
        if cut := next((k for k in b.axes.resolve(node.over) if k in cuts), None):
            return self._joined(n, cut, _segments(cuts[cut], b.axes.extent(cut)))
        uses = tuple(map(self._use, node.uses))
        if tuple(map(self._renewed, uses)) == tuple(map(self._renewed, node.uses)) and not _is_alias(node):
            return self._renewed(own)
        return self._made(node.op, uses, b.axes.resolve(node.over), node.dtype, dict(node.attrs))

    def _renewed(self, use: Use) -> Use:
        """The same under names that are not outdated: restricting an operand may merge axes of another."""
        return replace(use, axes=self.b.axes.resolve(use.axes))

    def _use(self, use: Use) -> Use:
        """An operand without concatenations, as its operator sees it."""
        inner = self.node(use.node)
        own = self.b.axes.resolve(self.b.nodes[use.node].axes)
        names = dict(zip(own, self.b.axes.resolve(use.axes), strict=True))
        return Use(inner.node, tuple(names[k] for k in self.b.axes.resolve(inner.axes)), use.dtype)

    def _joined(self, n: int, key: AxisKey, segments: Sequence[tuple[int, int]]) -> Use:
        """The sum of the reductions of each segment of an axis."""
        b, node = self.b, self.b.nodes[n]
        b.equation = self._to_blame(n, key)
        if node.op == "max":
            why = "a maximum over a concatenation, which is no shift of a softmax"
            raise NotExpressible(Code.LAYOUT, why, b.equation)
        total: Use | None = None
        for start, size in segments:
            window = b.axes.dimension(size)
            uses = seen(b, node.uses, key, start, size, window)
            over = tuple(itertools.chain(*(window if k == key else (k,) for k in b.axes.resolve(node.over))))
            part = b.append(node.op, uses, b.axes.resolve(over), node.dtype, **dict(node.attrs))
            b.origins[part] = b.origins.get(n, n)
            use = self.node(part)
            total = use if total is None else self._made("add", (total, use), (), node.dtype, {})
        assert total is not None
        return total

    def _made(
        self, op: str, uses: tuple[Use, ...], over: tuple[AxisKey, ...], dtype: str, attrs: Mapping[str, Attr]
    ) -> Use:
        """A new node, unless constants make it simpler; `over` may have axes that the operands have not."""
        uses, over = tuple(map(self._renewed, uses)), self.b.axes.resolve(over)
        if op in ("sum", "dot", "max"):
            return self._reduction(op, uses, over, dtype)
        number: dict[str, Any] = {"scale": ONE, "offset": ZERO, "ca": ONE, "cb": ONE, **attrs}
        match op, [_constant(self.b.nodes[use.node]) for use in uses]:
            case "affine", [None]:
                return self._affine(uses[0], number["scale"], number["offset"], dtype)
            case "affine", [Fraction() as c]:
                return self._constant(number["scale"] * c + number["offset"], dtype)
            case "add", [Fraction() as c, _]:
                shifted = {"scale": number["cb"], "offset": number["ca"] * c}
                return self._made("affine", uses[1:], (), dtype, shifted)
            case "add", [None, Fraction() as c]:
                return self._affine(uses[0], number["ca"], number["cb"] * c, dtype)
            case (("mul" | "div"), [Fraction() as c, _]) if c == 0:
                return self._constant(ZERO, dtype)
            case "mul", [Fraction() as c, _]:
                return self._made("affine", uses[1:], (), dtype, {"scale": c})
            case "mul", [None, Fraction()]:
                return self._made("mul", uses[::-1], (), dtype, {})
            case _:
                return self._append(op, uses, over, dtype, attrs)

    def _reduction(self, op: str, uses: tuple[Use, ...], over: tuple[AxisKey, ...], dtype: str) -> Use:
        """A reduction whose operands may have lost some of its axes."""
        present = set(itertools.chain(*(use.axes for use in uses)))
        lost = [k for k in over if k not in present]
        over = tuple(k for k in over if k in present)
        count = Fraction(math.prod(map(self.b.axes.extent, lost))) if op != "max" else ONE
        if lost:
            return self._made("affine", (self._reduction(op, uses, over, dtype),), (), dtype, {"scale": count})
        if op == "dot":
            return self._dot(uses, over, dtype)
        return self._append(op, uses, over, dtype, {}) if over else replace(uses[0], dtype=dtype)

    def _dot(self, uses: tuple[Use, ...], over: tuple[AxisKey, ...], dtype: str) -> Use:
        """A contraction; an axis that only one operand has is summed before they meet."""
        shared = tuple(k for k in over if all(k in use.axes for use in uses))
        summed: list[Use] = []
        for use in uses:
            alone = tuple(k for k in over if k in use.axes and k not in shared)
            summed.append(self._made("sum", (use,), alone, use.dtype, {}) if alone else use)
        if shared:
            return self._append("dot", tuple(summed), shared, dtype, {})
        return self._made("mul", tuple(summed), (), dtype, {})

    def _affine(self, x: Use, scale: Fraction, offset: Fraction, dtype: str) -> Use:
        if scale == 0:
            raise NotExpressible(Code.NON_FINITE, "a product with zero, which is no zero for every operand")
        if (scale, offset) == (ONE, ZERO):
            return replace(x, dtype=dtype)
        return self._append("affine", (x,), (), dtype, {"scale": scale, "offset": offset})

    def _constant(self, value: Fraction, dtype: str) -> Use:
        return Use(self.b.append("const", (), (), dtype, value=value), (), dtype)

    def _append(
        self, op: str, uses: tuple[Use, ...], over: tuple[AxisKey, ...], dtype: str, attrs: Mapping[str, Attr]
    ) -> Use:
        self.b.axes.keep_apart(dict.fromkeys(itertools.chain(*(use.axes for use in uses))))
        n = self.b.append(op, uses, over, dtype, **attrs)
        return Use(n, self.b.axes.resolve(self.b.nodes[n].axes), dtype)


def _constant(node: Node) -> Fraction | None:
    value = dict(node.attrs)["value"] if node.op == "const" else None
    assert value is None or isinstance(value, Fraction)
    return value


def _is_alias(node: Node) -> bool:
    return node.op == "affine" and not node.attrs


def _segments(bounds: frozenset[int], extent: int) -> list[tuple[int, int]]:
    """Start and size of the segments of an axis."""
    edges = [0, *sorted(bounds), extent]
    return [(low, high - low) for low, high in itertools.pairwise(edges)]
