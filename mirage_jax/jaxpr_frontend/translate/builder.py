"""Values over named axes, and the builder that turns operations on them into nodes of a muGraph.

A `AxisValue` is ``scale * node + offset`` seen through JAX dimensions. Scalars ride along and land in the next operator
that takes them for free (OPERATORS: pointwise functions act on ``scale * x + offset``, `add` on ``ca * x + cb * y``),
so a division by a literal, a mean or an epsilon costs no node. A node depends on *its* axes only; dimensions that are
merely broadcast have axes that the node does not know.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from mirage_jax.jaxpr_frontend.partition.reasons import Code, NotExpressible
from mirage_jax.jaxpr_frontend.translate.axes import AxisKey, AxisTable, Dims, View
from mirage_jax.mugraph.dtypes import FLOATS, holds, lowest, numpy_dtype
from mirage_jax.mugraph.graph import Attr
from mirage_jax.mugraph.passes.float16_range import FLOAT16, LEAST_SCALE
from mirage_jax.mugraph.passes.sentinels import HIGHEST_SENTINEL

ONE, ZERO = Fraction(1), Fraction(0)


@dataclass(frozen=True, slots=True)
class Use:
    """A node as an operator sees it: its axes under these names, its elements as this dtype."""

    node: int
    axes: tuple[AxisKey, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Node:
    """An input (`op` is "input") or one elementary operator; `over` are the axes that it reduces or counts."""

    op: str
    uses: tuple[Use, ...]
    axes: tuple[AxisKey, ...]
    over: tuple[AxisKey, ...]
    attrs: tuple[tuple[str, Attr], ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class AxisValue:
    """``scale * node + offset``, of JAX dimensions `dims`. Without a node: the constant `offset`, or, if
    there is one, `special`, an infinity or NaN.
    """

    dims: Dims
    dtype: str
    node: int | None = None
    scale: Fraction = ONE
    offset: Fraction = ZERO
    special: float | None = None

    @property
    def is_neg_inf(self) -> bool:
        """Tell whether this is the constant -inf."""
        return self.special == -math.inf

    @property
    def is_constant(self) -> bool:
        """Tell whether this depends on no node."""
        return self.node is None

    @property
    def is_plain(self) -> bool:
        """Tell whether this is a node with no scale and offset."""
        return self.node is not None and self.scale == 1 and self.offset == 0


@dataclass(frozen=True, slots=True)
class ConcatSegment:
    """One part of a concatenation: a node, and the axes (major first) along which it is one of the parts."""

    node: int
    group: tuple[AxisKey, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Concat:
    """Parts one after the other along `axis` (several axes after a split, major first); they share all other axes."""

    axis: tuple[AxisKey, ...]
    parts: tuple[ConcatSegment, ...]
    equation: int  # position of the one that asks for it


@dataclass(frozen=True, slots=True)
class InputSlice:
    """Which part of the input `parent`, of this shape, another input is."""

    parent: int
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


MAX_EXPONENT = 8  # of a power that proofs take apart
NONNEGATIVE_OPERATORS = frozenset({"exp", "abs", "logistic"})
NONNEGATIVE_DTYPES = frozenset({"bool", "u8"})
SIGN_KEEPING_OPERATORS = frozenset({"add", "affine", "sum", "max", "mul", "dot", "div", "maximum", "minimum"})


def _fits_float16(scale: Fraction) -> bool:
    """Whether a number fits into float16 as its product with `scale` does: no larger, and at most 4 bits smaller."""
    return 1 <= abs(scale) <= 1 / LEAST_SCALE


def _node_dtype(dtype: str, scale: Fraction) -> str:
    """The type of a number whose product with `scale` the program has, in `dtype`."""
    return "f32" if dtype == FLOAT16 and not _fits_float16(scale) else dtype


def _is_nonnegative(number: Attr) -> bool:
    return isinstance(number, Fraction) and number >= 0


class NodeBuilder:
    """Nodes in order, and the table of their axes.

    Nodes of `concats` are placeholders, which `Resolver.segments` replaces before the graph is assembled; `windows`
    says of inputs that they are parts of others.
    """

    def __init__(self) -> None:
        self.axes = AxisTable()
        self.nodes: list[Node] = []
        self.concats: dict[int, Concat] = {}
        self.windows: dict[int, InputSlice] = {}
        self.versions: dict[tuple[int, int, int], list[tuple[AxisKey, int, tuple[AxisKey, ...]]]] = {}
        self.origins: dict[int, int] = {}  # node -> the node of the program of which it computes a part
        self.intervals: dict[int, tuple[Fraction, Fraction] | None] = {}  # node -> bounds, where `integers` asked
        self.nonnegative: dict[int, bool] = {}  # node -> is it for sure, where it was asked
        self.equation = 0  # position of the one that is being translated
        self.asked_by: dict[int, int] = {}  # part of a node -> position of the equation that needs it

    # --- values

    def dims(self, value: AxisValue) -> Dims:
        """Give the dimensions of a value under the present names of its axes."""
        return self.axes.resolve_dims(value.dims)

    def value(
        self, dims: Dims, dtype: str, node: int | None, scale: Fraction = ONE, offset: Fraction = ZERO
    ) -> AxisValue:
        """Make ``scale * node + offset`` of these dimensions."""
        self.axes.keep_apart(k for dim in dims for k in dim)
        return AxisValue(dims, dtype, node, scale, offset)

    def input(self, shape: Sequence[int], dtype: str) -> AxisValue:
        """Make an input of this shape, with new axes."""
        dims = tuple(map(self.axes.dimension, shape))
        axes = tuple(k for dim in dims for k in dim)
        self.nodes.append(Node("input", (), axes, (), (), dtype))
        return self.value(dims, dtype, len(self.nodes) - 1)

    def constant(self, value: Fraction | float, dtype: str, dims: Dims = ()) -> AxisValue:
        """An exact constant; a float is an infinity or NaN."""
        if isinstance(value, Fraction):
            return AxisValue(dims, dtype, None, ONE, value)
        return AxisValue(dims, dtype, special=value)

    def materialize(self, x: AxisValue) -> AxisValue:
        """The same value as a node of its own."""
        if x.is_plain:
            return x
        if x.special is not None:
            raise NotExpressible(Code.NON_FINITE, f"the constant {x.special}, where it is not a mask")
        elif x.is_constant:
            node = self.append("const", (), (), x.dtype, value=x.offset)
        elif (node := self._chosen(x)) is None:
            node = self.append("affine", (self.use(x, {}),), (), x.dtype, scale=x.scale, offset=x.offset)
        return self.value(x.dims, x.dtype, node)

    def _chosen(self, x: AxisValue) -> int | None:
        """``scale * mask + offset`` as a choice of two constants: no sum of others, in which it would round."""
        if (choice := self._choice(x)) is None:
            return None
        use, *values = choice
        constants = (self.append("const", (), (), x.dtype, value=x.scale * value + x.offset) for value in values)
        uses = (replace(use, dtype="bool"), *(Use(c, (), x.dtype) for c in constants))
        return self.append("where", uses, (), x.dtype)

    def _choice(self, x: AxisValue) -> tuple[Use, Fraction, Fraction] | None:
        """The mask that chooses the node of x from two constants, and these; None if it is no such node."""
        assert x.node is not None
        node = self.nodes[x.node]
        if node.op == "where" and all(self.nodes[u.node].op == "const" for u in node.uses[1:]):
            use, *others = node.uses
            yes, no = (value for u in others for _, value in self.nodes[u.node].attrs if isinstance(value, Fraction))
            return use, yes, no
        return (self.use(x, {}), ONE, ZERO) if node.dtype == "bool" else None

    def test_of_choice(self, x: AxisValue, test: Callable[[Fraction], bool]) -> AxisValue | None:
        """A test of a choice of two constants, from the mask that chose: ``where(m, 1, 0) == 0`` is ``not m``.

        None if x is no such choice, or one that a type rounds.
        """
        choice = self._choice(x) if x.is_plain else None
        if choice is None:
            return None
        use, yes, no = choice
        mask, dtype = self._mask_of(use, x.dims), numpy_dtype(x.dtype)
        if mask is None or not (holds(dtype, yes) and holds(dtype, no)):
            return None
        if test(yes) == test(no):
            return self.constant(Fraction(test(yes)), "bool", x.dims)
        return mask if test(yes) else self.negated(mask)

    def _mask_of(self, use: Use, dims: Dims) -> AxisValue | None:
        """The mask that an operator reads, of these dimensions; None if it sees it under other axes than its own."""
        is_renamed = use.axes != self.axes.resolve(self.nodes[use.node].axes)
        return None if is_renamed else self.value(dims, "bool", use.node)

    def opposite(self, mask: AxisValue) -> AxisValue | None:
        """The mask that this one negates, under the same axes; None if it negates none."""
        if mask.node is None or self.nodes[mask.node].op != "not":
            return None
        (use,) = self.nodes[mask.node].uses
        return self._mask_of(use, mask.dims)

    def negated(self, mask: AxisValue) -> AxisValue:
        """The opposite of a mask; of an opposite, the mask itself."""
        if mask.is_constant:
            return self.constant(Fraction(not mask.offset), "bool", mask.dims)
        return self.opposite(mask) or self.plain("not", (mask,), "bool")

    def is_input(self, x: AxisValue) -> bool:
        """Tell whether a value is an input as it is."""
        return x.node is not None and x.is_plain and self.nodes[x.node].op == "input"

    def live(self, values: Sequence[AxisValue]) -> set[int]:
        """The nodes that values depend on."""
        live: set[int] = set()
        todo = [v.node for v in values if v.node is not None]
        while todo:
            if (n := todo.pop()) not in live:
                live.add(n)
                todo += [use.node for use in self.nodes[n].uses]
        return live

    def is_nonnegative(self, x: AxisValue) -> bool:
        """Is a value a sum of squares, exponentials or the like, for sure? (Or NaN.)"""
        if x.node is None:
            return x.offset >= 0
        return x.scale > 0 and x.offset >= 0 and self._is_nonnegative(x.node)

    def _is_nonnegative(self, n: int) -> bool:
        if n not in self.nonnegative:
            self.nonnegative[n] = self._makes_nonnegative(self.nodes[n])
        return self.nonnegative[n]

    def _makes_nonnegative(self, node: Node) -> bool:
        attrs = dict(node.attrs)
        if node.op in NONNEGATIVE_OPERATORS:
            return True
        if node.op in ("mul", "dot") and node.uses[0] == node.uses[1]:
            return True
        if node.op in SIGN_KEEPING_OPERATORS:
            numbers = [attrs.get(a, ZERO) for a in ("scale", "offset", "ca", "cb")]
            return all(map(_is_nonnegative, numbers)) and all(self._is_nonnegative(use.node) for use in node.uses)
        if node.op == "pow":
            exponent = attrs["exponent"]
            return isinstance(exponent, Fraction) and (exponent.denominator == 2 or exponent % 2 == 0)
        if node.op == "const":
            return _is_nonnegative(attrs["value"])
        return node.dtype in NONNEGATIVE_DTYPES

    # --- nodes

    def use(self, x: AxisValue, view: View) -> Use:
        """The node of x as an operator sees it: cast as x is, but float16 may hold a mean and not the sum."""
        assert x.node is not None
        node = self.nodes[x.node]
        axes = self.axes.resolve(node.axes)
        narrows = x.dtype == FLOAT16 and node.dtype in FLOATS and not (_fits_float16(x.scale) and x.offset == 0)
        return Use(x.node, tuple(view.get(k, k) for k in axes), node.dtype if narrows else x.dtype)

    def append(self, op: str, uses: tuple[Use, ...], over: tuple[AxisKey, ...], dtype: str, **attrs: Attr) -> int:
        """A new node."""
        seen = dict.fromkeys(k for use in uses for k in use.axes)
        axes = over if op == "iota" else tuple(k for k in seen if k not in over)
        defaults = {"scale": ONE, "offset": ZERO, "ca": ONE, "cb": ONE}
        kept = tuple(sorted((k, v) for k, v in attrs.items() if defaults.get(k) != v))
        self.nodes.append(Node(op, uses, axes, over, kept, dtype))
        return len(self.nodes) - 1

    def depends_on(self, x: AxisValue) -> tuple[AxisKey, ...]:
        """Give the axes that the node of a value depends on."""
        return () if x.node is None else self.axes.resolve(self.nodes[x.node].axes)

    def together(self, values: Sequence[AxisValue]) -> tuple[Dims, list[View]]:
        """Common dimensions of operands of a pointwise operator, and the view of each.

        Operands have the same rank, with dimensions of size 1 that stretch, or are scalars.
        """
        rank = max(len(v.dims) for v in values)
        full = [n for n, v in enumerate(values) if len(v.dims) == rank]
        first = next((n for n in full if not values[n].is_constant), full[0])
        common = list(values[first].dims)
        views = {n: self.join(common, values[n].dims) for n in full if n != first}
        return self.axes.resolve_dims(tuple(common)), [
            self.axes.resolve_view(views.get(n, {})) for n in range(len(values))
        ]

    def join(self, common: list[tuple[AxisKey, ...]], dims: Dims) -> View:
        """Unify the dimensions of one more operand with `common`, which takes over those that it lacks."""
        shared = [d for d, dim in enumerate(common) if dim and dims[d]]
        view = self.axes.unify([common[d] for d in shared], [dims[d] for d in shared])
        taken = set(self.axes.resolve(itertools.chain(*common)))
        for d, dim in enumerate(dims):
            if not common[d]:
                for key in self.axes.resolve(dim):
                    seen = self.axes.copy_of(key, taken) if key in taken else key
                    taken.add(seen)
                    if seen != key:
                        view[key] = seen
                    common[d] += (seen,)
        self.axes.keep_apart(itertools.chain(*common))
        return view

    def pointwise(
        self, op: str, values: Sequence[AxisValue], dtype: str, times: Fraction = ONE, **attrs: Attr
    ) -> AxisValue:
        """`times` `op` of the nodes of `values`, whose scales and offsets are the caller's business."""
        dims, views = self.together(values)
        uses = tuple(self.use(v, view) for v, view in zip(values, views, strict=True))
        return self.value(dims, dtype, self.append(op, uses, (), _node_dtype(dtype, times), **attrs), times)

    # --- arithmetic

    def scaled(self, x: AxisValue, scale: Fraction, offset: Fraction = ZERO, dtype: str | None = None) -> AxisValue:
        """``scale * x + offset``."""
        dtype = dtype or x.dtype
        if scale == 0 and not x.is_constant:
            raise NotExpressible(Code.NON_FINITE, "a product with zero, which is no zero for every operand")
        if x.is_constant:
            return self.constant(scale * x.offset + offset, dtype, x.dims)
        return replace(x, scale=scale * x.scale, offset=scale * x.offset + offset, dtype=dtype)

    def without_offset(self, x: AxisValue) -> AxisValue:
        """Give the same value as a scaled node with no offset."""
        return x if x.node is not None and x.offset == 0 else self.materialize(x)

    def widened(self, x: AxisValue, like: AxisValue) -> AxisValue:
        """A scalar, or a value with dimensions of size 1, stretched to the dimensions of the other operand."""
        if len(x.dims) < len(like.dims):
            return replace(x, dims=like.dims)
        if len(x.dims) > len(like.dims) or all(own or not other for own, other in zip(x.dims, like.dims, strict=True)):
            return x
        common = list(x.dims)
        self.join(common, like.dims)
        return replace(x, dims=self.axes.resolve_dims(tuple(common)))

    def add(self, x: AxisValue, y: AxisValue, dtype: str, sign: Fraction = ONE) -> AxisValue:
        """``x + sign * y``."""
        if y.is_constant:
            return self.scaled(self.widened(x, y), ONE, sign * y.offset, dtype)
        if x.is_constant:
            return self.scaled(self.widened(y, x), sign, x.offset, dtype)
        if (chosen := self._chosen_sum(x, y, ONE, sign, dtype) or self._chosen_sum(y, x, sign, ONE, dtype)) is not None:
            return chosen
        x, y = self.without_offset(x), self.without_offset(y)  # (1 - m) * -1e9 + s is not (1e9 * m + s) - 1e9 in floats
        ca, cb = x.scale, sign * y.scale
        common = ca if abs(ca) == abs(cb) and ca > 0 else ONE  # s*x - s*m = s*(x - m): what a safe softmax looks like
        return self.pointwise("add", (x, y), dtype, common, ca=ca / common, cb=cb / common)

    def _chosen_sum(self, x: AxisValue, mask: AxisValue, sx: Fraction, sm: Fraction, dtype: str) -> AxisValue | None:
        """``sx * x + sm * mask`` as a choice between two sums, if the mask is a sentinel in places; None if it is not.

        Both are the same number over the reals and in floats, whatever x is. But exp(x + mask) is exp(x) exp(mask) to
        the search, which would divide the factors of a softmax among kernels in many useless ways.
        """
        choice = None if dtype not in FLOATS or self._choice(x) else self._choice(mask)
        if choice is None or (condition := self._mask_of(choice[0], mask.dims)) is None:
            return None
        _, *values = choice
        offsets = [sm * (mask.scale * value + mask.offset) for value in values]
        low, high = min(offsets), max(offsets)
        if not (lowest(numpy_dtype(dtype)) <= low <= HIGHEST_SENTINEL and high <= -low):  # what overflows is no number
            return None
        sums = (self.scaled(x, sx, offset, dtype) for offset in offsets)
        return self.plain("where", (condition, *sums), dtype)

    def mul(self, x: AxisValue, y: AxisValue, dtype: str) -> AxisValue:
        """Make ``x * y``."""
        if y.is_constant:
            return self.scaled(self.widened(x, y), y.offset, ZERO, dtype)
        if x.is_constant:
            return self.scaled(self.widened(y, x), x.offset, ZERO, dtype)
        x, y = self.without_offset(x), self.without_offset(y)
        return self.pointwise("mul", (x, y), dtype, x.scale * y.scale)

    def div(self, x: AxisValue, y: AxisValue, dtype: str) -> AxisValue:
        """Make ``x / y``.

        Raises:
            NotExpressible: y is the constant zero.
        """
        if y.is_constant:
            if y.offset == 0:
                raise NotExpressible(Code.NON_FINITE, "division by a constant zero")
            return self.scaled(self.widened(x, y), 1 / y.offset, ZERO, dtype)
        if x.is_constant:
            return self.scaled(self.power(self.widened(y, x), Fraction(-1), dtype), x.offset)
        x, y = self.without_offset(x), self.without_offset(y)
        return self.pointwise("div", (x, y), dtype, x.scale / y.scale)

    def power(self, x: AxisValue, exponent: Fraction, dtype: str) -> AxisValue:
        """Make ``x ** exponent``.

        Raises:
            NotExpressible: the exponent is not a multiple of 1/2, or beyond `MAX_EXPONENT`.
        """
        if exponent.denominator not in (1, 2) or abs(exponent) > MAX_EXPONENT:
            raise NotExpressible(Code.PARAMETERS, f"the exponent {exponent} is not a small multiple of 1/2")
        if exponent == 0:
            return self.constant(ONE, dtype, x.dims)
        if exponent == 1:
            return replace(x, dtype=dtype)
        if exponent == 2:
            return self.mul(x, x, dtype)
        x = self.materialize(x) if x.is_constant else x
        if exponent.denominator == 1 and x.offset == 0:
            return self.pointwise("pow", (x,), dtype, x.scale ** int(exponent), exponent=exponent)
        return self.pointwise("pow", (x,), dtype, exponent=exponent, scale=x.scale, offset=x.offset)

    def unary(self, op: str, x: AxisValue, dtype: str) -> AxisValue:
        """`op` of ``scale * node + offset``."""
        x = self.materialize(x) if x.is_constant else x
        return self.pointwise(op, (x,), dtype, scale=x.scale, offset=x.offset)

    def plain(self, op: str, values: Sequence[AxisValue], dtype: str) -> AxisValue:
        """`op` of operands that do not take a scale."""
        return self.pointwise(op, [self.materialize(v) for v in values], dtype)

    def iota(self, dims: Dims, dimension: int, dtype: str) -> AxisValue:
        """Make the index along a dimension."""
        (axis,) = dims[dimension]
        return self.value(dims, dtype, self.append("iota", (), (axis,), dtype))

    # --- reductions

    def sum(self, x: AxisValue, over: tuple[AxisKey, ...], dims: Dims, dtype: str) -> AxisValue:
        """Sum over axes; `dims` are the remaining dimensions. Axes that x does not depend on give their extent."""
        over = self.axes.resolve(over)
        count = Fraction(math.prod(map(self.axes.extent, over)))
        if not over:
            return replace(x, dims=dims, dtype=dtype)
        if x.is_constant:
            return self.constant(x.offset * count, dtype, dims)
        node = self.append("sum", (self.use(x, {}),), over, _node_dtype(dtype, x.scale))
        return self.value(dims, dtype, node, x.scale, x.offset * count)

    def maximum(self, x: AxisValue, over: tuple[AxisKey, ...], dims: Dims, dtype: str) -> AxisValue:
        """Maximum over axes. A positive scale and an offset commute with it."""
        over = tuple(k for k in self.axes.resolve(over) if k in self.depends_on(x))
        if not over:
            return replace(x, dims=dims, dtype=dtype)
        x = x if x.scale > 0 else self.materialize(x)
        use = self.use(x, {})
        return self.value(dims, dtype, self.append("max", (use,), over, use.dtype), x.scale, x.offset)

    def contract(
        self, x: AxisValue, y: AxisValue, view: View, over: tuple[AxisKey, ...], dims: Dims, dtype: str
    ) -> AxisValue:
        """Sum over axes of x * y, with y seen through `view`."""
        x, y = self._factor(x), self._factor(y)
        over = self.axes.resolve(over)
        left, right = self.use(x, {}), self.use(y, view)
        both = tuple(k for k in over if k in left.axes and k in right.axes)
        absent = math.prod(self.axes.extent(k) for k in over if k not in left.axes + right.axes)
        uses = self._summed_alone(left, over, both), self._summed_alone(right, over, both)
        scale = x.scale * y.scale * absent
        node = self.append("dot" if both else "mul", uses, both, _node_dtype(dtype, scale))
        return self.value(dims, dtype, node, scale)

    def _factor(self, x: AxisValue) -> AxisValue:
        """The same value with no offset, and in float16 if it is: a matrix product of that type takes half the time."""
        x = self.without_offset(x)
        assert x.node is not None
        is_wide = x.dtype == FLOAT16 and self.nodes[x.node].dtype != FLOAT16 and not _fits_float16(x.scale)
        return self.materialize(x) if is_wide else x

    def _summed_alone(self, use: Use, over: tuple[AxisKey, ...], both: tuple[AxisKey, ...]) -> Use:
        """An operand of a contraction, summed over the axes that the other one lacks before they meet."""
        alone = tuple(k for k in over if k in use.axes and k not in both)
        if not alone:
            return use
        kept = tuple(k for k in use.axes if k not in alone)
        return Use(self.append("sum", (use,), alone, use.dtype), kept, use.dtype)
