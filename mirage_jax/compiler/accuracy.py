"""Are a winner's floats as good as XLA's? Both run on classes of inputs, against the region in float64; the rule that
compares three results is `verify.float_gate`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mirage_jax.compiler.subject import Subject
from mirage_jax.compiler.winner import Winner
from mirage_jax.errors import in_one_line
from mirage_jax.jaxpr_frontend.translate import Region
from mirage_jax.mugraph import evaluate
from mirage_jax.mugraph.arrays import is_float, numpy_dtype
from mirage_jax.mugraph.footprint import footprint
from mirage_jax.mugraph.graph import KernelGraph, Library, Op
from mirage_jax.mugraph.operators import COMPARISONS
from mirage_jax.turns import turn
from mirage_jax.verify import float_gate, input_classes
from mirage_jax.verify.noise import SAMPLES, noisy

log = logging.getLogger("mirage_jax")

EVERY_CLASS = 5e8  # operations of a region up to which every class of inputs runs; beyond, float64 takes its time
CORE_CLASSES = (
    "normal",
    "large",
    "near overflow",
    "heavy tail",
    "zero rows",
    "cancelling",
    "integers",
    "large logits",
    "nan",
    "inf",
)
NEARBY, AROUND = 4, (0.97, 1.03)  # inputs on which the program's roundings are seen, and how much larger they are
BRINK = 13  # inputs of size one times 2**13 are still float16 numbers
BEYOND = 3  # powers of two beyond the last at which XLA gives only finite numbers
NEAREST, FARTHEST, MOST_NEAR = 2.0**-4, 2.0**10, 3  # constants of a program near which inputs are tried, and how many


@dataclass
class Accuracy:
    """XLA's floats for a subject, and what its winners are held to."""

    subject: Subject

    def gate(self, winner: Winner, only: Sequence[str] = ()) -> tuple[bool, str]:
        """Are the winner's floats as good as XLA's on every input class, or on those that are named? And why."""
        ours, classes = jax.jit(self.subject.ours(winner)), self._classes
        names = list(only or (classes if self.is_small else (*CORE_CLASSES, *classes.own)))
        for name in names:
            if wrong := self._on_class(winner, name, ours):
                return False, f"{name}: {wrong}"
        if not only and (overflow := self._overflow(ours)):
            return False, overflow
        return True, f"passed on {len(names)} input classes, repeated runs equal bit for bit"

    @cached_property
    def _xla(self) -> Callable[..., list[jax.Array]]:
        return jax.jit(self.subject.xla)  # compiled once for all winners

    @cached_property
    def _classes(self) -> input_classes.InputClasses:
        region = self.subject.region
        near, roots, counts = _cancelled_by(region.graph), inputs_under_roots(region), indices_compared(region)
        return input_classes.input_classes(self.subject.specs, 0, near, roots, counts, switches(region))

    def _on_class(self, winner: Winner, name: str, ours: Callable[..., list[jax.Array]]) -> str:
        """What is wrong with the winner's results for inputs of a class; empty if nothing is."""
        values = self._classes[name]
        args = [jax.device_put(v, self.subject.device) for v in values]
        results = ours(*args)
        if not all(same_bits(a, b) for a, b in zip(results, ours(*args), strict=True)):
            return "two runs differ"
        inputs = self.wide_inputs(values)
        candidate, found = map(self._placed, (results, self._xla(*args)))
        reference = self.in_float64(inputs)
        if name in input_classes.ORDINARY:
            for r, x in zip(reference, found, strict=True):
                if wrong := float_gate.misread(r, x, self.narrowest):
                    return wrong
        reordered = winner.family == "algebra"  # another order meets other roundings, infinities in another order
        # Of infinities and NaN one may stand for another where infinity times a rest of zero is NaN.
        kinds = not reordered and not any(k.precise for k in winner.schedule.kernels)
        degenerate = name in input_classes.DEGENERATE or (reordered and name in input_classes.LOGITS)
        compare = partial(
            float_gate.float_gate,
            kinds=kinds and name not in input_classes.SPOILED,
            spread=(2.0 if reordered else 1.0) * (2.0 if degenerate else 1.0),
            skips=any(k.span for k in winner.graph),
            unit=self.unit,
        )
        reasons: list[str] = []
        for noise, written in self._allowances(values, inputs, reference):
            with ThreadPoolExecutor(len(reference)) as pool:
                rows = zip(reference, found, candidate, noise, written, strict=True)
                tasks = [pool.submit(compare, r, x, c, noise=n, written=w) for r, x, c, n, w in rows]
                reasons = [reason for task in tasks for reason in task.result().reasons]
            if not reasons:
                break
        return "; ".join(reasons)

    def _allowances(
        self, values: Sequence[np.ndarray], inputs: Sequence[Any], exact: Sequence[Any]
    ) -> Iterator[tuple[Sequence[Any], Sequence[Any]]]:
        """Noise and `written_errors` of each result that the gate allows for: none, then more and more, since they take
        time and only some results are near them.
        """
        nothing = noise = [None] * len(exact)
        yield noise, nothing
        for samples in (1, SAMPLES):
            noise = self.noise(inputs, exact, samples)
            yield noise, nothing
        if (written := self.written_errors(values)) is not None:
            yield noise, written

    def _overflow(self, ours: Callable[..., Any]) -> str:
        """Does the candidate leave the range of float16 before XLA does? Other orders have other intermediate values.

        All inputs together, then each of them alone, are scaled up until XLA is about to overflow.
        """
        specs = self.subject.specs
        floats = [i for i, (_, dtype) in enumerate(specs) if jnp.issubdtype(dtype, jnp.floating)]
        if not any(dtype == np.float16 for _, dtype in specs):
            return ""
        values = jax.device_put(self.subject.inputs(0), self.subject.device)  # not where JAX's default is

        def scaled(which: Sequence[int], n: int) -> list[jax.Array]:
            return [x * jnp.asarray(2.0**n, x.dtype) if i in which else x for i, x in enumerate(values)]

        for which in (floats, *([i] for i in floats if len(floats) > 1)):
            in_range = lambda n, w=which: all(bool(jnp.isfinite(y).all()) for y in self._xla(*scaled(w, n)))  # noqa: E731
            last = float_gate.brink(in_range, BRINK)
            for n in range(max(last, 0), min(last + BEYOND, BRINK) + 1):
                args = scaled(which, n)
                results = zip(self._xla(*args), ours(*args), strict=True)
                if any(float_gate.shorter_range(np.asarray(x), np.asarray(y)) for x, y in results):
                    what = "all inputs" if which is floats else f"input {which[0]}"
                    return f"overflows with {what} times 2**{n}, where XLA does not"
        return ""

    # ------------------------------------------------------------------ the region in float64

    @cached_property
    def is_small(self) -> bool:
        """Is float64 soon done with it?"""
        return footprint(self.subject.reference).flops < EVERY_CLASS

    @property
    def _on_host(self) -> bool:
        """Does the processor evaluate in float64 and compare? Else the device, where a processor would take minutes."""
        return self.is_small or self.subject.platform == "cpu"

    @property
    def _xp(self) -> Any:
        return np if self._on_host else jnp

    def _placed(self, results: Sequence[jax.Array]) -> list[Any]:
        """Results where they are compared."""
        return [np.asarray(y) for y in results] if self._on_host else list(results)

    def wide_inputs(self, values: Sequence[Any]) -> list[Any]:
        """What `in_float64` takes."""
        arrays = self.subject.region.prepare([np.asarray(v) for v in values])
        if self._on_host:
            return arrays
        with jax.enable_x64(True):
            return [jax.device_put(x, self.subject.device) for x in arrays]

    def in_float64(self, inputs: Sequence[Any], sample: int | None = None) -> list[Any]:
        """The region in float64, inputs upcast from their own dtype; with noise if `sample` is a number."""
        graph = self.subject.region.graph
        with self._arithmetic():
            if self._on_host:
                results = _wide(graph, inputs, np, sample)
            else:
                with turn(self.subject.device):
                    number = None if sample is None else float(sample)
                    results = jax.block_until_ready(self._on_device(number, *inputs))
            tensors = dict(zip(graph.outputs, results, strict=True))
            return [b.joined(tensors, self._xp) for b in self.subject.region.outputs]  # Region.finish without the cast

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """Where arithmetic may be in float64, and infinities and NaN are among the inputs."""
        with np.errstate(all="ignore"), nullcontext() if self._on_host else jax.enable_x64(True):
            yield

    @cached_property
    def _on_device(self) -> Callable[..., Any]:
        return jax.jit(lambda sample, *xs: _wide(self.subject.region.graph, xs, jnp, sample))

    # ------------------------------------------------------------------ what rounding may do

    def noise(self, inputs: Sequence[Any], exact: Sequence[Any], samples: int) -> list[Any]:
        """How far rounding may carry its results from these exact ones: root mean square of so many samples."""
        xp = self._xp
        with self._arithmetic():
            squares = [xp.zeros(r.shape) for r in exact]
            for sample in range(samples):
                for n, moved in enumerate(self.in_float64(inputs, sample)):
                    if exact[n].dtype.kind == "f":
                        squares[n] += (moved - exact[n]) ** 2 / samples
            return [xp.sqrt(x) for x in squares]

    def written_errors(self, values: Sequence[np.ndarray]) -> list[Any] | None:
        """How far the user's equations are from float64 if they run one by one, each result rounded to its type: the
        largest of a few times, with all inputs a little larger or smaller, since one rounding may undo another. None
        where they cannot run so.
        """
        found: list[Any] = []
        for sample in range(NEARBY):
            rng = np.random.default_rng(sample)
            factors = rng.uniform(*AROUND, len(values))
            with np.errstate(all="ignore"):  # the largest numbers of a type may overflow
                near = [
                    np.asarray(v * v.dtype.type(f), v.dtype) if is_float(v.dtype) else v
                    for v, f in zip(values, factors, strict=True)
                ]
            try:
                with turn(self.subject.device):
                    args = (jax.device_put(v, self.subject.device) for v in near)
                    results = self._placed(self.subject.xla(*args))
            except Exception as why:  # no memory for all intermediate results, say
                log.info("not run operation by operation: %s", in_one_line(why))
                return None
            exact = self.in_float64(self.wide_inputs(near))
            with self._arithmetic():
                errors = [self._xp.abs(y.astype(np.float64) - r) for y, r in zip(results, exact, strict=True)]
                found = [self._xp.fmax(*pair) for pair in zip(found or errors, errors, strict=True)]
        return found

    @cached_property
    def unit(self) -> float:
        """A unit in the last place of 1 in the narrowest type of floats among the user's values."""
        types = {np.dtype(a.dtype) for eqn in self.subject.region.equations for a in (*eqn.in_avals, *eqn.out_avals)}
        return max((float(jnp.finfo(t).eps) for t in types if is_float(t)), default=0.0)

    @cached_property
    def narrowest(self) -> int:
        """Bytes of the narrowest floats among the inputs."""
        floats = (dtype for _, dtype in self.subject.specs if jnp.issubdtype(dtype, jnp.floating))
        return min((dtype.itemsize for dtype in floats), default=4)


@jax.jit
def same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    """Are two arrays of one type equal bit for bit?"""
    if a.dtype != bool:
        a, b = (lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for x in (a, b))
    return jnp.array_equal(a, b)


def _wide(graph: KernelGraph, arrays: Sequence[Any], xp: Any, sample: Any) -> list[Any]:
    return evaluate.run(graph, arrays, xp=xp) if sample is None else noisy(graph, arrays, xp, sample)


def inputs_under_roots(region: Region) -> list[int]:
    """Inputs, by position, that have to be positive, since what is under a root or a logarithm grows with them."""
    operators = {k.name: k for k in region.graph.kernels if isinstance(k, Library)}
    found: set[str] = set()
    todo = [x for k in operators.values() if _is_root(k.op) for x in _grows_with(k)]
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            todo += _grows_with(operators[name]) if name in operators and not _is_root(operators[name].op) else ()
    return [i for i, b in enumerate(region.inputs) if not found.isdisjoint(b.tensors)]


def indices_compared(region: Region) -> dict[int, int]:
    """Inputs of integers, by position, that are compared with indices, and with how many: lengths and labels."""
    graph = region.graph
    inputs = {t.name for t in graph.inputs if t.dtype == "i32"}
    counts: dict[str, int] = {}
    for k in graph.kernels:
        if isinstance(k, Library) and k.op.op in COMPARISONS:
            sources = {x.name: x.tensor for x in k.loads}
            x, y = (sources[a] for a in k.op.args)
            for own, other in ((x, y), (y, x)):
                extents = [graph.extent(a) for a in graph.tensors[other].axes]
                if own in inputs and other not in inputs and extents:
                    counts[own] = max([counts.get(own, 1), *extents])
    positions = {i: [counts[t] for t in b.tensors if t in counts] for i, b in enumerate(region.inputs)}
    return {i: max(found) for i, found in positions.items() if found}


def switches(region: Region) -> list[int]:
    """Inputs of floats, by position, that a huge factor makes a mask of logits: `(x - 1) * 1e9`."""
    tensors = {t.name for t in region.graph.inputs if is_float(numpy_dtype(t.dtype))}
    found: set[str] = set()
    for k in region.graph.kernels:
        if isinstance(k, Library) and k.op.op in ("affine", "add"):
            sources = {x.name: x.tensor for x in k.loads}
            factors = ("scale",) if k.op.op == "affine" else ("ca", "cb")
            pairs = zip(k.op.args, factors, strict=True)
            found |= {sources[a] for a, factor in pairs if abs(_number(k.op, factor)) > FARTHEST}
    return [i for i, b in enumerate(region.inputs) if not tensors.intersection(found).isdisjoint(b.tensors)]


def _is_root(op: Op) -> bool:
    return op.op in ("log", "logs") or (op.op == "pow" and _number(op, "exponent").denominator > 1)


def _grows_with(k: Library) -> list[str]:
    """Operands that it is positive with, if they are."""
    sources = {x.name: x.tensor for x in k.loads}
    tensors = [sources[a] for a in k.op.args]
    match k.op.op:
        case "mul" | "dot" if tensors[0] == tensors[1]:
            return []  # a square
        case "add":
            return [t for t, factor in zip(tensors, ("ca", "cb"), strict=True) if _number(k.op, factor) > 0]
        case "affine" | "pow" | "log":
            return tensors if _number(k.op, "scale") > 0 else []
        case "logs":
            return tensors[:1]
        case "where" | "mask":
            return tensors[1:]
        case "mul" | "dot" | "div" | "sum" | "max":
            return tensors
        case _:
            return []


def _number(op: Op, attribute: str, default: int = 1) -> Fraction:
    value = op.attributes.get(attribute, default)
    assert isinstance(value, (int, Fraction)), f"{op}: {attribute}"
    return Fraction(value)


def _cancelled_by(graph: KernelGraph) -> list[float]:
    """Values that cancel a constant of the program: c of x - c. Other orders of evaluation differ there."""
    found: dict[float, None] = {}
    for op in (op for k in graph.kernels for op in k.ops):
        scale, offset = (float(_number(op, n, d)) for n, d in (("scale", 1), ("offset", 0)))
        if scale and NEAREST <= abs(offset / scale) <= FARTHEST:
            found[-offset / scale] = None
    return list(found)[:MOST_NEAR]
