"""Exponentials of differences from a maximum as one operator, which rounds both numbers before it subtracts them.

before -> after:  m = max x;  d = x - m;  exp(c d)  ->  exps{degree=c} x m = exp(c (x - m)),  c positive

Where x is a product, a compiler may leave it unrounded in x - m: it makes one fma of both. m, a maximum of such
products, is rounded. The exponential of the largest logit is then not 1, but off by e to the rounding error of a logit.
A program's own exponentials are all off by one factor, which their sum divides out. A candidate may make its sum from
other exponentials than those that it divides. So all of them are ``exps``, which subtracts rounded numbers in every
lowering (`FloatDomain.rounded`, `lower.triton.ops.softmax`). It takes a maximum of minus infinity for 0, so that no
other difference is written so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from mirage_jax.mugraph.graph import BlockGraph, Kernel, KernelGraph, Library, Op, seen_from, without_unread

WIDE = frozenset({"f32", "f64"})
MAXIMA = frozenset({"max", "shift"})
KEEP_MAXIMA = frozenset({"last", "where"})  # of a maximum: the end of a running one, and one that is finite


def with_rounded_exponents(graph: KernelGraph) -> KernelGraph:
    """The same graph with ``exps`` for exponentials of differences made in the same kernel, or both by XLA."""
    maxima, kernels = set[str](), list[Kernel]()  # tensors that are maxima
    made: dict[str, Library] = {}  # differences from maxima, made by XLA
    for k in graph.kernels:
        read = {x.name for x in k.loads if x.tensor in maxima}
        found = _maxima(k.ops, read)
        maxima |= {s.tensor.name for s in k.stores if s.value in found}
        if isinstance(k, BlockGraph):
            kernels.append(_in_kernel(k, found))
            continue
        if _is_difference(k.op, found):
            made[k.name] = k
        kernels.append(_of_library(k, made))
    if tuple(kernels) == graph.kernels:
        return graph
    return without_unread(replace(graph, kernels=tuple(kernels)))


def _maxima(ops: Iterable[Op], read: Set[str]) -> set[str]:
    """Values of a kernel that are maxima, given the loads that are."""
    found = set(read)
    for op in ops:
        if op.op in MAXIMA or (op.op in KEEP_MAXIMA and not found.isdisjoint(op.args)):
            found.add(op.name)
    return found


def _is_difference(op: Op, maxima: Set[str]) -> bool:
    return op.op == "add" and (op.number("ca"), op.number("cb")) == (1, -1) and op.args[1] in maxima


def _is_of_multiple(op: Op) -> bool:
    return op.op == "exp" and op.number("scale") > 0 and op.number("offset", 0) == 0


def _subtracting(exponential: Op, args: tuple[str, ...]) -> Op:
    degree = exponential.number("scale")
    return replace(exponential, op="exps", args=args, attrs=() if degree == 1 else (("degree", degree),))


def _in_kernel(k: BlockGraph, maxima: Set[str]) -> Kernel:
    differences = {op.name: op for op in k.ops if _is_difference(op, maxima)}
    ops = [_made_of(op, differences) for op in k.ops]
    read = {*(a for op in ops for a in op.args), *(s.value for s in k.stores)}
    return replace(k, ops=tuple(op for op in ops if op.name in read or op.name not in differences))


def _made_of(op: Op, differences: Mapping[str, Op]) -> Op:
    if not _is_of_multiple(op) or op.args[0] not in differences:
        return op
    return _subtracting(op, differences[op.args[0]].args)


def _of_library(k: Library, made: Mapping[str, Library]) -> Kernel:
    if not _is_of_multiple(k.op) or k.loads[0].tensor not in made:
        return k
    (load,) = k.loads
    difference = made[load.tensor]
    if difference.result.dtype not in WIDE:  # XLA rounds it
        return k
    x, m = (replace(seen_from(load, difference, y), name=str(n)) for n, y in enumerate(difference.operands))
    return replace(k, loads=(x, m), op=_subtracting(k.op, ("0", "1")))
