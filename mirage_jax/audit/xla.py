"""Is XLA's code for a function as accurate as float64 says that it can be?

The float gate, pointed at XLA. The function runs as XLA compiles it on classes of inputs, and is compared with its
jaxpr in float64. A result is flagged in three cases:

- it is infinite or NaN where float64, rounded to the type of the result, is finite;
- it is worse than its program with every operation rounded to its type (`differential.judged`);
- half of its digits are lost, while a careful evaluation would keep them. Careful is as good as an evaluation in these
  types can promise: the result moves as if the inputs had been rounded once more, and is rounded itself.

Each finding names a cause. If the program as written, with correctly rounded operations, is bad too, so is the program.
If it is bad when XLA runs its operations one by one, one operation of XLA is. Otherwise the compilation as a whole is:
fusion, another order of sums, contracted products. In the first two cases float64 tells which operation it is: the one
that makes the result bad if it alone is not in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import numpy as np

from mirage_jax.agreement import tolerance
from mirage_jax.audit import float64
from mirage_jax.audit.differential import SAMPLES, judged
from mirage_jax.bench.tables import Cells, TableReport
from mirage_jax.compiler.float_check import biases, indices_compared, inputs_under_roots, scaled_logits, switches
from mirage_jax.config import disabled, unknown
from mirage_jax.errors import UsageError
from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.jax_compat import Jaxpr
from mirage_jax.jaxpr_frontend.partition.program import FlatEqn, flatten
from mirage_jax.jaxpr_frontend.partition.regions import partition
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.mugraph.dtypes import is_float
from mirage_jax.verify.floats.input_classes import InputClasses, input_classes

type Array = np.ndarray

NEAR = (100.0, 1024.0)  # exponentials overflow in float32 but not in float64; squares cancel in a variance
CAREFUL_SAMPLES = 4  # of inputs rounded once more
CARELESS = 16.0  # how many times the error of a careful evaluation is too much, if half of the digits are lost


class Cause(StrEnum):
    """Who made a result bad."""

    WRITTEN = "program"
    OPERATION = "XLA's operation"
    COMPILED = "XLA's compilation"


CAUSES = {
    Cause.WRITTEN: "the program itself, even if all its operations are rounded correctly: write it in another way",
    Cause.OPERATION: "one operation, as XLA computes it",
    Cause.COMPILED: "the compilation as a whole: operation by operation XLA is accurate",
}


@dataclass(frozen=True)
class Finding:
    """A result that is flagged. Errors are the largest, over the largest number of the output in float64."""

    output: int
    inputs: str  # class of inputs
    cause: Cause
    culprit: str  # the operation and its line, if it is one
    error: float
    careful: float
    written: float
    lost: int  # elements that are infinite or NaN where float64 is finite

    def __str__(self) -> str:
        by = f": {self.culprit}" if self.culprit else ""
        return f"output {self.output}, {self.inputs}: {self.cause}{by}"


@dataclass
class XlaReport(TableReport):
    """How accurate XLA's code for a function is."""

    words: ClassVar[int] = 4
    method: ClassVar[str] = "errors are the largest, in units of the output's largest number"

    function: str
    outputs: int
    classes: tuple[str, ...]
    platform: str
    findings: tuple[Finding, ...] = ()
    largest: dict[str, float] = field(default_factory=dict)  # XLA's error by class of inputs

    @property
    def heading(self) -> str:
        """The verdict."""
        count = f"{self.outputs} output{'s' * (self.outputs != 1)} on {len(self.classes)} classes of inputs"
        n = len(self.findings)
        verdict = f"{n} finding{'s' * (n != 1)}" if n else "accurate"
        return f"XLA's code for {self.function} on {self.platform}: {verdict} ({count})"

    def cells(self) -> Cells:
        """A row for each output and culprit, with the worst of its classes."""
        header = (
            "output",
            "worst inputs",
            "cause",
            "operation",
            "classes",
            "XLA",
            "careful",
            "as written",
            "non-finite",
        )
        return header, [_row(group) for group in self._grouped()]

    def _grouped(self) -> list[list[Finding]]:
        groups: dict[tuple[int, Cause, str], list[Finding]] = {}
        for f in self.findings:
            groups.setdefault((f.output, f.cause, f.culprit), []).append(f)
        return list(groups.values())

    def causes(self) -> Iterator[str]:
        """What the causes in the table mean."""
        found = {f.cause for f in self.findings}
        yield from (f"{cause}: {text}" for cause, text in CAUSES.items() if cause in found)


def _row(group: Sequence[Finding]) -> list[str]:
    worst = max(group, key=lambda f: (f.lost, f.error))
    numbers = [f"{x:.1e}" for x in (worst.error, worst.careful, worst.written)]
    words = [str(worst.output), worst.inputs, worst.cause, worst.culprit or "-"]
    return [*words, str(len(group)), *numbers, str(worst.lost)]


def check(fn: Callable[..., Any], arguments: Sequence[Any], only: Sequence[str] = (), name: str = "") -> XlaReport:
    """Compare a function, as XLA compiles it, with float64.

    Args:
        fn: the function.
        arguments: arrays or `jax.ShapeDtypeStruct`s; their values are not read.
        only: classes of inputs; all if none is named.
        name: the function's name, for the report.

    Raises:
        UsageError: there is no such class of inputs, or the function has no outputs of floats.
        UnsupportedError: the float64 reference does not know one of its operations.
    """
    traced = jax.jit(fn).trace(*arguments)
    leaves = [(x.shape, np.dtype(x.dtype)) for x in jax.tree.leaves(tuple(arguments))]
    classes = _classes(traced.jaxpr, leaves)
    for one in only:
        if one not in classes:
            raise UsageError(f"--inputs: {unknown('class', one, classes)}")
    with disabled():  # an optimized function has code of ours; a new function is traced again
        compiled = jax.jit(lambda *args: fn(*args)).lower(*arguments).compile()
    structure = jax.tree.structure(tuple(arguments))
    names = tuple(only or classes)
    outputs = len(jax.tree.leaves(traced.out_info))
    report = XlaReport(name or getattr(fn, "__name__", "the function"), outputs, names, jax.default_backend())
    for inputs in names:
        values = classes[inputs]
        results = compiled(*jax.tree.unflatten(structure, values))
        examined = Examined(traced.jaxpr, values, [np.asarray(y) for y in jax.tree.leaves(results)])
        report.largest[inputs] = max((examined.error(n, examined.xla) for n in examined.floats), default=0.0)
        report.findings += tuple(examined.findings(inputs))
    return report


def _classes(jaxpr: Jaxpr, leaves: Sequence[Any]) -> InputClasses:
    """The gate's classes for all arguments, with those that regions of the program ask for."""
    found = partition(flatten(jaxpr))
    places = {value: n for n, value in enumerate(found.program.inputs)}

    def arguments(of: Callable[[Region], Sequence[int]]) -> list[int]:
        """Positions among the arguments of those inputs of regions."""
        values = {region.inputs[i].value for region in found.regions for i in of(region)}
        return sorted(places[v] for v in values if v in places)

    counts: dict[int, int] = {}
    for region in found.regions:
        for i, count in indices_compared(region).items():
            if (place := places.get(region.inputs[i].value)) is not None:
                counts[place] = max(counts.get(place, 1), count)
    own = [arguments(of) for of in (switches, biases, scaled_logits)]
    return input_classes(leaves, 0, NEAR, arguments(inputs_under_roots), counts, *own)


@dataclass
class Examined:
    """The results of one class of inputs, and what float64 says about them."""

    jaxpr: Jaxpr
    values: Sequence[Array]
    xla: Sequence[Array]

    @cached_property
    def floats(self) -> list[int]:
        """Outputs of floats, by position."""
        return [n for n, x in enumerate(self.xla) if is_float(x.dtype)]

    def evaluate(self, visitor: float64.Visitor | None = None) -> list[Array]:
        """Evaluate the program in float64, with a visitor's changes."""
        return float64.evaluate(self.jaxpr, self.values, visitor)

    @cached_property
    def exact(self) -> list[Array]:
        """The results in float64."""
        return self.evaluate()

    @cached_property
    def written(self) -> list[Array]:
        """The results of the program with every operation rounded to its type."""
        return self.evaluate(float64.Rounded())

    @cached_property
    def careful(self) -> list[Array]:
        """How far each element moves if the inputs are rounded once more, and then the results."""
        with np.errstate(all="ignore"):
            found = [np.abs(r.astype(x.dtype) - 1.0 * r) for r, x in zip(self.exact, self.xla, strict=True)]
            for sample in range(CAREFUL_SAMPLES):
                rng = np.random.default_rng(sample)
                moved = float64.evaluate(self.jaxpr, [_rounded_once_more(v, rng) for v in self.values])
                found = [np.fmax(f, _off(m, r)) for f, m, r in zip(found, moved, self.exact, strict=True)]
        return list(map(np.fmax, found, self.flushed))

    @cached_property
    def flushed(self) -> list[Array]:
        """How far each element moves if inputs below the normal range of their types are zero, as XLA has them."""
        normal = list(map(_without_subnormals, self.values))
        if all(a is b for a, b in zip(normal, self.values, strict=True)):
            return [np.zeros(x.shape) for x in self.xla]
        return list(map(_off, float64.evaluate(self.jaxpr, normal), self.exact))

    @cached_property
    def noise(self) -> list[Array]:
        """How far rounding may carry each element, whatever the order of the operations."""
        tf32 = jax.default_backend() == "gpu"
        found = float64.spread(self.jaxpr, self.values, self.exact, SAMPLES, 0, tf32)
        return list(map(np.fmax, found, self.flushed))

    def scale(self, n: int) -> float:
        """The largest number of an output that its type holds."""
        with np.errstate(all="ignore"):
            held = np.isfinite(self.exact[n].astype(self.xla[n].dtype))
        return float(np.abs(np.where(held, self.exact[n], 0.0)).max(initial=0.0))

    def error(self, n: int, results: Sequence[Array]) -> float:
        """The largest finite error of some results, in units of the output's scale."""
        return self._relative(n, _finite(_off(results[n], self.exact[n])))

    def _relative(self, n: int, errors: Array) -> float:
        largest, scale = float(errors.max(initial=0.0)), self.scale(n)
        return largest / scale if scale else (np.inf if largest else 0.0)

    def findings(self, inputs: str) -> Iterator[Finding]:
        """Judge each output."""
        for n in range(len(self.xla)):
            if self.is_bad(n, self.xla):
                cause, culprit = self._cause(n)
                careful = self._relative(n, _finite(self.careful[n]))
                errors = self.error(n, self.xla), careful, self.error(n, self.written)
                yield Finding(n, inputs, cause, culprit, *errors, int(self._lost(n, self.xla).sum()))

    def is_bad(self, n: int, results: Sequence[Array]) -> bool:
        """Whether one output is flagged."""
        if n not in self.floats:
            differs = (results[n] != self.exact[n]) & (results[n] != self.written[n])
            return bool((differs & (self.careful[n] == 0)).any())
        return bool(self._lost(n, results).any()) or self._is_careless(n, results) or self._is_worse(n, results)

    def _lost(self, n: int, results: Sequence[Array]) -> Array:
        """Where results are not finite and float64, rounded and with inputs rounded once more, is."""
        with np.errstate(all="ignore"):
            ideal = (1.0 * self.exact[n] + np.copysign(self.careful[n], self.exact[n])).astype(self.xla[n].dtype)
        return np.isfinite(ideal) & ~np.isfinite(results[n])

    def _is_careless(self, n: int, results: Sequence[Array]) -> bool:
        """Whether half of the digits are lost, relative to the output, and a careful evaluation would keep them."""
        off, careful = (float(_finite(x).max(initial=0.0)) for x in (_off(results[n], self.exact[n]), self.careful[n]))
        return off > max(tolerance(self.xla[n].dtype) * self.scale(n), CARELESS * careful)

    def _is_worse(self, n: int, results: Sequence[Array]) -> bool:
        """Whether results are worse than the program as it is written; noise is asked only where that seems so."""
        with np.errstate(all="ignore"):
            written, ours = (r[n].astype(self.xla[n].dtype) for r in (self.written, results))
        judge = partial(judged, self.exact[n], x=written, c=ours)
        return bool(judge(s=np.zeros(written.shape)) and judge(s=self.noise[n]))

    def _cause(self, n: int) -> tuple[Cause, str]:
        for cause, visitor in ((Cause.WRITTEN, float64.Rounded()), (Cause.OPERATION, _ByXla())):
            if self.is_bad(n, self.evaluate(visitor)):
                return cause, self._culprit(n, visitor)
        return Cause.COMPILED, ""

    def _culprit(self, n: int, visitor: float64.Visitor) -> str:
        """The operation that makes an output bad if it alone is not in float64; empty if none does."""
        names = _Names()
        self.evaluate(names)
        bad = (one for one in names.seen if self.is_bad(n, self.evaluate(_Only(visitor, one))))
        return next(bad, "")


class _ByXla(float64.Visitor):
    """Computes each operation as XLA does on its own, from operands of its types."""

    def result(self, x: Array, eqn: FlatEqn, xs: list[Array], dtype: Any, terms: Array | None) -> Array:
        if eqn.primitive in float64.SCOPES or len(eqn.outputs) != 1:
            return x
        with np.errstate(all="ignore"):
            operands = [np.asarray(v).astype(a.dtype) for v, a in zip(xs, eqn.in_avals, strict=True)]
        (found,) = jax_compat.bind_alone(eqn.eqn, operands)
        return np.asarray(found).astype(np.float64) if is_float(dtype) else np.asarray(found)


@dataclass(frozen=True)
class _Only(float64.Visitor):
    """Lets another visitor change the results of the operations of one name."""

    visitor: float64.Visitor
    name: str

    def result(self, x: Array, eqn: FlatEqn, xs: list[Array], dtype: Any, terms: Array | None) -> Array:
        return self.visitor.result(x, eqn, xs, dtype, terms) if _name(eqn) == self.name else x


@dataclass(frozen=True)
class _Names(float64.Visitor):
    """Collects the names of operations, in order."""

    seen: dict[str, None] = field(default_factory=dict[str, None])

    def result(self, x: Array, eqn: FlatEqn, xs: list[Array], dtype: Any, terms: Array | None) -> Array:
        self.seen[_name(eqn)] = None
        return x


def _name(eqn: FlatEqn) -> str:
    return f"{eqn.primitive} at {eqn.where}".removesuffix(" at unknown line")


def _rounded_once_more(x: Array, rng: np.random.Generator) -> Array:
    """Floats in float64, each moved by up to half a unit in the last place."""
    if not is_float(x.dtype):
        return x
    half = 0.5 * float(jax.numpy.finfo(x.dtype).eps)
    return x.astype(np.float64) * (1 + half * rng.uniform(-1, 1, x.shape))


def _without_subnormals(x: Array) -> Array:
    """Subnormal numbers set to zero; the same array if it has none, or is float16, which XLA computes in float32."""
    if not is_float(x.dtype) or x.dtype == np.float16:
        return x
    small = (np.abs(x) < jax.numpy.finfo(x.dtype).smallest_normal) & (x != 0)
    return np.where(small, x.dtype.type(0), x) if small.any() else x


def _off(x: Array, r: Array) -> Array:
    """Errors; NaN where one of the two is no number, zero where both are the same infinity."""
    with np.errstate(invalid="ignore"):
        return np.where(1.0 * x == r, 0.0, np.abs(1.0 * np.asarray(x, np.float64) - r))


def _finite(x: Array) -> Array:
    return np.where(np.isfinite(x), x, 0.0)
