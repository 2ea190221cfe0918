"""Differences from a maximum subtract rounded numbers.

before -> after:  m = max x;  d = x - m;  exp(c d)  ->  m = max x;  r = rounded x;  d = r - m;  exp(c d),  c positive

Where x is a product, a compiler may leave it unrounded in x - m: it makes one fma of both. m, a maximum of such
products, is rounded. The exponential of the largest logit is then not 1, but off by e to the rounding error of a logit.
A program's own exponentials are all off by one factor, which their sum divides out. A candidate may make its sum from
other exponentials than those that it divides, as ``exps`` does, which always subtracts rounded numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from mirage_jax.mugraph.graph import BlockGraph, Kernel, KernelGraph, Library, Op, Tensor

WIDE = frozenset({"f32", "f64"})
MAXIMA = frozenset({"max", "shift"})
KEEP_MAXIMA = frozenset({"last", "where"})  # of a maximum: the end of a running one, and one that is finite


def with_rounded_exponents(graph: KernelGraph) -> KernelGraph:
    """The same graph, in which exponentials of differences from a maximum are made of rounded numbers."""
    maxima, kernels = set[str](), list[Kernel]()  # tensors that are maxima
    rounded = {t.name for t in graph.inputs}  # tensors that lie in memory, or are rounded already
    for k in graph.kernels:
        read = {x.name for x in k.loads if x.tensor in maxima}
        found = _maxima(k.ops, read)
        maxima |= {s.tensor.name for s in k.stores if s.value in found}
        if isinstance(k, BlockGraph) or k.op.op == "rounded":
            rounded |= {s.tensor.name for s in k.stores}
        kernels += [_in_kernel(k, found)] if isinstance(k, BlockGraph) else _of_library(k, found, rounded)
    return graph if tuple(kernels) == graph.kernels else replace(graph, kernels=tuple(kernels))


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
    return op.op == "exp" and op.number("scale") > 0


def _in_kernel(k: BlockGraph, maxima: Set[str]) -> Kernel:
    """A kernel that rounds what it computes; what it loads is rounded."""
    computed = {op.name: op for op in k.ops if op.op != "rounded"}
    exponents = {op.args[0] for op in k.ops if _is_of_multiple(op)}
    ops = list[Op]()
    for op in k.ops:
        if op.name in exponents and _is_difference(op, maxima) and op.args[0] in computed:
            x, m = op.args
            rounded = Op(f"{op.name}_rounded", "rounded", (x,), computed[x].axes)
            ops += [rounded, replace(op, args=(rounded.name, m))]
        else:
            ops.append(op)
    return replace(k, ops=tuple(ops))


def _of_library(k: Library, maxima: Set[str], rounded: Set[str]) -> list[Kernel]:
    """A difference by XLA, and before it what rounds; in 16 bits XLA rounds the difference itself."""
    if not _is_difference(k.op, maxima) or k.result.dtype not in WIDE or k.operands[0].tensor in rounded:
        return [k]
    x, m = k.operands
    tensor = Tensor(f"{k.name}_rounded", x.axes, k.result.dtype)
    rounding = Library((x,), Op(k.op.name, "rounded", (x.name,), x.axes), tensor)
    return [rounding, replace(k, loads=(replace(x, tensor=tensor.name), m))]
