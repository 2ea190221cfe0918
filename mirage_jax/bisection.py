"""Which regions change the result of a function: regions are left to XLA by halves until few are left."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mirage_jax import agreement
from mirage_jax.api import Method, Optimized, optimize
from mirage_jax.compiler import Compiler
from mirage_jax.compiler.whole_function import not_measured
from mirage_jax.config import disabled, is_disabled
from mirage_jax.errors import UsageError, in_one_line
from mirage_jax.jaxpr_frontend.capture.lowering import WholeProgram
from mirage_jax.limits import brief
from mirage_jax.mugraph.schedule_json import schedule_to_json
from mirage_jax.report import RegionReport, WholeFunction, places

REFUSED = "the check refuses the result"

type Check = Callable[[Any, Any], bool]


@dataclass(frozen=True)
class Bisection:
    """The regions that change a function's result. True if there are any.

    regions: one region, or several that change it only together. why: how the result differs, or why nothing was found.
    runs: how many programs ran. of: how many kinds of regions are optimized.
    """

    name: str
    regions: tuple[RegionReport, ...]
    why: str
    runs: int
    of: int

    def __bool__(self) -> bool:
        return bool(self.regions)

    @property
    def where(self) -> tuple[str, ...]:
        """The source lines of the regions, as ``model.py:41 (f)``."""
        return tuple(places(place for r in self.regions for place in r.where))

    @property
    def keys(self) -> tuple[str, ...]:
        """The cache keys of the regions, to be given to the options `skip` and `only`."""
        return tuple(r.decision.key for r in self.regions)

    @cached_property
    def script(self) -> str:
        """A Python program that runs each of the regions alone, on random numbers, beside the user's equations."""
        return "\n\n".join(map(_script, self.regions))

    def __str__(self) -> str:
        head = f"{self.name}: {self.why}"
        if not self.regions:
            return head
        found = f"found by {self.runs} runs among {self.of} optimized regions:"
        lines = [f"  {', '.join(places(r.where))}, key {r.decision.key}" for r in self.regions]
        options = f"left to XLA by: mirage_jax.optimize(skip={list(self.keys)!r})"
        return "\n".join([head, found, *lines, options, "a script that runs it alone:", "", self.script])


def bisect(f: Callable[..., Any], /, *args: Any, check: Check | None = None, **kwargs: Any) -> Bisection:
    """Find the regions that change the result of a function, by leaving regions to XLA.

    Makes the decisions that a call would make, then runs the function with all optimized regions, with half of them,
    and so on. Runs it under plain `jax.jit` to compare. Whether the whole function is faster does not matter here.

    Args:
        f: an optimized function, or one to be optimized with the default options.
        args: arguments of the function, with the values that show the problem.
        check: takes the result and the one under plain jit, and says whether the result is right. By default half of
            the digits of each array's type have to agree, relative to its largest element.
        kwargs: named arguments of the function.

    Raises:
        UsageError: `f` is not callable, `check` is no function, or the optimizer is turned off.
    """
    if check is not None and not callable(check):
        raise UsageError(f"bisect: check: found {brief(check)}; allowed is a function of two results, or None")
    if is_disabled():
        raise UsageError("bisect: the optimizer is turned off: leave `mirage_jax.disabled()`, or unset MIRAGE_JAX=off")
    if isinstance(f, Method):
        f, args = f.__func__, (f.__self__, *args)
    function = f if isinstance(f, Optimized) else optimize(f)
    optimized = function.explain(*args, **kwargs).optimized
    regions = {r.decision.key: r for r in optimized if r.decision.key}
    if not regions:
        return Bisection(function.name, (), "no region is optimized, so none changes the result", 0, 0)
    return _bisected(_Trial(function, args, kwargs, check), regions)


def _bisected(trial: _Trial, regions: Mapping[str, RegionReport]) -> Bisection:
    why = trial.problem(list(regions))
    keys: list[str] = []
    if why:
        keys = _smallest(list(regions), trial.problem)
    else:
        why = "the result with all optimized regions agrees with plain jit"
    found = tuple(map(regions.__getitem__, keys))
    return Bisection(trial.function.name, found, why, trial.runs, len(regions))


def _smallest(keys: list[str], problem: Callable[[list[str]], str]) -> list[str]:
    """Keys without which the problem is gone: by halves, then, if it takes several together, one by one."""
    while len(keys) > 1:
        middle = len(keys) // 2
        half = next(filter(problem, (keys[:middle], keys[middle:])), None)
        if half is None:
            break
        keys = half
    for key in list(keys):
        rest = [other for other in keys if other != key]
        if rest and problem(rest):
            keys = rest
    return keys


class _Measureless(Compiler):
    """Makes no decision of its own, and runs the regions however fast the whole function is."""

    def choose(self, whole: WholeProgram) -> WholeFunction:
        """Take the first variant."""
        return not_measured(whole, "bisect compares results")


class _Trial:
    """Runs a function with some of its optimized regions."""

    def __init__(self, function: Optimized, args: Any, kwargs: Any, check: Check | None) -> None:
        self.function, self.given, self.check = function, (args, kwargs), check
        self.runs = 0

    def problem(self, keys: list[str]) -> str:
        """Say what is wrong with the result if only these regions are optimized; an empty text if nothing is."""
        self.runs += 1
        options = replace(self.function.options, on_miss="fallback", only=tuple(keys), pins=None)
        compiler = _Measureless(options)
        compiler.take_decisions(self.function.compiler)  # also those that are not stored
        try:
            ours = self._result(self.function.with_compiler(compiler))
        except UsageError:
            raise
        except Exception as error:
            return f"it fails: {in_one_line(error)}"
        if self.check is None:
            return agreement.difference(ours, self.plain)
        return "" if self.check(ours, self.plain) else REFUSED

    @cached_property
    def plain(self) -> Any:
        """The result under plain jit."""
        with disabled():
            return self._result(self.function)

    def _result(self, f: Optimized) -> Any:
        args, kwargs = f.copied(*self.given)
        return f(*args, **kwargs)


def _script(region: RegionReport) -> str:
    winner = region.decision.winner
    schedule = f", schedule={schedule_to_json(winner.schedule)!r}" if winner.has_kernels else ""
    return inspect.cleandoc("""
        # {where}
        # On your own arrays: mirage_jax.optimize(f, only=[{key!r}])
        import jax
        import numpy as np

        import mirage_jax

        program = mirage_jax.MuGraph.parse(\"\"\"{program}\"\"\")
        ours = mirage_jax.MuGraph.parse(\"\"\"{graph}\"\"\"{schedule})
        rng = np.random.default_rng(0)
        arrays = [jax.numpy.asarray(rng.standard_normal(x.shape), x.dtype) for x in program.shapes]
        wanted = jax.tree.leaves(program.as_function()(*arrays))
        shaped = [a.reshape(x.shape) for a, x in zip(arrays, ours.shapes)]
        for n, (a, b) in enumerate(zip(jax.tree.leaves(ours.as_function()(*shaped)), wanted)):
            a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
            error, largest = abs(a - b).max(), abs(b).max()
            print(f"output {{n}}: differs by up to {{error:.1e}}, its largest element is {{largest:.1e}}")
    """).format(
        where=", ".join(places(region.where)),
        key=region.decision.key,
        program=region.reference,
        graph=winner.graph,
        schedule=schedule,
    )
