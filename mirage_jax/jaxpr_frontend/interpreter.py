"""Plans and runs a captured jaxpr at lowering time, with compiled regions in the place of their equations.

By then every transformation has been applied: the jaxpr may be a forward or backward pass, batched or not. A region
that the compiler takes becomes one `mirage_region`, a leaf primitive with one lowering per platform; everything else
stays as it was, and is not traced again where a jaxpr can be built of it. Bodies of scan, while, cond, shard_map and
checkpoint become calls that arrive here on their own.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from mirage_jax.config import warn_once
from mirage_jax.errors import UsageError
from mirage_jax.garbage import no_collection
from mirage_jax.jaxpr_frontend import jax_compat, rules
from mirage_jax.jaxpr_frontend.flat import FlatEqn, FlatProgram, as_jaxpr, evaluate, flatten, read
from mirage_jax.jaxpr_frontend.jax_compat import Jaxpr, Primitive, Target
from mirage_jax.jaxpr_frontend.reasons import Code
from mirage_jax.jaxpr_frontend.regions import partition
from mirage_jax.jaxpr_frontend.remat import checkpointed, repeated
from mirage_jax.jaxpr_frontend.shards import Shards, one_device
from mirage_jax.jaxpr_frontend.translate import Region

log = logging.getLogger("mirage_jax")


class CompiledRegion(Protocol):
    """A region's replacement: functions from the graph's input tensors to its output tensors. Those inputs that it
    reads `in_place` it takes as the whole operands of which they are parts.

    Hashable, because identical regions share one lowering if they share one object.
    """

    @property
    def in_place(self) -> Collection[str]: ...

    @property
    def portable(self) -> Callable[..., list[Any]]: ...

    @property
    def cuda(self) -> Callable[..., list[Any]] | None: ...


class Compiler(Protocol):
    """Decides what replaces a region; None leaves it to XLA. Frozen and hashable: it is a parameter of an equation."""

    @property
    def strict(self) -> bool: ...

    @property
    def max_ops(self) -> int: ...

    @property
    def remat(self) -> bool:
        """Whether large values that are cheap to make again are not kept for the backward pass."""
        ...

    def prepare(self, regions: Sequence[Region], platforms: tuple[str, ...]) -> None:
        """Told of all regions of a program before it is asked for each: it may decide them in another order."""
        ...

    def compile_region(self, region: Region, platforms: tuple[str, ...]) -> CompiledRegion | None:
        """`platforms` are those that the program is being lowered for, as JAX names them: "cpu", "cuda", ..."""
        ...


mirage_region_p = jax_compat.create_leaf_primitive("mirage_region")


@dataclass(frozen=True, eq=False)
class Placed:
    """A compiled region as a function of JAX values. Equal layers share one, and its lowering."""

    region: Region  # as one device sees it
    compiled: CompiledRegion
    shards: Shards | None = None
    strict: bool = False

    @cached_property
    def out_avals(self) -> tuple[Any, ...]:
        return tuple(self.region.avals[b.value].update(weak_type=False) for b in self.region.outputs)

    def bind(self, *operands: Any) -> list[Any]:
        """Once, or on each device that XLA divides the program over."""
        run = functools.partial(mirage_region_p.bind, out_avals=self.out_avals, placed=self)
        return (run if self.shards is None else self.shards.mapped(run))(*operands)

    def lower(self, function: Callable[..., list[Any]], context: Any, operands: Sequence[Any]) -> Any:
        """What `function` makes of the graph's tensors, between JAX values. Raises `TypeError` if they are others."""

        def between(*values: Any) -> list[Any]:
            made = function(*self.region.prepare(values, self.compiled.in_place))
            want, have = self.region.tensor_types(), [(x.shape, x.dtype) for x in made]
            if want != have:
                raise TypeError(f"the replacement of {self.region.graph.outputs} returns {have}, expected {want}")
            return self.region.finish(made)

        return jax_compat.lower_traced(between, context, operands)

    def lower_safely(self, context: Any, operands: Sequence[Any]) -> Any:
        """As plain JAX; if that fails, the user's own equations."""
        try:
            return self.lower(self.compiled.portable, context, operands)
        except Exception as e:
            _failed(e, self.strict, f"lowering the region at {', '.join(self.region.where[:1])}")
            return jax_compat.lower_traced(self.region.reference, context, operands)


@dataclass(frozen=True)
class Replacement:
    """A region and what runs in its place."""

    region: Region
    placed: Placed

    @property
    def equations(self) -> tuple[FlatEqn, ...]:
        """The same as equations of a program."""
        region, last = self.region, self.region.equations[-1]
        params = {"out_avals": self.placed.out_avals, "placed": self.placed}
        one = jax_compat.equation_like(last.eqn, mirage_region_p, params)
        inputs, outputs = (tuple([b.value for b in border]) for border in (region.inputs, region.outputs))
        return FlatEqn(one, inputs, outputs, last.calls), *region.aside

    def run(self, values: dict[int, Any]) -> None:
        """Add the region's results to `values`."""
        region, last = self.region, self.region.equations[-1]
        with jax_compat.written_at(last.eqn, last.calls):
            made = self.placed.bind(*(values[b.value] for b in region.inputs))
        values.update(zip((b.value for b in region.outputs), made, strict=True))
        evaluate(region.aside, values)


@dataclass(frozen=True)
class Plan:
    """A program's steps in their order: what replaces a region, equations as they are, or one that has a body."""

    program: FlatProgram
    steps: tuple[Replacement | tuple[FlatEqn, ...], ...]
    compiler: Compiler
    call: Primitive
    is_as_written: bool = True  # apart from replacements

    @property
    def changes_nothing(self) -> bool:
        """Whether the program runs as it was written."""
        opened = any(isinstance(step, Replacement) or any(map(_to_be_opened, step)) for step in self.steps)
        return self.is_as_written and not opened

    def as_jaxpr(self, written: Jaxpr) -> Jaxpr | None:
        """The program, which was `written` so, as a jaxpr: what stays as it is need not be traced again. None if
        something has to be traced.
        """
        waits = any(eqn.after for eqn in self.program.eqns)
        if written.effects or waits or any(isinstance(s, Replacement) and s.placed.shards for s in self.steps):
            return None
        if self.changes_nothing:
            return written
        try:
            made: dict[tuple[int, ...], FlatEqn] = {}  # what regions have beside them, several may have
            for eqn in itertools.chain.from_iterable(map(self._equations, self.steps)):
                made.setdefault(eqn.outputs, eqn)
            return as_jaxpr(replace(self.program, eqns=tuple(made.values())), written)
        except Exception as e:
            _failed(e, self.compiler.strict, "building a program of equations")
            return None

    def _equations(self, step: Replacement | tuple[FlatEqn, ...]) -> tuple[FlatEqn, ...]:
        match step:
            case Replacement():
                return step.equations
            case (eqn,) if (params := _opened(eqn, self.compiler, self.call)) is not None:
                return (replace(eqn, eqn=eqn.eqn.replace(params=params)),)
            case equations:
                return equations

    def run(self, *args: Any) -> list[Any]:
        """Evaluate the program."""
        values = {**self.program.constants, **dict(zip(self.program.inputs, args, strict=True))}
        for step in self.steps:
            if isinstance(step, Replacement):
                step.run(values)
            else:
                evaluate(self._equations(step), values)
        return [read(values, atom) for atom in self.program.outputs]


def plan(jaxpr: Jaxpr, compiler: Compiler, call: Primitive, target: Target) -> Plan:
    """What replaces what in `jaxpr`. `call` brings a body back here."""
    with no_collection():
        written = flatten(jaxpr)
        program = _unless_it_fails(repeated, written, compiler) if compiler.remat else written
        found = _steps(program, compiler, target.is_partitioned)
    regions = [step for step in found if isinstance(step, Region)]
    kinds: dict[int, Region] = {}  # the first of equal layers, which share their graph
    for region in regions:
        kinds.setdefault(id(region.graph), region)
    shards = {kind: one_device(region) for kind, region in kinds.items()} if target.is_partitioned else {}
    if target.is_partitioned:
        regions = [local.region for region in regions if (local := shards[id(region.graph)]) is not None]
    _prepare(regions, compiler, target)
    placed = {kind: _placed(region, shards.get(kind), compiler, target) for kind, region in kinds.items()}
    steps: list[Replacement | tuple[FlatEqn, ...]] = []
    for step in found:
        if not isinstance(step, Region):
            steps.append((program.eqns[step],))
        elif (there := placed[id(step.graph)]) is not None:
            steps.append(Replacement(step, there))
        else:
            steps.append(step.equations)
    if any(eqn.after for step in steps if not isinstance(step, Replacement) for eqn in step):
        warn_once(
            "remat='regions': a backward pass for which there is no kernel stays with XLA, makes values again and "
            "takes longer so; mirage_jax.tune looks for kernels"
        )
    return Plan(program, tuple(steps), compiler, call, program is written)


def with_checkpoints(jaxpr: Jaxpr, compiler: Compiler) -> Jaxpr:
    """A jaxpr that was captured, as it is differentiated: what the compiler wants to be made again is checkpointed."""
    return _unless_it_fails(checkpointed, jaxpr, compiler) if compiler.remat else jaxpr


def _unless_it_fails[T](change: Callable[[T], T], x: T, compiler: Compiler) -> T:
    try:
        return change(x)
    except Exception as e:
        _failed(e, compiler.strict, "looking for values to make again")
        return x


def _steps(program: FlatProgram, compiler: Compiler, sharded: bool) -> Sequence[Region | int]:
    try:
        found = partition(program, compiler.max_ops, sharded)
    except Exception as e:
        _failed(e, compiler.strict, "dividing a program into regions")
        return range(len(program.eqns))
    if sharded and any(x.code is Code.SHARDED and x.primitive in rules.HEAVY for x in found.left_out):
        warn_once(f"{Code.SHARDED}: XLA divides this program over several devices and cannot divide a kernel")
    return found.steps


def _prepare(regions: Sequence[Region], compiler: Compiler, target: Target) -> None:
    try:
        compiler.prepare(regions, target.platforms)
    except Exception as e:
        _failed(e, compiler.strict, "choosing which regions to tune first")


def _placed(region: Region, shards: Shards | None, compiler: Compiler, target: Target) -> Placed | None:
    if target.is_partitioned and shards is None:
        return None
    local = region if shards is None else shards.region
    compiled = _compile(local, compiler, target)
    return None if compiled is None else Placed(local, compiled, shards, compiler.strict)


def _compile(region: Region, compiler: Compiler, target: Target) -> CompiledRegion | None:
    """The replacement of a region, if there is one."""
    try:
        compiled = compiler.compile_region(region, target.platforms)
        if compiled is None:
            return None
        if target.is_exported and "cuda" in target.platforms and compiled.cuda is not None:
            warn_once("an exported program has no kernels: jax.export promises nothing about their custom calls")
            return None
        return compiled
    except Exception as e:
        _failed(e, compiler.strict, f"compiling the region at {', '.join(region.where[:1])}")
        return None


def _opened(eqn: FlatEqn, compiler: Compiler, call: Primitive) -> dict[str, Any] | None:
    """The parameters of an equation whose bodies are to be optimized on their own."""
    try:
        if _to_be_opened(eqn):
            return jax_compat.with_bodies(eqn.eqn, lambda body: jax_compat.as_one_call(body, call, compiler=compiler))
    except Exception as e:
        _failed(e, compiler.strict, f"opening the body of {eqn.primitive}")
    return None


def _to_be_opened(eqn: FlatEqn) -> bool:
    return any(_has_work(body) for body in jax_compat.bodies(eqn.eqn))


def _has_work(jaxpr: Jaxpr) -> bool:
    for eqn in jaxpr.eqns:
        inner = (jax_compat.called_jaxpr(eqn), *jax_compat.bodies(eqn))
        if eqn.primitive.name in rules.HEAVY or any(j is not None and _has_work(j) for j in inner):
            return True
    return False


def _failed(error: Exception, strict: bool, doing: str) -> None:
    if strict or isinstance(error, UsageError):
        raise error
    warn_once(f"{Code.INTERNAL} while {doing}, your own code runs: {type(error).__name__}: {error}")


def _lower_portable(context: Any, *operands: Any, out_avals: Any, placed: Placed) -> Any:
    return placed.lower_safely(context, operands)


def _lower_cuda(context: Any, *operands: Any, out_avals: Any, placed: Placed) -> Any:
    if placed.compiled.cuda is not None:
        try:
            return placed.lower(placed.compiled.cuda, context, operands)
        except Exception as e:
            why = f"{type(e).__name__}: {e}"
            warn_once(f"{Code.INTERNAL} while lowering a kernel, the same program runs as plain JAX: {why}")
    return placed.lower_safely(context, operands)


jax_compat.register_lowering(mirage_region_p, _lower_portable)
jax_compat.register_lowering(mirage_region_p, _lower_cuda, platform="cuda")
