"""Which values of a candidate may be numbers of float16, whose range ordinary data reach.

A value may be stored in float16, or cast to it because a matrix product reads it with a tensor of that type, if the
program has it in float16 itself, or if its bound fits. Everything else is float32 (`in_range`), and a product that
reads it is one of float32, which has numbers of any size.

Whether two values are the same is asked of numbers: both graphs run as straight-line code on the same random inputs,
in float64, at small extents. Bounds are intervals. What a block has seen only a part of (a sum that goes on in the next
step of a loop, or in another part of a split axis) is another value than the whole, and may be larger.

bfloat16 has the range of float32, so none of this concerns it.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy

from mirage_jax.errors import GraphError
from mirage_jax.mugraph.domains.floats import FloatDomain, NamedArray, arrange
from mirage_jax.mugraph.dtypes import DTYPES, SIXTEEN_BIT_FLOATS, SMALL_INTEGERS, is_float, numpy_dtype
from mirage_jax.mugraph.graph import (
    Axis,
    Kernel,
    KernelGraph,
    Library,
    Load,
    Op,
    Store,
    Tensor,
    is_part,
    mentioned_axes,
    origin,
    split_axis,
)
from mirage_jax.mugraph.operators import ACCUMULATORS, ANYTHING, FUNCTIONS, Interval, operator

FLOAT16 = "f16"
MAX_FLOAT16 = 65504.0  # of float16
LEAST_SCALE = 2.0**-4  # of a value of the program that may be float16 as well: so many more bits are lost near zero
REDUCED_EXTENT = 3  # elements of an axis
INPUT_SAMPLES = 4  # sets of inputs
INPUT_SCALE = 0.25  # of inputs: sums over thousands of them must not overflow in an exponential
NARROW = (*SIXTEEN_BIT_FLOATS, *SMALL_INTEGERS)
EQUAL_RELATIVE = 1e-7  # relative difference of equal values in float64


@dataclass(frozen=True)
class Ranged:
    """A value in each sample, and an interval that holds its finite elements at any inputs."""

    axes: tuple[Axis, ...]
    samples: tuple[NamedArray, ...]
    within: Interval = ANYTHING


@dataclass(frozen=True)
class _Weighted(FloatDomain):
    """float64 where sums over the few elements of an axis have the mass of all that it really has."""

    weights: Mapping[Axis, float] = field(default_factory=dict[Axis, float])

    def sum(self, x: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """Sum with the mass of real extents."""
        total = super().sum(x, axes)
        return NamedArray(total.axes, total.array * self._mass(axes))

    def dot(self, x: NamedArray, y: NamedArray, axes: tuple[Axis, ...]) -> NamedArray:
        """Contract with the mass of real extents."""
        total = super().dot(x, y, axes)
        return NamedArray(total.axes, total.array * self._mass(axes))

    def _mass(self, axes: Iterable[Axis]) -> float:
        return math.prod(self.weights.get(origin(a), 1.0) for a in axes)


@dataclass(frozen=True)
class RangeDomain:
    """Samples in float64 and intervals side by side."""

    floats: _Weighted
    extents: Mapping[Axis, int]  # real ones

    def _made(self, method: str, within: Interval, *args: Ranged, more: Sequence[Any] = ()) -> Ranged:
        rows = zip(*(x.samples for x in args), strict=True)
        samples = tuple(getattr(self.floats, method)(*row, *more) for row in rows)
        return Ranged(samples[0].axes, samples, _tidy(within))

    def constant(self, value: Fraction) -> Ranged:
        """An interval of one number."""
        made = self.floats.constant(value)
        number = float(made.array)
        return Ranged((), (made,) * INPUT_SAMPLES, (number, number))

    def add(self, x: Ranged, y: Ranged) -> Ranged:
        """Add samples and ends."""
        return self._made("add", (x.within[0] + y.within[0], x.within[1] + y.within[1]), x, y)

    def mul(self, x: Ranged, y: Ranged) -> Ranged:
        """Multiply samples; a square is not negative."""
        return self._made("mul", _product(x, y), x, y)

    def power(self, x: Ranged, exponent: Fraction) -> Ranged:
        """Raise samples and ends."""
        return self._made("power", _power(x.within, exponent), x, more=(exponent,))

    def exp(self, x: Ranged) -> Ranged:
        """Exponentials are monotone."""
        return self._made("exp", (_exp(x.within[0]), _exp(x.within[1])), x)

    def rounded(self, x: Ranged) -> Ranged:
        """x: nothing is rounded here."""
        return x

    def log_product(self, x: Ranged, m: Ranged) -> Ranged:
        """Logarithms may be anything."""
        return self._made("log_product", ANYTHING, x, m)

    def less_log_product(self, y: Ranged, x: Ranged, m: Ranged) -> Ranged:
        return self._made("less_log_product", ANYTHING, y, x, m)

    def function(self, name: str, args: Sequence[Ranged]) -> Ranged:
        """Take the range from the function's record."""
        rows = zip(*(x.samples for x in args), strict=True)
        samples = tuple(self.floats.function(name, row) for row in rows)
        found = FUNCTIONS[name].range
        within = found(*(x.within for x in args)) if callable(found) else found
        return Ranged(samples[0].axes, samples, _tidy(within))

    def sum(self, x: Ranged, axes: tuple[Axis, ...]) -> Ranged:
        """Bound sums of up to as many terms as there are."""
        return self._made("sum", self._summed(x.within, axes), x, more=(axes,))

    def dot(self, x: Ranged, y: Ranged, axes: tuple[Axis, ...]) -> Ranged:
        """Bound sums of products."""
        return self._made("dot", self._summed(_product(x, y), axes), x, y, more=(axes,))

    def maximum(self, x: Ranged, axes: tuple[Axis, ...]) -> Ranged:
        """A maximum is one of the elements."""
        return self._made("maximum", x.within, x, more=(axes,))

    def shift(self, x: Ranged, axes: tuple[Axis, ...]) -> Ranged:
        """A shift may be anything."""
        return self._made("shift", ANYTHING, x, more=(axes,))

    def iota(self, axis: Axis) -> Ranged:
        """Indices lie in the real extent."""
        made = self.floats.iota(axis)
        return Ranged(made.axes, (made,) * INPUT_SAMPLES, (0.0, self._extent(axis) - 1.0))

    def _extent(self, axis: Axis) -> int:
        return self.extents.get(origin(axis), 1)

    def _summed(self, within: Interval, axes: Iterable[Axis]) -> Interval:
        """Bound sums of up to so many terms: a block may sum fewer."""
        count = math.prod(map(self._extent, axes))
        return min(within[0], within[0] * count), max(within[1], within[1] * count)


def _tidy(within: Interval) -> Interval:
    """Infinity minus infinity, or times zero, may be anything."""
    return ANYTHING if any(map(math.isnan, within)) else within


def _product(x: Ranged, y: Ranged) -> Interval:
    if x is y or _same(x, y):
        most = max(x.within, key=abs)
        return 0.0, most * most
    ends = [a * b if a and b else 0.0 for a in x.within for b in y.within]
    return min(ends), max(ends)


def _power(within: Interval, exponent: Fraction) -> Interval:
    low, high = within
    e = float(exponent)
    if exponent.denominator == 1 and exponent.numerator % 2 == 0 and exponent > 0:
        return 0.0, _to(max(abs(low), abs(high)), e)
    if exponent.denominator > 1:
        low, high = max(low, 0.0), max(high, 0.0)  # of what is negative there is no root
    elif low < 0:
        return ANYTHING
    ends = _to(low, e), _to(high, e)
    return min(ends), max(ends)


def _to(x: float, exponent: float) -> float:
    try:
        return x**exponent
    except (OverflowError, ZeroDivisionError):
        return math.inf


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _same(x: Ranged, y: Ranged) -> bool:
    return _factor(x, y) == 1.0


def _factor(x: Ranged, of: Ranged) -> float | None:
    """The constant by which `of` is multiplied in x, if there is one; exactly 1 for equal values."""
    if x is of:
        return 1.0
    have, want = tuple(map(origin, x.axes)), tuple(map(origin, of.axes))
    if sorted(have) != sorted(want) or len(set(have)) < len(have):
        return None
    a, b = (numpy.concatenate([numpy.ravel(v) for v in arrays]) for arrays in _aligned(x, of, have, want))
    with numpy.errstate(all="ignore"):
        known = numpy.isfinite(b) & (b != 0)
        if (numpy.isfinite(a) != numpy.isfinite(b)).any() or not known.any() or (a[b == 0] != 0).any():
            return None
        factors = a[known] / b[known]
    factor = float(factors[0])
    if not math.isfinite(factor) or (abs(factors - factor) > EQUAL_RELATIVE * abs(factor)).any():
        return None
    return 1.0 if abs(factor - 1.0) <= EQUAL_RELATIVE else factor


def _aligned(
    x: Ranged, of: Ranged, have: tuple[Axis, ...], want: tuple[Axis, ...]
) -> tuple[list[numpy.ndarray], list[numpy.ndarray]]:
    return [arrange(_array(v), have, want) for v in x.samples], [_array(v) for v in of.samples]


def _array(x: NamedArray) -> numpy.ndarray:
    return numpy.asarray(x.array, "float64")


# ---------------------------------------------------------------------- the values of a graph


class ProgramValues:
    """What a program's own values are: those that it has, on samples of inputs."""

    def __init__(self, reference: KernelGraph):
        self.graph = reference
        self.small = {a: min(n, REDUCED_EXTENT) for a, n in reference.extents}
        self.inputs = {t.name: self._drawn(t, i) for i, t in enumerate(reference.inputs)}
        self.tensors = dict(self.inputs)
        for kernel in reference:
            for store, value in _stored(kernel, self.values(reference, kernel, self.tensors)):
                self.tensors[store.tensor.name] = value

    @functools.cached_property
    def narrow(self) -> list[Ranged]:
        """Those that it has in float16."""
        return [x for name, x in self.tensors.items() if self.graph.tensors[name].dtype == FLOAT16]

    def values(self, graph: KernelGraph, kernel: Kernel, tensors: Mapping[str, Ranged]) -> dict[str, Ranged]:
        """Of every load and operator of a kernel, as straight-line code."""
        domain = self._domain(graph, kernel)
        env = {x.name: _loaded(tensors[x.tensor], x) for x in kernel.loads}
        with numpy.errstate(all="ignore"):
            for op in kernel.ops:
                made = operator(op.op).meaning(domain, *(env[a] for a in op.args), **op.attributes)
                env[op.name] = replace(made, within=self._narrowed(op, made))
        return env

    def _narrowed(self, op: Op, made: Ranged) -> Interval:
        """Narrow an interval: an exponential relative to a maximum is at most 1."""
        low, high = made.within
        if op.op == "exps" and all(numpy.all(numpy.asarray(x.array) <= 1 + EQUAL_RELATIVE) for x in made.samples):
            low, high = 0.0, min(high, 1.0)
        return low, high

    def scale(self, value: Ranged) -> float | None:
        """By what a value of the program that is float16 there is multiplied, if it is."""
        found = [abs(f) for x in self.narrow if (f := _factor(value, x)) is not None]
        return min(found, key=lambda f: (not LEAST_SCALE <= f <= 1, f), default=None)

    def _drawn(self, tensor: Tensor, number: int) -> Ranged:
        rng = numpy.random.default_rng([len(self.graph.inputs), number])
        shape = tuple(self.small[origin(a)] for a in tensor.axes)
        samples: list[NamedArray] = []
        for _ in range(INPUT_SAMPLES):
            if is_float(numpy_dtype(tensor.dtype)):
                array = INPUT_SCALE * rng.standard_normal(shape)
            else:
                array = rng.integers(0, 2 if tensor.dtype == "bool" else 4, shape).astype(numpy_dtype(tensor.dtype))
            samples.append(NamedArray(tensor.axes, numpy.asarray(array)))
        return Ranged(tensor.axes, tuple(samples), _of_type(tensor.dtype))

    def _domain(self, graph: KernelGraph, kernel: Kernel) -> RangeDomain:
        return RangeDomain(self.floats(graph, kernel, "float64"), dict(graph.extents))

    def floats(self, graph: KernelGraph, kernel: Kernel, dtype: str | None) -> _Weighted:
        """What computes the samples of a kernel's values."""
        origins = {a: origin(a) for a in mentioned_axes(kernel)}
        small = {o: self.small.get(o, min(graph.sizes.get(o, 1), REDUCED_EXTENT)) for o in origins.values()}
        weights = {o: graph.sizes[o] / n for o, n in small.items() if o in graph.sizes}
        return _Weighted(numpy, dtype, {a: range(small[o]) for a, o in origins.items()}, weights=weights)


def _of_type(dtype: str) -> Interval:
    return DTYPES[dtype].range if dtype in (FLOAT16, *SMALL_INTEGERS) else ANYTHING


def _loaded(x: Ranged, load: Load) -> Ranged:
    """With the load's names; a part axis, which straight-line code has one element of, is inserted or there already."""
    if x.axes == load.axes:
        return x
    if len(x.axes) != len(load.axes):
        raise GraphError(f"{load} does not fit a value over ({','.join(x.axes)})")
    return Ranged(load.axes, tuple(NamedArray(load.axes, v.array) for v in x.samples), x.within)


def _stored(kernel: Kernel, values: Mapping[str, Ranged]) -> Iterator[tuple[Store, Ranged]]:
    for store in kernel.stores:
        x, axes = values[store.value], store.tensor.axes
        arrays = [arrange(numpy.asarray(v.array), v.axes, axes) for v in x.samples]
        yield store, Ranged(axes, tuple(NamedArray(axes, a) for a in arrays), x.within)


@functools.lru_cache(maxsize=8)
def program(reference: KernelGraph) -> ProgramValues:
    """The values of a program; few programs are looked at at a time."""
    return ProgramValues(reference)


# ---------------------------------------------------------------------- what a candidate does with them


@dataclass(frozen=True)
class Narrowed:
    """A value of a candidate that is cast to float16: stored, if `product` is None, or read by this product."""

    kernel: int
    value: str
    tensor: str | None
    product: str | None
    why: str

    def __str__(self) -> str:
        where = f"stored as {self.tensor}" if self.product is None else f"read by %{self.product}"
        return f"%{self.value} of kernel {self.kernel}, {where}: {self.why}"


def out_of_range(reference: KernelGraph, candidate: KernelGraph) -> list[Narrowed]:
    """Values that a candidate casts to float16, though the program has no such value in that type, and no bound is
    known that it holds.
    """
    if all(t.dtype != FLOAT16 for t in candidate.tensors.values()):
        return []
    own = program(reference)
    seen = _Seen(own, candidate, dict(own.inputs))
    return [x for number, kernel in enumerate(candidate) for x in seen.narrowed(number, kernel)]


@dataclass
class _Seen:
    """The kernels of a candidate seen so far: values of tensors, and which tensors are parts of sums."""

    own: ProgramValues
    candidate: KernelGraph
    tensors: dict[str, Ranged]
    parts: set[str] = field(default_factory=set[str])

    def narrowed(self, number: int, kernel: Kernel) -> Iterator[Narrowed]:
        """What the next kernel casts to float16 without a reason."""
        values = self.own.values(self.candidate, kernel, self.tensors)
        partial = _partial(kernel, self.parts)
        checked = functools.partial(_unproven, self.own, values, partial)
        for op in kernel.ops:
            for name in narrowed_operands(kernel, op, self.candidate):
                if why := checked(name):
                    yield Narrowed(number, name, None, op.name, why)
        for store, value in _stored(kernel, values):
            name, is_narrow = store.tensor.name, store.tensor.dtype == FLOAT16
            if is_narrow and name not in self.candidate.outputs and (why := checked(store.value)):
                yield Narrowed(number, store.value, name, None, why)
            self.tensors[name] = _as_float16(value) if is_narrow else value
            if store.value in partial:
                self.parts.add(name)


def _as_float16(x: Ranged) -> Ranged:
    """What is read of a tensor of that type."""
    return replace(x, within=(max(x.within[0], -MAX_FLOAT16), min(x.within[1], MAX_FLOAT16)))


def narrowed_operands(kernel: Kernel, op: Op, graph: KernelGraph) -> list[str]:
    """Operands that a matrix product casts to float16, since another one is a tensor of that type.

    What XLA computes casts nothing, and neither does a product beside an input that 16 bits do not hold
    (`lower.triton.ops.products.operand_type`).
    """
    if op.op != "dot" or isinstance(kernel, Library):
        return []
    read = {x.name: graph.tensors[x.tensor] for x in kernel.loads if x.name in op.args}
    narrow = {name for name, t in read.items() if t.dtype in NARROW}
    floats = {read[name].dtype for name in narrow}.difference(SMALL_INTEGERS)
    if floats != {FLOAT16} or any(read[name] in graph.inputs for name in read.keys() - narrow):
        return []
    return [a for a in op.args if a not in narrow]


def _unproven(own: ProgramValues, values: Mapping[str, Ranged], partial: set[str], name: str) -> str:
    """Why a value is not known to fit into float16, if it is not."""
    value = values[name]
    if max(map(abs, value.within)) <= MAX_FLOAT16:
        return ""
    if name in partial:
        return "a part of a sum may be larger than the sum"
    scale = own.scale(value)
    if not scale:  # None, or a value that is 0 in the samples
        return "the program has no such value in float16"
    if not LEAST_SCALE <= scale <= 1:
        return f"the program has {1 / scale:.3g} times this value in float16"
    return ""


def _partial(kernel: Kernel, tensors: set[str]) -> set[str]:
    """Values that a block has seen in part: sums over the loop's axis in its body, or over an axis that is split over
    the grid, and all that depends on these. `tensors` are stored parts, which a sum over all parts makes whole.
    """
    split = {split_axis(origin(a)) for a in kernel.grid if is_part(a)}
    parts = {x.name for x in kernel.loads if x.tensor in tensors}
    seen: dict[str, set[Axis]] = {x.name: set() for x in kernel.loads}  # axes of which a value has seen a part
    for op in kernel.ops:
        summed = _summed(kernel, op, seen, split)
        seen[op.name] = {a for a in summed if a == kernel.loop or origin(a) in split}
        reads_part = not parts.isdisjoint(op.args)
        if reads_part and not any(map(is_part, _axes_of_sum(op))):
            parts.add(op.name)
    return parts | {name for name, axes in seen.items() if axes}


def _summed(kernel: Kernel, op: Op, seen: Mapping[str, set[Axis]], split: set[Axis]) -> set[Axis]:
    """Axes over which an operator, or one that it reads, sums; a loop that has ended leaves none of its own."""
    axes = set(_axes_of_sum(op)).union(*(seen[a] for a in op.args))
    if op.op not in ACCUMULATORS or kernel.loop is None:
        return axes
    return axes | {kernel.loop} if origin(kernel.loop) in split else axes - {kernel.loop}


def _axes_of_sum(op: Op) -> tuple[Axis, ...]:
    axes = op.attributes.get("axes", ())
    return axes if isinstance(axes, tuple) and op.op in ("sum", "dot") else ()


def rounded(reference: KernelGraph, graph: KernelGraph, dtype: str | None) -> list[numpy.ndarray]:
    """Outputs of a graph for the samples of the program's inputs, computed in its own types (`dtype` None) or in
    float64.
    """
    own = program(reference)
    samples = [_evaluated(own, graph, n, dtype) for n in range(INPUT_SAMPLES)]
    return [numpy.stack([numpy.asarray(x.array, "float64") for x in xs]) for xs in zip(*samples, strict=True)]


def _evaluated(own: ProgramValues, graph: KernelGraph, sample: int, dtype: str | None) -> list[NamedArray]:
    tensors = {t.name: _cast(own.inputs[t.name].samples[sample], t, dtype) for t in graph.inputs}
    for kernel in graph:
        domain = own.floats(graph, kernel, dtype)
        env = {x.name: NamedArray(x.axes, tensors[x.tensor].array) for x in kernel.loads}
        with numpy.errstate(all="ignore"):
            for op in kernel.ops:
                env[op.name] = operator(op.op).meaning(domain, *(env[a] for a in op.args), **op.attributes)
            tensors |= {s.tensor.name: domain.store(env[s.value], s.tensor) for s in kernel.stores}
    return [tensors[name] for name in graph.outputs]


def _cast(x: NamedArray, tensor: Tensor, dtype: str | None) -> NamedArray:
    """An input as its type holds it."""
    array = x.array.astype(numpy_dtype(tensor.dtype))
    return NamedArray(x.axes, array.astype(dtype) if dtype and is_float(array.dtype) else array)


def equal_tensors(reference: KernelGraph, candidate: KernelGraph) -> dict[str, list[str]]:
    """Tensors of the program that have the values of each tensor of a candidate, by name."""
    own = program(reference)
    tensors = dict(own.inputs)
    for kernel in candidate:
        values = own.values(candidate, kernel, tensors)
        tensors |= {store.tensor.name: value for store, value in _stored(kernel, values)}
    return {name: [n for n, y in own.tensors.items() if _same(x, y)] for name, x in tensors.items()}


# ---------------------------------------------------------------------- in float32 instead


def in_range(reference: KernelGraph, candidate: KernelGraph) -> KernelGraph:
    """The candidate with everything in float32 that is not known to fit into float16: tensors, and products, for which
    the other tensor is read through an `affine` that changes nothing, so that it counts as computed.
    """
    for _ in range(len(candidate.kernels) + 1):
        found = out_of_range(reference, candidate)
        if not found:
            return candidate
        wide = {x.tensor for x in found if x.tensor is not None}
        products: dict[int, set[str]] = defaultdict(set)
        for x in found:
            if x.product is not None:
                products[x.kernel].add(x.product)
        kernels = (_widened(k, wide, products[n], candidate) for n, k in enumerate(candidate.kernels))
        candidate = replace(candidate, kernels=tuple(kernels))
    return candidate


def _widened(kernel: Kernel, wide: set[str], products: set[str], graph: KernelGraph) -> Kernel:
    """Store the tensors `wide` in float32, and let `products` read float16 tensors as computed values."""

    def _as_wide(t: Tensor) -> Tensor:
        return replace(t, dtype="f32") if t.name in wide else t

    if isinstance(kernel, Library):
        return replace(kernel, result=_as_wide(kernel.result))
    kernel = replace(kernel, stores=tuple(replace(s, tensor=_as_wide(s.tensor)) for s in kernel.stores))
    narrow = {x.name: x for x in kernel.loads if graph.tensors[x.tensor].dtype == FLOAT16}
    copies: dict[str, Op] = {}
    ops: list[Op] = []
    for op in kernel.ops:
        if op.name in products:
            new = dict.fromkeys(a for a in op.args if a in narrow and a not in copies)
            copies |= {a: Op(f"wide_{a}", "affine", (a,), narrow[a].axes) for a in new}
            ops += [copies[a] for a in new]
            op = replace(op, args=tuple(copies[a].name if a in copies else a for a in op.args))
        ops.append(op)
    return replace(kernel, ops=tuple(ops))
