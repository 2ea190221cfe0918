"""Which candidates lose digits that the program keeps: forward errors at small extents, in the arithmetic of kernels.

``sum(w (x - y))`` and ``x sum(w) - sum(w y)`` are equal, and the search prefers what is cheaper. But the second loses
the digits that cancel. The float gate refuses such a candidate, but after it was compiled and timed in place of a
better one. Here both graphs are evaluated in float32 on ordinary numbers, and compared with float64. Programs of narrow
numbers round the operands of their products, as matrix units take them. This only says in which order to try
candidates. Whether a winner is accurate is for the gate to say.

Numbers near one show what normal ones at small extents do not: differences of points that are close to each other, as
many points are. (16 bits do not hold such points.) Larger numbers have softmaxes that one logit dominates: there a
gradient is a small difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from mirage_jax.errors import MirageError
from mirage_jax.mugraph import evaluate
from mirage_jax.mugraph.domains.floats import FloatDomain, NamedArray, random_integers
from mirage_jax.mugraph.dtypes import BYTES, FLOATS, is_float, numpy_dtype
from mirage_jax.mugraph.graph import Axis, KernelGraph, without_unread

type Array = np.ndarray

EXTENTS = (64, 32, 16, 8)  # the largest at which no value of the program has more than `MAX_ELEMENTS`
MAX_ELEMENTS = 1 << 14
NEAR_ONE = (8, 64)  # inputs are drawn as normal numbers, and as these parts of them plus one
LARGE = 4  # inputs are drawn as so many times normal numbers, too
LARGER = 2.0  # times the program's own error, from which on digits are lost
SINGLE = 2.0**-23  # relative rms error of a few sums in float32, in whatever order
TF32 = 2.0**-11  # largest relative change of an operand of a product in float32 on a GPU
NARROW = 2.0**-9  # the same of a number that 16 bits or fewer hold


class ForwardError:
    """The errors of a program in float32, and whether other graphs for it have larger ones.

    `whole` is the region that the program is a part of. The part is given the numbers that it has there: what cancels
    in the region does not cancel among numbers that are drawn one by one.
    """

    def __init__(self, reference: KernelGraph, whole: KernelGraph | None = None) -> None:
        self.reference, self.whole = reference, whole or reference
        self._known: dict[KernelGraph, bool] = {}
        sizes = [[n for a, n in self.whole.extents if a in t.axes] for t in self.whole.tensors.values()]
        self.most = next(
            (n for n in EXTENTS if all(math.prod(min(n, s) for s in own) <= MAX_ELEMENTS for own in sizes)), EXTENTS[-1]
        )

    def is_larger(self, graph: KernelGraph) -> bool:
        """Whether a graph's results lose digits that the program's have; False where nobody can say."""
        if graph not in self._known:
            errors = zip(self._errors(graph), self._own, self._floors, strict=False)  # none if one is unknown
            self._known[graph] = any(error > LARGER * own + floor for error, own, floor in errors)
        return self._known[graph]

    @cached_property
    def _own(self) -> list[float]:
        return self._errors(self.reference)

    @cached_property
    def _floors(self) -> list[float]:
        """The relative error of each result that XLA's code has anyway: a few sums in float32, or what changes if
        inputs are rounded to TF32; in programs of narrow numbers, the rounding of a result.
        """
        least = NARROW if self._is_narrow else SINGLE
        if self._is_narrow or not any(self._rounded):
            return [least] * len(self._own)
        return list(np.where(self._rounded * len(self._draws), self._changes, least))

    @property
    def _changes(self) -> list[float]:
        """How much results change if inputs are rounded to TF32."""
        small = self._small(self.reference)
        with np.errstate(all="ignore"):
            moved = [evaluate.run(small, [_moved(x, TF32) for x in inputs]) for inputs in self._draws]
        return list(map(_relative, chain(*moved), chain(*self._exact)))

    @cached_property
    def _rounded(self) -> list[bool]:
        """Which results come from numbers that a product rounds."""
        found = set[str]()
        for kernel in self.reference.kernels:
            for op in kernel.ops:
                if op.op == "dot" or not found.isdisjoint(x.tensor for x in kernel.loads):
                    found.add(op.name)
        return [name in found for name in self.reference.outputs]

    @cached_property
    def _is_narrow(self) -> bool:
        return any(t.dtype in FLOATS and BYTES[t.dtype] <= 2 for t in self.whole.inputs)

    @cached_property
    def _domain(self) -> type[FloatDomain]:
        if not self._is_narrow:
            return FloatDomain
        return _Bfloat16 if any(t.dtype == "bf16" for t in self.whole.inputs) else _Float16

    @cached_property
    def _draws(self) -> list[list[Array]]:
        own = [t.name for t in self.reference.inputs]
        return [[values[name] for name in own] for values in map(self._with_made, self._inputs_of_whole)]

    def _with_made(self, inputs: list[Array]) -> dict[str, Array]:
        """The region's inputs by name, and the values that its part reads."""
        values = dict(zip((t.name for t in self.whole.inputs), inputs, strict=True))
        made = tuple(t.name for t in self.reference.inputs if t.name not in values)
        part = without_unread(replace(self._small(self.whole), outputs=made))
        with np.errstate(all="ignore"):
            return values | dict(zip(made, map(_single, evaluate.run(part, inputs)), strict=True))

    @property
    def _inputs_of_whole(self) -> list[list[Array]]:
        rng, small = np.random.default_rng(0), self._small(self.whole)
        shapes = [([small.extent(a) for a in t.axes], numpy_dtype(t.dtype)) for t in small.inputs]
        normal = [self._draw(rng, *shape) for shape in shapes]
        large = [x * LARGE if is_float(x.dtype) else x for x in normal]
        near = [] if self._is_narrow else [[_near_one(x, part) for x in normal] for part in NEAR_ONE]
        return [normal, *near, large]

    def _draw(self, rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> Array:
        if dtype == np.bool_:
            return rng.random(shape) < 0.9
        if not is_float(dtype):
            return random_integers(rng, shape, dtype)
        return rng.standard_normal(shape).astype(dtype).astype(np.float32)

    @cached_property
    def _exact(self) -> list[list[Array]]:
        with np.errstate(all="ignore"):
            return [evaluate.run(self._small(self.reference), inputs) for inputs in self._draws]

    def _errors(self, graph: KernelGraph) -> list[float]:
        """Relative root mean square errors of the results of each draw, where they are finite; none if small extents do
        not suit.
        """
        try:
            with np.errstate(all="ignore"):
                small, domain = self._small(graph), self._domain
                results = [evaluate.run(small, inputs, dtype="float32", domain=domain) for inputs in self._draws]
                return list(map(_relative, chain(*results), chain(*self._exact)))
        except (MirageError, ArithmeticError, ValueError):
            return []

    def _small(self, graph: KernelGraph) -> KernelGraph:
        return graph.with_extents({a: min(n, self.most) for a, n in graph.extents})


class _Bfloat16(FloatDomain):
    """Float32, with operands of matrix products rounded as a matrix unit takes them."""

    dropped = 16  # of the 24 bits of a number

    def dot(self, x: NamedArray, y: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """Contract; round both operands if each has rows or columns of its own."""
        is_matrix = set(x.axes) - set(y.axes) and set(y.axes) - set(x.axes)
        return super().dot(self._cut(x), self._cut(y), axes) if is_matrix else super().dot(x, y, axes)

    def _cut(self, x: NamedArray) -> NamedArray:
        """Round to fewer bits (Veltkamp's splitting)."""
        array = np.asarray(x.array, np.float32)
        large = array * np.float32(2**self.dropped + 1)
        return NamedArray(x.axes, large - (large - array))


class _Float16(_Bfloat16):
    dropped = 13


def _single(x: Array) -> Array:
    return x.astype(np.float32) if is_float(x.dtype) else x


def _near_one(x: Array, part: int) -> Array:
    return np.asarray(1 + x / part, x.dtype) if is_float(x.dtype) else x


def _relative(y: Array, r: Array) -> float:
    """Relative root mean square error of finite results; zero where it cannot be told."""
    y, r = (np.asarray(a, np.float64) for a in (y, r))
    good = np.isfinite(r) & np.isfinite(y)
    with np.errstate(all="ignore"):  # squares of numbers near the end of the range
        size, error = (math.sqrt(np.square(x[good]).sum()) for x in (r, y - r))
    return error / size if 0 < size < math.inf else 0.0


def _moved(x: Array, unit: float) -> Array:
    """Each number larger or smaller by up to `unit` times its size."""
    if not is_float(x.dtype):
        return x
    return x.astype(np.float64) * (1 + unit * np.random.default_rng(1).uniform(-1, 1, x.shape))
