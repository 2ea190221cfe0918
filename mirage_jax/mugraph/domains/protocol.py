"""The primitive operations that define every operator, and who interprets them.

An operator is written once, as a function over an abstract `Domain` (registry: `operators.py`). Each reader of a
muGraph is a domain: float64 numpy (the oracle), jax.numpy (the portable lowering), pairs over Z_p x Z_q (the
verifier) and normal forms (the abstract expressions that guide the search). One record, many readers: they cannot
disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

from mirage_jax.mugraph.graph import Axis


class Domain[V](Protocol):
    """Values carry named axes; binary operations align them, broadcasting over axes that only one side has."""

    def constant(self, value: Fraction) -> V:
        """A scalar (no axes), exactly `value`."""
        ...

    def add(self, x: V, y: V) -> V:
        """x + y."""
        ...

    def mul(self, x: V, y: V) -> V:
        """x * y."""
        ...

    def power(self, x: V, exponent: Fraction) -> V:
        """x ** exponent; exponents -1, 1/2 and -1/2 and small integers occur."""
        ...

    def exp(self, x: V) -> V:
        """e ** x."""
        ...

    def rounded(self, x: V) -> V:
        """x; in floats rounded to its type here, whatever it is used for. A compiler keeps the product of a fused
        multiply-add unrounded, and then ``c * x - max(c * x)`` is above 0 by half a unit of the maximum.
        """
        ...

    def log_product(self, x: V, m: V) -> V:
        """``log(x * exp(m))``: where x is relative to a shift m, this is not. In floats ``log(x) + m``."""
        ...

    def less_log_product(self, y: V, x: V, m: V) -> V:
        """``y - log(x * exp(m))``. In floats ``(y - m) - log(x)``, which keeps log(x) where y and m are huge."""
        ...

    def function(self, name: str, args: Sequence[V]) -> V:
        """A pointwise function outside the Lax fragment; uninterpreted in the field and in normal forms."""
        ...

    def sum(self, x: V, axes: tuple[Axis, ...]) -> V:
        """Sum over `axes`; an axis that x does not have contributes the factor extent(axis)."""
        ...

    def dot(self, x: V, y: V, axes: tuple[Axis, ...]) -> V:
        """Product of the two, summed over `axes` (which both have)."""
        ...

    def maximum(self, x: V, axes: tuple[Axis, ...]) -> V:
        """The true maximum over `axes`; uninterpreted in the field."""
        ...

    def shift(self, x: V, axes: tuple[Axis, ...]) -> V:
        """Some value without `axes`: the maximum in floats, for stability, but a *free variable* in the field.

        Graphs whose result depends on it are wrong (safe softmax; `docs/soundness.md`).
        """
        ...

    def iota(self, axis: Axis) -> V:
        """The index along `axis`, 0, 1, 2, ..."""
        ...
