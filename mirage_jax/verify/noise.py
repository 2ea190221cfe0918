"""How far rounding may carry a program's results, whatever the order of its evaluation.

The program is evaluated in float64 with every intermediate moved by chance, as rounding to float32 would, and every sum
as rounding its terms one after the other would (Monte Carlo arithmetic, Parker, 1997). Where results cancel, as
gradients of a saturated softmax do, one program may be exact by luck, because it subtracts a number from itself, while
another is as good and is not. One sample may have that luck too; `SAMPLES` of them hardly ever all.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from mirage_jax.mugraph.arrays import FloatDomain, Named, is_float
from mirage_jax.mugraph.evaluate import evaluate
from mirage_jax.mugraph.graph import Axis, KernelGraph, Tensor

HALF_UNIT = 2.0**-24
SAMPLES = 8


@dataclass(frozen=True)
class NoisyDomain(FloatDomain):
    """float64 with noise on what is stored and summed. `exact` names tensors that no rounding moves; sums of `wide`
    programs, in float64, it does not move either. `sample`: which of all possible noises.
    """

    exact: frozenset[str] = frozenset()
    wide: bool = False
    sample: Any = 0

    def store(self, x: Named, tensor: Tensor) -> Named:
        made = super().store(x, tensor)
        if tensor.name in self.exact or not tensor.axes or tensor.dtype == "f64" or not is_float(made.array.dtype):
            return made
        moved = made.array * (1 + HALF_UNIT * self._random(made.array, zlib.crc32(tensor.name.encode())))
        return Named(made.axes, moved)

    def dot(self, x: Named, y: Named, axes: tuple[Axis, ...]) -> Named:
        total = super().dot(x, y, axes)
        return total if self._is_exact(total) else self._moved(total, super().dot(_squared(x), _squared(y), axes))

    def sum(self, x: Named, axes: tuple[Axis, ...]) -> Named:
        total = super().sum(x, axes)
        return total if self._is_exact(total) else self._moved(total, super().sum(_squared(x), axes))

    def _is_exact(self, total: Named) -> bool:
        return self.wide or not is_float(total.array.dtype)

    def _moved(self, total: Named, squares: Named) -> Named:
        """A sum, moved as far as rounding where it stood after some of its terms; `squares` is the sum of theirs."""
        size = self.xp.sqrt(squares.array)
        stream = zlib.crc32(" ".join(total.axes).encode())
        return Named(total.axes, total.array + HALF_UNIT * size * self._random(size, stream))

    def _random(self, like: Any, stream: int) -> Any:
        """Numbers of mean 0 and variance 1 between -1.8 and 1.8, for the elements of an array."""
        places = self.xp.arange(like.size, dtype="float64").reshape(like.shape)
        shuffled = 43758.5453 * self.xp.sin(12.9898 * places + stream % 1000 + 1.37 * self.sample)
        return 3.0**0.5 * (2 * (shuffled - self.xp.floor(shuffled)) - 1)


def _squared(x: Named) -> Named:
    return Named(x.axes, x.array * x.array)


def noisy(graph: KernelGraph, arrays: Sequence[Any], xp: Any = numpy, sample: Any = 0) -> list[Any]:
    """Results of a graph of library operators, as `evaluate.run` gives them in float64, but with noise."""
    indices = frozenset(s.tensor.name for k in graph.kernels for op in k.ops if op.op == "iota" for s in k.stores)
    inputs = [Named(t.axes, xp.asarray(a)) for t, a in zip(graph.inputs, arrays, strict=True)]
    wide = any(t.dtype == "f64" for t in graph.tensors.values())
    domain = NoisyDomain(xp, "float64", exact=indices, wide=wide, sample=sample)
    return [x.array for x in evaluate(graph, inputs, domain)]
