"""The public surface: `optimize` and `tune`.

``@mirage_jax.optimize`` wraps a function as `jax.jit` does; the captured program travels through every transformation
as one call primitive (`jaxpr_frontend.capture.call_primitive`), and where JAX lowers it, `compiler.Compiler` decides
region by region.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from types import MethodType
from typing import Any, Concatenate, Protocol, Self, TypedDict, Unpack, overload

import jax

from mirage_jax import log_topics
from mirage_jax import pins as pins_file
from mirage_jax.cluster import Machine, join
from mirage_jax.compiler import Compiler
from mirage_jax.compiler.selection import is_named
from mirage_jax.compiler.whole_function import as_written
from mirage_jax.config import JIT_OPTIONS, Budget, Options, is_disabled, warn_once
from mirage_jax.errors import UsageError, in_one_line
from mirage_jax.jaxpr_frontend import flax_modules
from mirage_jax.jaxpr_frontend.capture.call_primitive import capture, gradients_of, planned_alone
from mirage_jax.jaxpr_frontend.capture.lowering import PLAIN
from mirage_jax.jaxpr_frontend.jax_compat import LoweringTarget, Tracer, default_platform, pruned
from mirage_jax.jaxpr_frontend.partition.regions import Analysis
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.limits import brief
from mirage_jax.pins import Choice
from mirage_jax.report import Decision, RegionReport, Report, WholeFunction, preview_command
from mirage_jax.self_check import SelfCheck

log = logging.getLogger("mirage_jax")


class Optimized[**P, T]:
    """An optimized function: call it like the function; mirrors `jax.jit` and adds `explain`.

    Inside ``with mirage_jax.disabled():`` or under ``MIRAGE_JAX=off`` it is plain `jax.jit` of the function.
    """

    def __init__(
        self,
        fn: Callable[P, T],
        options: Options,
        jit_options: dict[str, Any],
        compiler: Compiler | None = None,
    ) -> None:
        given: Any = fn
        if inspect.isfunction(given):  # what it was given, as under `jax.jit`; our own names come after
            self.__dict__.update({name: value for name, value in vars(given).items() if not name.startswith("_")})
        self.options = options
        self.compiler = compiler or Compiler(options)
        self.__wrapped__ = fn
        self._jit_options = jit_options
        self._plain = jax.jit(fn, **jit_options)
        self._jit: Any = jax.jit(capture(fn, self.compiler), **jit_options)
        self._alone: Any = jax.jit(capture(fn, self.compiler, is_differentiated=False), **jit_options)
        functools.update_wrapper(self, fn, updated=())
        self._check = SelfCheck(self.name, options.check, options.strict) if options.check else None

    @functools.cached_property
    def _of_modules(self) -> tuple[Any, Any]:
        """The same as `_plain` and `_jit` for arguments that are nnx modules, whose state has to come back."""
        made = (flax_modules.jit(self.__wrapped__, c, self._jit_options) for c in (None, self.compiler))
        return next(made), next(made)

    def _jitted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The function under plain jit, and optimized."""
        if self._jit_options.get("static_argnums") is None and self._jit_options.get("static_argnames") is None:
            flax_modules.check_no_linen(args)
        return self._of_modules if flax_modules.has_modules(args, kwargs) else (self._plain, self._jit)

    def _active(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._jitted(args, kwargs)[not is_disabled()]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        active = self._active(args, kwargs)
        if not (self._check or self.compiler.checkpoints) or any(map(_is_traced, jax.tree.leaves((args, kwargs)))):
            return active(*args, **kwargs)
        active = self._undifferentiated(active)
        if self._check and not is_disabled():
            return self._check.call(active, self._jitted(args, kwargs)[0], self.copied, args, kwargs)
        return active(*args, **kwargs)

    def _undifferentiated(self, active: Any) -> Any:
        """The function as it is called with values, or compiled: nobody differentiates what that returns."""
        return self._alone if self.compiler.checkpoints and active is self._jit else active

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__[S, **Q](
        self: Optimized[Concatenate[S, Q], T], instance: S, owner: type | None = None
    ) -> Method[Q, T]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else Method(self, instance)

    def with_compiler(self, compiler: Compiler) -> Optimized[P, T]:
        """Make the same function with other decisions."""
        return Optimized(self.__wrapped__, compiler.options, self._jit_options, compiler)

    def copied(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Copies of the arguments, if a call takes their memory or writes their state; else the arguments."""
        donates = any(self._jit_options.get(name) for name in ("donate_argnums", "donate_argnames"))
        is_consuming = donates or flax_modules.has_modules(args, kwargs)
        return copy.deepcopy((args, kwargs)) if is_consuming else (args, kwargs)

    @property
    def name(self) -> str:
        """The function's name, or its type's name if it has none, as a callable module."""
        name = getattr(self.__wrapped__, "__qualname__", type(self.__wrapped__).__qualname__)
        return name.removesuffix(".__call__")

    def __repr__(self) -> str:
        return f"mirage_jax.optimize({self.name})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself, like a function, so that what holds one can be copied."""
        return self

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As `jax.jit(f).lower`."""
        return self._undifferentiated(self._active(args, kwargs)).lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """As `jax.jit(f).trace`."""
        return self._active(args, kwargs).trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(f).eval_shape`."""
        return self._active(args, kwargs).eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget compiled programs; the next call compiles with the decisions known then."""
        self._jit.clear_cache()
        self._alone.clear_cache()
        self.__dict__.pop("_of_modules", None)

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """What happens to this function at these argument shapes: regions, decisions, evidence. Arguments may be
        `jax.ShapeDtypeStruct`s.

        Makes the same decisions as a call would. The function itself is not run; regions without a decision are, on
        random inputs, to be measured.
        """
        return self._report(args, kwargs, on_miss=None)

    def _report(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], on_miss: str | None, machines: Sequence[Machine] = ()
    ) -> Report:
        try:
            return self._decided(args, kwargs, on_miss, machines)
        except TypeError as error:
            if isinstance(error, UsageError) or (why := _misused(args, kwargs)) is None:
                raise
            raise UsageError(f"{self.name}: {why}") from error

    def _decided(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], on_miss: str | None, machines: Sequence[Machine]
    ) -> Report:
        if is_disabled():
            return Report(self.name, (), notes=("disabled: runs as plain jax.jit",))
        target = LoweringTarget((self.compiler.platform,), is_partitioned=self._is_partitioned(args, kwargs))
        with self.compiler.asking(on_miss, machines):
            if on_miss is not None:
                self.clear_cache()  # whether values are made again is asked when a function is traced
            traced = self._jitted(args, kwargs)[1].trace(*args, **kwargs)
            traced = getattr(traced, "traced", traced)  # nnx wraps the trace of JAX
            jaxpr = pruned(traced.jaxpr)
            found = planned_alone(jaxpr, self.compiler, target)
            analysis = found.analysis()
            self.compiler.prepare(analysis.regions, target)  # those that are not planned before they run
            regions = self._regions_of(analysis, target)
        gradients = gradients_of(jaxpr)
        whole = gradients or found.whole or (as_written() if found.changes_nothing else None)
        whole = self._with_memory(whole, args, kwargs)
        notes = (*self._notes(gradients is not None), *self._unmatched(regions), *self._lost(regions))
        command = preview_command(self.__wrapped__, args, kwargs)
        return Report(self.name, regions, tuple(analysis.left_out), notes, whole, command)

    def _with_memory(self, whole: WholeFunction | None, args: Any, kwargs: Any) -> WholeFunction | None:
        """What XLA plans for a function that was measured as its one region."""
        if whole is None or whole.is_plain or whole.ratio is None or whole.memory:
            return whole
        if self.compiler.platform != default_platform():  # there is no such device here to compile for
            return whole
        try:
            plans = [f.lower(*args, **kwargs).compile().memory_analysis() for f in self._jitted(args, kwargs)]
            memory = [int(plan.temp_size_in_bytes) for plan in plans]
        except Exception as why:  # of a report: the call will meet it
            log.info("temporary memory is not known: %s", in_one_line(why))
            return whole
        return replace(whole, memory=dict(zip((PLAIN, whole.chosen), memory, strict=True)))

    def _notes(self, with_gradients: bool) -> tuple[str, ...]:
        """What a whole function's ratio is not about."""
        notes = ["measured with its gradients with respect to all of its arguments"] if with_gradients else []
        if self.compiler.is_part:
            notes.append("part of a program of your own: measured alone, which is not the ratio of that program")
        return tuple(notes)

    def _regions_of(self, analysis: Analysis, target: LoweringTarget) -> tuple[RegionReport, ...]:
        """What was decided for each kind of region."""
        reports: dict[tuple[str, str], RegionReport] = {}
        for region in analysis.regions:
            decision = self.compiler.decide(region, target.platforms[0])
            text, kind = region.text, (region.text, decision.why)  # options may part equal regions
            if kind in reports:
                old = reports[kind]
                where = tuple(dict.fromkeys((*old.where, *region.where)))
                reports[kind] = replace(old, where=where, occurrences=old.occurrences + 1)
            else:
                control = _Control(self, region, target.platforms[0])
                reports[kind] = RegionReport(region.where, text, decision, control=control)
        return tuple(reports.values())

    def _unmatched(self, regions: Sequence[RegionReport]) -> tuple[str, ...]:
        """Notes about selectors of `skip` and `only` that name no region: somebody may have edited the file."""
        given = (("skip", self.options.skip), ("only", self.options.only or ()))
        return tuple(
            f"{option}: {selector!r} names no region of this function"
            for option, selectors in given
            for selector in selectors
            if not any(is_named((selector,), r.where, r.decision.key) for r in regions)
        )

    def _lost(self, regions: Sequence[RegionReport]) -> tuple[str, ...]:
        """Notes about entries of the file `pins` that name no region of this function; log each once."""
        unused = pins_file.unused(self.compiler.choices, [r.decision.key for r in regions])
        notes = tuple(
            f"{choice} is not used: no region of {self.name} has the key {chosen[:12]} at these shapes"
            for chosen, choice in unused.items()
            if choice.function in ("", self.name)
        )
        for note in notes:
            warn_once(note)
        return notes

    def _is_partitioned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether XLA will divide the program over several devices."""
        if jax.device_count() == 1:
            return False
        module = self._jitted(args, kwargs)[0].lower(*args, **kwargs).compiler_ir("stablehlo")
        attributes: Any = module.operation.attributes  # type: ignore[union-attr]
        return "mhlo.num_partitions" in attributes and attributes["mhlo.num_partitions"].value > 1


class _Control:
    """Decides one region of an optimized function for its user."""

    def __init__(self, function: Optimized[..., Any], region: Region, platform: str) -> None:
        self.function, self.region, self.platform = function, region, platform

    def choose(self, choice: Choice) -> Decision:
        """Decide the region so, and forget the programs that were compiled before."""
        decision = self.function.compiler.choose_for(self.region, self.platform, choice)
        self.function.clear_cache()
        return decision

    def choice(self) -> Choice | None:
        """Find how the user has decided the region."""
        return self.function.compiler.choice_for(self.region, self.platform)


class Method[**P, T]:
    """An optimized function bound to an object, with the methods that take its arguments."""

    def __init__(self, function: Optimized[..., T], instance: Any) -> None:
        self.__func__, self.__self__ = function, instance
        functools.update_wrapper(self, MethodType(function.__wrapped__, instance), updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.__func__(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower the bound method, like `jax.jit(f).lower`."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace the bound method, like `jax.jit(f).trace`."""
        return self.__func__.trace(self.__self__, *args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Give the shapes and dtypes of the results, like `jax.eval_shape`."""
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """Report the decisions about the bound method."""
        return self.__func__.explain(self.__self__, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Method) and self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))

    def __repr__(self) -> str:
        return f"{self.__func__!r} of a {type(self.__self__).__qualname__}"


def _misused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why `explain` or `tune` cannot take such arguments, for mistakes that are easily made."""
    if option := next((f.name for f in fields(Options) if f.name in kwargs), None):
        return f"{option} is an option of optimize: mirage_jax.optimize(f, {option}={kwargs[option]!r})"
    for x in (*args, *kwargs.values()):
        if isinstance(x, tuple | list) and x and all(isinstance(n, int) for n in x):
            shape = f"jax.ShapeDtypeStruct({tuple(x)}, 'float32')"
            return f"found the argument {brief(x)}; allowed are arrays, or for a shape {shape}"
        if isinstance(x, str) and re.fullmatch(r"\w+\[[\d, ]*\]", x):
            shape = "jax.ShapeDtypeStruct((8, 8), 'float32')"
            return (
                f"found the argument {brief(x)}, as on the command line; allowed are arrays, or shapes such as {shape}"
            )
    return None


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, Tracer)


_NOT_GIVEN: Any = object()


class Keywords(TypedDict, total=False):
    """The keywords of `optimize`, for type checkers. Those after `pins` are options of `jax.jit`."""

    on_miss: str | None
    budget: Budget | str | float | None
    backend: str | None
    cache_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
    strict: bool | None
    strict_range: bool | None
    remat: str | bool | None
    devices: Sequence[int] | int | str | None
    skip: Sequence[str] | str | None
    only: Sequence[str] | str | None
    check: str | None
    pins: str | os.PathLike[str] | None
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    in_shardings: Any
    out_shardings: Any
    keep_unused: bool
    device: Any
    inline: bool
    compiler_options: dict[str, Any] | None


class _Decorator(Protocol):
    def __call__[**P, T](self, fn: Callable[P, T], /) -> Optimized[P, T]: ...


@overload
def optimize[**P, T](fn: Callable[P, T], /, **options: Unpack[Keywords]) -> Optimized[P, T]: ...
@overload
def optimize(**options: Unpack[Keywords]) -> _Decorator: ...


def optimize(
    fn: Any = _NOT_GIVEN,
    /,
    *,
    on_miss: str | None = None,
    budget: Budget | str | float | None = None,
    backend: str | None = None,
    cache_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    strict: bool | None = None,
    strict_range: bool | None = None,
    remat: str | bool | None = None,
    devices: Sequence[int] | int | str | None = None,
    skip: Sequence[str] | str | None = None,
    only: Sequence[str] | str | None = None,
    check: str | None = None,
    pins: str | os.PathLike[str] | None = None,
    **jit_options: Any,
) -> Any:
    """Wrap a function like `jax.jit`, with its regions of the Lax fragment superoptimized.

    Use bare (``@optimize``) or with options (``@optimize(on_miss="fallback")``):

    * on_miss: what to do with a region that was never decided before: "search" (default in a single process),
      "heuristic" (the cost model's choice, verified but not measured), "fallback" (leave to XLA; default in several
      processes, except for programs that they run together: there the first one searches) or "error".
    * budget: of one search: seconds, or a text such as "30s"; see `mirage_jax.Budget`.
    * backend: "auto", "triton" (kernels on GPUs) or "jax" (algebra only).
    * remat: whether large values that are cheap to make, such as scores of attention, are recomputed from their
      operands, tile by tile, instead of stored. "auto" (default): on a GPU, where a program has both passes, or several
      regions that read such values. "regions", or True: also on CPUs, and for functions that are differentiated from
      outside, which are tuned with their gradients when they are first traced. False: never. Values are recomputed only
      where kernels that were chosen do so; by default, only where the whole function was measured and is faster.
    * cache_dir: where winners are kept; default: the user's cache directory. Of several directories the first is
      written, and all are read in their order.
    * strict: raise what would otherwise be logged and left to XLA.
    * strict_range: refuse rewrites that overflow, or lose digits near zero, before XLA does, also in float32 and
      bfloat16, whose range other rewrites may leave where intermediate values near 3e38 or 1e-38 arise.
    * devices: which of `jax.local_devices()` measure, by number; several share the variants that are tried.
    * skip: regions to leave to XLA, by source line ("model.py:41") or by the key that `explain` prints.
    * only: the same, for all other regions.
    * check: compare with plain `jax.jit` on your own arguments, at the "first" call with each kind or "always".
      Such a call returns the result of plain jit. Where results differ, one warning says so, and plain jit runs.
    * pins: a TOML file with vetoes and pinned muGraphs of regions, as `Report.save_pins` writes it. A pinned graph is
      proven again in each process.
    * static_argnums, static_argnames, donate_argnums, donate_argnames, ...: as for `jax.jit`.

    Arguments may be Flax modules: the state of nnx modules is passed and written back as `flax.nnx.jit` does.

    Raises `UsageError` for anything else. An optimized function is returned as it is if no options are given.
    """
    given: dict[str, Any] = {
        "on_miss": on_miss,
        "budget": budget,
        "backend": backend,
        "cache_dir": cache_dir,
        "strict": strict,
        "strict_range": strict_range,
        "remat": remat,
        "devices": devices,
        "skip": skip,
        "only": only,
        "check": check,
        "pins": pins,
    }
    log_topics.show_those_of_environment()
    given = {name: value for name, value in given.items() if value is not None}
    unknown = {name: value for name, value in jit_options.items() if name not in JIT_OPTIONS}
    chosen = Options.make({**given, **unknown}, also=JIT_OPTIONS)
    if fn is _NOT_GIVEN:
        return lambda f: optimize(f, **given, **jit_options)
    if isinstance(fn, Optimized | Method) and not given and not jit_options:
        return fn
    if (module := flax_modules.owner(fn)) is not None and callable(fn):
        return Method(Optimized(flax_modules.unbound(fn), chosen, flax_modules.behind_module(jit_options)), module)
    if (problem := _why_not(fn)) is not None:
        raise UsageError(f"optimize: found {brief(fn)}{problem}; it takes a function, a method or a callable module")
    return Optimized(fn, chosen, jit_options)


def _why_not(fn: Any) -> str | None:
    """Why something cannot be optimized: a text to go behind its description."""
    if not callable(fn):
        return ""
    if inspect.isclass(fn):
        return ", not an instance of it"
    for code in (fn, type(fn).__call__):
        if inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code):
            return ", which is asynchronous: optimize the function that it awaits for"
        if inspect.isgeneratorfunction(code):
            return ", which is a generator: return its values instead"
    return None


def tune(fn: Callable[..., Any], /, *args: Any, cluster: str | None = None, **kwargs: Any) -> Report:
    """Search and measure every region of a function ahead of time, for these argument shapes; returns the report.

    Arguments may be arrays or `jax.ShapeDtypeStruct`s. Winners go to the cache, and later calls of
    `fn`, if it is an optimized function, or of ``optimize(fn)`` use them.

    Args:
        fn: the function.
        args: its arguments.
        cluster: machines of a Ray cluster that search parts of regions, and try variants on GPUs of the same kind:
            "auto" for the cluster that this machine is part of, or "ray://host:port". Everything is proven, checked
            and stored in this process. (If `fn` has an argument of this name, pass it by position.)
        kwargs: more arguments of the function.

    Raises:
        UsageError: there is no such cluster, or Ray is not installed.
    """
    if isinstance(fn, Method):
        fn, args = fn.__func__, (fn.__self__, *args)
    f = fn if isinstance(fn, Optimized) else optimize(fn)
    machines = () if cluster is None else join(cluster)
    report = f._report(args, kwargs, on_miss="search", machines=machines)
    f.clear_cache()
    return report
