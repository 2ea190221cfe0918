"""Thread graphs: the third level of a muGraph, formed by rule (Mirage, OSDI'25, section 4.2).

Input: a block graph. Output: its thread graphs, the maximal connected groups of pointwise operators of one stage.
Inside a group every value has one element per thread position and lives in registers; only what a contraction, a
reduction, an accumulator or a store reads leaves it (`outputs`), and only that may change its layout between threads.
Triton's compiler does the same to the expressions that `lower.triton.emitter` writes for a group. So the rule
describes the code that runs, and there is nothing to search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mirage_jax.mugraph.graph import BlockGraph, Op
from mirage_jax.mugraph.operators import operator


@dataclass(frozen=True, slots=True)
class ThreadGraph:
    """Names of the operators, in order, of the values that they read from outside, and of those that others read."""

    ops: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        names = (" ".join("%" + x for x in xs) for xs in (self.inputs, self.ops, self.outputs))
        return f"thread {{ {' -> '.join(names)} }}"


def thread_graphs(kernel: BlockGraph) -> tuple[ThreadGraph, ...]:
    """Form the thread graphs of a kernel, in order of their first operators."""
    pointwise = {op.name: op for op in kernel.ops if operator(op.op).pointwise and op.args}
    order = list(pointwise)
    groups = {name: [name] for name in pointwise}  # all members of a group share one list
    for op in pointwise.values():
        for a in op.args:
            if a in pointwise and kernel.stages[a] == kernel.stages[op.name]:
                merged = sorted({*groups[a], *groups[op.name]}, key=order.index)
                groups |= dict.fromkeys(merged, merged)
    first = {id(group): group for group in groups.values()}  # in order of first operators
    return tuple(_thread_graph(kernel, group, pointwise) for group in first.values())


def _thread_graph(kernel: BlockGraph, group: list[str], pointwise: Mapping[str, Op]) -> ThreadGraph:
    stored = {s.value for s in kernel.stores}
    reads = dict.fromkeys(a for n in group for a in pointwise[n].args if a not in group)
    outputs = tuple(n for n in group if n in stored or not set(group).issuperset(kernel.users[n]))
    return ThreadGraph(tuple(group), tuple(reads), outputs)
