"""How far rounding may carry a program's results, whatever the order of its evaluation.

The program is evaluated in float64 with each intermediate moved by half a unit of float32 in the last place, up or down
by chance (Monte Carlo arithmetic, Parker, 1997). Where results cancel, as gradients of a saturated softmax do, one
program may be exact by luck, because it subtracts a number from itself, while another is as good and is not.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from mirage_jax.mugraph.arrays import FloatDomain, Named, is_float
from mirage_jax.mugraph.evaluate import evaluate
from mirage_jax.mugraph.graph import KernelGraph, Tensor

HALF_UNIT = 2.0**-24


@dataclass(frozen=True)
class NoisyDomain(FloatDomain):
    """float64 with noise on what is stored; `exact` names tensors that no rounding moves."""

    exact: frozenset[str] = frozenset()

    def store(self, x: Named, tensor: Tensor) -> Named:
        made = super().store(x, tensor)
        if tensor.name in self.exact or not tensor.axes or tensor.dtype == "f64" or not is_float(made.array.dtype):
            return made
        places = self.xp.arange(made.array.size, dtype="float64").reshape(made.array.shape)
        signs = self.xp.sign(self.xp.sin(12.9898 * places + zlib.crc32(tensor.name.encode()) % 1000))
        return Named(made.axes, made.array * (1 + HALF_UNIT * signs))


def noisy(graph: KernelGraph, arrays: Sequence[Any], xp: Any = numpy) -> list[Any]:
    """Results of a graph of library operators, as `evaluate.run` gives them in float64, but with noise."""
    indices = frozenset(s.tensor.name for k in graph.kernels for op in k.ops if op.op == "iota" for s in k.stores)
    inputs = [Named(t.axes, xp.asarray(a)) for t, a in zip(graph.inputs, arrays, strict=True)]
    return [x.array for x in evaluate(graph, inputs, NoisyDomain(xp, "float64", exact=indices))]
