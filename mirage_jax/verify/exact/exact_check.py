"""The exact check of generated kernels: the text that will be compiled, run on numbers without rounding.

Input: a graph and its schedule. Output: how a kernel's results differ from the graph's, or "". Both sides
compute on `mugraph.domains.exact`: the text in the interpreter, block by block, with its own index arithmetic, masks,
loops and constants; the kernel's graph by `mugraph.evaluate`, under the same schedule. They share no code but the
numbers, and must agree in every bit; so errors that a tolerance would forgive are caught as surely as a wrong stride: a
lane too many in a large sum, a rescaling forgotten where maxima hardly move. The interpreter checks every access to
memory on top (`interpreters.memory`).

This is Mirage's twin in Z_p of a kernel, except that it needs no second text: the kernel's own gets another meaning.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Protocol

import numpy as np

from mirage_jax.errors import KernelFault, LoweringError, UnsupportedError, in_one_line
from mirage_jax.lower.tiling import Tiling, extent, stored_axes
from mirage_jax.lower.triton.emitter import DEFAULT_OPTIONS, EmitOptions, KernelSource, emit
from mirage_jax.lower.triton.horizontal_fusion import join
from mirage_jax.lower.triton.two_forms import minimized_tensor
from mirage_jax.mugraph.domains import exact
from mirage_jax.mugraph.domains.exact_domain import ExactDomain
from mirage_jax.mugraph.domains.floats import NamedArray, arrange, random_integers
from mirage_jax.mugraph.dtypes import is_float, numpy_dtype
from mirage_jax.mugraph.evaluate import evaluate_kernel
from mirage_jax.mugraph.graph import Axis, BlockGraph, KernelGraph, KernelSchedule, Schedule, Store, Tensor
from mirage_jax.mugraph.passes.sentinels import forms_of
from mirage_jax.mugraph.views import View, ViewStep
from mirage_jax.verify.exact.interpreters.triton import interpret_kernel
from mirage_jax.verify.exact.small_sizes import small_sizes
from mirage_jax.verify.gate import HasGraph, Verdict

log = logging.getLogger("mirage_jax.gate")

GUARD_ELEMENTS = 8  # elements


@dataclass(frozen=True)
class Twin:
    """A kernel of a graph at the sizes at which it is checked."""

    kernel: BlockGraph
    graph: KernelGraph
    sizes: KernelSchedule
    parts: Mapping[Axis, int]
    views: Mapping[str, View] = field(default_factory=dict)  # inputs that the text reads as parts of arrays

    def emit(self, options: EmitOptions) -> KernelSource:
        """Write the kernel's text at these sizes."""
        return emit(self.kernel, self.graph, self.sizes, self.parts, replace(options, views=tuple(self.views.items())))

    def stored(self, name: str, x: NamedArray, rng: np.random.Generator) -> Any:
        """A tensor as it lies in memory."""
        array = arrange(x.array, x.axes, stored_axes(self.graph.tensors[name], self.graph))
        return _inside(array, self.views.get(name), rng)

    def __str__(self) -> str:
        return f"kernel {self.kernel.name} at {' '.join(f'{a}={n}' for a, n in self.graph.extents)}"


def exact_check(graph: KernelGraph, schedule: Schedule, options: EmitOptions = DEFAULT_OPTIONS) -> str:
    """What is wrong with a launch of the graph at small extents (`small_sizes`), with full and with ragged tiles.

    Raises `UnsupportedError` for a kernel that the exact numbers cannot express.
    """
    for wave in schedule.waves(graph):
        kernels = [(k, schedule.kernels[n]) for n in wave if isinstance(k := graph.kernels[n], BlockGraph)]
        for ragged, depth in _cases(kernels, graph):
            twins = [_twin(k, graph, sizes, schedule.part_counts, options, ragged) for k, sizes in kernels]
            if wrong := _check_launch(twins, options, depth):
                return wrong
    return ""


def _cases(kernels: Sequence[tuple[BlockGraph, KernelSchedule]], graph: KernelGraph) -> Iterator[tuple[bool, float]]:
    """How a launch is checked: with ragged tiles or full ones, and how low some rows are; 0 if none is."""
    if not kernels:
        return iter(())
    is_full = any(sizes.specialized for _, sizes in kernels)  # such a kernel has full tiles at its real extents
    has_two_forms = any(forms_of(k, graph) for k, _ in kernels)
    return product((False,) if is_full else (False, True), (0.0, LOW) if has_two_forms else (0.0,))


class HasKernels(HasGraph, Protocol):
    """A winner: a graph, and the text of its kernels if `has_kernels`."""

    @property
    def has_kernels(self) -> bool:
        """Whether the winner has generated code."""
        ...

    @property
    def schedule(self) -> Schedule:
        """The sizes of its kernels."""
        ...

    @property
    def options(self) -> EmitOptions:
        """Options for the emitter."""
        ...


class ExactGate:
    """The gate for generated text: `exact_check`.

    A winner that cannot be checked passes: the float gate then decides alone, and the report says so.
    """

    name = "exact check"

    def check(self, candidate: HasKernels) -> Verdict:
        """Run the kernels' text at small sizes."""
        if not candidate.has_kernels:
            return Verdict(True)
        try:
            wrong = exact_check(candidate.graph, candidate.schedule, candidate.options)
        except UnsupportedError as why:
            return Verdict(True, f"not done: {why}")
        except LoweringError as why:
            return Verdict(False, f"not written at small sizes: {why}")
        except Exception as why:  # Triton's interpreter changes from version to version; a wrong text did compile
            log.warning("kernels are not checked on exact numbers: %s: %s", type(why).__name__, why)
            return Verdict(True, f"not done: {in_one_line(why)}")
        return Verdict(not wrong, wrong or "kernels agree with the graph bit for bit on exact numbers, at small sizes")


def _check_launch(twins: Sequence[Twin], options: EmitOptions, depth: float) -> str:
    """What is wrong with kernels in one launch; with each by itself, where they mean different numbers by one float."""
    inputs = [twin.emit(options).inputs for twin in twins]
    try:
        return _disagreement(twins, inputs, join([twin.emit for twin in twins], options), 0, depth)
    except UnsupportedError:
        if len(twins) == 1:
            raise
        return next(filter(None, (_check_launch([twin], options, depth) for twin in twins)), "")


def _twin(
    kernel: BlockGraph,
    graph: KernelGraph,
    sizes: KernelSchedule,
    parts: Mapping[Axis, int],
    options: EmitOptions,
    ragged: bool,
) -> Twin:
    small, parts = small_sizes(kernel, graph, sizes, parts, ragged)
    if sizes.programs:  # two or three blocks for each, or all for one
        sizes = replace(sizes, programs=max(Tiling(kernel, small, sizes, parts).grid * 2 // 5, 1))
    views = {name: _with_a_border(tuple(map(small.extent, graph.tensors[name].axes))) for name, _ in options.views}
    return Twin(kernel, small, sizes, parts, views)


def disagreement(
    kernel: BlockGraph,
    graph: KernelGraph,
    sizes: KernelSchedule,
    parts: Mapping[Axis, int],
    source: KernelSource,
    seed: int = 0,
) -> str:
    """Run the text of a kernel, and the kernel, on the same random numbers; "" if all results agree."""
    return _disagreement([Twin(kernel, graph, sizes, parts)], [source.inputs], source, seed)


def _disagreement(
    twins: Sequence[Twin], inputs: Sequence[tuple[str, ...]], source: KernelSource, seed: int, depth: float = 0.0
) -> str:
    """The same for a launch of several kernels, given the inputs of each, and how low some rows are.

    Where numbers as low as sentinels swallow all others, equal floats stand for different numbers, and their maximum
    may be any. What depends on it is not compared there, but once more on rows that are not as low.
    """
    rng = np.random.default_rng(seed)
    given = [_drawn(twin, names, rng) for twin, names in zip(twins, inputs, strict=True)]
    if depth:
        for twin, own in zip(twins, given, strict=True):
            _lower(own, rng, depth, share=1.0 if twin.sizes.programs else 0.5)
    memory = [
        _least(own[tensor].array) if (tensor := minimized_tensor(name)) else twin.stored(name, own[name], rng)
        for twin, own, names in zip(twins, given, inputs, strict=True)
        for name in names
    ]
    try:
        results = iter(interpret_kernel(source, memory, exact=True))
    except KernelFault as fault:
        return f"{', '.join(map(str, twins))}: {fault}"
    is_open = False
    for twin, own in zip(twins, given, strict=True):
        for store, want, is_decided in _expected(twin, own, has_ties=depth > 0):
            is_open |= not is_decided.all()
            if wrong := _differences(twin, store, next(results), want, is_decided):
                return f"{twin}: {wrong}"
    return _disagreement(twins, inputs, source, seed, LESS_LOW) if is_open and depth > LESS_LOW else ""


def _drawn(twin: Twin, names: Sequence[str], rng: np.random.Generator) -> dict[str, NamedArray]:
    tensors = {name: twin.graph.tensors[name] for name in names if minimized_tensor(name) is None}
    return {name: _random(t, twin.graph, twin.parts, rng) for name, t in tensors.items()}


def _differences(twin: Twin, store: Store, have: Any, want: NamedArray, is_decided: Any) -> str:
    have = arrange(have, stored_axes(store.tensor, twin.graph), want.axes)
    wrong = _apart(have, want.array) & is_decided
    if _is_shift(twin.kernel, store):  # if all is masked: minus infinity in kernels, any number in graphs
        wrong &= have["real"] != -np.inf
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{int(wrong.sum())} of {wrong.size} elements of {store.tensor.name} differ from the graph's, the first at {at}"
    )


def _apart(x: Any, y: Any) -> Any:
    return exact.differences(x, y) if x.dtype == exact.EXACT else x != y


def _expected(twin: Twin, inputs: Mapping[str, NamedArray], has_ties: bool) -> Iterator[tuple[Store, NamedArray, Any]]:
    """Evaluate one kernel: what it stores, and where that is the same whichever of equal floats is their maximum.

    It stays within its graph, since the kernels that read its results decide whether it has two forms.
    """
    names = dict.fromkeys(load.tensor for load in twin.kernel.loads)  # also of loads that the text has no use for
    tensors = {n: inputs[n] if n in inputs else _random(twin.graph.tensors[n], twin.graph, twin.parts) for n in names}
    schedule = Schedule((twin.sizes,), tuple(sorted(twin.parts.items())))
    run = functools.partial(evaluate_kernel, twin.kernel, twin.graph, schedule, tensors)
    with np.errstate(all="ignore"):
        wanted = run(ExactDomain())
        others = run(ExactDomain(of_equal=-1)) if has_ties else wanted
    for store, want, other in zip(twin.kernel.stores, wanted, others, strict=True):
        yield store, want, ~_apart(want.array, other.array)


def _random(
    tensor: Tensor, graph: KernelGraph, parts: Mapping[Axis, int], rng: np.random.Generator | None = None
) -> NamedArray:
    rng = rng or np.random.default_rng(0)
    shape, dtype = tuple(extent(a, graph, parts) for a in tensor.axes), numpy_dtype(tensor.dtype)
    array: Any
    if is_float(dtype):
        array = exact.random_numbers(rng, shape)
    elif tensor.dtype == "bool":
        array = rng.random(shape) < 0.8
    else:
        array = random_integers(rng, shape, dtype)
    return NamedArray(tensor.axes, array)


LOW = 1e60  # a product of it with any of our numbers is beyond every sentinel; its fifth power is a float64
LESS_LOW = 2.0**32  # beyond what kernels take for an ordinary maximum; a float64 holds it and another number beside it


def _lower(given: Mapping[str, NamedArray], rng: np.random.Generator, depth: float, share: float) -> None:
    """Make products of the first input with any other huge negative numbers, as far as order goes: in a share of the
    rows, the first of each matrix among them. A program that computes several blocks computes all or none again.
    """
    first = True
    for x in given.values():
        if x.array.dtype != exact.EXACT:
            continue
        real = np.abs(x.array["real"]) + 0.5
        if first and real.ndim:
            matrix = real if real.ndim > 1 else real[:, None]  # rows of one number each
            rows = rng.random((*matrix.shape[:-1], 1)) < share
            rows[..., :1, :] = True
            real, first = np.where(rows, -depth * matrix, matrix).reshape(real.shape), False
        x.array["real"] = real


def _least(x: exact.Numbers) -> exact.Numbers:
    """What a kernel is given as the least number of a tensor."""
    flat = x.reshape(-1)
    return flat[[int(np.argmin(flat["real"]))]]


def _with_a_border(shape: tuple[int, ...]) -> View:
    """A part of an array that is larger along every axis, by what leaves rows aligned."""
    whole = tuple(n + 2 * GUARD_ELEMENTS for n in shape)
    return View(
        whole, (ViewStep(whole, (GUARD_ELEMENTS,) * len(shape), tuple(n + GUARD_ELEMENTS for n in shape)),), shape
    )


def _inside(x: Any, view: View | None, rng: np.random.Generator) -> Any:
    """Put x into a larger array, at the place that a view says, with other values around it."""
    if view is None or not view.shape:
        return x
    whole = rng.choice(x.ravel(), view.whole)
    view.of(whole)[...] = x
    return whole


def _is_shift(kernel: BlockGraph, store: Store) -> bool:
    ops = {op.name: op for op in kernel.ops}
    op = ops.get(store.value)
    if op is not None and op.op == "last":
        op = ops.get(op.args[0])
    return op is not None and op.op == "shift"
