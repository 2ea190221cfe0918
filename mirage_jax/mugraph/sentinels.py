"""Huge negative numbers in place of minus infinity: masks that they stand for.

Many programs mask the logits of a softmax with the most negative float rather than with -inf, so that a row of which
everything is masked gives no NaN. Where indices alone tell that no such row exists, the two are the same in floats: the
row's maximum is a logit, and the exponential of the sentinel less any logit is exactly zero.

before -> after:  t = where(n <= i, s, -2e38); exp(t - max[n] t)  ->  t = mask(n <= i, s); exp(t - max[n] t)

Only there: every use of t has to be a maximum over a row that is not wholly masked, an exponential, or an exponential
of its difference to such a maximum. And no logit may be as low by the program's own doing: in a row of which it masked
all the rest, too, the sentinel would be the maximum. (Inputs that low would tell the difference as well.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mirage_jax.mugraph.evaluate import evaluate
from mirage_jax.mugraph.graph import Axis, Kernel, KernelGraph, Library, Load
from mirage_jax.mugraph.predicates import Affine, FactDomain, Known, Masked, Truth, holds_somewhere, renamed

SENTINEL = -(10**30)  # no logit of a program that means something is as low
LOW = frozenset({"mask", "log"})  # operators that make minus infinity of ordinary numbers
FINITE = frozenset(
    {"exp", "logistic", "tanh", "erf", "erfc", "sign", "isfinite", "lt", "le", "eq", "and", "or", "not"}
)  # and those that give ordinary numbers also for minus infinity


def sentinels_to_masks(graph: KernelGraph) -> KernelGraph:
    """The same program with masks for what sentinels mask; a graph of library operators."""
    every = replace(graph, outputs=tuple(graph.tensors))
    inputs = [Known(axes=t.axes) for t in graph.inputs]
    facts = dict(zip(every.outputs, evaluate(every, inputs, FactDomain()), strict=True))
    low = _as_low(graph)
    kernels = tuple(_masked(graph, k, facts, low) for k in graph.kernels)
    unread = {x.tensor for k in graph for x in k.loads} - {x.tensor for k in kernels for x in k.loads}
    return replace(graph, kernels=tuple(k for k in kernels if k.name not in unread))


def _as_low(graph: KernelGraph) -> frozenset[str]:
    """Tensors that may hold minus infinity, or a sentinel, where inputs are ordinary numbers."""
    out: set[str] = set()
    for k in graph.kernels:
        if isinstance(k, Library):
            numbers = (v for v in k.op.attributes.values() if not isinstance(v, str | tuple))
            given = k.op.op not in FINITE and any(x.tensor in out for x in k.loads)
            if given or k.op.op in LOW or any(abs(v) >= -SENTINEL for v in numbers):
                out.add(k.name)
    return frozenset(out)


def _masked(graph: KernelGraph, kernel: Kernel, facts: dict[str, Known], as_low: frozenset[str]) -> Kernel:
    if not isinstance(kernel, Library) or kernel.op.op != "where":
        return kernel
    loads = {x.name: x for x in kernel.loads}
    condition, value, low = (loads[a] for a in kernel.op.args)
    match facts[low.tensor].fact, facts[condition.tensor].fact:
        case Affine(coefficients, number), Truth(holds) if (
            not coefficients and number <= SENTINEL and value.tensor not in as_low
        ):
            seen = renamed(Masked(holds), dict(zip(facts[condition.tensor].axes, condition.axes, strict=True)))
            if not _only_exponentials(graph, Known(seen, kernel.result.axes), kernel.name):
                return kernel
            op = replace(kernel.op, op="mask", args=(condition.name, value.name))
            return replace(kernel, op=op, loads=(condition, value))
        case _:
            return kernel


def _only_exponentials(graph: KernelGraph, mask: Known, name: str) -> bool:
    """Would every use of tensor `name` be the same if it were minus infinity where `mask` says?"""
    maxima = {k.name for k, load in _uses(graph, name) if k.op.op == "max" and _no_empty_row(graph, mask, k, load)}
    return name not in graph.outputs and all(
        k.name in maxima or _is_exponential(k) or _is_difference(graph, k, load, maxima)
        for k, load in _uses(graph, name)
    )


def _uses(graph: KernelGraph, name: str) -> Iterator[tuple[Library, Load]]:
    for k in graph.kernels:
        if isinstance(k, Library):
            yield from ((k, load) for load in k.loads if load.tensor == name)


def _no_empty_row(graph: KernelGraph, mask: Known, kernel: Library, load: Load) -> bool:
    fact = renamed(mask.fact, dict(zip(mask.axes, load.axes, strict=True)))
    reduced = kernel.op.attributes["axes"]
    assert isinstance(fact, Masked) and isinstance(reduced, tuple)
    return any(_somewhere(graph, fact, n) for n in reduced)


def _somewhere(graph: KernelGraph, mask: Masked, n: Axis) -> bool:
    return holds_somewhere(mask.unless, n, graph.extent)


def _is_exponential(kernel: Library) -> bool:
    scale = kernel.op.attributes.get("scale", 1)
    return kernel.op.op == "exp" and not isinstance(scale, str | tuple) and scale > 0


def _is_difference(graph: KernelGraph, kernel: Library, load: Load, maxima: set[str]) -> bool:
    """``t - max t``, of which nothing but exponentials is taken."""
    attrs = {"ca": 1, "cb": 1} | kernel.op.attributes
    if kernel.op.op != "add" or kernel.op.args[0] != load.name or (attrs["ca"], attrs["cb"]) != (1, -1):
        return False
    other = next(x for x in kernel.loads if x.name == kernel.op.args[1])
    uses = [k for k, _ in _uses(graph, kernel.name)]
    return other.tensor in maxima and kernel.name not in graph.outputs and all(map(_is_exponential, uses))
