"""Exponentials inside of exponentials: small inner ones become functions that no algebra looks into.

Proofs know one exponential on each path (`mugraph.domains.finite_field`). A second one is an unknown function there,
and has no shift: nothing is left of softmax and log-sum-exp. Often the inner one is a parameter, such as a deviation
``exp(s)`` in ``logsumexp(-((x - m) / exp(s))**2)``, a length scale or a rate of decay. Nothing is lost if that one is
the unknown function.

before -> after:  t = exp{scale=c} s  ->  a = affine{scale=c} s;  t = inner_exp a

Both are the same number. An inner exponential that is as large as the outer one's argument stays as it is: it may be
another softmax, whose algebra is worth more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from mirage_jax.mugraph.graph import Axis, KernelGraph, Library, Load, Op, Tensor, unused_name
from mirage_jax.mugraph.operators import FUNCTIONS

MIN_SIZE_RATIO = 8  # of an outer exponential's argument over an inner exponential
UNKNOWN = FUNCTIONS.keys() | {"max", "shift", "logs", "lesslogs"}  # their values are unknown, whatever they are made of


def with_inner_functions(graph: KernelGraph) -> KernelGraph:
    """The same program, with small inner exponentials as functions; a graph of library operators."""
    made = {k.name: k for k in graph.kernels if isinstance(k, Library)}
    inner = {name for k in made.values() if k.op.op == "exp" for name in _small_inside(graph, made, k)}
    if not inner:
        return graph
    kernels = [new for k in graph.kernels for new in (_as_function(graph, made[k.name]) if k.name in inner else (k,))]
    return replace(graph, kernels=tuple(kernels))


def _small_inside(graph: KernelGraph, made: Mapping[str, Library], outer: Library) -> set[str]:
    """The small exponentials that an exponential's argument is made of, except through unknown functions."""
    most = _size(graph, outer.result.axes) / MIN_SIZE_RATIO
    found, seen, todo = set[str](), set[str](), [x.tensor for x in outer.loads]
    while todo:
        k = made.get(todo.pop())
        if k is None or k.name in seen or k.op.op in UNKNOWN:
            continue
        seen.add(k.name)
        if k.op.op == "exp" and _size(graph, k.result.axes) <= most:
            found.add(k.name)
        else:
            todo += [x.tensor for x in k.loads]
    return found


def _size(graph: KernelGraph, axes: tuple[Axis, ...]) -> int:
    return math.prod(map(graph.extent, axes))


def _as_function(graph: KernelGraph, k: Library) -> tuple[Library, ...]:
    """An exponential of a multiple of a number as a function of that multiple."""
    (x,) = k.loads
    if not k.op.attrs:
        return (replace(k, op=replace(k.op, op="inner_exp")),)
    name = unused_name(f"{k.name}a", {*graph.tensors})
    multiple = Library((x,), Op(name, "affine", (x.name,), x.axes, k.op.attrs), Tensor(name, x.axes, k.result.dtype))
    function = Op(k.op.name, "inner_exp", (x.name,), k.op.axes)
    return multiple, Library((Load(x.name, name, x.axes),), function, k.result)
