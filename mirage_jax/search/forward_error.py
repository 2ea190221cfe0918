"""Which candidates lose digits that the program keeps: forward errors in float32, at small extents.

``sum(w (x - y))`` and ``x sum(w) - sum(w y)`` are equal, and the search prefers what is cheaper. But the second loses
the digits that cancel. The float gate refuses such a candidate, but after it was compiled and timed in place of a
better one. Here both graphs are evaluated in float32 on ordinary numbers, and compared with float64. This only says in
which order to try candidates. Whether a winner is accurate is for the gate to say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mirage_jax.errors import MirageError
from mirage_jax.mugraph import evaluate
from mirage_jax.mugraph.domains.floats import random_integers
from mirage_jax.mugraph.dtypes import BYTES, FLOATS, is_float, numpy_dtype
from mirage_jax.mugraph.graph import KernelGraph

type Array = np.ndarray

EXTENTS = (64, 32, 16, 8)  # the largest at which no value of the program has more than `MAX_ELEMENTS`
MAX_ELEMENTS = 1 << 14
LARGER = 16.0  # times the program's own error, from which on digits are lost
TF32 = 2.0**-12  # relative rms error of products in float32 on a GPU
NARROW = 2.0**-10  # the same of what 16 bits or fewer hold


class ForwardError:
    """The errors of a program in float32, and whether other graphs for it have larger ones."""

    def __init__(self, reference: KernelGraph) -> None:
        self.reference = reference
        self._known: dict[KernelGraph, bool] = {}
        sizes = [[n for a, n in reference.extents if a in t.axes] for t in reference.tensors.values()]
        self.most = next(
            (n for n in EXTENTS if all(math.prod(min(n, s) for s in own) <= MAX_ELEMENTS for own in sizes)), EXTENTS[-1]
        )

    def is_larger(self, graph: KernelGraph) -> bool:
        """Whether a graph's results lose digits that the program's have; False where nobody can say."""
        if graph not in self._known:
            pairs = zip(self._errors(graph), self._own, strict=False)  # none where one of both is unknown
            self._known[graph] = any(error > LARGER * own + self._floor for error, own in pairs)
        return self._known[graph]

    @cached_property
    def _own(self) -> list[float]:
        return self._errors(self.reference)

    @cached_property
    def _floor(self) -> float:
        """The relative error that XLA's code has anyway."""
        narrowest = min((BYTES[t.dtype] for t in self.reference.inputs if t.dtype in FLOATS), default=4)
        has_products = any(op.op == "dot" for k in self.reference.kernels for op in k.ops)
        return NARROW if narrowest <= 2 else TF32 if has_products else 0.0

    @cached_property
    def _inputs(self) -> list[Array]:
        rng, small = np.random.default_rng(0), self._small(self.reference)
        return [self._draw(rng, [small.extent(a) for a in t.axes], numpy_dtype(t.dtype)) for t in small.inputs]

    def _draw(self, rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> Array:
        if dtype == np.bool_:
            return rng.random(shape) < 0.9
        return rng.standard_normal(shape).astype(np.float32) if is_float(dtype) else random_integers(rng, shape, dtype)

    @cached_property
    def _exact(self) -> list[Array]:
        with np.errstate(all="ignore"):
            return evaluate.run(self._small(self.reference), self._inputs)

    def _errors(self, graph: KernelGraph) -> list[float]:
        """Relative root mean square errors of the results, where they are finite; none if small extents do not suit."""
        try:
            with np.errstate(all="ignore"):
                results = evaluate.run(self._small(graph), self._inputs, dtype="float32")
                exact = self._exact
        except (MirageError, ArithmeticError, ValueError):
            return []
        return [_relative(np.asarray(y, np.float64), np.asarray(r)) for y, r in zip(results, exact, strict=True)]

    def _small(self, graph: KernelGraph) -> KernelGraph:
        return graph.with_extents({a: min(n, self.most) for a, n in graph.extents})


def _relative(y: Array, r: Array) -> float:
    good = np.isfinite(r) & np.isfinite(y)
    size = math.sqrt(np.square(r[good]).sum())
    return math.sqrt(np.square(y[good] - r[good]).sum()) / size if size else 0.0
