"""The table of operators: one record each, read by everybody.

To add an operator, add a record here (`OpDef`, or `Function` for a pointwise function that proofs need not know).
Checker, evaluators, verifier, exact check, cost model, portable and Triton lowerings pick it up;
`tests/mugraph/test_operators.py` adds one from outside. Others ask for an operator by name only where they treat it
specially: accumulators, whose meaning is the loop itself, products, masks, exponentials and logarithms.

Scalars ride for free: pointwise unary operators act on ``scale * x + offset``, `add` on ``ca * x + cb * y``.
Fractions are exact.
"""

# A record's lambdas take values of any domain and arrays of any library: their parameters have no type to name.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from typing import Any

from mirage_jax.errors import GraphError
from mirage_jax.mugraph.domains import exact
from mirage_jax.mugraph.domains.protocol import Domain
from mirage_jax.mugraph.graph import Attr, Axis

ONE, ZERO = Fraction(1), Fraction(0)
type Meaning = Callable[..., Any]  # (domain, *values, **attributes) -> value
type Axes = tuple[Axis, ...]
type Steps = tuple[tuple[str, str], ...]  # variables of a Triton expression, in order: `steep` is read as {steep}


@dataclass(frozen=True)
class OpDef:
    """One operator, for every stage."""

    name: str
    arity: int
    infer: Callable[[tuple[Axes, ...], Mapping[str, Attr]], Axes]  # axes of the result
    meaning: Meaning
    defaults: Mapping[str, Attr] = field(default_factory=dict[str, Attr])  # attributes that may be left out
    required: tuple[str, ...] = ()  # attributes that may not
    flops: float = 1.0  # per element of the iteration space (result axes and reduced axes)
    triton: str = ""  # f32 tile expression over {0}, {1}, ..; "" where the emitter owns the operator (dot, sum, ...)
    steps: Steps = ()
    pointwise: bool = True
    summary: str = ""


type Interval = tuple[float, float]
ANYTHING, UNIT, SIGNED = (-math.inf, math.inf), (0.0, 1.0), (-1.0, 1.0)


def _anything(*args: Interval) -> Interval:
    return ANYTHING


@dataclass(frozen=True)
class Function:
    """A pointwise function outside the Lax fragment. Proofs know only that equal arguments give equal values."""

    name: str
    value: Callable[..., Any]  # on floats: (xp, *arrays), where xp is numpy or jax.numpy
    exact: Callable[..., exact.Numbers]  # on exact numbers, for the exact check
    triton: str
    arity: int = 1
    flops: float = 4.0
    range: Interval | Callable[..., Interval] = _anything  # of its finite values; may depend on the arguments' ranges
    steps: Steps = ()


def _special(name: str) -> Callable[..., Any]:
    def _value(xp: Any, x: Any) -> Any:
        if xp.__name__ == "numpy":
            import scipy.special  # pyright: ignore[reportMissingTypeStubs]  # it takes a while to load

            return getattr(scipy.special, name)(x)
        import jax.scipy.special  # jax.numpy was passed in, so jax is loaded already; mugraph itself stays free of it

        return getattr(jax.scipy.special, name)(x)

    return _value


# log(1 + x) without losing small x: the rounding error of 1 + x is divided out again; inf / inf would be NaN
LOG1P = "tl.where((1.0 + {0} == 1.0) | ({0} == float('inf')), {0}, tl.log(1.0 + {0}) * ({0} / ((1.0 + {0}) - 1.0)))"
# exp(x) - 1 without losing small x: its series there
EXPM1 = (
    "tl.where(tl.abs({0}) < 0.25, {0} * (1.0 + {0} / 2.0 * (1.0 + {0} / 3.0 * (1.0 + {0} / 4.0 * (1.0 + {0} / 5.0 "
    "* (1.0 + {0} / 6.0))))), tl.exp({0}) - 1.0)"
)

# by exp, without losing small x: the series there; of digits after the seventh nothing is left there
TANH = (
    "tl.where(tl.abs({0}) < 0.125, {0} * (1.0 - {0} * {0} * 0.3333333432674408 * (1.0 - {0} * {0} * 0.4000000059604645 "
    "* (1.0 - {0} * {0} * 0.4047619104385376))), 1.0 - 2.0 / (1.0 + tl.exp(2.0 * {0})))"
)

# without losing small results to 1 - erf: exp(-x^2) times a rational function, fitted to 1e-8 of exp(x^2) erfc(x) for x
# from 1 to 10; beyond, nothing of it is left in float32
_OVER, _UNDER = (
    reduce(lambda tail, c: f"({tail}) * tl.abs({{0}}) + {c!r}", coefficients[1:], repr(coefficients[0]))
    for coefficients in (exact.ERFC_OVER, exact.ERFC_UNDER)
)
ERFC = (
    "tl.where(tl.abs({0}) < 1.0, 1.0 - tl.erf({0}), tl.where({0} < 0.0, 2.0, 0.0) + tl.where({0} < 0.0, -1.0, 1.0) "
    f"* tl.where(tl.abs({{0}}) > 10.0, 0.0, tl.exp(-({{0}} * {{0}})) * (({_OVER}) / ({_UNDER}))))"
)

# by its series where exponentials cancel; no exponential is infinite before the result is
SINH = (
    "tl.where(tl.abs({0}) < 1.0, {0} * (1.0 + {0} * {0} / 6.0 * (1.0 + {0} * {0} / 20.0 * (1.0 + {0} * {0} / 42.0 "
    f"* (1.0 + {{0}} * {{0}} / 72.0)))), tl.exp({{0}} - {exact.LN2!r}) - tl.exp(-{{0}} - {exact.LN2!r}))"
)

# log(|x| + sqrt(x * x + 1)) and log(x + sqrt(x * x - 1)), without losing small results or a square that is infinite
_LOG_UNLESS_NEAR = (
    f"tl.where({{size}} > {exact.LARGE!r}, tl.log({{size}}) + {exact.LN2!r}, {LOG1P.replace('{0}', '{near}')})"
)
ASINH_STEPS = (
    ("size", "tl.abs({0})"),
    ("near", "{size} + {0} * {0} / (1.0 + tl.sqrt(1.0 + {0} * {0}))"),
    ("size", _LOG_UNLESS_NEAR),
)
ASINH = "tl.where({0} < 0.0, {size} * -1.0, tl.where({0} == 0.0, {0}, {size}))"
ACOSH_STEPS = (
    ("size", "{0}"),
    ("above", "{0} - 1.0"),
    ("near", "{above} + tl.sqrt({above}) * tl.sqrt({0} + 1.0)"),
)
ACOSH = _LOG_UNLESS_NEAR

# atan(t) = t + t^3 p(t^2) for a small slope t
_TAIL = reduce(lambda tail, c: f"({tail}) * {{square}} + {c!r}", exact.ATAN[1:], repr(exact.ATAN[0]))
ATAN_STEPS = (
    ("sign", "tl.where({slope} < 0.0, -1.0, 1.0)"),
    ("size", "tl.abs({slope})"),
    ("is_steep", f"{{size}} > {exact.DIAGONAL_END!r}"),
    ("is_diagonal", f"{{size}} > {exact.SERIES_END!r}"),
    (
        "turn",
        f"{{sign}} * tl.where({{is_steep}}, {exact.QUARTER_TURN!r}, "
        f"tl.where({{is_diagonal}}, {exact.EIGHTH_TURN!r}, 0.0))",
    ),
    ("near", "tl.where({is_diagonal}, ({slope} - {sign}) / ({size} + 1.0), {slope})"),
    ("slope", "tl.where({is_steep}, -1.0 / {slope}, {near})"),
    ("square", "{slope} * {slope}"),
)
ATAN = f"{{turn}} + ({{slope}} + {{slope}} * {{square}} * ({_TAIL}))"

_HAS_MINUS, _SECOND_HAS_MINUS = (f"({{{n}}} < 0.0) | (1.0 / {{{n}}} < 0.0)" for n in (0, 1))  # also of -0
ATAN2_STEPS = (
    ("rise", "tl.abs({0})"),
    ("run", "tl.abs({1})"),
    ("is_upright", "{rise} > {run}"),
    ("slope", "tl.where({is_upright}, {run} / {rise}, {rise} / {run})"),
    ("slope", "tl.where({rise} == {run}, tl.where({rise} == 0.0, 0.0, 1.0), {slope})"),
    *ATAN_STEPS,
    ("angle", ATAN),
    ("angle", f"tl.where({{is_upright}}, {exact.QUARTER_TURN!r} - {{angle}}, {{angle}})"),
    ("angle", f"tl.where({_SECOND_HAS_MINUS}, {exact.HALF_TURN!r} - {{angle}}, {{angle}})"),
)
ATAN2 = f"tl.where({_HAS_MINUS}, {{angle}} * -1.0, {{angle}})"

# exp(y log |x|), with the sign of x if y is odd; NaN where x is below zero and y no whole number
POWER_STEPS = (
    ("size", "tl.abs({0})"),
    ("power", "tl.where(({size} == 1.0) | ({1} == 0.0), 1.0, tl.exp({1} * tl.log({size})))"),
    ("is_whole", "tl.floor({1}) == {1}"),
    ("is_odd", "{is_whole} & (2.0 * tl.floor({1} * 0.5) != {1})"),
    ("power", f"tl.where(({_HAS_MINUS}) & {{is_odd}}, {{power}} * -1.0, {{power}})"),
)
POWER = "tl.where(({0} < 0.0) & ({is_whole} == 0) & ({size} < float('inf')), float('nan'), {power})"

# the nearest whole number, of two the even one; no sum here rounds, and zero keeps its sign
NEAREST = (
    "tl.where(tl.abs({0}) <= 0.5, {0} * 0.0, tl.floor({0}) + (({0} - tl.floor({0}) > 0.5)"
    " | (({0} - tl.floor({0}) == 0.5) & (tl.floor({0}) != 2.0 * tl.floor(tl.floor({0}) * 0.5)))).to(tl.float32))"
)

SIGN = "tl.where({0} != {0}, {0}, ({0} > 0).to(tl.float32) - ({0} < 0).to(tl.float32))"
KEEPS_NAN = "propagate_nan=tl.PropagateNan.ALL"  # as XLA and numpy do; Triton takes the argument that is a number

COMPARISONS = ("lt", "le", "eq")
TRUTHS = frozenset({*COMPARISONS, "isfinite", "and", "or", "not"})  # functions whose results are 0 or 1
MAX_NARROW_SIDE = 4  # rows or columns of a product in float32 up to which vector units are faster than matrix units
CARRIED_REGISTERS = 160  # per thread, for tiles of sums that a loop without matrix products carries
MAX_NARROW_DEPTH = 8  # products that such a product sums, up to which vector units are faster


def _truth(test: Callable[..., Any]) -> Callable[..., exact.Numbers]:
    return lambda *xs: exact.integers(test(*xs))


def _chosen(condition: Interval, *args: Interval) -> Interval:
    lows, highs = zip(*args, strict=True)
    return min(lows), max(highs)


FUNCTIONS: dict[str, Function] = {}

# fmt: off
_FUNCTIONS = (
    Function(
        "logistic", lambda xp, x: 1 / (1 + xp.exp(-x)), exact.logistic, "(1.0 / (1.0 + tl.exp(({0}) * -1.0)))",
        range=UNIT,
    ),
    Function("tanh", lambda xp, x: xp.tanh(x), exact.tanh, TANH, flops=10, range=SIGNED),
    Function("erf", _special("erf"), exact.erf, "tl.erf({0})", range=SIGNED),
    Function("erfc", _special("erfc"), exact.erfc, ERFC, flops=24, range=(0.0, 2.0)),
    # an exponential whose algebra is not needed (passes.nested_exponentials)
    Function("inner_exp", lambda xp, x: xp.exp(x), exact.exp, "tl.exp({0})", range=(0.0, math.inf)),
    Function("log", lambda xp, x: xp.log(x), exact.log, "tl.log({0})"),
    Function("log1p", lambda xp, x: xp.log1p(x), exact.log1p, LOG1P),
    Function("expm1", lambda xp, x: xp.expm1(x), exact.expm1, EXPM1, flops=12),
    Function(
        "floor", lambda xp, x: xp.floor(x), exact.floor, "tl.floor({0})", flops=1, range=lambda x: (x[0] - 1, x[1])
    ),
    Function(
        "round", lambda xp, x: xp.round(x), exact.nearest, NEAREST, flops=8, range=lambda x: (x[0] - 0.5, x[1] + 0.5)
    ),
    Function(
        "fraction", lambda xp, x: x - xp.floor(x), lambda x: exact.subtract(x, exact.floor(x)), "({0} - tl.floor({0}))",
        flops=2, range=UNIT,
    ),
    Function("sinh", lambda xp, x: xp.sinh(x), exact.sinh, SINH, flops=12),
    Function("asinh", lambda xp, x: xp.arcsinh(x), exact.asinh, ASINH, flops=16, steps=ASINH_STEPS),
    Function(
        "acosh", lambda xp, x: xp.arccosh(x), exact.acosh, ACOSH, flops=16, range=(0.0, math.inf), steps=ACOSH_STEPS
    ),
    Function(
        "atan", lambda xp, x: xp.arctan(x), exact.atan, ATAN, flops=24, range=(-1.6, 1.6),
        steps=(("slope", "{0}"), *ATAN_STEPS),
    ),
    Function(
        "asin", lambda xp, x: xp.arcsin(x), exact.asin, ATAN, flops=30, range=(-1.6, 1.6),
        steps=(("slope", "{0} / tl.sqrt((1.0 - {0}) * (1.0 + {0}))"), *ATAN_STEPS),
    ),
    Function(
        "acos", lambda xp, x: xp.arccos(x), exact.acos, f"2.0 * ({ATAN})", flops=30, range=(0.0, 3.2),
        steps=(("slope", "tl.sqrt((1.0 - {0}) / (1.0 + {0}))"), *ATAN_STEPS),
    ),
    Function("atan2", lambda xp, y, x: xp.arctan2(y, x), exact.atan2, ATAN2, 2, 36, (-3.2, 3.2), ATAN2_STEPS),
    Function("power", lambda xp, x, y: xp.power(x, y), exact.real_power, POWER, 2, 16, steps=POWER_STEPS),
    Function("sin", lambda xp, x: xp.sin(x), exact.sin, "tl.sin({0})", range=SIGNED),
    Function("cos", lambda xp, x: xp.cos(x), exact.cos, "tl.cos({0})", range=SIGNED),
    Function(
        "abs", lambda xp, x: xp.abs(x), exact.absolute, "tl.abs({0})", flops=1,
        range=lambda x: (0.0, max(abs(x[0]), abs(x[1]))),
    ),
    Function(
        "isfinite", lambda xp, x: xp.isfinite(x), _truth(exact.is_finite),
        "(tl.abs({0}) < float('inf')).to(tl.float32)", flops=1, range=UNIT,
    ),
    Function("sign", lambda xp, x: xp.sign(x), exact.sign, SIGN, flops=1, range=SIGNED),
    Function(
        "maximum", lambda xp, x, y: xp.maximum(x, y), exact.maximum, f"tl.maximum({{0}}, {{1}}, {KEEPS_NAN})", 2, 1,
        range=lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    ),
    Function(
        "minimum", lambda xp, x, y: xp.minimum(x, y), exact.minimum, f"tl.minimum({{0}}, {{1}}, {KEEPS_NAN})", 2, 1,
        range=lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    ),
    Function("lt", lambda xp, x, y: x < y, _truth(exact.less), "(({0}) < ({1})).to(tl.float32)", 2, 1, UNIT),
    Function("le", lambda xp, x, y: x <= y, _truth(exact.less_equal), "(({0}) <= ({1})).to(tl.float32)", 2, 1, UNIT),
    Function("eq", lambda xp, x, y: x == y, _truth(exact.equal), "(({0}) == ({1})).to(tl.float32)", 2, 1, UNIT),
    Function(
        "and", lambda xp, x, y: (x != 0) & (y != 0), _truth(lambda x, y: ~exact.is_zero(x) & ~exact.is_zero(y)),
        "((({0}) != 0) & (({1}) != 0)).to(tl.float32)", 2, 1, UNIT,
    ),
    Function(
        "or", lambda xp, x, y: (x != 0) | (y != 0), _truth(lambda x, y: ~exact.is_zero(x) | ~exact.is_zero(y)),
        "((({0}) != 0) | (({1}) != 0)).to(tl.float32)", 2, 1, UNIT,
    ),
    Function("not", lambda xp, x: x == 0, _truth(exact.is_zero), "(({0}) == 0).to(tl.float32)", 1, 1, UNIT),
    # where(c, x, y): x where the condition holds
    Function(
        "where", lambda xp, c, x, y: xp.where(c != 0, x, y), exact.where, "tl.where(({0}) != 0, {1}, {2})", 3, 1,
        _chosen,
    ),
    # mask(c, x): x where the condition holds, else minus infinity (no constant: those are fractions)
    Function(
        "mask", lambda xp, c, x: xp.where(c != 0, x, -xp.inf), lambda c, x: exact.where(c, x, exact.MINUS_INFINITY),
        "tl.where(({0}) != 0, {1}, float('-inf'))", 2, 1, _chosen,
    ),
)
# fmt: on


def union(args: tuple[Axes, ...]) -> Axes:
    """Axes of a pointwise result, in order of first appearance."""
    return tuple(dict.fromkeys(a for axes in args for a in axes))


def _pointwise(args: tuple[Axes, ...], attrs: Mapping[str, Attr]) -> Axes:
    return union(args)


def _reduced(args: tuple[Axes, ...], attrs: Mapping[str, Attr]) -> Axes:
    gone = attrs["axes"]
    return tuple(a for a in union(args) if a not in gone)  # type: ignore[operator]


def _constant(args: tuple[Axes, ...], attrs: Mapping[str, Attr]) -> Axes:
    return ()


def _iota(args: tuple[Axes, ...], attrs: Mapping[str, Attr]) -> Axes:
    return (str(attrs["axis"]),)


def affine[V](d: Domain[V], x: V, scale: Fraction, offset: Fraction) -> V:
    """``scale * x + offset``."""
    if scale != 1:
        x = d.mul(d.constant(scale), x)
    return d.add(x, d.constant(offset)) if offset else x


def _add[V](d: Domain[V], x: V, y: V, *, ca: Fraction = ONE, cb: Fraction = ONE) -> V:
    return d.add(affine(d, x, ca, ZERO), affine(d, y, cb, ZERO))


def _exp[V](d: Domain[V], x: V, *, scale: Fraction = ONE, offset: Fraction = ZERO) -> V:
    return d.exp(affine(d, x, scale, offset))


def _exp_shifted[V](d: Domain[V], x: V, m: V, *, scale: Fraction = ONE) -> V:
    return d.exp(d.add(d.rounded(affine(d, x, scale, ZERO)), affine(d, m, Fraction(-1), ZERO)))


def _rescale[V](d: Domain[V], x: V, old: V, new: V, *, degree: Fraction = ONE) -> V:
    """``x * exp(degree * (old - new))``: a value relative to the shift `old`, made relative to `new`."""
    moved = d.add(old, affine(d, new, Fraction(-1), ZERO))  # first, which cancels exactly
    return d.mul(x, d.exp(affine(d, moved, degree, ZERO)))


def _log_shifted[V](d: Domain[V], x: V, m: V, *, degree: Fraction = ONE) -> V:
    return d.log_product(x, affine(d, m, degree, ZERO))


def _less_log_shifted[V](d: Domain[V], y: V, x: V, m: V, *, degree: Fraction = ONE, scale: Fraction = ONE) -> V:
    return affine(d, d.less_log_product(y, x, affine(d, m, degree, ZERO)), scale, ZERO)


def _opaque(f: Function) -> OpDef:
    def _meaning[V](d: Domain[V], *xs: V, scale: Fraction = ONE, offset: Fraction = ZERO) -> V:
        if f.arity == 1:
            xs = (affine(d, xs[0], scale, offset),)
        return d.function(f.name, xs)

    defaults: dict[str, Attr] = {"scale": ONE, "offset": ZERO} if f.arity == 1 else {}
    return OpDef(
        f.name,
        f.arity,
        _pointwise,
        _meaning,
        defaults,
        flops=f.flops,
        triton=f.triton,
        steps=f.steps,
        summary="uninterpreted",
    )


def _loop_only[V](d: Domain[V], *xs: V, **_: Attr) -> V:
    """Accumulators get their meaning from the loop; outside of one they are the identity."""
    return xs[0]


UNARY: dict[str, Attr] = {"scale": ONE, "offset": ZERO}

OPERATORS: dict[str, OpDef] = {}


def register(op: OpDef | Function) -> None:
    """Add an operator.

    Raises:
        GraphError: the name is taken.
    """
    if op.name in OPERATORS:
        raise GraphError(f"operator {op.name} is registered twice")
    if isinstance(op, Function):
        FUNCTIONS[op.name] = op
        op = _opaque(op)
    OPERATORS[op.name] = op


def unregister(name: str) -> None:
    """Remove an operator, for tests that add one."""
    del OPERATORS[name]
    FUNCTIONS.pop(name, None)


# fmt: off
for _op in (
    OpDef(
        "const", 0, _constant, lambda d, *, value: d.constant(value), required=("value",), flops=0,
        summary="a scalar",
    ),
    OpDef(
        "iota", 0, _iota, lambda d, *, axis: d.iota(axis), required=("axis",), flops=0,
        summary="index along an axis",
    ),
    OpDef(
        "affine", 1, _pointwise, lambda d, x, *, scale=ONE, offset=ZERO: affine(d, x, scale, offset), UNARY,
        triton="{0}",
        summary="scale * x + offset",
    ),
    OpDef("add", 2, _pointwise, _add, {"ca": ONE, "cb": ONE}, triton="{0} + {1}", summary="ca * x + cb * y"),
    OpDef("mul", 2, _pointwise, lambda d, x, y: d.mul(x, y), triton="{0} * {1}", summary="x * y"),
    OpDef(
        "div", 2, _pointwise, lambda d, x, y: d.mul(x, d.power(y, Fraction(-1))), flops=3, triton="{0} / {1}",
        summary="x / y",
    ),
    OpDef(
        "pow", 1, _pointwise,
        lambda d, x, *, exponent, scale=ONE, offset=ZERO: d.power(affine(d, x, scale, offset), exponent),
        UNARY, ("exponent",), flops=4, summary="(scale * x + offset) ** exponent",
    ),
    OpDef("exp", 1, _pointwise, _exp, UNARY, flops=4, triton="tl.exp({0})", summary="exp(scale * x + offset)"),
    OpDef(
        "rounded", 1, _pointwise, lambda d, x: d.rounded(x), flops=1, triton="tl.fma({0}, 1.0, 0.0)",
        summary="x, in floats rounded before it is used",
    ),
    # --- safe softmax: exponentials relative to a shift (a free variable of the algebra, a running maximum in floats)
    OpDef("exps", 2, _pointwise, _exp_shifted, {"scale": ONE}, flops=4, summary="exp(scale * x - m)"),
    OpDef("rescale", 3, _pointwise, _rescale, {"degree": ONE}, flops=6, summary="x * exp(degree * (old - new))"),
    OpDef("logs", 2, _pointwise, _log_shifted, {"degree": ONE}, flops=6, summary="log(x * exp(degree * m))"),
    OpDef(
        "lesslogs", 3, _pointwise, _less_log_shifted, {"degree": ONE, "scale": ONE}, flops=6,
        summary="scale * (y - log(x * exp(degree * m)))",
    ),
    OpDef(
        "shift", 1, _reduced, lambda d, x, *, axes, scale=ONE: d.shift(affine(d, x, scale, ZERO), axes),
        {"scale": ONE}, ("axes",),
        pointwise=False,
        summary="shift of a safe softmax: max(scale * x) over axes, "
        "carried over the loop if it reduces the loop axis",
    ),
    # --- reductions
    OpDef(
        "sum", 1, _reduced, lambda d, x, *, axes: d.sum(x, axes), required=("axes",), pointwise=False,
        summary="sum over axes",
    ),
    OpDef(
        "dot", 2, _reduced, lambda d, x, y, *, axes: d.dot(x, y, axes), required=("axes",), flops=2, pointwise=False,
        summary="sum over axes of x * y",
    ),
    OpDef(
        "max", 1, _reduced, lambda d, x, *, axes: d.maximum(x, axes), required=("axes",), pointwise=False,
        summary="maximum over axes",
    ),
    # --- accumulators: their meaning is the loop
    OpDef(
        "acc", 1, _pointwise, _loop_only, pointwise=False, summary="sum of x over the loop steps",
    ),
    OpDef(
        "accs", 2, _pointwise, _loop_only, {"degree": ONE}, pointwise=False,
        summary="sum of x over the loop steps, where x is relative to the running shift m: rescaled whenever m moves",
    ),
    OpDef("last", 1, _pointwise, _loop_only, flops=0, pointwise=False, summary="value of x after the last loop step"),
):
    register(_op)
# fmt: on
for _function in _FUNCTIONS:
    register(_function)

ACCUMULATORS = frozenset({"acc", "accs", "last"})


def operator(name: str) -> OpDef:
    """The record of an operator; the error lists the known names."""
    try:
        return OPERATORS[name]
    except KeyError:
        raise GraphError(f"unknown operator {name!r}; known: {', '.join(sorted(OPERATORS))}") from None
