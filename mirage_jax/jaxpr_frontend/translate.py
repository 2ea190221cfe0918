"""Equations of one region -> its reference muGraph and the border between JAX values and graph tensors.

The reference says *what* is computed: one library kernel per elementary operator over named axes. Casts are identities
in the algebra; tensors have the dtypes that the program stores.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from mirage_jax.jaxpr_frontend import jax_compat, rules
from mirage_jax.jaxpr_frontend.assemble import Assembled, assemble
from mirage_jax.jaxpr_frontend.axes import Key
from mirage_jax.jaxpr_frontend.flat import FlatEqn, FlatProgram, evaluate
from mirage_jax.jaxpr_frontend.reasons import NotExpressible
from mirage_jax.jaxpr_frontend.values import Builder, Value
from mirage_jax.mugraph.arrays import numpy_dtype
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.logarithms import join_shifts
from mirage_jax.mugraph.sentinels import sentinels_to_masks


@dataclass(frozen=True, slots=True)
class Boundary:
    """How a JAX value and a graph tensor become each other, all row-major.

    In: reshape to `shape`. Out: transpose by `permutation`, reshape to `spread` (1 for axes that the tensor does not
    depend on), broadcast to `full`, reshape to `shape`, cast to `dtype`.
    """

    value: int  # number of the value in the flat program
    tensor: str
    shape: tuple[int, ...]
    dtype: Any
    permutation: tuple[int, ...] = ()
    spread: tuple[int, ...] = ()
    full: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a program that a muGraph can replace.

    `graph` reads and makes graph tensors; `prepare` and `finish` are the border. Some results need no kernel (an input
    seen through a reshape, a constant): equations in `aside` make them, the way JAX would.
    """

    graph: KernelGraph
    inputs: tuple[Boundary, ...]
    outputs: tuple[Boundary, ...]
    equations: tuple[FlatEqn, ...]
    aside: tuple[FlatEqn, ...] = ()
    operands: tuple[int, ...] = ()  # values that the equations read from outside
    results: tuple[int, ...] = ()  # values that the program reads from here, in order
    avals: dict[int, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def where(self) -> tuple[str, ...]:
        """The user's lines, each once, in order."""
        return tuple(dict.fromkeys(eqn.where for eqn in self.equations))

    @cached_property
    def primitives(self) -> tuple[str, ...]:
        return tuple(eqn.primitive for eqn in self.equations)

    def prepare(self, values: Sequence[Any]) -> list[Any]:
        """JAX values of `inputs` -> input tensors of the graph."""
        return [jnp.reshape(v, b.shape) for v, b in zip(values, self.inputs, strict=True)]

    def finish(self, tensors: Sequence[Any]) -> list[Any]:
        """Output tensors of the graph -> JAX values of `outputs`."""
        by_name = dict(zip(self.graph.outputs, tensors, strict=True))

        def one(b: Boundary) -> Any:
            x = jnp.transpose(by_name[b.tensor], b.permutation)
            return jnp.broadcast_to(x.reshape(b.spread), b.full).reshape(b.shape).astype(b.dtype)

        return [one(b) for b in self.outputs]

    def reference(self, *values: Any) -> list[Any]:
        """The original equations, from the values of `inputs` to those of `outputs`, alone on one device."""
        given = dict(zip((b.value for b in self.inputs), values, strict=True))
        # An operand that is no input of the graph has no influence on the result: any value will do.
        env = {
            v: given[v] if v in given else jnp.zeros(a.shape, a.dtype) for v in self.operands for a in [self.avals[v]]
        }
        evaluate(self.equations, env, jax_compat.bind_alone)
        return [env[b.value] for b in self.outputs]

    def tensor_avals(self) -> list[Any]:
        """Avals of the graph's outputs, varying over the same manual axes as the JAX values that they become."""
        by_name = {b.tensor: b for b in reversed(self.outputs)}

        def one(name: str) -> Any:
            tensor, boundary = self.graph.tensors[name], by_name[name]
            shape = tuple(map(self.graph.extent, tensor.axes))
            return self.avals[boundary.value].update(shape=shape, dtype=numpy_dtype(tensor.dtype), weak_type=False)

        return [one(name) for name in self.graph.outputs]


class Refused(Exception):
    """An equation of the region cannot be expressed; carries its position and the reason."""

    def __init__(self, position: int, reason: NotExpressible):
        super().__init__(str(reason))
        self.position = position
        self.reason = reason


def translate(program: FlatProgram, eqns: Sequence[FlatEqn], results: Sequence[int]) -> Region | None:
    """The region that `eqns` form, of which `results` are read outside. None if nothing is left to compute."""
    made = {v for eqn in eqns for v in eqn.outputs}
    operands = tuple(dict.fromkeys(v for eqn in eqns for v in eqn.reads if v not in made))
    builder = Builder()
    env = {v: _input(builder, program.avals[v]) for v in operands}
    for position, eqn in enumerate(eqns):
        try:
            (out,) = eqn.outputs
            env[out] = _apply(builder, eqn, env)
        except NotExpressible as reason:
            raise Refused(position, reason) from None
    free = {env[v].node for v in operands}
    computed = [v for v in results if not env[v].is_constant and (env[v].node not in free or not env[v].is_plain)]
    if not computed:
        return None
    values = {v: builder.materialize(env[v]) for v in computed}
    nodes = {v: env[v].node for v in operands}
    assembled = assemble(builder, [n for n in nodes.values() if n is not None], list(values.values()))
    used = [v for v in operands if nodes[v] in assembled.tensors]
    return Region(
        graph=join_shifts(sentinels_to_masks(assembled.graph)),
        inputs=tuple(_inward(builder, assembled, v, env[v], program) for v in used),
        outputs=tuple(_outward(builder, assembled, v, values[v], program) for v in computed),
        equations=tuple(eqns),
        aside=_aside(eqns, [v for v in results if v not in values]),
        operands=operands,
        results=tuple(results),
        avals={v: program.avals[v] for v in (*operands, *results)},
    )


def _input(builder: Builder, aval: Any) -> Value:
    return builder.input(aval.shape, rules.dtype_name(aval.dtype))


def _apply(builder: Builder, eqn: FlatEqn, env: dict[int, Value]) -> Value:
    operands = [
        env[atom] if isinstance(atom, int) else rules.literal(builder, atom.val, aval)
        for atom, aval in zip(eqn.inputs, eqn.in_avals, strict=True)
    ]
    (aval,) = eqn.out_avals
    result = rules.Result(eqn.params, tuple(aval.shape), rules.dtype_name(aval.dtype), aval.dtype)
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


def _inward(builder: Builder, graph: Assembled, number: int, value: Value, program: FlatProgram) -> Boundary:
    assert value.node is not None
    name = graph.tensors[value.node]
    shape = tuple(map(builder.axes.extent, graph.axes[name]))
    return Boundary(number, name, shape, program.avals[number].dtype)


def _outward(builder: Builder, graph: Assembled, number: int, value: Value, program: FlatProgram) -> Boundary:
    assert value.node is not None
    name = graph.tensors[value.node]
    stored: tuple[Key, ...] = graph.axes[name]
    axes = tuple(itertools.chain(*builder.dims(value)))
    extents = tuple(map(builder.axes.extent, axes))
    return Boundary(
        value=number,
        tensor=name,
        shape=tuple(program.avals[number].shape),
        dtype=program.avals[number].dtype,
        permutation=tuple(stored.index(k) for k in axes if k in stored),
        spread=tuple(n if k in stored else 1 for k, n in zip(axes, extents, strict=True)),
        full=extents,
    )
