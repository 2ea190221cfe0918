"""The operators of CMU's Mirage written with ours: one rule each, for all levels.

A `Sketch` is an unfinished kernel, whose values have numbered dimensions (`mirage_import.factors`); axes get names
when all dimensions are known. In a block, tensors have the dimensions of one tile, without the axes of blocks and loop
steps. Operators work block by block and step by step and leave these axes alone; only accumulators reduce the loop's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from mirage_jax.errors import ParseError, UnsupportedError
from mirage_jax.mirage_import.factors import Dim, Dims, Factors
from mirage_jax.mirage_import.file import SavedOp

HALF = Fraction(1, 2)


class ImportedValue(NamedTuple):
    """A value with numbered dimensions."""

    name: str
    dims: Dims
    looped: bool  # does it differ from step to step of the loop?


class ImportedOperator(NamedTuple):
    """An operator; attributes that are axes are still dimensions."""

    result: ImportedValue
    op: str
    args: tuple[str, ...]
    attrs: dict[str, Fraction | Dim]


@dataclass
class Sketch:
    """Collects the operators of one kernel."""

    factors: Factors
    loop: Dim = ()
    forloop_range: int = 1
    steps: list[ImportedOperator] = field(default_factory=list[ImportedOperator])
    _count: int = 0

    def fresh(self) -> str:
        """Make up a name."""
        self._count += 1
        return f"v{self._count - 1}"

    def op(self, op: str, *args: ImportedValue, dims: Dims, **attrs: Fraction | Dim) -> ImportedValue:
        """Add an operator."""
        result = ImportedValue(self.fresh(), dims, any(x.looped for x in args))
        self.steps.append(ImportedOperator(result, op, tuple(x.name for x in args), attrs))
        return result

    def pointwise(self, op: str, *args: ImportedValue, **attrs: Fraction | Dim) -> ImportedValue:
        """Add a pointwise operator: dimensions of size 1 are broadcast, the others made the same."""
        dims = args[0].dims
        for x in args[1:]:
            dims = self._broadcast(dims, x.dims)
        return self.op(op, *args, dims=dims, **attrs)

    def _broadcast(self, left: Dims, right: Dims) -> Dims:
        shapes = [list(self.factors.shape(d)) for d in (left, right)]
        if len(left) != len(right) or any(m != n and 1 not in (m, n) for m, n in zip(*shapes, strict=True)):
            raise ParseError(f"shapes {shapes[0]} and {shapes[1]} do not go together")
        return tuple(map(self._common, left, right))

    def _common(self, a: Dim, b: Dim) -> Dim:
        """Make two dimensions the same, unless one has size 1."""
        if a and b:
            self.factors.unify(a, b)
        return a or b

    def matmul(self, a: ImportedValue, b: ImportedValue) -> ImportedValue:
        """Multiply matrices: (.., m, k) by (.., k, n), with equal leading dimensions. Raises `ParseError`."""
        shapes = [list(self.factors.shape(x.dims)) for x in (a, b)]
        if min(map(len, shapes)) < 2 or shapes[0][:-2] != shapes[1][:-2] or shapes[0][-1] != shapes[1][-2]:
            raise ParseError(f"shapes {shapes[0]} and {shapes[1]} do not go together")
        batch = self._broadcast(a.dims[:-2], b.dims[:-2])
        (k, other) = a.dims[-1], b.dims[-2]
        self.factors.unify(k, other)
        dims = (*batch, a.dims[-2], b.dims[-1])
        return self.op("dot", a, b, dims=dims, axes=k) if k else self.op("mul", a, b, dims=dims)

    def sum(self, x: ImportedValue, dim: int, left: int = 1) -> ImportedValue:
        """Leave `left` of a dimension: sums over it seen as (size / left, left)."""
        outer, dims = self._outer(x, dim, left)
        return self.op("sum", x, dims=dims, axes=outer) if outer else x

    def _outer(self, x: ImportedValue, dim: int, left: int) -> tuple[Dim, Dims]:
        size = self.factors.size(x.dims[dim])
        if size % left:
            raise ParseError(f"a dimension of {size} cannot be reduced to {left}")
        outer, inner = self.factors.dim(size // left), self.factors.dim(left)
        self.factors.unify(x.dims[dim], (*outer, *inner))
        dims = list(x.dims)
        dims[dim] = inner
        return outer, tuple(dims)

    def accumulate(self, x: ImportedValue, left: int | None = None) -> tuple[ImportedValue, int]:
        """Sum over the loop, and over all but `left` of the last dimension; also returns the missing factor.

        A value that is the same in each step is not summed over the loop: the factor is the number of steps.
        """
        axes, dims = ((), x.dims) if left is None else self._outer(x, len(x.dims) - 1, left)
        if x.looped:
            axes = (*axes, *self.loop)
        total = self.op("sum", x, dims=dims, axes=axes) if axes else x
        if not x.looped:
            return total, self.forloop_range
        total = self.op("acc", total, dims=dims)
        return total._replace(looped=False), 1


type Rule = Callable[[Sketch, SavedOp, tuple[ImportedValue, ...]], ImportedValue]


def _last(k: Sketch, x: ImportedValue) -> int:
    """Size of the last dimension."""
    return k.factors.size(x.dims[-1])


def _elementwise(name: str, **attrs: Fraction | Dim) -> Rule:
    return lambda k, op, xs: k.pointwise(name, *xs, **attrs)


def _relu(k: Sketch, op: SavedOp, xs: tuple[ImportedValue, ...]) -> ImportedValue:
    (x,) = xs
    zero = k.op("const", dims=tuple(() for _ in x.dims), value=Fraction(0))
    return k.pointwise("maximum", x, zero)


def _silu(k: Sketch, op: SavedOp, xs: tuple[ImportedValue, ...]) -> ImportedValue:
    return k.pointwise("mul", xs[0], k.pointwise("logistic", xs[0]))


def _gelu(k: Sketch, op: SavedOp, xs: tuple[ImportedValue, ...]) -> ImportedValue:
    """x / 2 * (1 + erf(x / sqrt(2)))"""
    erf = k.pointwise("erf", xs[0], scale=Fraction(math.sqrt(0.5)))
    return k.pointwise("mul", xs[0], k.pointwise("affine", erf, scale=HALF, offset=HALF))


def _rms_norm(k: Sketch, op: SavedOp, xs: tuple[ImportedValue, ...]) -> ImportedValue:
    """x / sqrt(mean of x * x over the last dimension); nothing is added to the mean."""
    (x,) = xs
    squares = k.sum(k.pointwise("mul", x, x), len(x.dims) - 1)
    return k.pointwise("div", x, k.pointwise("pow", squares, exponent=HALF, scale=Fraction(1, _last(k, x))))


def _concat_then_matmul(k: Sketch, op: SavedOp, xs: tuple[ImportedValue, ...]) -> ImportedValue:
    """(A | B)(C | D) = A C + B D"""
    a, b, c, d = xs
    return k.pointwise("add", k.matmul(a, c), k.matmul(b, d))


def _reduction(k: Sketch, op: SavedOp, xs: tuple[ImportedValue, ...]) -> ImportedValue:
    """reduction_D, reduction_D_to_dimx: the shape of the result tells the rest of dimension D."""
    (x,), dim = xs, int(re.findall(r"\d", op.kind)[0])
    shape = op.outputs[0].shape
    if dim >= min(len(x.dims), len(shape)):
        raise ParseError(f"reduces dimension {dim} of a tensor with {len(x.dims)}")
    return k.sum(x, dim, shape[dim])


def _scaled(k: Sketch, x: ImportedValue, scale: Fraction) -> ImportedValue:
    return x if scale == 1 else k.pointwise("affine", x, scale=scale)


def _accum(left: Callable[[SavedOp], int | None], mean: bool = False) -> Rule:
    def rule(k: Sketch, op: SavedOp, xs: tuple[ImportedValue, ...]) -> ImportedValue:
        total, times = k.accumulate(xs[0], left(op))
        return _scaled(k, total, Fraction(times, k.forloop_range * _last(k, xs[0]) if mean else 1))

    return rule


def _accum_rms(k: Sketch, op: SavedOp, xs: tuple[ImportedValue, ...]) -> ImportedValue:
    (x,) = xs
    total, times = k.accumulate(k.pointwise("mul", x, x), left=1)
    return k.pointwise("pow", total, exponent=HALF, scale=Fraction(times, k.forloop_range * _last(k, x)))


RULES: dict[str, tuple[int, Rule]] = {  # kind -> number of operands, rule
    "matmul": (2, lambda k, op, xs: k.matmul(*xs)),
    "exp": (1, _elementwise("exp")),
    "log": (1, _elementwise("log")),
    "square": (1, lambda k, op, xs: k.pointwise("mul", xs[0], xs[0])),
    "sqrt": (1, _elementwise("pow", exponent=HALF)),
    "sigmoid": (1, _elementwise("logistic")),
    "silu": (1, _silu),
    "gelu": (1, _gelu),
    "relu": (1, _relu),
    "add": (2, _elementwise("add")),
    "sub": (2, _elementwise("add", cb=Fraction(-1))),
    "mul": (2, _elementwise("mul")),
    "div": (2, _elementwise("div")),
    "rms_norm": (1, _rms_norm),
    "concat_then_matmul": (4, _concat_then_matmul),
    **{f"reduction_{dim}{to}": (1, _reduction) for dim in range(4) for to in ("", "_to_dimx")},
    "accum_nored": (1, _accum(lambda op: None)),
    "accum_red_ld_sum": (1, _accum(lambda op: 1)),
    "accum_red_ld_mean": (1, _accum(lambda op: 1, mean=True)),
    "accum_red_ld_rms": (1, _accum_rms),
    "accum_redtox_ld_sum": (1, _accum(lambda op: op.outputs[0].shape[-1])),
}

REFUSED = {  # pattern of kinds -> why there is no rule
    r"clamp": "its bounds are not in the file",
    r"mul_scalar": "its scalar is not in the file",
    r"pow": "powers with a tensor as exponent cannot be written in a muGraph here",
    r"concat(_\d)?|split(_\d)?|chunk(_\d)?": "slices, and concatenations that no product sums, cannot be written here",
    r"reduction_\d_max": "a running maximum with its difference cannot be written in a muGraph here",
    r"accum_(max|\w+_rescale)": "accumulators of an online softmax are not read",
    r"allreduce|alltoall": "muGraphs here are of one device",
}


def apply(k: Sketch, op: SavedOp, xs: tuple[ImportedValue, ...]) -> ImportedValue:
    """Translate an operator, whose result has the shape in the file. Raises `UnsupportedError` and `ParseError`."""
    if op.kind not in RULES:
        for pattern, why in REFUSED.items():
            if re.fullmatch(pattern, op.kind):
                raise UnsupportedError(f"{op.where}: {why}")
        raise ParseError(f"{op.where}: unknown operator; known: {', '.join(sorted(RULES))}")
    arity, rule = RULES[op.kind]
    if len(xs) != arity:
        raise ParseError(f"{op.where}: {len(xs)} operands; it takes {arity}")
    try:
        value = rule(k, op, xs)
    except ParseError as error:
        raise ParseError(f"{op.where}: {error}") from None
    except UnsupportedError as error:
        raise UnsupportedError(f"{op.where}: {error}") from None
    require_shape(op, op.outputs[0].shape, k.factors.shape(value.dims))
    return value


def require_shape(op: SavedOp, said: tuple[int, ...], found: tuple[int, ...]) -> None:
    """Raise `ParseError` if the file has another shape for a tensor than its operator gives."""
    if said != found:
        raise ParseError(f"{op.where}: a tensor is {list(said)} in the file; by the operator it is {list(found)}")
