"""A jaxpr in float64 on numpy: the reference of a differential test, made by neither XLA nor the optimizer.

Inputs and constants are upcast after rounding to their own dtype, casts between floats do nothing, and nothing else is
rounded. With `Noise`, the same walk instead disturbs the result of every equation by as much as rounding to its own
dtype might (Monte Carlo arithmetic, Parker 1997). The distance of such runs from the undisturbed one bounds the errors
of a correct program in these dtypes, whatever the order of its operations.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np
import scipy.special
from jax import lax

from mirage_jax.errors import UnsupportedError, in_one_line
from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.jax_compat import Jaxpr, Literal
from mirage_jax.jaxpr_frontend.partition.product_boundaries import summed_elements
from mirage_jax.jaxpr_frontend.partition.program import FlatEqn, flatten, read
from mirage_jax.jaxpr_frontend.translate.rules import PRODUCT_PRIMITIVES
from mirage_jax.mugraph.dtypes import is_float, is_sixteen_bit_float
from mirage_jax.verify.floats.noise import TF32_UNIT

type Array = np.ndarray

SENTINEL = 1e29  # numbers from here on that are exact carry no noise: biases that mask are no measurements
EARLIER = 2.0**-8  # of the largest number, from where a result may overflow; underflow is as near to the smallest


class Visitor(Protocol):
    """Looks at equations on the way, and may change their operands and results."""

    def operands(self, eqn: FlatEqn, xs: list[Array]) -> list[Array]:
        """Change the operands of an equation, or leave them."""
        return xs

    def result(self, x: Array, eqn: FlatEqn, xs: list[Array], dtype: Any, terms: Array | None) -> Array:
        """Change a result of an equation. `terms`: the sizes of a linear one's terms, see `_terms`."""
        ...


@dataclass(frozen=True)
class Noise:
    """Relative errors: of every element on its own, or the same of a whole result, as equal rows have them.

    `tf32`: operands of products of float32 are rounded to TF32, as on NVIDIA GPUs by default. Those of products of
    16-bit types always have an error too: ``a (b c)`` rounds a product that ``(a b) c`` does not, and so is off by eps
    of its terms where ``a b`` cancels. `strict_range`: no product in another order leaves the range of its type.

    A derivative adds up the cotangents of one value's uses. Where JAX subtracts what it added (a softmax's row maximum
    has such a gradient), the sum is exactly 0 by the form of the program, not by what it means: a form that has no such
    terms is off by their errors. So one of the two terms is the one of `other`, a run with errors of its own.
    """

    rng: np.random.Generator
    together: bool = False
    tf32: bool = False
    strict_range: bool = False
    other: Noise | None = None
    cotangents: list[Array] = field(default_factory=list, init=False)  # first terms of their sums, in order

    def draw(self, shape: tuple[int, ...]) -> Array:
        """Draw errors between -1 and 1."""
        return self.rng.uniform(-1, 1, (1,) * len(shape) if self.together else shape)

    def of_operands(self, eqn: FlatEqn) -> float:
        """The relative error of an equation's operands, in addition to those of the equations that made them."""
        if eqn.primitive not in PRODUCT_PRIMITIVES:
            return 0.0
        if self.tf32 and eqn.params["precision"] is None and all(a.dtype == np.float32 for a in eqn.in_avals):
            return TF32_UNIT
        return max(float(ml_dtypes.finfo(a.dtype).eps) if is_sixteen_bit_float(a.dtype) else 0.0 for a in eqn.in_avals)

    def operands(self, eqn: FlatEqn, xs: list[Array]) -> list[Array]:
        """Disturb the operands of a product, and take a term of a sum of cotangents from the other run."""
        if eqn.primitive == "add_any":
            return [self._of_other(xs[0]), xs[1]]
        eps = self.of_operands(eqn)
        return [x * (1 + eps * self.draw(np.shape(x))) for x in xs] if eps else xs

    def _of_other(self, x: Array) -> Array:
        place = len(self.cotangents)
        self.cotangents.append(x)
        terms = self.other.cotangents if self.other else []
        same = place < len(terms) and terms[place].shape == x.shape  # branches may differ, and runs of loops
        return terms[place] if same else x

    def result(self, x: Array, eqn: FlatEqn, xs: list[Array], dtype: Any, terms: Array | None) -> Array:
        """Disturb a result."""
        return _disturbed(x, eqn, xs, dtype, terms, self)


@dataclass(frozen=True)
class Rounded(Visitor):
    """Rounds results to their types: all, as the program is written, or with `rng` every other one by chance.

    XLA keeps more digits within what it fuses, and we do within a region. `Noise` makes no two numbers equal, but
    rounding does: float16 has nothing below -65504.
    """

    rng: np.random.Generator | None = None

    def result(self, x: Array, eqn: FlatEqn, xs: list[Array], dtype: Any, terms: Array | None) -> Array:
        """Round a result, or leave it."""
        if not is_float(dtype) or (self.rng is not None and self.rng.random() < 0.5):
            return x
        return np.asarray(x).astype(dtype).astype(np.float64)


@dataclass(frozen=True)
class Ranges(Visitor):
    """The largest number of every result of floats, over the largest and the smallest that its type may hold."""

    seen: list[tuple[float, float]] = field(default_factory=list)

    def result(self, x: Array, eqn: FlatEqn, xs: list[Array], dtype: Any, terms: Array | None) -> Array:
        """Record the range of a result."""
        if is_float(dtype):
            info = ml_dtypes.finfo(dtype)
            room = 0.5 if dtype == np.float16 else EARLIER / 2  # noise takes larger numbers for an overflow
            top = float(np.abs(x).max()) if np.size(x) else 0.0
            small = eqn.primitive in PRODUCTS and top > 0  # an exponential may be as small as it likes
            self.seen.append((top / (room * float(info.max)), float(info.tiny) / room / top if small else 0.0))
        return x

    def stays(self, before: Ranges) -> bool:
        """Whether every number is in range, or no further out than before."""
        return all(
            now <= max(1.0, then)
            for a, b in zip(self.seen, before.seen, strict=True)
            for now, then in zip(a, b, strict=True)
        )


@dataclass
class Growth(Visitor):
    """Do ordinary numbers grow as large as sentinels? Then factors that meet in another order may leave float32."""

    found: bool = False
    given: bool = False  # a sentinel, as an argument or a constant

    def result(self, x: Array, eqn: FlatEqn, xs: list[Array], dtype: Any, terms: Array | None) -> Array:
        """Look at a result of floats, and at constants."""
        if not is_float(dtype):
            return x
        large = [a for a, y in zip(eqn.inputs, xs, strict=True) if _is_huge(y)]
        self.given |= any(isinstance(a, Literal) for a in large)
        self.found |= not large and _is_huge(x)
        return x


def _is_huge(x: Array) -> bool:
    return bool((np.abs(x) >= SENTINEL).any())


def grows(jaxpr: Jaxpr, args: Sequence[Any]) -> bool:
    """Whether a program without sentinels computes numbers as large."""
    seen = Growth(given=any(_is_huge(_wide(x)) for x in args))
    evaluate(jaxpr, args, seen)
    return seen.found and not seen.given


def evaluate(jaxpr: Jaxpr, args: Sequence[Any], noise: Visitor | None = None) -> list[Array]:
    """Evaluate a jaxpr, floats as float64. Raises `UnsupportedError` for an unknown primitive."""
    program = flatten(jaxpr)
    values = dict(zip(program.inputs, map(_wide, args), strict=True))
    values |= {v: _wide(c) for v, c in program.constants.items()}
    sizes: dict[int, Array] = {}  # of the terms of a value, where it is a sum of products
    cancelled: dict[int, Array] = {}  # the same for a difference of such values
    known = ChainMap(sizes, cancelled)
    with np.errstate(all="ignore"):
        for eqn in program.eqns:
            xs = [_operand(values, a) for a in eqn.inputs]
            xs = xs if noise is None else noise.operands(eqn, xs)
            results = _apply(eqn, xs, noise)
            for number, aval, result in zip(eqn.outputs, eqn.out_avals, results, strict=True):
                if noise is not None:
                    if eqn.primitive in LINEAR:
                        sizes[number] = _terms(eqn, xs, sizes)
                    elif eqn.primitive == "sub" and (twice := _computed_twice(eqn, known)) is not None:
                        cancelled[number] = twice
                    result = noise.result(result, eqn, xs, aval.dtype, known.get(number))
                values[number] = result
    return [_operand(values, a) for a in program.outputs]


def _operand(values: Mapping[int, Array], atom: Any) -> Array:
    """The value of an operand. A literal may be a number of Python, with more digits than its type."""
    x = np.asarray(read(values, atom))
    if isinstance(atom, Literal):
        aval: Any = atom.aval
        x = x.astype(aval.dtype)
    return _wide(x)


def _wide(x: Any) -> Array:
    x = np.asarray(x)
    return x.astype(np.float64) if is_float(x.dtype) else x


def _terms(eqn: FlatEqn, xs: list[Array], sizes: Mapping[int, Array]) -> Array:
    """Add up the sizes of a linear result's terms. An operand that is a sum of products counts with all of its terms.

    ``sum_j (sum_i a_i b_ij) c_j`` may be computed as one sum over i and j. Where the inner sums cancel, that is off by
    eps of terms which are far larger than all numbers of the program. A quotient is linear in what it divides.
    """
    found = [
        np.abs(x) if isinstance(a, Literal) else sizes.get(a, np.abs(x)) for a, x in zip(eqn.inputs, xs, strict=True)
    ]
    if eqn.primitive == "div":
        found[1] = np.abs(xs[1])
    return _apply(eqn, found, None)[0]


def _computed_twice(eqn: FlatEqn, sizes: Mapping[int, Array]) -> Array | None:
    """The sizes of the terms in a difference; None if neither operand is a sum of products.

    ``s - max(s)`` is 0 for the largest s only if the sum s is computed once. A kernel that reads one s may compute
    it again in another order, and then both roundings are left: the diagonal of a log-softmax is such a program.
    """
    found = [sizes[a] for a in eqn.inputs if not isinstance(a, Literal) and a in sizes]
    return np.asarray(sum(found)) if found else None


def _roundings(eqn: FlatEqn, xs: list[Array]) -> float:
    """How many times float32's eps a sum may be off, over the sizes of its terms.

    n equal terms that are added one by one round the same way, so their errors do not cancel.
    """
    if eqn.primitive == "sub":
        return 1.0
    if eqn.primitive in PRODUCT_PRIMITIVES:
        terms = summed_elements(eqn.primitive, eqn.in_avals, eqn.params)
    elif eqn.primitive == "reduce_sum":
        terms = math.prod(np.shape(xs[0])[axis] for axis in eqn.params["axes"])
    else:
        return 0.0
    return max(1.0, terms / 32)


def _disturbed(x: Array, eqn: FlatEqn, xs: list[Array], dtype: Any, terms: Array | None, noise: Noise) -> Array:
    """`x` with the relative error that rounding may have; a sum may also have the error of its partial sums in float32.

    Numbers beyond the range of the type may overflow. (XLA may keep them in a wider type; another order may leave the
    range of float32, which nobody comes near by chance, a little earlier.) Numbers below may be flushed to zero, but
    not in float16, which is computed in float32 and rounds it to a multiple of the smallest.

    A sentinel has no noise where the result is a number of the type as it is: its sum with an ordinary number is
    the sentinel again, in float64 as in float32, in whatever order. Otherwise rows in which everything is masked would
    not be determined. A sum over an axis may have several: scaled after it and not before, as the range of float32
    and bfloat16 permits without `strict_range`, they overflow.
    """
    if eqn.primitive in EXACT or not is_float(dtype):
        return x
    info = ml_dtypes.finfo(dtype)
    y = x * (1 + float(info.eps) * noise.draw(np.shape(x)))
    if dtype == np.float16:
        y += np.where(x == 0, 0.0, float(info.smallest_subnormal) * noise.draw(np.shape(x)))
    if terms is not None and (roundings := _roundings(eqn, xs)):
        y += roundings * float(np.finfo(np.float32).eps) * terms * noise.draw(np.shape(x))
    y = y if dtype == np.float16 else _flushed(y, eqn, float(info.smallest_normal), noise)
    most = float(info.max)
    y = np.where(np.abs(y) > (most if dtype == np.float16 else EARLIER * most), np.copysign(math.inf, y), y)
    low = (x <= -SENTINEL) & (noise.strict_range or eqn.primitive != "reduce_sum")
    y = np.where(low & (x.astype(dtype) == x), x, y) if low.any() else y
    return y if noise.strict_range else np.where(_factors(eqn, xs), math.nan, y)


def _flushed(y: Array, eqn: FlatEqn, least: float, noise: Noise) -> Array:
    """`y` with numbers below the `least` normal one flushed to zero by chance, as XLA does in some loops on CPUs.

    A sum of products that is not much larger may lose terms in this way.
    """
    small = (np.abs(y) < least / EARLIER) & (y != 0)
    if small.any():
        y = np.where(small & (noise.draw(np.shape(y)) > 0), 0.0, y)
    if eqn.primitive in PRODUCT_PRIMITIVES:
        low = (np.abs(y) < least / EARLIER**2) & (y != 0)
        y = np.where(low, y + least * noise.draw(np.shape(y)), y) if low.any() else y
    return y


def _factors(eqn: FlatEqn, xs: list[Array]) -> Array:
    """Find products of a sentinel and another computed number, and its quotients, which may be anything.

    In another order of multiplication the sentinel may meet a large number first, and then a zero.
    """
    if eqn.primitive == "div" and not isinstance(eqn.inputs[1], Literal):
        return np.abs(xs[0]) >= SENTINEL
    huge = [np.abs(x) >= SENTINEL for x in xs] if eqn.primitive in (*PRODUCT_PRIMITIVES, "mul") else []
    if not any(h.any() for h in huge) or isinstance(eqn.inputs[0], Literal) or isinstance(eqn.inputs[1], Literal):
        return np.zeros((), bool)
    left, right = (np.ones(x.shape) for x in xs)
    (first,), (second,) = (_apply(eqn, [1.0 * a, 1.0 * b], None) for a, b in ((huge[0], right), (left, huge[1])))
    return np.asarray(first + second > 0)


def _apply(eqn: FlatEqn, xs: list[Array], noise: Visitor | None) -> list[Array]:
    name = eqn.primitive
    if name in SCOPES:
        return SCOPES[name](eqn, xs, noise)
    if name in POINTWISE:
        return [POINTWISE[name](*xs)]
    return [STRUCTURAL[name](xs, eqn)] if name in STRUCTURAL else _by_jax(eqn, xs)


def _by_jax(eqn: FlatEqn, xs: list[Array]) -> list[Array]:
    """Apply a primitive to operands of float64: convolutions, cumulative sums, sorting."""
    known = f"the float64 reference does not know {eqn.primitive} at {eqn.where}"
    params = dict(eqn.params)
    if any(hasattr(value, "eqns") for value in jax.tree.leaves(list(params.values()))):
        raise UnsupportedError(f"{known}: it has a body, whose types are not float64")
    if any(jax.numpy.issubdtype(a.dtype, np.complexfloating) for a in (*eqn.in_avals, *eqn.out_avals)):
        raise UnsupportedError(f"{known}: it has complex numbers")
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = np.dtype(np.float64)
    try:
        with jax.enable_x64(True):
            out = eqn.eqn.primitive.bind(*xs, **eqn.eqn.primitive.get_bind_params(params))
        return list(map(np.asarray, out if eqn.eqn.primitive.multiple_results else [out]))
    except Exception as error:
        raise UnsupportedError(f"{known}: {in_one_line(error)}") from None


def _scan(eqn: FlatEqn, xs: list[Array], noise: Visitor | None) -> list[Array]:
    """Run a scan. Shapes tell constants, carried operands and slices apart, since parameters vary with JAX."""
    params, (body,) = eqn.params, jax_compat.bodies(eqn.eqn)
    inside: list[Any] = [v.aval for v in body.invars]
    results: list[Any] = [v.aval for v in body.outvars]
    cut = sum(x.shape != a.shape for x, a in zip(inside, eqn.in_avals, strict=True))
    carried = sum(y.shape == a.shape for y, a in zip(results, eqn.out_avals, strict=True))
    consts = len(xs) - cut - carried
    fixed, carry, rows = xs[:consts], xs[consts : consts + carried], xs[consts + carried :]
    order = range(params["length"])
    stacked: list[list[Array]] = []
    for i in reversed(order) if params["reverse"] else order:
        out = evaluate(body, [*fixed, *carry, *(x[i] for x in rows)], noise)
        carry = out[:carried]
        stacked.append(out[carried:])
    if params["reverse"]:
        stacked.reverse()
    return [*carry, *(np.stack(column) for column in zip(*stacked, strict=True))]


def _while(eqn: FlatEqn, xs: list[Array], noise: Visitor | None) -> list[Array]:
    condition, body = jax_compat.bodies(eqn.eqn)
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    asked, fixed, carry = xs[:first], xs[first : first + second], xs[first + second :]
    while evaluate(condition, [*asked, *carry])[0]:
        carry = evaluate(body, [*fixed, *carry], noise)
    return carry


def _cond(eqn: FlatEqn, xs: list[Array], noise: Visitor | None) -> list[Array]:
    branches = jax_compat.bodies(eqn.eqn)
    return evaluate(branches[int(np.clip(xs[0], 0, len(branches) - 1))], xs[1:], noise)


def _checkpoint(eqn: FlatEqn, xs: list[Array], noise: Visitor | None) -> list[Array]:
    """Run a scope that was differentiated."""
    return evaluate(jax_compat.bodies(eqn.eqn)[0], xs, noise)


SCOPES: dict[str, Callable[[FlatEqn, list[Array], Visitor | None], list[Array]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "remat2": _checkpoint,
    "checkpoint": _checkpoint,
    "optimization_barrier": lambda eqn, xs, noise: xs,
}


# ---------------------------------------------------------------------- primitives


def _quotient(x: Array, y: Array) -> Array:
    """x / y; of integers rounded towards zero, and -1 where y is zero, as XLA has it."""
    if is_float(x.dtype):
        return np.divide(x, y)
    return np.where(y == 0, np.asarray(-1, x.dtype), (x - np.fmod(x, y)) // y).astype(x.dtype)


def _remainder(x: Array, y: Array) -> Array:
    """x less y times their quotient; of integers x itself where y is zero."""
    return np.fmod(x, y) if is_float(x.dtype) else np.where(y == 0, x, np.fmod(x, y))


def _shift_right_logical(x: Array, by: Array) -> Array:
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return (x.view(unsigned) >> by.view(unsigned)).view(x.dtype)


UFUNCS = (  # with the names that numpy has for them
    "abs", "cbrt", "ceil", "cos", "cosh", "exp", "exp2", "expm1", "floor", "log", "log1p", "sign", "sin", "sinh",
    "sqrt", "square", "tan", "tanh",
)  # fmt: skip
POINTWISE: dict[str, Callable[..., Array]] = {
    **{name: getattr(np, name) for name in UFUNCS},
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": _quotient, "rem": _remainder,
    "neg": np.negative, "max": np.maximum, "min": np.minimum, "pow": np.power, "is_finite": np.isfinite,
    "round": np.round,  # of two the even one, as jnp.round asks for
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not,
    "shift_left": np.left_shift, "shift_right_arithmetic": np.right_shift, "shift_right_logical": _shift_right_logical,
    "logistic": scipy.special.expit, "erf": scipy.special.erf, "erfc": scipy.special.erfc,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    jax_compat.EXP_OF_NEGATIVE_SQUARE: lambda x: np.exp(-x * x),
    "one_minus_square": lambda x: (1 + x) * (1 - x),
    "polynomial": lambda x, *coefficients: sum(c * x**n for n, c in enumerate(coefficients)),
    **dict.fromkeys(("stop_gradient", "copy", "copy_p", "name"), lambda x: x),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, *cases: np.choose(which.astype(np.int8), cases),
}  # fmt: skip

type Structural = Callable[[list[Array], FlatEqn], Array]


def _dot(xs: list[Array], eqn: FlatEqn) -> Array:
    (left_summed, right_summed), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    x, y = xs
    rows, columns = (
        [d for d in range(z.ndim) if d not in (*summed, *batch)]
        for z, summed, batch in ((x, left_summed, left_batch), (y, right_summed, right_batch))
    )
    batch, m, n, k = (
        [z.shape[d] for d in dims] for z, dims in ((x, left_batch), (x, rows), (y, columns), (x, left_summed))
    )
    left = x.transpose(*left_batch, *rows, *left_summed).reshape(*batch, math.prod(m), math.prod(k))
    right = y.transpose(*right_batch, *right_summed, *columns).reshape(*batch, math.prod(k), math.prod(n))
    return np.matmul(left, right).reshape(*batch, *m, *n)


def _cast(xs: list[Array], eqn: FlatEqn) -> Array:
    dtype = eqn.out_avals[0].dtype
    return _wide(xs[0] if is_float(dtype) and is_float(xs[0].dtype) else xs[0].astype(dtype))


def _bits(xs: list[Array], eqn: FlatEqn) -> Array:
    """Reinterpret bits; JAX's own functions cut a float in two, which need not be exact here."""
    return _wide(xs[0].astype(eqn.in_avals[0].dtype).view(eqn.out_avals[0].dtype))


def _broadcast(xs: list[Array], eqn: FlatEqn) -> Array:
    shape = [1] * len(eqn.params["shape"])
    for size, dim in zip(xs[0].shape, eqn.params["broadcast_dimensions"], strict=True):
        shape[dim] = size
    return np.broadcast_to(xs[0].reshape(shape), eqn.params["shape"])


def _slice(xs: list[Array], eqn: FlatEqn) -> Array:
    steps = eqn.params["strides"] or (1,) * xs[0].ndim
    return xs[0][tuple(map(slice, eqn.params["start_indices"], eqn.params["limit_indices"], steps))]


def _pad(xs: list[Array], eqn: FlatEqn) -> Array:
    x, value = xs
    config = eqn.params["padding_config"]
    ends = [(max(low, 0), max(high, 0)) for low, high, _ in config]
    spread = [n + i * max(n - 1, 0) for n, (_, _, i) in zip(x.shape, config, strict=True)]
    out = np.full([n + low + high for n, (low, high) in zip(spread, ends, strict=True)], value, x.dtype)
    rows = zip(ends, spread, config, strict=True)
    out[tuple(slice(low, low + n, 1 + i) for (low, _), n, (_, _, i) in rows)] = x
    kept = zip(out.shape, config, strict=True)
    return out[tuple(slice(max(-low, 0), n - max(-high, 0)) for n, (low, high, _) in kept)]


def _iota(xs: list[Array], eqn: FlatEqn) -> Array:
    aval, dimension = eqn.out_avals[0], eqn.params["dimension"]
    shape = [-1 if d == dimension else 1 for d in range(len(aval.shape))]
    return _wide(np.broadcast_to(np.arange(aval.shape[dimension]).reshape(shape), aval.shape).astype(aval.dtype))


def _reduce(function: Callable[..., Array]) -> Structural:
    return lambda xs, eqn: np.asarray(function(xs[0], axis=tuple(eqn.params["axes"])))


def _round(xs: list[Array], eqn: FlatEqn) -> Array:
    if eqn.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN:
        return np.round(xs[0])
    return np.trunc(xs[0] + np.copysign(0.5, xs[0]))


def _elements(eqn: FlatEqn, x: Array, index: Array) -> tuple[list[Array], Array]:
    """Indices by dimension of the operand, all of the shape of the picked elements, and a mask of those in range."""
    d = jax_compat.indexed(eqn.params)
    if d.collapsed != d.mapped:
        raise UnsupportedError(f"the float64 reference knows no {eqn.primitive} but one of elements of rows")
    places = d.places(x.ndim, index.ndim)
    whole = [x.shape[n] if n is not None else index.shape[m or 0] for n, m in places]

    def along(values: Array, out: Sequence[int]) -> Array:
        shape = [n if o in out else 1 for o, n in enumerate(whole)]
        return np.broadcast_to(values.reshape(shape), whole)

    indexed = [o for o, (_, m) in enumerate(places) if m is not None]
    at = {axis: along(index[..., c], indexed) for c, axis in enumerate(d.mapped)}
    inside = np.logical_and.reduce([(i >= 0) & (i < x.shape[axis]) for axis, i in at.items()])
    rows = {n: along(np.arange(whole[o]), [o]) for o, (n, _) in enumerate(places) if n is not None}
    found = rows | {axis: np.clip(i, 0, x.shape[axis] - 1) for axis, i in at.items()}
    return [found[n] for n in range(x.ndim)], inside


def _gather(xs: list[Array], eqn: FlatEqn) -> Array:
    """Pick elements. All indices are in range: a flat program has further equations for the others."""
    return xs[0][tuple(_elements(eqn, *xs)[0])]


def _scatter_add(xs: list[Array], eqn: FlatEqn) -> Array:
    x, index, y = xs
    elements, inside = _elements(eqn, x, index)
    out = np.array(x)
    np.add.at(out, tuple(elements), y if eqn.params["mode"] == lax.GatherScatterMode.CLIP else np.where(inside, y, 0))
    return out


def _platform(xs: list[Array], eqn: FlatEqn) -> Array:
    """Number of the branch for a CPU, which says the same as the others."""
    del xs
    return np.asarray(jax_compat.branch_for("cpu", eqn.params["platforms"]), np.int32)


STRUCTURAL: dict[str, Structural] = {
    "platform_index": _platform,
    "gather": _gather,
    "scatter-add": _scatter_add,
    "round": _round,
    "dot_general": _dot,
    "convert_element_type": _cast,
    "bitcast_convert_type": _bits,
    "reduce_precision": lambda xs, eqn: xs[0],
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), lambda xs, eqn: xs[0].reshape(eqn.out_avals[0].shape)),
    "transpose": lambda xs, eqn: np.transpose(xs[0], eqn.params["permutation"]),
    "tile": lambda xs, eqn: np.tile(xs[0], eqn.params["reps"]),
    "rev": lambda xs, eqn: np.flip(xs[0], eqn.params["dimensions"]),
    "concatenate": lambda xs, eqn: np.concatenate(xs, eqn.params["dimension"]),
    "stack": lambda xs, eqn: np.stack(xs, eqn.params["axis"]),
    "slice": _slice,
    "pad": _pad,
    "empty2": lambda xs, eqn: _wide(np.zeros(eqn.out_avals[0].shape, eqn.out_avals[0].dtype)),
    "iota": _iota,
    "integer_pow": lambda xs, eqn: xs[0] ** eqn.params["y"],
    "reduce_sum": _reduce(np.sum),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_prod": _reduce(np.prod),
    "reduce_and": _reduce(np.all),
    "reduce_or": _reduce(np.any),
}


LINEAR = PRODUCT_PRIMITIVES | {"reduce_sum", "mul", "div", "neg", "reshape", "transpose", "broadcast_in_dim", "squeeze"}
PRODUCTS = PRODUCT_PRIMITIVES | {"mul", "div", "integer_pow", "square"}
ROUNDED = PRODUCT_PRIMITIVES | {"scatter-add", "convert_element_type", "integer_pow", "reduce_sum", "reduce_prod"}
EXACT = (STRUCTURAL.keys() - ROUNDED) | SCOPES.keys()
EXACT |= {"neg", "max", "min", "abs", "sign", "floor", "ceil", "round", "clamp", "select_n"}
EXACT |= {"stop_gradient", "copy", "copy_p", "name"}


def spread(
    jaxpr: Jaxpr,
    args: Sequence[Any],
    exact: Sequence[Array],
    samples: int,
    seed: int,
    tf32: bool = False,
    strict_range: bool = False,
) -> list[Array]:
    """Measure, for each element of each result, the largest distance of disturbed runs from the undisturbed one."""
    out = [np.zeros(np.shape(r)) for r in exact]
    for run in disturbed_runs(jaxpr, args, samples, seed, tf32, strict_range):
        for i, (x, r) in enumerate(zip(run, exact, strict=True)):
            if is_float(np.asarray(r).dtype):
                with np.errstate(invalid="ignore"):
                    off = np.where(np.isnan(x) & np.isnan(r) | (x == r), 0.0, np.abs(x - r))
                out[i] = np.maximum(out[i], np.where(np.isnan(off), math.inf, off))  # NaN in one run says: anything
    return out


def shifts(runs: Iterable[Sequence[Array]], exact: Sequence[Array]) -> list[float]:
    """The largest distance of the mean of a disturbed run's result from the mean of the undisturbed one.

    Errors that elements share, such as a rounded number that multiplies each, move the mean.
    """
    return [max(abs(mean_error(x, r)) for x in results) for *results, r in zip(*runs, exact, strict=True)]


def mean_error(x: Array, r: Array) -> float:
    """The mean of how far x is off r, where both are finite."""
    with np.errstate(all="ignore"):
        off = np.asarray(x, np.float64) - r
    finite = off[np.isfinite(off)]
    return float(finite.mean()) if finite.size else 0.0


def disturbed_runs(
    jaxpr: Jaxpr, args: Sequence[Any], samples: int, seed: int, tf32: bool = False, strict_range: bool = False
) -> Iterator[list[Array]]:
    """Results of disturbed runs: half have noise, the others round."""
    other = None
    for n in range(samples):
        other = Noise(np.random.default_rng([seed, n]), n % 2 == 1, tf32, strict_range, other)
        yield evaluate(jaxpr, args, other)
    for n in range(samples):
        yield evaluate(jaxpr, args, Rounded(np.random.default_rng([seed, samples + n]) if n else None))
