"""One rule per JAX primitive: what it means for values over named axes.

A rule takes the builder, the parameters, the type of the result and the operands. What it cannot express it refuses
with `NotExpressible`; a primitive without a rule is left to XLA. `LAYOUT_PRIMITIVES` primitives cost nothing in a
muGraph, `CONTRACTION_PRIMITIVES` make a region worth a search.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.partition.reasons import Code, NotExpressible
from mirage_jax.jaxpr_frontend.translate import convolutions, gathers, integers
from mirage_jax.jaxpr_frontend.translate.builder import MAX_EXPONENT, AxisValue, NodeBuilder
from mirage_jax.jaxpr_frontend.translate.slicing import concatenated, sliced
from mirage_jax.mugraph.dtypes import DTYPES, FLOATS, SIXTEEN_BIT_FLOATS, lowest, numpy_dtype

SHORT_NAMES = {dtype.long_name: name for name, dtype in DTYPES.items() if dtype.in_programs}
PRODUCT_PRIMITIVES = frozenset({"dot_general", "conv_general_dilated"})
CONTRACTION_PRIMITIVES = PRODUCT_PRIMITIVES.union(
    ("reduce_sum", "reduce_max", "reduce_min"), convolutions.WINDOW_REDUCTIONS
)
SLICING_PRIMITIVES = frozenset(
    {"slice", "concatenate", "stack", "pad"}
)  # what takes arrays apart and puts them together


@dataclass(frozen=True, slots=True)
class EquationInfo:
    """What a rule needs to know about the equation besides its operands."""

    params: Mapping[str, Any]
    shape: tuple[int, ...]
    dtype: str
    numpy_dtype: Any


type Rule = Callable[..., AxisValue]  # (builder, result, *operands) -> value
type Fold = Callable[..., Any]  # (params, *numpy scalars) -> numpy scalar

RULES: dict[str, Rule] = {}
LAYOUT_PRIMITIVES: set[str] = set()
VIEWS: set[str] = set()  # the light ones that show one operand in another shape or dtype
FOLDS: dict[str, Fold] = {}  # the same on numpy scalars, for constants
TAKES_NON_FINITE: set[str] = set()


def rule(
    *names: str, light: bool = False, view: bool = False, special: bool = False, fold: Fold | None = None
) -> Callable[[Rule], Rule]:
    """Register a function as the rule of primitives.

    light: costs nothing in a muGraph. view: light, and shows one operand in another shape or dtype. special: takes
    infinities and NaN, as light ones do. fold: the same on numpy scalars, for constants.
    """
    return functools.partial(_register, names, light or view, view, special, fold)


def _register(names: Sequence[str], light: bool, view: bool, special: bool, fold: Fold | None, fn: Rule) -> Rule:
    RULES.update(dict.fromkeys(names, fn))
    LAYOUT_PRIMITIVES.update(names if light else ())
    VIEWS.update(names if view else ())
    TAKES_NON_FINITE.update(names if light or special else ())
    if fold is not None:
        FOLDS.update(dict.fromkeys(names, fold))
    return fn


def unregister(*names: str) -> None:
    """Forget the rules of primitives: XLA computes them."""
    for name in names:
        RULES.pop(name, None)
        FOLDS.pop(name, None)
        for properties in (LAYOUT_PRIMITIVES, VIEWS, TAKES_NON_FINITE):
            properties.discard(name)


def apply(primitive: str, builder: NodeBuilder, result: EquationInfo, operands: Sequence[AxisValue]) -> AxisValue:
    """Make the value of one equation.

    Raises:
        NotExpressible: no muGraph computes it.
    """
    if primitive in FOLDS and operands and all(v.is_constant for v in operands):
        return _fold(primitive, builder, result, operands)
    if primitive not in TAKES_NON_FINITE:
        _check_finite(primitive, operands)
    if result.dtype in integers.RANGES:
        wide = RULES[primitive](builder, replace(result, dtype="i32"), *operands)
        return integers.fitted(builder, wide, result.dtype)
    value = RULES[primitive](builder, result, *operands)
    return integers.known(builder, value) if result.dtype == "i32" else value


def _check_finite(primitive: str, operands: Sequence[AxisValue]) -> None:
    special = next((v.special for v in operands if v.special is not None), None)
    if special is not None:
        raise NotExpressible(Code.NON_FINITE, f"{primitive} of {special}")


def literal(builder: NodeBuilder, value: Any, aval: Any) -> AxisValue:
    """An exact constant: the literal as rounded to its dtype."""
    return builder.constant(_exact(np.asarray(value).astype(aval.dtype)), dtype_name(aval.dtype))


@functools.cache
def dtype_name(dtype: Any) -> str:
    """Give the muGraph's name of a dtype.

    Raises:
        NotExpressible: muGraphs have no such dtype.
    """
    try:
        return SHORT_NAMES[str(dtype)]
    except KeyError:
        raise NotExpressible(Code.DTYPE, f"{dtype}; known are {', '.join(SHORT_NAMES)}") from None


def _exact(value: Any) -> Fraction | float:
    number = float(value)
    return Fraction(number) if math.isfinite(number) else number


def _fold(primitive: str, builder: NodeBuilder, result: EquationInfo, operands: Sequence[AxisValue]) -> AxisValue:
    constants = (float(v.offset) if v.special is None else v.special for v in operands)
    numbers = [np.asarray(c).astype(_NUMPY[v.dtype]) for c, v in zip(constants, operands, strict=True)]
    with np.errstate(all="ignore"):
        folded = np.asarray(FOLDS[primitive](result.params, *numbers)).astype(result.numpy_dtype)
    dims = max((v.dims for v in operands), key=len)
    return builder.constant(_exact(folded), result.dtype, dims)


_NUMPY: dict[str, Any] = {name: dtype.numpy for name, dtype in DTYPES.items()}
_NUMPY["bf16"] = np.float32  # a bf16 number is an f32 number; results are rounded to the dtype of the equation


# --- layout and casts: names move, nothing is computed


@rule("stop_gradient", "copy", "copy_p", "pvary", "pcast", "name", view=True)
def _identity(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    return x


@rule("reduce_precision", view=True)
def _reduce_precision(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    """`jax.checkpoint` rounds what it keeps to the type that it has; to fewer bits is how quantization is emulated."""
    kept = jnp.finfo(out.numpy_dtype)
    if out.params["exponent_bits"] < kept.nexp or out.params["mantissa_bits"] < kept.nmant:
        raise NotExpressible(Code.PARAMETERS, f"rounding {out.dtype} to fewer bits")
    return x


@rule("convert_element_type", view=True)
def _convert(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    if out.dtype == "bool" and x.node is not None and (mask := b.test_of_choice(x, bool)) is not None:
        return mask
    if out.dtype not in FLOATS and x.dtype in FLOATS:
        raise NotExpressible(Code.DTYPE, f"a cast from {x.dtype} to {out.dtype} rounds")
    if out.dtype == "bool" and x.dtype != "bool":
        raise NotExpressible(Code.DTYPE, f"a cast from {x.dtype} to bool compares")
    if x.is_constant and x.special is None:
        with np.errstate(over="ignore"):
            rounded = np.asarray(float(x.offset)).astype(out.numpy_dtype)
        return b.constant(_exact(rounded), out.dtype, x.dims)
    return replace(x, dtype=out.dtype)


@rule("transpose", view=True)
def _transpose(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    return replace(x, dims=tuple(x.dims[p] for p in out.params["permutation"]))


@rule("squeeze", view=True)
def _squeeze(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    gone = {d % len(x.dims) for d in out.params["dimensions"]}
    return replace(x, dims=tuple(dim for d, dim in enumerate(x.dims) if d not in gone))


@rule("expand_dims", view=True)
def _expand_dims(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    old = iter(x.dims)
    new = {d % len(out.shape) for d in out.params["dimensions"]}
    return replace(x, dims=tuple(() if d in new else next(old) for d in range(len(out.shape))))


@rule("broadcast_in_dim", view=True)
def _broadcast_in_dim(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    source = {target: d for d, target in enumerate(out.params["broadcast_dimensions"])}
    old = b.dims(x)

    def dimension(d: int, size: int) -> tuple[Any, ...]:
        kept = old[source[d]] if d in source else ()
        return kept or b.axes.dimension(size)

    dims = tuple(dimension(d, size) for d, size in enumerate(out.shape))
    b.axes.keep_apart(itertools.chain(*dims))
    return replace(x, dims=dims)


@rule("reshape", view=True)
def _reshape(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    if out.params.get("dimensions") is not None:
        raise NotExpressible(Code.PARAMETERS, "a reshape that also transposes")
    return replace(x, dims=b.axes.regroup(x.dims, out.shape))


@rule("tile", view=True)
def _tile(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    """Copies along dimensions of their own, each merged with the one that it repeats."""
    shape = tuple(n for pair in zip(out.params["reps"], b.axes.size(x.dims), strict=True) for n in pair)
    copies = replace(out, shape=shape, params={"broadcast_dimensions": tuple(range(1, len(shape), 2))})
    return _reshape(b, replace(out, params={}), _broadcast_in_dim(b, copies, x))


# --- parts of arrays: windows and pieces


@rule("slice", light=True)
def _slice(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    starts, strides = out.params["start_indices"], out.params["strides"] or (1,) * len(x.dims)
    for d, (start, size, step) in enumerate(zip(starts, out.shape, strides, strict=True)):
        at = int(start)
        x = sliced(b, x, d, at, size) if step == 1 or size == 1 else _every(b, x, d, at, size, int(step))
    return x


def _every(b: NodeBuilder, x: AxisValue, d: int, start: int, size: int, step: int) -> AxisValue:
    """Every `step`-th element along dimension d: one column of its rows of `step`."""
    shape = b.axes.size(x.dims)
    if shape[d] % step:
        raise NotExpressible(Code.LAYOUT, f"every {step}-th of {shape[d]} elements")
    rows = replace(x, dims=b.axes.regroup(x.dims, (*shape[:d], shape[d] // step, step, *shape[d + 1 :])))
    column = sliced(b, sliced(b, rows, d + 1, start % step, 1), d, start // step, size)
    return replace(column, dims=(*column.dims[: d + 1], *column.dims[d + 2 :]))


def _spread(
    b: NodeBuilder, x: AxisValue, d: int, before: int, after: int, padding: AxisValue, out: EquationInfo
) -> AxisValue:
    """Every element along dimension d with padding before and after it."""
    shape = b.axes.size(x.dims)
    column = replace(x, dims=(*x.dims[: d + 1], (), *x.dims[d + 1 :]))
    rows = _between(b, before, column, after, padding, d + 1, out.dtype)
    return replace(rows, dims=b.axes.regroup(rows.dims, (*shape[:d], shape[d] * (before + 1 + after), *shape[d + 1 :])))


def _between(
    b: NodeBuilder, before: int, x: AxisValue, after: int, padding: AxisValue, d: int, dtype: str
) -> AxisValue:
    """x between paddings along dimension d."""
    shape = b.axes.size(x.dims)

    def end(size: int) -> list[AxisValue]:
        return [broadcast_scalar(b, padding, (*shape[:d], size, *shape[d + 1 :]))] if size > 0 else []

    parts = [*end(before), x, *end(after)]
    return concatenated(b, parts, d, dtype) if len(parts) > 1 else x


@rule("concatenate", light=True)
def _concatenate(b: NodeBuilder, out: EquationInfo, *operands: AxisValue) -> AxisValue:
    if len(operands) == 1:
        return operands[0]
    if all(v.is_constant and v.offset == operands[0].offset and v.special is None for v in operands):
        return broadcast_scalar(b, replace(operands[0], dims=()), out.shape)
    return concatenated(b, operands, out.params["dimension"], out.dtype)


@rule("stack", light=True)
def _stack(b: NodeBuilder, out: EquationInfo, *operands: AxisValue) -> AxisValue:
    axis = out.params["axis"]
    return _concatenate(
        b,
        replace(out, params={"dimension": axis}),
        *(replace(v, dims=(*v.dims[:axis], (), *v.dims[axis:])) for v in operands),
    )


@rule("pad", light=True)
def _pad(b: NodeBuilder, out: EquationInfo, x: AxisValue, padding: AxisValue) -> AxisValue:
    if not padding.is_constant or padding.special is not None:
        raise NotExpressible(Code.PARAMETERS, "padding that is not a finite literal")
    for d, config in enumerate(out.params["padding_config"]):
        low, high, inner = map(int, config)  # numpy's integers, at times
        if inner:
            before = min(max(low, 0), inner)
            x = _spread(b, x, d, before, inner - before, padding, out)
            low, high = low - before, high - (inner - before)
        x = _padded(b, low, x, high, padding, d, out.dtype)
    return x


def _padded(b: NodeBuilder, low: int, x: AxisValue, high: int, padding: AxisValue, d: int, dtype: str) -> AxisValue:
    """x along dimension d with `low` elements of padding before it and `high` after it; negative numbers crop x."""
    shape = b.axes.size(x.dims)
    begin, end = max(-low, 0), shape[d] - max(-high, 0)
    if begin >= end:  # nothing is left of x, and no window is empty
        return broadcast_scalar(b, padding, (*shape[:d], low + shape[d] + high, *shape[d + 1 :]))
    return _between(b, low, sliced(b, x, d, begin, end - begin), high, padding, d, dtype)


# --- arithmetic


def _needs_float(out: EquationInfo, what: str) -> None:
    if out.dtype not in FLOATS:
        raise NotExpressible(Code.DTYPE, f"{what} of {out.dtype}")


MINUS_ONE, LN2 = Fraction(-1), Fraction(math.log(2))

# Primitives that are one or two calls.
for _name, _rule in {
    "add": lambda b, out, x, y: b.add(x, y, out.dtype),
    "add_any": lambda b, out, x, y: b.add(x, y, out.dtype),
    "sub": lambda b, out, x, y: b.add(x, y, out.dtype, sign=MINUS_ONE),
    "mul": lambda b, out, x, y: b.mul(x, y, out.dtype),
    "square": lambda b, out, x: b.mul(x, x, out.dtype),
    "one_minus_square": lambda b, out, x: b.scaled(b.mul(x, x, out.dtype), MINUS_ONE, Fraction(1)),
    "sqrt": lambda b, out, x: b.power(x, Fraction(1, 2), out.dtype),
    "rsqrt": lambda b, out, x: b.power(x, Fraction(-1, 2), out.dtype),
    "exp": lambda b, out, x: b.unary("exp", x, out.dtype),
    "exp2": lambda b, out, x: b.unary("exp", b.scaled(x, LN2), out.dtype),
    "log2": lambda b, out, x: b.scaled(b.unary("log", x, out.dtype), 1 / LN2),
    "min": lambda b, out, x, y: b.plain("minimum", (x, y), out.dtype),
    "clamp": lambda b, out, low, x, high: b.plain(
        "minimum", (b.plain("maximum", (x, low), out.dtype), high), out.dtype
    ),
    "shift_right_arithmetic": lambda b, out, x, by: integers.shifted_right(b, x, by, is_arithmetic=True),
    "shift_right_logical": lambda b, out, x, by: integers.shifted_right(b, x, by, is_arithmetic=False),
    "shift_left": lambda b, out, x, by: integers.shifted_left(b, x, by),
}.items():
    rule(_name)(_rule)


@rule("neg", light=True)
def _neg(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    if x.special is not None:
        return replace(x, special=-x.special)
    return b.scaled(x, MINUS_ONE)


@rule("div")
def _div(b: NodeBuilder, out: EquationInfo, x: AxisValue, y: AxisValue) -> AxisValue:
    if out.dtype == "i32":
        return integers.divided(b, x, y)
    _needs_float(out, "a quotient")
    return b.div(x, y, out.dtype)


@rule("rem")
def _rem(b: NodeBuilder, out: EquationInfo, x: AxisValue, y: AxisValue) -> AxisValue:
    if out.dtype != "i32":
        raise NotExpressible(Code.UNSUPPORTED_PRIMITIVE, "a remainder of floats")
    return integers.remainder(b, x, y)


@rule("integer_pow")
def _integer_pow(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    _needs_float(out, "a power")
    return b.power(x, Fraction(int(out.params["y"])), out.dtype)


@rule("pow")
def _pow(b: NodeBuilder, out: EquationInfo, x: AxisValue, y: AxisValue) -> AxisValue:
    _needs_float(out, "a power")
    if not y.is_constant or y.offset.denominator not in (1, 2) or abs(y.offset) > MAX_EXPONENT:
        return _power(b, out, x, y)
    if y.offset.denominator == 2 and not b.is_nonnegative(x):
        raise NotExpressible(Code.NON_FINITE, f"a power {y.offset} of what may be -inf, which a root makes NaN")
    return b.power(b.widened(x, y), y.offset, out.dtype)


def _power(b: NodeBuilder, out: EquationInfo, x: AxisValue, y: AxisValue) -> AxisValue:
    """A power with an exponent that is data, or no small multiple of a half."""
    if y.dtype not in FLOATS or y.special is not None:
        raise NotExpressible(Code.PARAMETERS, f"an exponent of type {y.dtype}")
    if not (y.is_constant or b.is_nonnegative(x)):
        _refuse_computed(b, y)
    return b.plain("power", (x, y), out.dtype)


def _refuse_computed(b: NodeBuilder, y: AxisValue) -> None:
    """Of a negative number only a whole exponent gives a power: none may be made in an order of the kernel's own."""
    if not (y.scale == 1 and y.offset == 0 and _is_chosen(b, y)):
        raise NotExpressible(Code.NON_FINITE, "a power of what may be negative, with an exponent that is computed")


def _function(op: str, b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    if out.dtype == "i32" and op in ("abs", "sign"):
        return b.unary(op, x, out.dtype)
    _needs_float(out, op)
    if op in ("floor", "round", "sign"):
        _refuse_rounded(b, op, x)
    return b.unary(op, x, out.dtype)


for _name in (
    *("logistic", "tanh", "erf", "erfc", "log", "log1p", "expm1", "sin", "cos", "abs", "sign", "floor"),
    *("sinh", "asinh", "acosh", "atan", "asin", "acos"),
):
    rule(_name)(functools.partial(_function, _name))


@rule("cosh")
def _cosh(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    """The halves of two exponentials: the whole ones may be infinite where their mean is not."""
    _needs_float(out, "cosh")
    up, down = (b.unary("exp", b.scaled(x, Fraction(sign), -LN2), out.dtype) for sign in (1, -1))
    return b.add(up, down, out.dtype)


@rule("atanh")
def _atanh(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    up, down = (_function("log1p", b, out, y) for y in (x, b.scaled(x, MINUS_ONE)))
    return b.scaled(b.add(up, down, out.dtype, sign=MINUS_ONE), Fraction(1, 2))


@rule("atan2")
def _atan2(b: NodeBuilder, out: EquationInfo, y: AxisValue, x: AxisValue) -> AxisValue:
    _needs_float(out, "atan2")
    return b.plain("atan2", (y, x), out.dtype)


@rule(jax_compat.EXP_OF_NEGATIVE_SQUARE)
def _exp_of_negative_square(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    return b.unary("exp", b.scaled(b.mul(x, x, out.dtype), MINUS_ONE), out.dtype)


@rule("polynomial")
def _polynomial(b: NodeBuilder, out: EquationInfo, x: AxisValue, *coefficients: AxisValue) -> AxisValue:
    """By Horner's rule; coefficients of the lowest powers come first."""
    _needs_float(out, "a polynomial")
    *lower, total = coefficients
    for c in reversed(lower):
        total = b.add(b.mul(total, x, out.dtype), c, out.dtype)
    return b.widened(total, x)


@rule("ceil")
def _ceil(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    _refuse_rounded(b, "ceil", x)
    return b.scaled(b.unary("floor", b.scaled(x, MINUS_ONE), out.dtype), MINUS_ONE)


@rule("round")
def _round(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    if out.params["rounding_method"] != lax.RoundingMethod.TO_NEAREST_EVEN:
        raise NotExpressible(Code.PARAMETERS, "rounding halves away from zero, which jnp.round does not")
    return _function("round", b, out, x)


@rule("is_finite", light=True)
def _is_finite(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    if not _may_be_wider(b, x):
        return b.unary("isfinite", x, out.dtype)
    kind = jnp.finfo(numpy_dtype(x.dtype))  # beyond the middle between its largest number and the next power of 2,
    # which both f32 and the middle itself hold, a number rounds to infinity
    most = b.constant((Fraction(float(kind.max)) + Fraction(2) ** int(kind.maxexp)) / 2, "f32")
    least = b.scaled(most, MINUS_ONE)
    return b.plain("and", (b.plain("lt", (x, most), out.dtype), b.plain("lt", (least, x), out.dtype)), out.dtype)


def _may_be_wider(b: NodeBuilder, x: AxisValue) -> bool:
    """Whether a kernel may hold finite numbers for a value that are infinite in its type.

    Casts are views, and a kernel may hold f16 results as f32. It may hold bf16 as f32, too, but f32 reaches only 0.4%
    beyond bf16.
    """
    if x.node is None or x.dtype not in SIXTEEN_BIT_FLOATS:
        return False
    node = b.nodes[x.node]
    return _is_narrowed(b, x) or (x.dtype == "f16" and node.op != "input")


def _refuse_rounded(b: NodeBuilder, what: str, *values: AxisValue) -> None:
    """Kernels round neither where the program casts nor after each operation of 16 bits: none sees that a rounding
    carried a number over a step of the function.
    """
    if rounded := [v for v in values if _is_rounded(b, v)]:
        raise NotExpressible(Code.DTYPE, f"{what} of what was rounded to {rounded[0].dtype}")


def _is_rounded(b: NodeBuilder, x: AxisValue) -> bool:
    """Does the program round a value to fewer bits than a kernel has for it?"""
    if x.node is None or x.dtype not in FLOATS:
        return False
    return _is_narrowed(b, x) or (
        x.dtype in SIXTEEN_BIT_FLOATS and not (abs(x.scale) == 1 and x.offset == 0 and _is_chosen(b, x))
    )


SELECTING_OPERATORS = ("maximum", "minimum", "max", "where", "mask", "abs")  # what gives one of its operands, as it is


def _is_chosen(b: NodeBuilder, x: AxisValue) -> bool:
    """Is a value an input, or one of several inputs?"""
    todo = [] if x.node is None else [x.node]
    while todo:
        node = b.nodes[todo.pop()]
        if node.op in SELECTING_OPERATORS:
            todo += [use.node for use in node.uses if b.nodes[use.node].dtype in FLOATS]
        elif node.op not in ("input", "const"):
            return False
    return True


def _keeps_sides(x: AxisValue, y: AxisValue) -> bool:
    """Whether rounding keeps the order of two values: of a number and itself, or, for bfloat16, of a number and zero.

    In float16 small numbers become zero.
    """
    return (x.node, x.scale, x.offset) == (y.node, y.scale, y.offset) or any(
        one.is_constant and one.offset == 0 and other.dtype == "bf16" for one, other in ((x, y), (y, x))
    )


def _is_narrowed(b: NodeBuilder, x: AxisValue) -> bool:
    """Is a value the cast of one of a wider type?"""
    if x.node is None or x.dtype not in FLOATS:
        return False
    own = b.nodes[x.node].dtype
    if own == "i32":
        return x.dtype in SIXTEEN_BIT_FLOATS
    return own in FLOATS and numpy_dtype(own).itemsize > numpy_dtype(x.dtype).itemsize


@rule("max", special=True)
def _max(b: NodeBuilder, out: EquationInfo, x: AxisValue, y: AxisValue) -> AxisValue:
    if x.is_neg_inf:
        return b.widened(y, x)
    if y.is_neg_inf:
        return b.widened(x, y)
    return b.plain("maximum", (x, y), out.dtype)


# --- masks


def _is_infinite(b: NodeBuilder, op: str, x: AxisValue, y: AxisValue) -> AxisValue | None:
    """``x == inf``, said with the largest number; None if neither operand is infinite."""
    x, y = (y, x) if x.special is not None else (x, y)
    if y.special is None:
        return None
    if op != "eq" or math.isnan(y.special) or x.dtype not in FLOATS:
        raise NotExpressible(Code.NON_FINITE, f"a comparison with {y.special}")
    if _may_be_wider(b, x):
        raise NotExpressible(Code.DTYPE, f"a comparison of what was rounded to {x.dtype} with {y.special}")
    x, most = (
        b.widened(x, y),
        b.constant(Fraction(lowest(numpy_dtype(x.dtype))) * (-1 if y.special > 0 else 1), x.dtype),
    )
    return b.plain("lt", (most, x) if y.special > 0 else (x, most), "bool")


def _comparison(
    op: str, swap: bool, invert: bool, b: NodeBuilder, out: EquationInfo, x: AxisValue, y: AxisValue
) -> AxisValue:
    value = _is_infinite(b, op, x, y) or _test_of_choice(b, op, swap, x, y)
    if value is None:
        if not _keeps_sides(x, y):
            _refuse_rounded(b, "a comparison", x, y)
        integers.check_comparison(b, x, y)
        value = b.plain(op, (y, x) if swap else (x, y), out.dtype)
    return b.negated(value) if invert else value


TESTS = {  # of a first operand against a second, by operator and by whether the first is on the left
    ("eq", True): operator.eq,
    ("eq", False): operator.eq,
    ("lt", True): operator.lt,
    ("lt", False): operator.gt,
    ("le", True): operator.le,
    ("le", False): operator.ge,
}


def _test_of_choice(b: NodeBuilder, op: str, swap: bool, x: AxisValue, y: AxisValue) -> AxisValue | None:
    """A comparison of a choice of two constants with a third, as the mask that chose."""
    is_left = not swap
    if x.is_constant:
        x, y, is_left = y, x, swap
    if x.node is None or y.node is not None or y.special is not None:
        return None
    test = TESTS[op, is_left]
    mask = b.test_of_choice(x, lambda value: test(value, y.offset))
    return mask and b.widened(mask, y)


for _name, _op, _swap, _invert in (
    ("lt", "lt", False, False),
    ("le", "le", False, False),
    ("gt", "lt", True, False),
    ("ge", "le", True, False),
    ("eq", "eq", False, False),
    ("ne", "eq", False, True),
):
    rule(_name, light=True)(functools.partial(_comparison, _op, _swap, _invert))


def _logical(op: str, b: NodeBuilder, out: EquationInfo, x: AxisValue, y: AxisValue) -> AxisValue:
    if op == "and" and x.dtype in integers.RANGES:
        return integers.masked(b, x, y) if y.is_constant else integers.masked(b, y, x)
    _needs_bool(out, op, x)
    for constant, other in ((x, y), (y, x)):
        if constant.is_constant:  # true and x = x; false and x = false; or: the other way round
            is_neutral = bool(constant.offset) == (op == "and")
            return b.widened(other, constant) if is_neutral else b.widened(constant, other)
    return b.plain(op, (x, y), out.dtype)


for _name in ("and", "or"):
    rule(_name, light=True)(functools.partial(_logical, _name))


@rule("not", light=True)
def _not(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    _needs_bool(out, "not", x)
    return b.negated(x)


@rule("xor", light=True)
def _xor(b: NodeBuilder, out: EquationInfo, x: AxisValue, y: AxisValue) -> AxisValue:
    _needs_bool(out, "xor", x)
    return b.negated(b.plain("eq", (x, y), out.dtype))


def _needs_bool(out: EquationInfo, op: str, x: AxisValue) -> None:
    if out.dtype != "bool":
        raise NotExpressible(Code.DTYPE, f"bitwise {op} of {x.dtype}")


@rule("select_n", special=True)
def _select_n(b: NodeBuilder, out: EquationInfo, condition: AxisValue, *cases: AxisValue) -> AxisValue:
    if condition.dtype != "bool" or len(cases) != 2:
        raise NotExpressible(Code.PARAMETERS, "a select that is not between two cases")
    if condition.is_constant:
        return cases[int(condition.offset)]
    no, yes = cases
    if (opposite := b.opposite(condition)) is not None:
        condition, no, yes = opposite, yes, no
    if out.dtype == "bool" and _are_different_constants(no, yes):
        return b.widened(condition if yes.offset else b.negated(condition), no)
    if any(v.special is not None and not v.is_neg_inf for v in cases):
        raise NotExpressible(Code.NON_FINITE, "a choice of plus infinity or NaN")
    if no.is_neg_inf or yes.is_neg_inf:
        return _masked(b, condition, no, yes, out.dtype)
    return b.plain("where", (condition, yes, no), out.dtype)


def _are_different_constants(x: AxisValue, y: AxisValue) -> bool:
    return x.is_constant and y.is_constant and x.offset != y.offset


def _masked(b: NodeBuilder, condition: AxisValue, no: AxisValue, yes: AxisValue, dtype: str) -> AxisValue:
    """A choice between a value and -inf."""
    if no.is_neg_inf and yes.is_neg_inf:
        return b.widened(no, yes)
    if yes.is_neg_inf:
        condition, no, yes = b.negated(condition), yes, no
    return b.plain("mask", (condition, b.widened(yes, no)), dtype)


@rule("iota", light=True)
def _iota(b: NodeBuilder, out: EquationInfo) -> AxisValue:
    dimension = out.params["dimension"]
    dims = tuple(map(b.axes.dimension, out.shape))
    if not dims[dimension]:
        return b.constant(Fraction(0), out.dtype, dims)
    if out.dtype in FLOATS and out.shape[dimension] - 1 > 2 ** (jnp.finfo(out.numpy_dtype).nmant + 1):
        raise NotExpressible(Code.DTYPE, f"indices beyond what {out.dtype} holds")
    return b.iota(dims, dimension, out.dtype)


# --- reductions and contractions


def _reduced(b: NodeBuilder, x: AxisValue, axes: Sequence[int]) -> tuple[Any, Any]:
    dims = b.dims(x)
    over = tuple(itertools.chain(*(dims[a] for a in axes)))
    return over, tuple(dim for d, dim in enumerate(dims) if d not in axes)


@rule("reduce_sum")
def _reduce_sum(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    _needs_float(out, "a sum")
    return b.sum(x, *_reduced(b, x, out.params["axes"]), out.dtype)


@rule("reduce_max")
def _reduce_max(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    _needs_float(out, "a maximum")
    return b.maximum(x, *_reduced(b, x, out.params["axes"]), out.dtype)


@rule("reduce_min")
def _reduce_min(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    _needs_float(out, "a minimum")
    over, dims = _reduced(b, x, out.params["axes"])
    return b.scaled(b.maximum(b.scaled(x, MINUS_ONE), over, dims, out.dtype), MINUS_ONE)


@rule("reduce_or")
def _reduce_or(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    _needs_bool(out, "or", x)
    return b.maximum(x, *_reduced(b, x, out.params["axes"]), out.dtype)


@rule("reduce_and")
def _reduce_and(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    return b.negated(_reduce_or(b, out, b.negated(x)))


def _over_windows(reduce: Rule, b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    """A reduction over axes, as one over windows."""
    shape, axes = convolutions.as_reduction(out.params, b.axes.size(x.dims))
    return reduce(b, replace(out, params={"axes": axes}), replace(x, dims=b.axes.regroup(x.dims, shape)))


for _name, _rule in zip(convolutions.WINDOW_REDUCTIONS, (_reduce_sum, _reduce_max, _reduce_min), strict=True):
    rule(_name)(functools.partial(_over_windows, _rule))


# --- an element of every row


@rule("gather")
def _gather(b: NodeBuilder, out: EquationInfo, x: AxisValue, index: AxisValue) -> AxisValue:
    return gathers.picked(b, out.params, x, index, len(out.shape))


@rule("scatter-add")
def _scatter_add(b: NodeBuilder, out: EquationInfo, x: AxisValue, index: AxisValue, y: AxisValue) -> AxisValue:
    _needs_float(out, "a sum")
    return gathers.put(b, out.params, x, index, y, out.dtype)


@rule("dot_general")
def _dot_general(b: NodeBuilder, out: EquationInfo, x: AxisValue, y: AxisValue) -> AxisValue:
    _needs_float(out, "a contraction")
    _check_precision(out.params, (x.dtype, y.dtype))
    (x_sum, y_sum), (x_batch, y_batch) = out.params["dimension_numbers"]
    view = b.axes.unify([x.dims[d] for d in (*x_batch, *x_sum)], [y.dims[d] for d in (*y_batch, *y_sum)])
    x_dims, y_dims = b.dims(x), b.dims(y)
    x_free = tuple(dim for d, dim in enumerate(x_dims) if d not in (*x_sum, *x_batch))
    y_free = tuple(dim for d, dim in enumerate(y_dims) if d not in (*y_sum, *y_batch))
    used = set(itertools.chain(*x_dims))
    for key in itertools.chain(*y_free):  # the free axes of the two operands are different ones
        if key in used:
            view[key] = b.axes.copy_of(key, used)
        used.add(view.get(key, key))
    b.axes.keep_apart(used)
    seen = tuple(tuple(view.get(k, k) for k in dim) for dim in y_free)
    over = tuple(itertools.chain(*(x_dims[d] for d in x_sum)))
    dims = (*(x_dims[d] for d in x_batch), *x_free, *seen)
    return b.contract(x, y, view, over, dims, out.dtype)


@rule("conv_general_dilated")
def _conv_general_dilated(b: NodeBuilder, out: EquationInfo, x: AxisValue, y: AxisValue) -> AxisValue:
    found = convolutions.as_product(out.params, b.axes.size(x.dims), b.axes.size(y.dims))
    x = replace(x, dims=b.axes.regroup(x.dims, found.shape))
    params = {"dimension_numbers": (found.sums, ((), ())), "precision": out.params.get("precision")}
    value = _dot_general(b, replace(out, params=params), x, y)
    return replace(value, dims=tuple(value.dims[d] for d in found.permutation))


@rule("rev", view=True)
def _rev(b: NodeBuilder, out: EquationInfo, x: AxisValue) -> AxisValue:
    if any(out.shape[d] > 1 for d in out.params["dimensions"]):
        raise NotExpressible(Code.UNSUPPORTED_PRIMITIVE, "elements in reverse order")
    return x


# Precisions that ask for no more than products of narrow operands, summed in f32. XLA's HIGH is TF32 on GPUs.
NARROW_PRECISIONS = frozenset(
    {"DEFAULT", "HIGH", "F16_F16_F16", "F16_F16_F32", "BF16_BF16_BF16", "BF16_BF16_F32", "TF32_TF32_F32"}
)


def asks_for_float32(params: Mapping[str, Any], operands: Sequence[Any]) -> bool:
    """Does a product of such arrays ask by name for more than TF32?"""
    has_float32 = any(np.dtype(x.dtype).itemsize > 2 for x in operands)
    return has_float32 and any(name not in NARROW_PRECISIONS for name in _precisions(params))


def _precisions(params: Mapping[str, Any]) -> list[str]:
    """The names of the precisions that a product asks for."""
    asked = params.get("precision")
    each = asked if isinstance(asked, tuple) else (asked,)
    return [getattr(p, "name", str(p)).upper() for p in each if p is not None]


def _check_precision(params: Mapping[str, Any], dtypes: tuple[str, str]) -> None:
    """Kernels accumulate in f32: more than that, asked for by name, is XLA's."""
    for name in _precisions(params):
        if "F64" in name:
            raise NotExpressible(Code.PRECISION, f"a contraction of {' and '.join(dtypes)} in precision {name}")


# --- constants

FOLDS.update(
    add=lambda p, x, y: x + y,
    add_any=lambda p, x, y: x + y,
    sub=lambda p, x, y: x - y,
    mul=lambda p, x, y: x * y,
    rem=lambda p, x, y: np.fmod(x, y),
    div=lambda p, x, y: x / y if np.issubdtype(x.dtype, np.floating) else np.trunc(x / y),
    neg=lambda p, x: -x,
    max=lambda p, x, y: np.maximum(x, y),
    min=lambda p, x, y: np.minimum(x, y),
    sqrt=lambda p, x: np.sqrt(x),
    rsqrt=lambda p, x: 1 / np.sqrt(x),
    square=lambda p, x: x * x,
    integer_pow=lambda p, x: x ** float(p["y"]),
    pow=lambda p, x, y: x**y,
    exp=lambda p, x: np.exp(x),
    exp2=lambda p, x: np.exp2(x),
    log=lambda p, x: np.log(x),
    lt=lambda p, x, y: x < y,
    le=lambda p, x, y: x <= y,
    gt=lambda p, x, y: x > y,
    ge=lambda p, x, y: x >= y,
    eq=lambda p, x, y: x == y,
    ne=lambda p, x, y: x != y,
)
FOLDS["and"] = lambda p, x, y: np.bitwise_and(x, y)
FOLDS["or"] = lambda p, x, y: np.bitwise_or(x, y)
FOLDS["not"] = lambda p, x: np.bitwise_not(x)


def broadcast_scalar(b: NodeBuilder, x: AxisValue, shape: Sequence[int]) -> AxisValue:
    """A scalar seen as an array of `shape`."""
    dims = tuple(map(b.axes.dimension, shape))
    b.axes.keep_apart(itertools.chain(*dims))
    return replace(x, dims=dims)


_FAMILIES = {
    "an index into data": ("gather", "scatter", "dynamic_slice", "dynamic_update_slice", "scatter-add", "take"),
    "an order backwards": ("rev",),
    "a scan along an axis": ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
    "random bits": ("random_bits", "random_seed", "random_wrap", "random_unwrap", "random_fold_in", "threefry2x32"),
    "the device's place in the mesh": ("axis_index",),
    "an order of elements": ("sort", "top_k", "argmax", "argmin"),
}


def why_not(primitive: str) -> str:
    """What to tell a user about a primitive without a rule."""
    return next((why for why, names in _FAMILIES.items() if primitive in names), "no rule for it")
