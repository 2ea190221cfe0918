"""Equations of one region -> its reference muGraph and the border between JAX values and graph tensors.

The reference says *what* is computed: one library kernel per elementary operator over named axes. Casts are identities
in the algebra; tensors have the dtypes that the program stores.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.partition.fingerprint import digest
from mirage_jax.jaxpr_frontend.partition.program import Bind, FlatEqn, FlatProgram, evaluate, needed_for, operands_of
from mirage_jax.jaxpr_frontend.partition.reasons import BY_ITSELF, Code, NotExpressible
from mirage_jax.jaxpr_frontend.translate import rules
from mirage_jax.jaxpr_frontend.translate.assemble import Assembled, assemble
from mirage_jax.jaxpr_frontend.translate.builder import AxisValue, NodeBuilder
from mirage_jax.jaxpr_frontend.translate.concatenation import Resolver, Segments
from mirage_jax.mugraph.dtypes import numpy_dtype
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.passes.diagonals import with_diagonals_read
from mirage_jax.mugraph.passes.log_sum_exp import join_shifts
from mirage_jax.mugraph.passes.nested_exponentials import with_inner_functions
from mirage_jax.mugraph.views import View, ViewStep


@dataclass(frozen=True, slots=True)
class Inward:
    """How a JAX value becomes graph tensors, whole or in parts."""

    value: int  # number of the value in the flat program
    dtype: Any
    tensors: tuple[str, ...]
    views: tuple[View, ...]

    @property
    def parts(self) -> list[tuple[str, View]]:
        """Pair each tensor with the part that it is."""
        return list(zip(self.tensors, self.views, strict=True))

    @property
    def is_mostly_read(self) -> bool:
        """Whether the graph reads half of the value or more. XLA copies a smaller part, and need not make the rest."""
        parts = {view.cuts: math.prod(view.shape) for view in self.views}
        return 2 * sum(parts.values()) >= math.prod(self.views[0].whole)


@dataclass(frozen=True, slots=True)
class Segment:
    """How a graph tensor becomes a segment of a JAX value: transpose by `permutation`, reshape to `spread` (1 for axes
    that the tensor does not depend on), broadcast to `full`, reshape to `shape`. Without a tensor: a constant.
    """

    tensor: str | None
    constant: Fraction
    permutation: tuple[int, ...]
    spread: tuple[int, ...]
    full: tuple[int, ...]
    shape: tuple[int, ...]

    def array(self, tensors: Mapping[str, Any], dtype: Any, xp: Any) -> Any:
        """Make the segment of a value from the graph's tensors."""
        if self.tensor is None:
            return xp.full(self.shape, float(self.constant), dtype)
        x = xp.transpose(tensors[self.tensor], self.permutation).reshape(self.spread)
        return xp.broadcast_to(x, self.full).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Outward:
    """How graph tensors become a JAX value: segments, in row-major order of `grid`, joined and reshaped to `shape`."""

    value: int
    shape: tuple[int, ...]
    dtype: Any
    segments: tuple[Segment, ...]
    grid: tuple[int, ...]

    def joined(self, tensors: Mapping[str, Any], xp: Any) -> Any:
        """The JAX value, in the dtypes of the tensors."""
        arrays = [segment.array(tensors, self.dtype, xp) for segment in self.segments]
        for axis, count in reversed(list(enumerate(self.grid))):
            if count > 1:
                arrays = [xp.concatenate(arrays[n : n + count], axis) for n in range(0, len(arrays), count)]
        (whole,) = arrays
        return whole.reshape(self.shape)


_FILE_AND_LINE = re.compile(r"(\w+)(?:\.\w+)?:(\d+)")


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a program that a muGraph can replace.

    `graph` reads and makes graph tensors; `prepare` and `finish` are the border. Some results need no kernel (an input
    seen through a reshape, a constant): equations in `aside` make them, the way JAX would. `translated` says the same
    as `graph` in the order of the equations: how far rounding may carry results depends on it.
    """

    graph: KernelGraph
    translated: KernelGraph
    inputs: tuple[Inward, ...]
    outputs: tuple[Outward, ...]
    equations: tuple[FlatEqn, ...]
    aside: tuple[FlatEqn, ...] = ()
    operands: tuple[int, ...] = ()  # values that the equations read from outside
    results: tuple[int, ...] = ()  # values that the program reads from here, in order
    avals: dict[int, Any] = field(default_factory=dict, repr=False)
    written: str = ""  # digest of the equations

    @cached_property
    def where(self) -> tuple[str, ...]:
        """The user's lines, each once, in order."""
        return tuple(dict.fromkeys(eqn.where for eqn in self.equations))

    @cached_property
    def in_float32(self) -> bool:
        """Does a product of float32 ask for more than TF32, as with ``precision="highest"``?"""
        products = (eqn for eqn in self.equations if eqn.primitive in rules.PRODUCT_PRIMITIVES)
        return any(rules.asks_for_float32(eqn.params, eqn.in_avals) for eqn in products)

    @cached_property
    def scope(self) -> str:
        """Name the region's operations in profiles by its first line and its digest: ``mirage_model_41_0f3a9c``."""
        found = _FILE_AND_LINE.search(self.where[0] if self.where else "")
        return "_".join(("mirage", *(found.groups() if found else ("unknown", "line")), self.written[:6]))

    @cached_property
    def places(self) -> dict[int, tuple[int, bool, int]]:
        """Locate the values of the border: equation, whether it reads the value, and the place among its operands."""
        border = {*self.operands, *self.results, *(b.value for b in self.inputs), *(b.value for b in self.outputs)}
        return {
            v: (n, read, i)
            for n, eqn in enumerate(self.equations)
            for read, values in ((True, eqn.reads), (False, eqn.outputs))
            for i, v in enumerate(values)
            if v in border
        }

    @cached_property
    def primitives(self) -> tuple[str, ...]:
        """Name the primitives of the equations, in order."""
        return tuple(eqn.primitive for eqn in self.equations)

    def prepare(self, values: Sequence[Any], in_place: Collection[str] = ()) -> list[Any]:
        """Make the graph's input tensors from values of `inputs`; tensors read `in_place` are whole operands."""
        pairs = [(v, tensor, view) for v, b in zip(values, self.inputs, strict=True) for tensor, view in b.parts]
        return [v if tensor in in_place else view.of(v) for v, tensor, view in pairs]

    @property
    def partial(self) -> dict[str, View]:
        """Name the input tensors that are parts of mostly read operands."""
        return {name: view for b in self.inputs if b.is_mostly_read for name, view in b.parts if view.cuts}

    @cached_property
    def text(self) -> str:
        """Write down the computation: the graph, the parts of operands that it reads, a digest of the equations."""
        return self.annotated(self.graph)

    def annotated(self, graph: KernelGraph) -> str:
        """The text of a graph with this one's inputs, and in comments which parts of the operands they are, and which
        equations it was made of: how far from exact results floats may be depends on these.
        """
        parts = (f"# {name}: {view}" for name, view in self.partial.items())
        return "\n".join((str(graph), *parts, f"# equations {self.written}"))

    def finish(self, tensors: Sequence[Any]) -> list[Any]:
        """Output tensors of the graph -> JAX values of `outputs`."""
        by_name = dict(zip(self.graph.outputs, tensors, strict=True))
        return [b.joined(by_name, jnp).astype(b.dtype) for b in self.outputs]

    def reference(self, *values: Any, bind: Bind = jax_compat.bind_alone) -> list[Any]:
        """Evaluate the original equations on one device, from values of `inputs` to values of `outputs`."""
        given = dict(zip((b.value for b in self.inputs), values, strict=True))
        # An operand that is no input of the graph has no influence on the result: any value will do.
        env = {
            v: given[v] if v in given else jnp.zeros(a.shape, a.dtype) for v in self.operands for a in [self.avals[v]]
        }
        evaluate(self.equations, env, bind)
        return [env[b.value] for b in self.outputs]

    def tensor_types(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of the graph's outputs."""
        tensors = (self.graph.tensors[name] for name in self.graph.outputs)
        return [(tuple(map(self.graph.extent, t.axes)), numpy_dtype(t.dtype)) for t in tensors]


class TranslationRefused(Exception):
    """Equations of the region cannot be expressed; carries the reason for each, by its position.

    There are several if their reasons do not depend on their surroundings (`BY_ITSELF`), or if all were asked for.
    """

    def __init__(self, reasons: Mapping[int, NotExpressible]):
        super().__init__("; ".join(map(str, reasons.values())))
        self.reasons = reasons

    @property
    def by_itself(self) -> bool:
        """Whether the equations cannot be in any region."""
        return all(reason.code in BY_ITSELF for reason in self.reasons.values())


def translate(
    program: FlatProgram, eqns: Sequence[FlatEqn], results: Sequence[int], patient: bool = True
) -> Region | None:
    """Make the region of `eqns`, whose `results` others read. None if nothing is left to compute.

    patient: of reasons that another cut may remove, report only the first.

    Raises:
        TranslationRefused: a muGraph cannot express some of the equations.
    """
    operands = operands_of(eqns)
    builder = NodeBuilder()
    env = {v: _input(builder, program.avals[v]) for v in operands}
    _apply_all(builder, eqns, env, patient)
    outward = _outward_segments(builder, eqns, {v: env[v] for v in results}, patient)
    if not outward:
        return None
    inputs = _inputs(builder, {v: env[v].node for v in operands})
    assembled = assemble(builder, [*itertools.chain(*inputs.values())], _all_values(outward))
    border = _Border(builder, assembled, program.avals)
    used = {v: [n for n in nodes if n in assembled.tensors] for v, nodes in inputs.items()}
    inward = tuple(border.inward(v, nodes) for v, nodes in used.items() if nodes)
    return Region(
        graph=with_inner_functions(join_shifts(with_diagonals_read(assembled.graph))),
        translated=assembled.graph,
        inputs=inward,
        outputs=tuple(itertools.starmap(border.outward, outward.items())),
        equations=tuple(eqns),
        aside=needed_for(set(results) - outward.keys(), eqns),
        operands=operands,
        results=tuple(results),
        avals={v: program.avals[v] for v in (*operands, *results)},
        written=digest(eqns, [b.value for b in inward], list(outward)),
    )


def renamed(region: Region, program: FlatProgram, eqns: Sequence[FlatEqn]) -> Region:
    """Make the region of `eqns` from a region of the same form."""
    names = {v: (eqns[n].reads if read else eqns[n].outputs)[i] for v, (n, read, i) in region.places.items()}
    position = {id(eqn): n for n, eqn in enumerate(region.equations)} if region.aside else {}
    operands, results = (tuple(map(names.__getitem__, values)) for values in (region.operands, region.results))
    return replace(
        region,
        inputs=tuple([Inward(names[b.value], b.dtype, b.tensors, b.views) for b in region.inputs]),
        outputs=tuple([Outward(names[b.value], b.shape, b.dtype, b.segments, b.grid) for b in region.outputs]),
        equations=tuple(eqns),
        aside=tuple(eqns[position[id(eqn)]] for eqn in region.aside),
        operands=operands,
        results=results,
        avals={v: program.avals[v] for v in (*operands, *results)},
    )


def _apply_all(builder: NodeBuilder, eqns: Sequence[FlatEqn], env: dict[int, AxisValue], patient: bool) -> None:
    """Add the result of every equation to `env`. Where one cannot be in any region, its result is an operand for those
    after it, as it will be, so that all such equations are found at once.
    """
    refused: dict[int, NotExpressible] = {}
    for position, eqn in enumerate(eqns):
        builder.equation = position
        (out,) = eqn.outputs
        try:
            env[out] = _apply(builder, eqn, env)
        except NotExpressible as reason:
            if patient and reason.code not in BY_ITSELF:  # with another cut it may be none
                raise TranslationRefused(refused or {position: reason}) from None
            refused[position] = reason
            env[out] = _input(builder, eqn.out_avals[0])
    if refused:
        raise TranslationRefused(refused)


def _outward_segments(
    builder: NodeBuilder, eqns: Sequence[FlatEqn], results: Mapping[int, AxisValue], patient: bool
) -> dict[int, Segments]:
    """The results that need a kernel, in segments; each segment is constant or a node."""
    resolver = Resolver(builder)
    try:
        resolved = {v: _resolved(resolver, value) for v, value in results.items()}
        outward = {v: segments for v, segments in resolved.items() if segments is not None}
        _check_work(builder, _all_values(outward))
        return outward
    except NotExpressible as reason:
        raise TranslationRefused(_to_blame(eqns, reason, patient)) from None


def _resolved(resolver: Resolver, value: AxisValue) -> Segments | None:
    """A result in segments; None if it needs no kernel."""
    builder, segments = resolver.b, resolver.segments(value)
    given = [v for v in segments.values if v.is_constant or builder.is_input(v)]
    if len(given) == len(segments.values):
        return None
    if not all(v.is_constant for v in given):
        why = "an operand is a part of a result: XLA copies it"
        raise NotExpressible(Code.LAYOUT, why, resolver.to_blame(value))
    return replace(segments, values=tuple(v if v.is_constant else builder.materialize(v) for v in segments.values))


def _all_values(outward: Mapping[int, Segments]) -> list[AxisValue]:
    return [v for segments in outward.values() for v in segments.values]


def _inputs(builder: NodeBuilder, operands: Mapping[int, int | None]) -> dict[int, list[int]]:
    """For each operand the input nodes that show all or parts of the value."""
    out = {v: [n] for v, n in operands.items() if n is not None}
    number = {n: v for v, n in operands.items() if n is not None}
    for n, window in sorted(builder.windows.items()):
        number[n] = number[window.parent]
        out[number[n]].append(n)
    return out


def _to_blame(eqns: Sequence[FlatEqn], reason: NotExpressible, patient: bool) -> dict[int, NotExpressible]:
    """The equations to leave out if the parts of a region do not fit together: the last, or all."""
    parts = [n for n, eqn in enumerate(eqns) if eqn.primitive in rules.SLICING_PRIMITIVES]
    first = max(parts) if reason.equation is None else reason.equation
    return dict.fromkeys([first] if patient else [first, *parts], reason)


def _check_work(builder: NodeBuilder, values: Sequence[AxisValue]) -> None:
    """Refuse parts of a contraction or reduction that are more work together than the whole."""
    work: Counter[int] = Counter()
    live = [n for n in builder.live(values) if builder.nodes[n].over]
    for n in live:
        work[builder.origins.get(n, n)] += _work(builder, n)
    repeated = {origin for origin, total in work.items() if total > _work(builder, origin)}
    if not repeated:
        return
    to_blame = (builder.asked_by[n] for n in live if n in builder.asked_by and builder.origins[n] in repeated)
    why = "a part of what is needed as a whole too would be computed twice"
    raise NotExpressible(Code.LAYOUT, why, max(to_blame, default=None))


def _work(builder: NodeBuilder, n: int) -> int:
    axes = itertools.chain(builder.nodes[n].over, *(use.axes for use in builder.nodes[n].uses))
    return math.prod(map(builder.axes.extent, dict.fromkeys(builder.axes.resolve(axes))))


def _input(builder: NodeBuilder, aval: Any) -> AxisValue:
    return builder.input(aval.shape, rules.dtype_name(aval.dtype))


def _apply(builder: NodeBuilder, eqn: FlatEqn, env: dict[int, AxisValue]) -> AxisValue:
    operands = [
        env[atom] if isinstance(atom, int) else rules.literal(builder, atom.val, aval)
        for atom, aval in zip(eqn.inputs, eqn.in_avals, strict=True)
    ]
    (aval,) = eqn.out_avals
    result = rules.EquationInfo(eqn.params, tuple(aval.shape), rules.dtype_name(aval.dtype), aval.dtype)
    value = rules.apply(eqn.primitive, builder, result, operands)
    if len(value.dims) < len(result.shape):  # scalar constants of a shaped result
        value = rules.broadcast_scalar(builder, value, result.shape)
    return value


@dataclass(frozen=True)
class _Border:
    """How the values of a program become tensors of an assembled graph, and back."""

    builder: NodeBuilder
    graph: Assembled
    avals: Mapping[int, Any]

    def inward(self, number: int, nodes: Sequence[int]) -> Inward:
        """Describe the input nodes of one value."""
        names, aval = tuple(self.graph.tensors[n] for n in nodes), self.avals[number]
        shapes = (tuple(map(self.builder.axes.extent, self.graph.axes[name])) for name in names)
        views = (View(tuple(aval.shape), self._cuts(n), shape) for n, shape in zip(nodes, shapes, strict=True))
        return Inward(number, aval.dtype, names, tuple(views))

    def _cuts(self, node: int) -> tuple[ViewStep, ...]:
        if (window := self.builder.windows.get(node)) is None:
            return ()
        limits = tuple(map(operator.add, window.starts, window.sizes))
        return (*self._cuts(window.parent), ViewStep(window.shape, window.starts, limits))

    def outward(self, number: int, segments: Segments) -> Outward:
        """Describe how one value is joined from its segments."""
        aval = self.avals[number]
        return Outward(number, tuple(aval.shape), aval.dtype, tuple(map(self._segment, segments.values)), segments.grid)

    def _segment(self, value: AxisValue) -> Segment:
        axes = tuple(itertools.chain(*self.builder.dims(value)))
        extents, shape = tuple(map(self.builder.axes.extent, axes)), self.builder.axes.size(value.dims)
        if value.node is None:
            return Segment(None, value.offset, (), (), extents, shape)
        name = self.graph.tensors[value.node]
        stored = self.graph.axes[name]
        return Segment(
            tensor=name,
            constant=Fraction(0),
            permutation=tuple(stored.index(k) for k in axes if k in stored),
            spread=tuple(n if k in stored else 1 for k, n in zip(axes, extents, strict=True)),
            full=extents,
            shape=shape,
        )
