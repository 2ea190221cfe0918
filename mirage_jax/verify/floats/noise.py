"""How far rounding may carry a program's results, whatever the order of its evaluation.

The program is evaluated in float64 with every intermediate moved by chance, as rounding to float32 would, and every sum
as rounding its terms one after the other would (Monte Carlo arithmetic, Parker, 1997). Sums of products move further:
matrix units cut off what does not fit, always towards zero (Fasi et al., Numerical behavior of NVIDIA tensor cores,
2021), so that errors of a few steps add up; and where a product is used twice it may be computed twice, in two ways.
Where results cancel, as gradients of a saturated softmax do, one program may be exact by luck, because it subtracts a
number from itself, while another is as good and is not. One sample may have that luck too; `SAMPLES` of them hardly
ever all.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy

from mirage_jax.mugraph.domains.floats import FloatDomain, NamedArray
from mirage_jax.mugraph.dtypes import is_float, is_power_of_two
from mirage_jax.mugraph.evaluate import evaluate
from mirage_jax.mugraph.graph import Axis, Kernel, KernelGraph, Library, Op, Tensor
from mirage_jax.mugraph.passes.sentinels import HIGHEST_SENTINEL

HALF_UNIT = 2.0**-24  # of float32, in the last place of 1
TF32_UNIT = 2.0**-10  # the type has 10 bits of mantissa
CUT_OFF = 4  # half units: up to a unit at each of some steps, all in one direction
SAMPLES = 8
ABSORBING = -1e29  # ordinary numbers added to it, or to less, change no bit of it, even in float64
EXACT = frozenset(
    {"affine", "iota", "max", "shift", "maximum", "minimum", "where", "mask", "abs", "sign", "floor", "round"}
)


@dataclass(frozen=True)
class NoisyDomain(FloatDomain):
    """float64 with noise on what is stored and summed. `exact` names tensors that no rounding moves, and `sentinels`
    are numbers that it does not: a mask puts them there, and nothing computes them. Nor does it move a number so low
    that what is added to it is lost, in float64 as in float32: an input that masks puts it there. Sums of `wide`
    programs, in float64, it does not move either. `sample`: which of all possible noises; `half_unit`: its size.
    """

    exact: frozenset[str] = frozenset()
    sentinels: tuple[float, ...] = ()
    wide: bool = False
    sample: Any = 0
    half_unit: float = HALF_UNIT
    count: Iterator[int] = field(default_factory=itertools.count)  # of sums, each with noise of its own

    def store(self, x: NamedArray, tensor: Tensor) -> NamedArray:
        """Round to the tensor's type, with noise of half a unit."""
        made = super().store(x, tensor)
        if tensor.name in self.exact or not tensor.axes or tensor.dtype == "f64" or not is_float(made.array.dtype):
            return made
        moved = made.array * (1 + self.half_unit * self._random(made.array, zlib.crc32(tensor.name.encode())))
        for number in self.sentinels:
            moved = self.xp.where(made.array == number, number, moved)
        low = (made.array <= ABSORBING) & (made.array.astype("float32") == made.array)
        return NamedArray(made.axes, self.xp.where(low, made.array, moved))

    def dot(self, x: NamedArray, y: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """Multiply, with noise of the sum."""
        total = super().dot(x, y, axes)
        if self._is_exact(total):
            return total
        return self._moved(total, super().dot(_squared(x), _squared(y), axes), CUT_OFF * self.half_unit)

    def sum(self, x: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """Add, with noise of the sum."""
        total = super().sum(x, axes)
        return total if self._is_exact(total) else self._moved(total, super().sum(_squared(x), axes), self.half_unit)

    def _is_exact(self, total: NamedArray) -> bool:
        return self.wide or not is_float(total.array.dtype)

    def _moved(self, total: NamedArray, squares: NamedArray, unit: float) -> NamedArray:
        """A sum, moved by a unit of where it stood after some of its terms; `squares` is the sum of theirs."""
        size = self.xp.sqrt(squares.array)
        stream = zlib.crc32(" ".join(total.axes).encode()) + next(self.count)
        return NamedArray(total.axes, total.array + unit * size * self._random(size, stream))

    def _random(self, like: Any, stream: int) -> Any:
        """Numbers of mean 0 and variance 1 between -1.8 and 1.8, for the elements of an array."""
        places = self.xp.arange(like.size, dtype="float64").reshape(like.shape)
        shuffled = 43758.5453 * self.xp.sin(12.9898 * places + stream % 1000 + 1.37 * self.sample)
        return 3.0**0.5 * (2 * (shuffled - self.xp.floor(shuffled)) - 1)


def _squared(x: NamedArray) -> NamedArray:
    return NamedArray(x.axes, x.array * x.array)


def unshared(graph: KernelGraph) -> KernelGraph:
    """Copy a product for each of its uses, in a graph of library operators."""
    uses = Counter(load.tensor for k in graph for load in k.loads)
    products = {k.name: k for k in graph if isinstance(k, Library) and k.op.op == "dot" and uses[k.name] > 1}
    kernels: list[Kernel] = []
    for k in graph:
        loads = []
        for n, load in enumerate(k.loads):
            if product := products.get(load.tensor):
                tensor = replace(product.result, name=f"{load.tensor}.{k.name}.{n}")
                kernels.append(replace(product, result=tensor))
                load = replace(load, tensor=tensor.name)
            loads.append(load)
        kernels.append(replace(k, loads=tuple(loads)))
    return replace(graph, kernels=tuple(kernels))


def unrounded(graph: KernelGraph) -> frozenset[str]:
    """Tensors of a graph of library operators that are no more rounded than what they are made of: indices, and numbers
    that are picked, negated or scaled by a power of two.

    Noise on a maximum would say that nobody can know the difference to it: `x w - max(x) sum(w)` loses digits that
    `(x - max(x)) w` has.
    """
    return frozenset(s.tensor.name for k in graph for s in k.stores if all(map(_is_exact, k.ops)))


def _is_exact(op: Op) -> bool:
    return op.op in EXACT and op.number("offset", 0) == 0 and is_power_of_two(abs(op.number("scale")))


def sentinels(graph: KernelGraph) -> tuple[float, ...]:
    """Huge negative constants of a graph of library operators."""
    constants = (k.op.attributes["value"] for k in graph if isinstance(k, Library) and k.op.op == "const")
    return tuple({float(x) for x in constants if isinstance(x, int | Fraction) and x <= HIGHEST_SENTINEL})


def noisy(
    graph: KernelGraph,
    arrays: Sequence[Any],
    xp: Any = numpy,
    sample: Any = 0,
    half_unit: float = HALF_UNIT,
    in_range: bool = False,
) -> list[Any]:
    """Results of a graph of library operators, as `evaluate.run` gives them in float64, but with noise."""
    inputs = [NamedArray(t.axes, xp.asarray(a)) for t, a in zip(graph.inputs, arrays, strict=True)]
    wide = any(t.dtype == "f64" for t in graph.tensors.values())
    exact, lowest = unrounded(graph), sentinels(graph)
    domain = NoisyDomain(
        xp, "float64", in_range=in_range, exact=exact, sentinels=lowest, wide=wide, sample=sample, half_unit=half_unit
    )
    return [x.array for x in evaluate(unshared(graph), inputs, domain)]
