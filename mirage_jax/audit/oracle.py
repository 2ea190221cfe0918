"""Decide in float64, on three sets of inputs, whether two muGraphs compute the same: the judge of mutants.

A graph has to be right both as straight-line code and tile by tile. The oracle shares the meaning of operators with the
verifier, but neither its fields nor its reduced extents. A shift is a true running maximum, so safe softmax with
another shift is right. But masked elements are minus infinity, so may be their maximum, and differences of infinities
are NaN. Certificates are about exact arithmetic without infinities (see docs/soundness.md), so with `finite` masks and
shifts are finite, in the program as well; the float gate does the rest. Without exponentials the numbers may be
fractions, which lose no digits beside a huge constant that cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from mirage_jax.errors import GraphError
from mirage_jax.mugraph.domains.floats import FloatDomain, NamedArray, random_integers
from mirage_jax.mugraph.dtypes import FLOATS, numpy_dtype
from mirage_jax.mugraph.evaluate import evaluate, part_length
from mirage_jax.mugraph.graph import Axis, KernelGraph, KernelSchedule, Schedule, is_part
from mirage_jax.verify.floats.gate import float_gate

TOLERANCE = 1e-6  # relative to the largest element of an output
TILES = ((2, 2), (3, 3), (2, 3))  # of divided axes and numbers of parts, for each set of inputs


def uniform_schedule(graph: KernelGraph, tile: int, parts: int) -> Schedule:
    """Use the same tile for every divided axis and, if no part is empty, `parts` parts for every split axis."""
    kernels = [KernelSchedule(tuple((a, tile) for a in k.divided if not is_part(a))) for k in graph]
    return Schedule(tuple(kernels), tuple((a, _parts(graph.extent(a), parts)) for a in graph.split_axes))


def _parts(extent: int, wanted: int) -> int:
    for parts in range(wanted, 1, -1):
        try:
            part_length(extent, parts)
        except GraphError:
            continue
        return parts
    return 1


class FiniteDomain(FloatDomain):
    """Floats in which every shift is a number between -50 and 50, and masked elements are -1000."""

    def shift(self, x: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """Clip the running maximum."""
        m = super().shift(x, axes)
        return NamedArray(m.axes, np.clip(np.nan_to_num(m.array), -50.0, 50.0))

    def function(self, name: str, args: Sequence[NamedArray]) -> NamedArray:
        """Replace masked elements by a large negative number."""
        if name == "mask":
            return super().function("where", [*args, self.constant(Fraction(-1000))])
        return super().function(name, args)


class RationalDomain(FloatDomain):
    """Numbers without rounding, of programs that only add, multiply and divide."""

    def constant(self, value: Fraction) -> NamedArray:
        """The number itself."""
        return NamedArray((), value)


def _in_fractions(graph: KernelGraph, arrays: Sequence[np.ndarray]) -> list[Any]:
    """Values of the outputs. Raises `TypeError` where an operator has no meaning on fractions."""
    fractions = [np.vectorize(Fraction, otypes=[object])(a) for a in arrays]
    inputs = [NamedArray(t.axes, a) for t, a in zip(graph.inputs, fractions, strict=True)]
    return [x.array.tolist() for x in evaluate(graph, inputs, RationalDomain(np, "object"))]


def _run(graph: KernelGraph, arrays: Sequence[np.ndarray], schedule: Schedule | None, finite: bool) -> list[np.ndarray]:
    inputs = [NamedArray(t.axes, a) for t, a in zip(graph.inputs, arrays, strict=True)]
    domain = (FiniteDomain if finite else FloatDomain)(np, "float64")
    with np.errstate(all="ignore"):
        return [x.array for x in evaluate(graph, inputs, domain, schedule)]


class Oracle:
    """A reference's values on three sets of inputs, with which any number of graphs are compared."""

    def __init__(self, reference: KernelGraph, seed: int):
        rng = np.random.default_rng(seed)
        self.reference = reference
        self.inputs = [
            [_draw(reference, t.axes, t.dtype, positive, rng) for t in reference.inputs] for positive in KIND
        ]
        self.want = [_run(reference, xs, None, False) for xs in self.inputs]

    @property
    def defined(self) -> bool:
        """Whether the reference is finite on all inputs; otherwise it is no judge."""
        return all(np.isfinite(y).all() for ys in self.want for y in ys)

    @cached_property
    def _finite(self) -> list[list[np.ndarray]]:
        return [_run(self.reference, xs, None, True) for xs in self.inputs]

    def same(self, graph: KernelGraph, finite: bool = False) -> bool:
        """Whether it computes the reference, up to rounding. Raises `GraphError` if it cannot be run."""
        try:
            return all(
                _close(want, self._values(graph, n, tiled, finite))
                for tiled in (False, True)
                for n, want in enumerate(self._finite if finite else self.want)
            )
        except ArithmeticError:  # of constants, which are Python's numbers
            return False

    def same_where_finite(self, graph: KernelGraph) -> bool:
        """Whether every finite number that it computes is the reference's; there may be none."""
        return all(
            _close(
                [np.where(np.isfinite(y), x, 0) for x, y in zip(want, have, strict=True)],
                [np.nan_to_num(y, nan=0.0, posinf=0.0, neginf=0.0) for y in have],
            )
            for n, want in enumerate(self.want)
            for have in [self._values(graph, n, True, False)]
        )

    def same_in_fractions(self, graph: KernelGraph) -> bool:
        """Whether it computes the reference without any rounding; False where operators are more than rational."""
        try:
            return _in_fractions(graph, self.inputs[0]) == _in_fractions(self.reference, self.inputs[0])
        except (TypeError, ArithmeticError):
            return False

    def passes_gate(self, graph: KernelGraph) -> bool:
        """Whether the float gate would accept it if the reference were XLA's code."""
        pairs = [
            (x, y)
            for n, want in enumerate(self.want)
            for x, y in zip(want, self._values(graph, n, True, False), strict=True)
        ]
        return all(float_gate(x, x, y) for x, y in pairs)

    def _values(self, graph: KernelGraph, n: int, tiled: bool, finite: bool) -> list[np.ndarray]:
        return _run(graph, self.inputs[n], uniform_schedule(graph, *TILES[n]) if tiled else None, finite)


KIND = (False, True, False)  # positive inputs?


def _draw(graph: KernelGraph, axes: Sequence[str], dtype: str, positive: bool, rng: np.random.Generator) -> np.ndarray:
    shape = [graph.extent(a) for a in axes]
    if dtype == "bool":
        return rng.random(shape) < 0.7
    if dtype not in FLOATS:
        return random_integers(rng, shape, numpy_dtype(dtype))
    return rng.uniform(0.5, 1.5, shape) if positive else rng.standard_normal(shape)


def _close(want: Sequence[np.ndarray], have: Sequence[np.ndarray]) -> bool:
    with np.errstate(all="ignore"):
        errors = [np.abs(1.0 * y - x).max() / np.abs(1.0 * x).max() for x, y in zip(want, have, strict=True)]
        return all(bool(e <= TOLERANCE) or np.array_equal(x, y) for e, x, y in zip(errors, want, have, strict=True))
