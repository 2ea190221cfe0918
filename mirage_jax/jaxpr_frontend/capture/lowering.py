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
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import jax

from mirage_jax.config import warn_once
from mirage_jax.errors import UsageError
from mirage_jax.gc_pause import no_collection
from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.capture.rehearsal import rehearsed
from mirage_jax.jaxpr_frontend.capture.rematerialize import Keeps, checkpointed, made_large, makes_again, repeated
from mirage_jax.jaxpr_frontend.capture.sharding import Shards, one_device
from mirage_jax.jaxpr_frontend.jax_compat import Jaxpr, LoweringTarget, Primitive
from mirage_jax.jaxpr_frontend.partition.program import (
    FlatEqn,
    FlatProgram,
    as_jaxpr,
    evaluate,
    flatten,
    read,
    without_dead_code,
)
from mirage_jax.jaxpr_frontend.partition.reasons import Code, LeftOut
from mirage_jax.jaxpr_frontend.partition.regions import Analysis, analyse, partition
from mirage_jax.jaxpr_frontend.translate import rules
from mirage_jax.jaxpr_frontend.translate.translate import Region

log = logging.getLogger("mirage_jax")

# Labels of a program and its variants.
PLAIN, OURS, FIRST_CUT, WITHOUT = "xla", "mirage", "mirage, first cut", "mirage without remat"
MAX_LEFT_OUT_REGIONS = 3  # that are left to XLA one by one, where all together are slower than plain jit


class CompiledRegion(Protocol):
    """A region's replacement: functions from the graph's input tensors to its output tensors. An input that it reads
    `in_place` is a whole operand, not the part that the graph reads.

    Hashable, because identical regions share one lowering if they share one object.
    """

    @property
    def in_place(self) -> Collection[str]:
        """Name the inputs that it reads in place."""
        ...

    @property
    def portable(self) -> Callable[..., list[Any]]:
        """Compute with plain JAX, on any platform."""
        ...

    @property
    def cuda(self) -> Callable[..., list[Any]] | None:
        """Compute with kernels; None if there are none."""
        ...


@dataclass(frozen=True)
class AsWritten:
    """Replaces a region by its own equations, which gives them a name in profiles."""

    in_place: Collection[str] = ()
    cuda: None = None

    def portable(self, *tensors: Any) -> list[Any]:
        """Unused: the equations are functions of JAX values, not of tensors."""
        raise NotImplementedError


class Chosen(Protocol):
    """Which of a program's variants runs: a label; another one than theirs is the program as it was written."""

    @property
    def chosen(self) -> str:
        """Label the variant."""
        ...

    def after(self, lost: Any, labels: Iterable[str]) -> Chosen:
        """The same where variants of these labels, which recompute large values, lost before."""
        ...


class RegionCompiler(Protocol):
    """Decides what replaces a region; None leaves it to XLA. Frozen and hashable: it is a parameter of an equation."""

    @property
    def strict(self) -> bool:
        """Tell whether failures are raised instead of warned about."""
        ...

    @property
    def max_ops(self) -> int:
        """Give the largest number of operators in a region."""
        ...

    @property
    def platform(self) -> str:
        """Name the platform that a function runs on, if nothing else names one."""
        ...

    @property
    def exports_kernels(self) -> bool:
        """Tell whether programs that `jax.export` stores have kernels: it promises nothing about their custom calls."""
        ...

    def recomputes(self, target: LoweringTarget) -> bool:
        """Whether large values that are cheap to make may be recomputed in a program for this target."""
        ...

    @property
    def checkpoints(self) -> bool:
        """Whether such values need not be stored for the gradients of a function that others differentiate."""
        ...

    def prepare(self, regions: Sequence[Region], target: LoweringTarget, again: bool = False) -> None:
        """Told of all regions of a program before it is asked for each: it may decide them in another order. `again`:
        they were cut in another way before, with more values made again.
        """
        ...

    def compile_region(self, region: Region, platforms: tuple[str, ...]) -> CompiledRegion | None:
        """`platforms` are those that the program is being lowered for, as JAX names them: "cpu", "cuda", ..."""
        ...

    def known_region(self, region: Region, platforms: tuple[str, ...]) -> CompiledRegion | None:
        """Give the replacement if it is decided already, or stored."""
        ...

    def choose(self, whole: WholeProgram) -> Chosen:
        """Which of a program's variants is the fastest, as a whole. Where that cannot be told it is the first."""
        ...

    def names_line_of(self, region: Region) -> tuple[str, ...]:
        """List the options that name a region's source lines: equal regions with other lines are asked for apart."""
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
        """Give the types of the region's results."""
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

        return self._traced(between, context, operands)

    def lower_safely(self, context: Any, operands: Sequence[Any]) -> Any:
        """As plain JAX; if that fails, the user's own equations."""
        if not isinstance(self.compiled, AsWritten):
            try:
                return self.lower(self.compiled.portable, context, operands)
            except Exception as e:
                _failed(e, self.strict, f"lowering the region at {', '.join(self.region.where[:1])}")
        return self._traced(self.region.reference, context, operands)

    def _traced(self, function: Callable[..., list[Any]], context: Any, operands: Sequence[Any]) -> Any:
        """The code of a function of JAX values, which profiles show under the region's name."""

        def named(*values: Any) -> list[Any]:
            with jax.named_scope(self.region.scope):
                return function(*values)

        return jax_compat.lower_traced(named, context, operands)


@dataclass(frozen=True)
class Replacement:
    """A region and its replacement."""

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


@dataclass(frozen=True, eq=False)
class LoweringPlan:
    """A program's steps in their order: what replaces a region, equations as they are, or one that has bodies.

    bodies: the plans of an equation's bodies, where they are planned already. regions: all regions, those that stay
    with XLA as well. repeats: some region that is replaced makes values of another one again. whole: how long the
    program as a whole takes, where that was asked.
    """

    program: FlatProgram
    steps: tuple[Replacement | tuple[FlatEqn, ...], ...]
    compiler: RegionCompiler
    call: Primitive
    bodies: Mapping[FlatEqn, tuple[LoweringPlan, ...]]
    regions: tuple[Region, ...] = ()
    left_out: Callable[[], tuple[LeftOut, ...]] = tuple
    is_as_written: bool = True  # apart from replacements
    repeats: bool = False
    whole: Any = None

    @property
    def _replacements(self) -> list[Replacement]:
        return [step for step in self.steps if isinstance(step, Replacement)]

    @property
    def _kept(self) -> list[FlatEqn]:
        """Equations that no kernel replaces."""
        return [eqn for step in self.steps if not isinstance(step, Replacement) for eqn in step]

    @property
    def _inner(self) -> Iterator[LoweringPlan]:
        return itertools.chain.from_iterable(self.bodies.values())

    def with_bodies(self) -> Iterator[LoweringPlan]:
        """Walk this plan and the plans of its equations' bodies."""
        yield self
        for body in self._inner:
            yield from body.with_bodies()

    @cached_property
    def replaced(self) -> tuple[Placed, ...]:
        """List the replacements of regions here and in bodies, once each."""
        return tuple(dict.fromkeys(step.placed for plan in self.with_bodies() for step in plan._replacements))

    @property
    def kernels(self) -> frozenset[str]:
        """The texts of the regions that are replaced."""
        return frozenset(placed.region.text for placed in self.replaced)

    def without(self, text: str) -> LoweringPlan:
        """The plan with the regions of this text left to XLA."""

        def left(step: Replacement | tuple[FlatEqn, ...]) -> Replacement | tuple[FlatEqn, ...]:
            if isinstance(step, Replacement) and step.placed.region.text == text:
                return step.region.equations
            return step

        bodies = {eqn: tuple(body.without(text) for body in plans) for eqn, plans in self.bodies.items()}
        return replace(self, steps=tuple(map(left, self.steps)), bodies=bodies)

    @property
    def only_region(self) -> Region | None:
        """The region that is all of the program, if one is."""
        replacements = self._replacements
        return replacements[0].region if len(replacements) == 1 and not self.left_to_xla() else None

    @cached_property
    def changes_nothing(self) -> bool:
        """Tell whether the program runs as it was written."""
        if not self.is_as_written or self.replaced or not all(body.changes_nothing for body in self._inner):
            return False
        return not any(_to_be_opened(eqn) for eqn in self._kept if eqn not in self.bodies)

    @property
    def makes_again(self) -> bool:
        """Whether values are made a second time for kernels that read them so."""
        return any(plan.program.again or plan.repeats for plan in self.with_bodies())

    def left_to_xla(self) -> tuple[FlatEqn, ...]:
        """The equations that XLA computes because their results are needed."""
        steps = itertools.chain.from_iterable(
            step.equations if isinstance(step, Replacement) else step for step in self.steps
        )
        needed = without_dead_code(replace(self.program, eqns=tuple(steps))).eqns
        return tuple(eqn for eqn in needed if eqn.eqn.primitive is not mirage_region_p)

    def as_jaxpr(self, written: Jaxpr) -> Jaxpr | None:
        """The program, which was `written` so, as a jaxpr: what stays as it is need not be traced again. None if
        something has to be traced.
        """
        if self.changes_nothing:
            return written
        waits = any(eqn.after for eqn in self.program.eqns)
        if written.effects or waits or any(step.placed.shards for step in self._replacements):
            return None
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
            case (eqn,) if (params := self._opened(eqn)) is not None:
                return (replace(eqn, eqn=eqn.eqn.replace(params=params)),)
            case equations:
                return equations

    def _opened(self, eqn: FlatEqn) -> dict[str, Any] | None:
        """The parameters of an equation whose bodies are optimized on their own."""
        plans = iter(self.bodies.get(eqn, ()))

        def opened(body: Jaxpr) -> Jaxpr:
            known = next(plans, None)
            if known is not None and known.changes_nothing:
                return body
            return jax_compat.as_one_call(body, self.call, compiler=self.compiler, plan=known, is_body=True)

        try:
            return jax_compat.with_bodies(eqn.eqn, opened) if _to_be_opened(eqn) else None
        except Exception as e:
            _failed(e, self.compiler.strict, f"opening the body of {eqn.primitive}")
            return None

    def run(self, *args: Any) -> list[Any]:
        """Evaluate the program."""
        values = {**self.program.constants, **dict(zip(self.program.inputs, args, strict=True))}
        for step in self.steps:
            if isinstance(step, Replacement):
                step.run(values)
            else:
                evaluate(self._equations(step), values)
        return [read(values, atom) for atom in self.program.outputs]

    def analysis(self) -> Analysis:
        """Collect all regions and left-out equations, also of bodies that are planned where they are lowered."""
        inner = [body.analysis() for body in self._inner]
        late = (eqn for eqn in self._kept if eqn.primitive == "shard_map")
        inner += [analyse(body, self.compiler.max_ops) for eqn in late for body in jax_compat.bodies(eqn.eqn)]
        return sum(inner, Analysis(self.regions, self.left_out()))


def plan(
    jaxpr: Jaxpr, compiler: RegionCompiler, call: Primitive, target: LoweringTarget, is_body: bool = False
) -> LoweringPlan:
    """What replaces what in `jaxpr`. `call` brings a body back here. A program that is not the body of another one is
    measured as a whole, and runs as it was written where that is faster.
    """
    rounds = _rounds(jaxpr, compiler, call, target)
    if is_body or makes_again(jaxpr) or not any(found.replaced for found in rounds):
        return rounds[-1]
    return _faster(jaxpr, rounds, compiler, call, target)


def _faster(
    jaxpr: Jaxpr,
    rounds: Sequence[LoweringPlan],
    compiler: RegionCompiler,
    call: Primitive,
    target: LoweringTarget,
    remat: bool | None = None,
) -> LoweringPlan:
    """The last plan, or the first one that has other kernels, or the program as it was written, or as it is without
    values that are made again.

    remat: whether the plan may make values again; the compiler says, if it is not given.
    """
    ours = rounds[-1]

    def plan_of(jaxpr: Jaxpr, label: str) -> LoweringPlan:
        """A variant of a program, of decisions that are made."""
        found = _cuts(_rounds(jaxpr, compiler, call, target, False if label == WITHOUT else remat, search=False))
        return found.get(label, found[OURS])

    cuts = {label: found for label, found in _cuts(rounds).items() if found.replaced}
    variants: dict[str, Callable[[], LoweringPlan]] = {label: lambda cut=cut: cut for label, cut in cuts.items()}
    recomputing = [label for label, cut in cuts.items() if cut.makes_again]
    if recomputing:
        variants[WITHOUT] = functools.cache(lambda: plan_of(jaxpr, WITHOUT))
    program = ours.program if ours.is_as_written else flatten(jaxpr)
    asked = WholeProgram(jaxpr, program, variants, target)
    whole = _choose(_to_be_timed(asked, plan_of, compiler.strict), compiler)
    if whole.chosen in variants:
        return replace(variants[whole.chosen](), whole=whole)
    if recomputing and (found := _tuned_without(jaxpr, compiler, call, target)) is not None:
        return replace(found, whole=found.whole.after(whole, recomputing))
    if whole.chosen == PLAIN and (found := _with_one_left_out(asked, plan_of, compiler)) is not None:
        return found
    return replace(_as_written(jaxpr, compiler, call, ours), whole=whole)


def _tuned_without(
    jaxpr: Jaxpr, compiler: RegionCompiler, call: Primitive, target: LoweringTarget
) -> LoweringPlan | None:
    """The best plan without values that are made again, whose regions are tuned only now; None if it has no kernels."""
    rounds = _rounds(jaxpr, compiler, call, target, remat=False, again=True)
    is_of_use = any(found.replaced for found in rounds)
    return _faster(jaxpr, rounds, compiler, call, target, remat=False) if is_of_use else None


def _with_one_left_out(
    whole: WholeProgram, plan_of: Callable[[Jaxpr, str], LoweringPlan], compiler: RegionCompiler
) -> LoweringPlan | None:
    """The first variant with one of its regions left to XLA; None if no such plan is faster than plain jit."""
    texts = list(dict.fromkeys(placed.region.text for placed in whole.ours.replaced))
    if not 1 < len(texts) <= MAX_LEFT_OUT_REGIONS:
        return None
    left_out = {f"{OURS}, region {n} left out": text for n, text in enumerate(texts, 1)}
    fewer = {label: functools.partial(whole.ours.without, text) for label, text in left_out.items()}
    ours_of = functools.cache(lambda jaxpr: plan_of(jaxpr, OURS))

    def variant(jaxpr: Jaxpr, label: str) -> LoweringPlan:
        return ours_of(jaxpr).without(left_out[label]) if label in left_out else ours_of(jaxpr)

    asked = replace(whole, variants={OURS: lambda: whole.ours, **fewer})  # the first runs where nothing is measured
    second = _choose(_to_be_timed(asked, variant, compiler.strict), compiler)
    return replace(fewer[second.chosen](), whole=second) if second.chosen in fewer else None


def _to_be_timed(whole: WholeProgram, plan_of: Callable[[Jaxpr, str], LoweringPlan], strict: bool) -> WholeProgram:
    """The program in a form that can be timed, if it has the same kernels in that form."""
    if whole.target.is_partitioned or whole.target.is_manual:
        return whole
    try:
        other = rehearsed(whole.jaxpr)
    except Exception as e:
        _failed(e, strict, "making a form of a program that can be timed")
        return whole
    if other is whole.jaxpr:
        return whole
    variants = {label: functools.cache(functools.partial(plan_of, other, label)) for label in whole.variants}
    timed = replace(whole, jaxpr=other, as_written=flatten(other), variants=variants)
    return timed if timed.ours.kernels == whole.ours.kernels else whole


@dataclass(frozen=True)
class First:
    """The first variant runs where nothing is measured."""

    chosen: str = OURS

    def after(self, lost: Any, labels: Iterable[str]) -> Chosen:
        """The same."""
        return self


def _choose(whole: WholeProgram, compiler: RegionCompiler) -> Chosen:
    try:
        return compiler.choose(whole)
    except Exception as e:
        _failed(e, compiler.strict, "measuring a function")
        return First()


def _as_written(
    jaxpr: Jaxpr, compiler: RegionCompiler, call: Primitive, like: LoweringPlan | None = None
) -> LoweringPlan:
    """What JAX would run, with the regions and left-out equations of another plan, which a report names."""
    program = flatten(jaxpr)
    steps = tuple((eqn,) for eqn in program.eqns)
    bodies = {
        eqn: tuple(_as_written(body, compiler, call) for body in jax_compat.bodies(eqn.eqn))
        for eqn in program.eqns
        if _to_be_opened(eqn)
    }
    if like is None:
        return LoweringPlan(program, steps, compiler, call, bodies)
    regions = tuple(region for p in like.with_bodies() for region in p.regions)
    left_out = lambda: tuple(left for p in like.with_bodies() for left in p.left_out())  # noqa: E731
    return LoweringPlan(program, steps, compiler, call, bodies, regions, left_out)


@dataclass(frozen=True)
class WholeProgram:
    """A program as it was written, and what may run in its place, by label. The first is the one to be judged."""

    jaxpr: Jaxpr
    as_written: FlatProgram  # with nothing replaced, calls of optimized functions opened
    variants: Mapping[str, Callable[[], LoweringPlan]]
    target: LoweringTarget

    @property
    def ours(self) -> LoweringPlan:
        """The first of the variants."""
        return next(iter(self.variants.values()))()

    @property
    def with_kernels(self) -> WholeProgram:
        """The same with those variants that replace anything: others would be timed as plain jit once more."""
        return replace(self, variants={label: plan for label, plan in self.variants.items() if plan().replaced})

    def run(self, *args: Any) -> list[Any]:
        """Evaluate the program as it was written."""
        if not _has_calls(self.jaxpr):  # with its inner calls, as plain jit has them
            return jax_compat.eval_jaxpr(self.jaxpr, self.jaxpr.consts, *args)
        values = {**self.as_written.constants, **dict(zip(self.as_written.inputs, args, strict=True))}
        evaluate([_plain(eqn) for eqn in self.as_written.eqns], values)
        return [read(values, atom) for atom in self.as_written.outputs]

    def equations(self) -> Iterator[FlatEqn]:
        """Walk all equations of the program and of its bodies."""
        todo = [self.as_written]
        while todo:
            for eqn in todo.pop().eqns:
                yield eqn
                todo += map(flatten, jax_compat.bodies(eqn.eqn))


def _plain(eqn: FlatEqn) -> FlatEqn:
    """The equation, with no call of an optimized function in its bodies."""
    if not any(map(_has_calls, jax_compat.bodies(eqn.eqn))):
        return eqn

    def opened(body: Jaxpr) -> Jaxpr:
        program = flatten(body)
        return as_jaxpr(replace(program, eqns=tuple(map(_plain, program.eqns))), body)

    return replace(eqn, eqn=eqn.eqn.replace(params=jax_compat.with_bodies(eqn.eqn, opened)))


def _has_calls(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr calls optimized functions."""
    return any(
        eqn.primitive.name == "mirage_call" or any(map(_has_calls, jax_compat.inside(eqn))) for eqn in jaxpr.eqns
    )


@dataclass(frozen=True)
class _Cut:
    """A program cut into regions, with the cuts of its equations' bodies."""

    jaxpr: Jaxpr
    program: FlatProgram
    steps: Sequence[Region | int]
    left_out: Callable[[], tuple[LeftOut, ...]]
    remade: Mapping[Region, int]
    bodies: Mapping[int, tuple[_Cut, ...]]
    is_as_written: bool

    def regions(self) -> Iterator[Region]:
        """All regions, bodies' too."""
        yield from (step for step in self.steps if isinstance(step, Region))
        for body in itertools.chain.from_iterable(self.bodies.values()):
            yield from body.regions()


@dataclass
class _Kept:
    """Values that are not made again, because no kernel reads them so: units by their jaxpr, regions by their numbers,
    and policies.
    """

    left: dict[int, set[int]] = field(default_factory=dict)
    stored: set[int] = field(default_factory=set)
    merged: set[Any] = field(default_factory=set)

    def add(self, cut: _Cut, found: LoweringPlan) -> bool:
        """Of a plan, those large values that XLA would make again; whether there are any."""
        changed = False
        if cut.program.again:
            again = cut.program.again
            units = {again[v] for eqn in found.left_to_xla() for v in eqn.outputs if v in again}
            self.left.setdefault(id(cut.jaxpr), set()).update(units)
            changed = bool(units)
        left = (r for r, step in zip(cut.steps, found.steps, strict=True) if not isinstance(step, Replacement))
        numbers = {cut.remade[r] for r in left if isinstance(r, Region) and r in cut.remade}
        changed |= not numbers <= self.stored
        self.stored |= numbers
        for n, inner in cut.bodies.items():
            eqn = cut.program.eqns[n]
            plans = found.bodies[eqn]
            policy = jax_compat.policy_of(eqn.eqn)
            if _may_merge(policy) and any(made_large(p.program, p.left_to_xla()) for p in plans):
                self.merged.add(policy)
                changed = True
            else:
                for pair in zip(inner, plans, strict=True):
                    changed |= self.add(*pair)
        return changed


def _may_merge(policy: Any) -> bool:
    """Whether this is the policy of a checkpoint of ours that may be taken back."""
    return isinstance(policy, Keeps) and not policy.is_settled


def planned(jaxpr: Jaxpr, compiler: RegionCompiler, call: Primitive, target: LoweringTarget) -> LoweringPlan:
    """What replaces what in `jaxpr`, with values made again where a kernel that was chosen reads them so, and nowhere
    else.
    """
    return _rounds(jaxpr, compiler, call, target)[-1]


def _rounds(
    jaxpr: Jaxpr,
    compiler: RegionCompiler,
    call: Primitive,
    target: LoweringTarget,
    remat: bool | None = None,
    search: bool = True,
    again: bool = False,
) -> list[LoweringPlan]:
    """The plans that lead to `planned`, which is the last. Each stores a value that XLA made again in the one before,
    and so cuts other regions, for which there may be no time left.

    remat: whether any may be; the compiler says, if it is not given. search: False takes only decisions that are made.
    again: the program was cut in another way before.
    """
    kept, rounds = _Kept(), list[LoweringPlan]()
    remat = compiler.recomputes(target) if remat is None else remat
    while True:
        cut = _cut(jaxpr, compiler, target, kept, remat)
        if search:
            _prepare(_local(list(cut.regions()), target), compiler, target, again)
        rounds.append(_place(cut, compiler, call, target, search))
        if not kept.add(cut, rounds[-1]):
            return rounds
        again = True


def _cuts(rounds: Sequence[LoweringPlan]) -> dict[str, LoweringPlan]:
    """The last plan, and the first one that has kernels which the last lacks, by their labels."""
    last = rounds[-1]
    first = next((found for found in rounds if not found.kernels <= last.kernels), None)
    return {OURS: last} if first is None else {OURS: last, FIRST_CUT: first}


def _cut(jaxpr: Jaxpr, compiler: RegionCompiler, target: LoweringTarget, kept: _Kept, remat: bool) -> _Cut:
    with no_collection():
        written = flatten(jaxpr, kept.merged)
        again = functools.partial(repeated, left=kept.left.get(id(jaxpr), ()))
        program = _unless_it_fails(again, written, compiler) if remat else written
        steps, left_out, remade = _steps(program, compiler, target.is_partitioned, remat, kept.stored)
    bodies = {
        n: tuple(_cut(body, compiler, target, kept, remat) for body in jax_compat.bodies(eqn.eqn))
        for n in steps
        if isinstance(n, int) and (eqn := program.eqns[n]).primitive != "shard_map" and _to_be_opened(eqn)
    }
    return _Cut(jaxpr, program, steps, left_out, remade, bodies, program is written and not kept.merged)


def _local(regions: Sequence[Region], target: LoweringTarget) -> Sequence[Region]:
    """Regions as one device sees them."""
    if not target.is_partitioned:
        return regions
    return [local.region for region in regions if (local := one_device(region)) is not None]


def _place(cut: _Cut, compiler: RegionCompiler, call: Primitive, target: LoweringTarget, search: bool) -> LoweringPlan:
    """The plan of a cut program, for which the compiler is prepared."""
    regions = [step for step in cut.steps if isinstance(step, Region)]
    kinds: dict[Hashable, Region] = {}  # the first of equal layers, which share their graph
    kind_of = {region: (id(region.graph), compiler.names_line_of(region)) for region in regions}
    for region, kind in kind_of.items():
        kinds.setdefault(kind, region)
    shards = {kind: one_device(region) for kind, region in kinds.items()} if target.is_partitioned else {}
    placed = {kind: _placed(region, shards.get(kind), compiler, target, search) for kind, region in kinds.items()}
    steps: list[Replacement | tuple[FlatEqn, ...]] = []
    for step in cut.steps:
        if not isinstance(step, Region):
            steps.append((cut.program.eqns[step],))
        elif (there := placed[kind_of[step]]) is not None:
            steps.append(Replacement(step, there))
        else:
            steps.append(step.equations)
    bodies = {
        cut.program.eqns[n]: tuple(_place(body, compiler, call, target, search) for body in inner)
        for n, inner in cut.bodies.items()
    }
    local = tuple(_local(regions, target))
    repeats = any(isinstance(step, Replacement) and step.region in cut.remade for step in steps)
    return LoweringPlan(
        cut.program, tuple(steps), compiler, call, bodies, local, cut.left_out, cut.is_as_written, repeats
    )


def with_checkpoints(jaxpr: Jaxpr, compiler: RegionCompiler, call: Primitive) -> tuple[Jaxpr, Any]:
    """A jaxpr that was captured, as it is differentiated: what a kernel of the backward pass reads so is checkpointed.
    Where it has a backward pass already, `repeated` does that instead.

    Which kernels there are is asked of the function with its gradients, all of them. The second is how long these take
    as a whole, where that was asked.
    """
    if not compiler.checkpoints or jax_compat.differentiates(jaxpr):
        return jaxpr, None
    try:
        return _with_checkpoints(jaxpr, compiler, call)
    except Exception as e:
        _failed(e, compiler.strict, "looking for values to make again")
        return jaxpr, None


def _with_checkpoints(jaxpr: Jaxpr, compiler: RegionCompiler, call: Primitive) -> tuple[Jaxpr, Any]:
    marked = checkpointed(jaxpr)
    if marked is jaxpr or (both := jax_compat.both_passes(marked)) is None:
        return jaxpr, None
    target = LoweringTarget((compiler.platform,))
    rounds = _rounds(both, compiler, call, target)
    kept = {label: units for label, found in _cuts(rounds).items() if (units := set(_made_again(found)))}
    variants = {label: checkpointed(jaxpr, units, label == FIRST_CUT) for label, units in kept.items()}
    programs = {label: p for label, variant in variants.items() if (p := jax_compat.both_passes(variant)) is not None}
    plain = jax_compat.both_passes(jaxpr)
    if not programs or plain is None:
        return jaxpr, None
    plan_of = functools.partial(planned, compiler=compiler, call=call, target=target)
    plans = {label: functools.cache(functools.partial(plan_of, program)) for label, program in programs.items()}
    plans[WITHOUT] = functools.cache(lambda: _rounds(plain, compiler, call, target, search=False)[-1])
    whole = _choose(WholeProgram(plain, flatten(plain), plans, target), compiler)
    return variants.get(whole.chosen, jaxpr), whole


def _made_again(found: LoweringPlan) -> Iterator[Keeps]:
    """Policies of checkpoints in which values are made again."""
    for eqn, plans in found.bodies.items():
        if isinstance(policy := jax_compat.policy_of(eqn.eqn), Keeps):
            yield policy
        for body in plans:
            yield from _made_again(body)


def _unless_it_fails[T](change: Callable[[T], T], x: T, compiler: RegionCompiler) -> T:
    try:
        return change(x)
    except Exception as e:
        _failed(e, compiler.strict, "looking for values to make again")
        return x


def _steps(
    program: FlatProgram, compiler: RegionCompiler, sharded: bool, remat: bool, stored: Collection[int]
) -> tuple[Sequence[Region | int], Callable[[], tuple[LeftOut, ...]], Mapping[Region, int]]:
    try:
        found = partition(program, compiler.max_ops, sharded, remat, stored)
    except Exception as e:
        _failed(e, compiler.strict, "dividing a program into regions")
        return range(len(program.eqns)), tuple, {}
    if sharded and any(x.code is Code.SHARDED and x.primitive in rules.CONTRACTION_PRIMITIVES for x in found.left_out):
        warn_once(f"{Code.SHARDED}: XLA divides this program over several devices and cannot divide a kernel")
    return found.steps, lambda: found.left_out, found.remade


def _prepare(regions: Sequence[Region], compiler: RegionCompiler, target: LoweringTarget, again: bool) -> None:
    try:
        compiler.prepare(regions, target, again)
    except Exception as e:
        _failed(e, compiler.strict, "choosing which regions to tune first")


def _placed(
    region: Region, shards: Shards | None, compiler: RegionCompiler, target: LoweringTarget, search: bool
) -> Placed | None:
    if target.is_partitioned and shards is None:
        return None
    local = region if shards is None else shards.region
    compiled = _compile(local, compiler, target, search)
    return None if compiled is None else Placed(local, compiled, shards, compiler.strict)


def _compile(region: Region, compiler: RegionCompiler, target: LoweringTarget, search: bool) -> CompiledRegion | None:
    """The replacement of a region, if there is one."""
    try:
        ask = compiler.compile_region if search else compiler.known_region
        compiled = ask(region, target.platforms)
        if compiled is None:
            return None
        is_for_cuda = "cuda" in target.platforms and compiled.cuda is not None
        if target.is_exported and is_for_cuda and not compiler.exports_kernels:
            warn_once("an exported program has no kernels: mirage_jax.export makes one that has")
            return None
        return compiled
    except Exception as e:
        _failed(e, compiler.strict, f"compiling the region at {', '.join(region.where[:1])}")
        return None


def _to_be_opened(eqn: FlatEqn) -> bool:
    return not eqn.is_disabled and any(_has_work(body) for body in jax_compat.bodies(eqn.eqn))


def _has_work(jaxpr: Jaxpr) -> bool:
    for eqn in jaxpr.eqns:
        inner = (jax_compat.called_jaxpr(eqn), *jax_compat.bodies(eqn))
        if eqn.primitive.name in rules.CONTRACTION_PRIMITIVES or any(j is not None and _has_work(j) for j in inner):
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
