"""Equations of one region -> its reference muGraph and the border between JAX values and graph tensors.

The reference says *what* is computed: one library kernel per elementary operator over named axes. Casts are identities
in the algebra; tensors have the dtypes that the program stores.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.partition.fingerprint import digest
from mirage_jax.jaxpr_frontend.partition.program import FlatEqn, FlatProgram, evaluate
from mirage_jax.jaxpr_frontend.partition.reasons import BY_ITSELF, Code, NotExpressible
from mirage_jax.jaxpr_frontend.translate import rules
from mirage_jax.jaxpr_frontend.translate.assemble import Assembled, assemble
from mirage_jax.jaxpr_frontend.translate.axes import AxisKey
from mirage_jax.jaxpr_frontend.translate.builder import AxisValue, NodeBuilder
from mirage_jax.jaxpr_frontend.translate.concatenation import Pieces, Resolver
from mirage_jax.mugraph.dtypes import numpy_dtype
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.passes.log_sum_exp import join_shifts
from mirage_jax.mugraph.views import View, ViewStep


@dataclass(frozen=True, slots=True)
class Inward:
    """How a JAX value becomes graph tensors: each is all of it, or a part."""

    value: int  # number of the value in the flat program
    dtype: Any
    tensors: tuple[str, ...]
    views: tuple[View, ...]

    @property
    def parts(self) -> list[tuple[str, View]]:
        return list(zip(self.tensors, self.views, strict=True))

    @property
    def is_mostly_read(self) -> bool:
        """Is half of it or more in some tensor? If it is made for this, XLA makes no more than is read in copies."""
        parts = {view.cuts: math.prod(view.shape) for view in self.views}
        return 2 * sum(parts.values()) >= math.prod(self.views[0].whole)


@dataclass(frozen=True, slots=True)
class Piece:
    """How a graph tensor becomes a piece of a JAX value: transpose by `permutation`, reshape to `spread` (1 for axes
    that the tensor does not depend on), broadcast to `full`, reshape to `shape`. Without a tensor: a constant.
    """

    tensor: str | None
    constant: Fraction
    permutation: tuple[int, ...]
    spread: tuple[int, ...]
    full: tuple[int, ...]
    shape: tuple[int, ...]

    def array(self, tensors: Mapping[str, Any], dtype: Any, xp: Any) -> Any:
        if self.tensor is None:
            return xp.full(self.shape, float(self.constant), dtype)
        x = xp.transpose(tensors[self.tensor], self.permutation).reshape(self.spread)
        return xp.broadcast_to(x, self.full).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Outward:
    """How graph tensors become a JAX value: pieces, in row-major order of `grid`, joined and reshaped to `shape`."""

    value: int
    shape: tuple[int, ...]
    dtype: Any
    pieces: tuple[Piece, ...]
    grid: tuple[int, ...]

    def joined(self, tensors: Mapping[str, Any], xp: Any) -> Any:
        """The JAX value, in the dtypes of the tensors."""
        arrays = [piece.array(tensors, self.dtype, xp) for piece in self.pieces]
        for axis, count in reversed(list(enumerate(self.grid))):
            if count > 1:
                arrays = [xp.concatenate(arrays[n : n + count], axis) for n in range(0, len(arrays), count)]
        (whole,) = arrays
        return whole.reshape(self.shape)


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
    def places(self) -> dict[int, tuple[int, bool, int]]:
        """Where its border is in its equations: by value which of them, whether it is read there, and its place."""
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
        return tuple(eqn.primitive for eqn in self.equations)

    def prepare(self, values: Sequence[Any], in_place: Collection[str] = ()) -> list[Any]:
        """Values of `inputs`, arrays of JAX or numpy -> input tensors of the graph; for those `in_place` all of it."""
        pairs = [(v, tensor, view) for v, b in zip(values, self.inputs, strict=True) for tensor, view in b.parts]
        return [v if tensor in in_place else view.of(v) for v, tensor, view in pairs]

    @property
    def partial(self) -> dict[str, View]:
        """Input tensors that are parts of operands of which much is read."""
        return {name: view for b in self.inputs if b.is_mostly_read for name, view in b.parts if view.cuts}

    @cached_property
    def text(self) -> str:
        """What is computed, of which parts of the operands, and how the user wrote it."""
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

    def reference(self, *values: Any) -> list[Any]:
        """The original equations, from the values of `inputs` to those of `outputs`, alone on one device."""
        given = dict(zip((b.value for b in self.inputs), values, strict=True))
        # An operand that is no input of the graph has no influence on the result: any value will do.
        env = {
            v: given[v] if v in given else jnp.zeros(a.shape, a.dtype) for v in self.operands for a in [self.avals[v]]
        }
        evaluate(self.equations, env, jax_compat.bind_alone)
        return [env[b.value] for b in self.outputs]

    def tensor_types(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of the graph's outputs."""
        tensors = (self.graph.tensors[name] for name in self.graph.outputs)
        return [(tuple(map(self.graph.extent, t.axes)), numpy_dtype(t.dtype)) for t in tensors]


class TranslationRefused(Exception):
    """Equations of the region cannot be expressed; carries the reason for each, by its position.

    There are several if each of them has its reason whatever is around it (`BY_ITSELF`), or if all were asked for.
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
    """Make the region that `eqns` form, of which `results` are read outside. None if nothing is left to compute.

    Raises `TranslationRefused`. patient: of reasons that another cut may remove, only the first is told.
    """
    made = {v for eqn in eqns for v in eqn.outputs}
    operands = tuple(dict.fromkeys(v for eqn in eqns for v in eqn.reads if v not in made))
    builder = NodeBuilder()
    env = {v: _input(builder, program.avals[v]) for v in operands}
    _apply_all(builder, eqns, env, patient)
    try:
        outward = _resolved(builder, {v: env[v] for v in results})
        _check_work(builder, [v for pieces in outward.values() for v in pieces.values])
    except NotExpressible as reason:
        raise TranslationRefused(_to_blame(eqns, reason, patient)) from None
    if not outward:
        return None
    flat = [v for pieces in outward.values() for v in pieces.values if not v.is_constant]
    inputs = _inputs(builder, {v: env[v].node for v in operands})
    assembled = assemble(builder, [n for nodes in inputs.values() for n in nodes], flat)
    inward = tuple(
        _inward(builder, assembled, v, used, program)
        for v, nodes in inputs.items()
        if (used := [n for n in nodes if n in assembled.tensors])
    )
    return Region(
        graph=join_shifts(assembled.graph),
        translated=assembled.graph,
        inputs=inward,
        outputs=tuple(_outward(builder, assembled, v, pieces, program) for v, pieces in outward.items()),
        equations=tuple(eqns),
        aside=_aside(eqns, [v for v in results if v not in outward]),
        operands=operands,
        results=tuple(results),
        avals={v: program.avals[v] for v in (*operands, *results)},
        written=digest(eqns, [b.value for b in inward], list(outward)),
    )


def renamed(region: Region, program: FlatProgram, eqns: Sequence[FlatEqn]) -> Region:
    """The region that `eqns` form, which are of the same form as those of `region`."""
    names = {v: (eqns[n].reads if read else eqns[n].outputs)[i] for v, (n, read, i) in region.places.items()}
    position = {id(eqn): n for n, eqn in enumerate(region.equations)} if region.aside else {}
    operands, results = (tuple(map(names.__getitem__, values)) for values in (region.operands, region.results))
    return replace(
        region,
        inputs=tuple([Inward(names[b.value], b.dtype, b.tensors, b.views) for b in region.inputs]),
        outputs=tuple([Outward(names[b.value], b.shape, b.dtype, b.pieces, b.grid) for b in region.outputs]),
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


def _resolved(builder: NodeBuilder, results: Mapping[int, AxisValue]) -> dict[int, Pieces]:
    """The results that need a kernel, in pieces of which each is constant or a node."""
    resolver, out = Resolver(builder), {}

    def is_given(v: AxisValue) -> bool:
        return v.node is None or (v.is_plain and builder.nodes[v.node].op == "input")

    for number, value in results.items():
        pieces = resolver.pieces(value)
        if all(map(is_given, pieces.values)):
            continue
        if any(is_given(v) and not v.is_constant for v in pieces.values):
            why = "an operand is a part of a result: XLA copies it"
            raise NotExpressible(Code.LAYOUT, why, resolver.to_blame(value))
        values = tuple(v if v.is_constant else builder.materialize(v) for v in pieces.values)
        out[number] = replace(pieces, values=values)
    return out


def _inputs(builder: NodeBuilder, operands: Mapping[int, int | None]) -> dict[int, list[int]]:
    """For each operand the inputs that are the whole of it, or windows of it."""
    out = {v: [n] for v, n in operands.items() if n is not None}
    number = {n: v for v, n in operands.items() if n is not None}
    for n, window in sorted(builder.windows.items()):
        number[n] = number[window.parent]
        out[number[n]].append(n)
    return out


def _to_blame(eqns: Sequence[FlatEqn], reason: NotExpressible, patient: bool) -> dict[int, NotExpressible]:
    """What is left out if the parts of a region do not fit together: the last of them, or all."""
    parts = [n for n, eqn in enumerate(eqns) if eqn.primitive in rules.SLICING_PRIMITIVES]
    first = max(parts) if reason.equation is None else reason.equation
    return dict.fromkeys([first] if patient else [first, *parts], reason)


def _check_work(builder: NodeBuilder, values: Sequence[AxisValue]) -> None:
    """The parts of a contraction or reduction may be no more work together than the whole of it."""
    work: dict[int, int] = {}
    live = [n for n in builder.live(values) if builder.nodes[n].over]
    for n in live:
        origin = builder.origins.get(n, n)
        work[origin] = work.get(origin, 0) + _work(builder, n)
    repeated = {origin for origin, total in work.items() if total > _work(builder, origin)}
    if repeated:
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


def _aside(eqns: Sequence[FlatEqn], wanted: Sequence[int]) -> tuple[FlatEqn, ...]:
    """The equations that `wanted` need."""
    needed, kept = set(wanted), []
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outputs):
            kept.append(eqn)
            needed.update(eqn.reads)
    return tuple(reversed(kept))


def _inward(builder: NodeBuilder, graph: Assembled, number: int, nodes: Sequence[int], program: FlatProgram) -> Inward:
    names, aval = tuple(graph.tensors[n] for n in nodes), program.avals[number]
    shapes = (tuple(map(builder.axes.extent, graph.axes[name])) for name in names)
    views = (View(tuple(aval.shape), _cuts(builder, n), shape) for n, shape in zip(nodes, shapes, strict=True))
    return Inward(number, aval.dtype, names, tuple(views))


def _cuts(builder: NodeBuilder, node: int) -> tuple[ViewStep, ...]:
    if (window := builder.windows.get(node)) is None:
        return ()
    limits = tuple(map(operator.add, window.starts, window.sizes))
    return (*_cuts(builder, window.parent), ViewStep(window.shape, window.starts, limits))


def _outward(builder: NodeBuilder, graph: Assembled, number: int, pieces: Pieces, program: FlatProgram) -> Outward:
    aval = program.avals[number]
    outward = tuple(_piece(builder, graph, v) for v in pieces.values)
    return Outward(number, tuple(aval.shape), aval.dtype, outward, pieces.grid)


def _piece(builder: NodeBuilder, graph: Assembled, value: AxisValue) -> Piece:
    axes = tuple(itertools.chain(*builder.dims(value)))
    extents, shape = tuple(map(builder.axes.extent, axes)), builder.axes.size(value.dims)
    if value.node is None:
        return Piece(None, value.offset, (), (), extents, shape)
    name = graph.tensors[value.node]
    stored: tuple[AxisKey, ...] = graph.axes[name]
    return Piece(
        tensor=name,
        constant=Fraction(0),
        permutation=tuple(stored.index(k) for k in axes if k in stored),
        spread=tuple(n if k in stored else 1 for k, n in zip(axes, extents, strict=True)),
        full=extents,
        shape=shape,
    )
