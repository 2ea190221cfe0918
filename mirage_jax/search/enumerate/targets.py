"""What is searched for: the outputs of a reference as normal forms, and its batch axes."""

from __future__ import annotations

from mirage_jax.errors import UnsupportedError
from mirage_jax.mugraph.graph import Axis, KernelGraph
from mirage_jax.mugraph.operators import operator
from mirage_jax.search.enumerate.axioms import Axioms
from mirage_jax.search.enumerate.normal_form import Expressions, NormalFormDomain, Poly

MAX_SUM_TERMS = 64  # a sum of more products than this is not searched


def express(reference: KernelGraph, e: Expressions) -> dict[str, Poly]:
    """Normal form of every tensor of a graph of library operators."""
    domain = NormalFormDomain(e)
    known = {t.name: e.atom(t.name, t.axes) for t in reference.inputs}
    for k in reference.kernels:
        values = {
            load.name: e.rename(
                known[load.tensor], dict(zip(reference.tensors[load.tensor].axes, load.axes, strict=True))
            )
            for load in k.loads
        }
        for op in k.ops:
            p = operator(op.op).meaning(domain, *(values[a] for a in op.args), **op.attributes)
            if len(e.poly(p)) > MAX_SUM_TERMS:
                raise UnsupportedError(f"a value expands to a sum of more than {MAX_SUM_TERMS} products")
            values[op.name] = p
        for s in k.stores:
            known[s.tensor.name] = values[s.value]
    return known


def batch_axes(
    reference: KernelGraph, targets: list[Poly], axioms: Axioms, reduced: frozenset[Axis]
) -> frozenset[Axis]:
    """Axes that tiles have one element of: in every output, never reduced, and in every large input, which keeps two
    others, or needed to bound the rank. Rather not the last axis of an input: neighbours are read together.

    Of a tensor that is summed over several axes one of these does that: a loop then takes its elements one by one. So
    scales that groups of weights share are applied behind the product of a group.
    """
    e = axioms.e
    candidates = frozenset[Axis].intersection(*(e.axes(r) for r in targets)) - reduced
    shapes = [frozenset(t.axes) for t in reference.inputs if len(t.axes) > 1] + [e.axes(r) for r in targets]
    big = [s for s in shapes if len(s) > 2]
    last = {t.axes[-1] for t in reference.inputs if len(t.axes) > 2}
    batch = frozenset[Axis]()
    for a in sorted(candidates, key=lambda a: (a in last, reference.extent(a), a)):
        if big and all(a in s and len(s - batch) > 2 for s in big):
            batch |= {a}
    for s in sorted(shapes, key=lambda s: (-len(s), sorted(s))):
        while len(s - batch) > 2 and ((s - batch) & candidates or len(s & reduced - batch) > 1):
            summed = s & reduced - batch
            chosen = summed if len(summed) > 1 else (s - batch) & candidates
            batch |= {min(chosen, key=lambda a: (reference.extent(a), a))}
    return batch
