"""Checks the types and constants of a candidate. A certificate is about real numbers; these rules are about floats.

* An intermediate tensor is float32 (float64 if it depends on one), or has the type of a tensor of the program with the
  same values, or has a type that holds its values exactly: a mask's, a constant's. It may be a 16-bit float as well if
  the program has that type, a matrix product reads it, it is no part of a sum, and, in float16, a bound says that it
  fits (`mugraph.passes.float16_range`).
* A factor is one that float32 holds, and no larger or smaller than the square of what all factors and constants of the
  program and the lengths of its sums make together; so is a constant that is added, unless the program adds it.
  Exponents are no larger than the program's powers and products make.
* Where the program compares a number with its own maximum, or subtracts that, both come from one computation: computed
  twice, or scaled and scaled back, it may be rounded in two ways, and a maximum would equal no element.
* In its own types, on a few small inputs, it keeps the digits that the program keeps: no certificate sees that adding
  1e9 and subtracting it again loses digits.

The search keeps to these rules; whoever edits a stored decision may not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction

import ml_dtypes
import numpy as np

from mirage_jax.errors import VerificationError
from mirage_jax.mugraph.comparisons import interface, shared_digits, torn
from mirage_jax.mugraph.dtypes import FLOATS, SIXTEEN_BIT_FLOATS, holds, numpy_dtype
from mirage_jax.mugraph.graph import Attr, Axis, KernelGraph, Op, Tensor, is_part
from mirage_jax.mugraph.operators import TRUTHS, operator
from mirage_jax.mugraph.passes.float16_range import equal_tensors, out_of_range, rounded
from mirage_jax.verify.gate import HasGraph, Verdict

FACTORS = ("scale", "ca", "cb")
TERMS = ("offset", "value")
EXPONENTS = ("exponent", "degree")
MAX_ROUNDING_RATIO = 32.0  # error of a candidate over the program's own error and its unit in the last place
MAX_CONSTANT_POWER = 2.0  # what a product reads twice has its constants twice
MAX_EXPONENT_BITS = 1000.0  # what a power of two may be in Python
SLACK_BITS = 4.0  # bits beyond what the program's own constants make


def check_types(reference: KernelGraph, candidate: KernelGraph) -> None:
    """Hold a candidate's types and constants against what its program has.

    Raises:
        VerificationError: one is not allowed; the text says which, and the limits.
    """
    _check_constants(reference, candidate)
    if found := out_of_range(reference, candidate):
        raise VerificationError(f"a value need not fit into float16: {found[0]}")
    _check_dtypes(reference, candidate)
    _check_comparisons(reference, candidate)
    _check_digits(reference, candidate)


@dataclass(frozen=True)
class TypeGate:
    """The gate for types and constants: `check_types` against one program."""

    reference: KernelGraph
    name = "checker"

    def check(self, candidate: HasGraph) -> Verdict:
        """Compare the candidate's types and constants with the program's."""
        try:
            check_types(self.reference, candidate.graph)
        except VerificationError as why:
            return Verdict(False, str(why))
        return Verdict(True)


# ---------------------------------------------------------------------- types


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a candidate, as far as their types depend on more than themselves."""

    program_dtypes: frozenset[str]
    interface: frozenset[str]  # inputs and outputs, whose types are given
    factors: frozenset[str]  # a matrix product reads these
    wide: frozenset[str]  # these depend on a tensor of float64
    exact: frozenset[str]  # their types hold their values as they are

    def default(self, t: Tensor) -> str:
        """The type of an intermediate that needs no reason."""
        return "f64" if t.name in self.wide else "f32"

    def is_usual(self, t: Tensor) -> bool:
        """Whether a tensor has a type that needs no reason, or is a factor of 16 bits."""
        needs_none = t.name in self.interface or t.name in self.exact or t.dtype == self.default(t)
        return needs_none or self._is_narrow_factor(t)

    def _is_narrow_factor(self, t: Tensor) -> bool:
        is_narrow = t.dtype in SIXTEEN_BIT_FLOATS and t.dtype in self.program_dtypes and t.name not in self.wide
        return is_narrow and t.name in self.factors and not any(map(is_part, t.axes))


def _check_dtypes(reference: KernelGraph, candidate: KernelGraph) -> None:
    tensors = _Tensors(
        frozenset(t.dtype for t in reference.tensors.values()),
        frozenset(t.name for t in candidate.inputs) | frozenset(candidate.outputs),
        frozenset(_operands_of_products(candidate)),
        frozenset(_in_float64(candidate)),
        frozenset(_held_exactly(candidate)),
    )
    unusual = [t for t in candidate.tensors.values() if not tensors.is_usual(t)]
    equal = equal_tensors(reference, candidate) if unusual else {}  # takes its time
    for t in unusual:
        if t.dtype not in (types := {reference.tensors[name].dtype for name in equal[t.name]}):
            allowed = sorted(types | {tensors.default(t)})
            raise VerificationError(f"tensor {t} has a type that the program gives no such value; allowed: {allowed}")


def _in_float64(graph: KernelGraph) -> set[str]:
    """Tensors that depend on one of float64."""
    found = {t.name for t in graph.inputs if t.dtype == "f64"}
    for kernel in graph:
        if any(x.tensor in found for x in kernel.loads):
            found |= {s.tensor.name for s in kernel.stores}
    return found


def _held_exactly(graph: KernelGraph) -> Iterator[str]:
    """Name the tensors whose types round none of their values: masks as bool, and constants."""
    for kernel in graph:
        made = {op.name: op for op in kernel.ops}
        for store in kernel.stores:
            if _holds(numpy_dtype(store.tensor.dtype), made.get(store.value)):
                yield store.tensor.name


def _holds(dtype: np.dtype, op: Op | None) -> bool:
    """Whether an operator's results are all numbers of a type, whatever its operands."""
    if op is None:
        return False
    if op.op == "const":
        return holds(dtype, op.number("value"))
    return op.op in TRUTHS and dtype == np.bool_


def _operands_of_products(graph: KernelGraph) -> set[str]:
    """Tensors that a matrix product reads."""
    found = set[str]()
    for kernel in graph:
        axes = {v.name: set(v.axes) for v in (*kernel.loads, *kernel.ops)}
        tensors = {x.name: x.tensor for x in kernel.loads}
        for op in kernel.ops:
            if op.op == "dot" and _is_of_matrices(*(axes[a] for a in op.args)):
                found |= {tensors[a] for a in op.args if a in tensors}
    return found


def _is_of_matrices(x: set[Axis], y: set[Axis]) -> bool:
    """Whether each operand of a product has an axis that the other has not."""
    return not x <= y and not y <= x


# ---------------------------------------------------------------------- comparisons


@functools.lru_cache(maxsize=8)
def _torn_operators(reference: KernelGraph) -> frozenset[str]:
    return frozenset(sides.op.op for sides in torn(reference))


@functools.lru_cache(maxsize=8)
def _shared_digits(reference: KernelGraph) -> Set[tuple[int, int]]:
    return shared_digits(reference)


def _check_comparisons(reference: KernelGraph, candidate: KernelGraph) -> None:
    """Numbers that the program compares with their own maximum, or subtracts it from, are computed once. So are those
    that it reads or returns with their maximum.
    """
    if (pairs := _shared_digits(reference)) and (apart := pairs - shared_digits(candidate)):
        names = interface(candidate)
        places = ", ".join(f"{names[m]} and {names[n]}" for m, n in sorted(apart))
        raise VerificationError(f"digits that the program has twice are computed apart: {places}")
    for sides in torn(candidate):
        if sides.op.op not in _torn_operators(reference):
            places = sorted({str(d.origin) for side in sides.digits for d in side})
            raise VerificationError(f"{sides.op}: one side is computed apart from the other: {', '.join(places)}")


# ---------------------------------------------------------------------- constants


@dataclass(frozen=True)
class _Allowed:
    """Limits that the constants of a program justify."""

    held: tuple[float, float]  # the smallest and largest normal numbers of the program's widest type, or of float32
    bits: float  # by which a factor may be larger or smaller than 1
    largest: float  # number that may be added
    exponent: float

    @classmethod
    def by(cls, reference: KernelGraph) -> _Allowed:
        """Derive the limits from a program."""
        ops = [op for k in reference for op in k.ops]
        constants = [(key, c) for op in ops for key, c in _constants(op)]
        powers, terms = ([abs(c) for key, c in constants if key in keys] for keys in (EXPONENTS, TERMS))
        products = sum(op.op in ("mul", "dot", "div") for op in ops)
        bits = min(_bits(reference, ops, constants) * max(1.0, float(max(powers, default=1))), MAX_EXPONENT_BITS)
        has_wide = "f64" in {t.dtype for t in reference.tensors.values()}
        widest = ml_dtypes.finfo("float64" if has_wide else "float32")
        held = float(widest.smallest_normal), float(widest.max)
        largest = min(float(max([*terms, Fraction(1)])) * 2.0**bits, held[1])
        return cls(held, bits, largest, 2.0 + float(sum(powers)) + products)

    def refuses(self, key: str, value: Fraction) -> str:
        """Give the limits that a constant breaks; empty if it keeps to them."""
        size = abs(value)
        if key in EXPONENTS:
            return _at_most(self.exponent, size)
        if key in TERMS:
            return _at_most(self.largest, size)
        low, high = max(2.0**-self.bits, self.held[0]), min(2.0**self.bits, self.held[1])
        return f"{low:.3g} to {high:.3g}" if size and not low <= size <= high else ""


def _at_most(limit: float, size: Fraction) -> str:
    return f"at most {limit:g}" if size > limit else ""


def _bits(reference: KernelGraph, ops: Sequence[Op], constants: Sequence[tuple[str, Fraction]]) -> float:
    """Bits by which the factors of a program and the lengths of its sums may scale a value."""
    factors = [abs(c) for key, c in constants if key not in EXPONENTS and c]
    lengths = [reference.extent(a) for op in ops for a in _reduced(op)]
    return MAX_CONSTANT_POWER * (sum(abs(math.log2(f)) for f in factors) + sum(map(math.log2, lengths))) + SLACK_BITS


@functools.lru_cache(maxsize=8)
def _allowed(reference: KernelGraph) -> _Allowed:
    return _Allowed.by(reference)


def _check_constants(reference: KernelGraph, candidate: KernelGraph) -> None:
    own = _allowed(reference)
    for kernel in candidate:
        for op in kernel.ops:
            for key, value in _constants(op):
                if allowed := own.refuses(key, value):
                    text = f"{key} of %{op.name} in {kernel.name} is {_short(value)}"
                    raise VerificationError(f"{text}; the program's constants justify {allowed}")


def _short(value: Fraction) -> str:
    try:
        return f"{float(value):.3g}"
    except OverflowError:
        return "beyond every float"


def _constants(op: Op) -> Iterator[tuple[str, Fraction]]:
    """Constants of an operator that say something: what stands there for what may be left out is none."""
    defaults = operator(op.op).defaults
    for key, value in op.attrs:
        known = key in (*FACTORS, *TERMS, *EXPONENTS)
        if known and isinstance(value, Fraction | int) and value != defaults.get(key):
            yield key, Fraction(value)


def _reduced(op: Op) -> tuple[str, ...]:
    axes: Attr = op.attributes.get("axes", ())
    return axes if isinstance(axes, tuple) and op.op in ("sum", "dot") else ()


# ---------------------------------------------------------------------- digits


def _check_digits(reference: KernelGraph, candidate: KernelGraph) -> None:
    """Run both in their own types, at small extents, as straight-line code."""
    exact, own = (rounded(reference, reference, dtype) for dtype in ("float64", None))
    found = rounded(reference, candidate, None)
    floats = [t.dtype for t in reference.tensors.values() if t.dtype in FLOATS]
    unit = max((float(ml_dtypes.finfo(numpy_dtype(d)).eps) for d in floats), default=0.0)
    for name, r, x, c in zip(reference.outputs, exact, own, found, strict=True):
        good = np.isfinite(r) & np.isfinite(x)
        if not good.any():
            continue
        with np.errstate(invalid="ignore"):
            error, allowed = (float(np.abs(np.where(good, y - r, 0.0)).max()) for y in (c, x))
        allowed = MAX_ROUNDING_RATIO * (allowed + unit * float(np.abs(r[good]).max()))
        if not error <= allowed:
            raise VerificationError(
                f"output {name} is off by {error:.3g} on small inputs, the program by {allowed:.3g}"
            )
