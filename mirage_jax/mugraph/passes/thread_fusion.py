"""Thread graphs: the third level of a muGraph, formed by rule (Mirage, OSDI'25, section 4.2).

Input: a block graph. Output: its thread graphs, the maximal connected groups of pointwise operators of one stage.
Inside a group every value has one element per thread position and lives in registers; only what a contraction, a
reduction, an accumulator or a store reads leaves it (`outputs`), and only that may be laid out anew between threads.
Triton's compiler does the same to the expressions that `lower.triton.emitter` writes for a group, so the rule says
what runs, and costs nothing to search.
"""

from __future__ import annotations

from dataclasses import dataclass

from mirage_jax.mugraph.graph import BlockGraph
from mirage_jax.mugraph.operators import operator


@dataclass(frozen=True, slots=True)
class ThreadGraph:
    """Names of the operators, in order, of the values that they read from outside, and of those that others read."""

    ops: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        def names(xs: tuple[str, ...]) -> str:
            return " ".join("%" + x for x in xs)

        return f"thread {{ {names(self.inputs)} -> {names(self.ops)} -> {names(self.outputs)} }}"


def thread_graphs(kernel: BlockGraph) -> tuple[ThreadGraph, ...]:
    """The thread graphs of a kernel, in order of their first operators."""
    pointwise = {op.name: op for op in kernel.ops if operator(op.op).pointwise and op.args}
    group = {name: name for name in pointwise}  # union-find by the first operator of each group

    def find(name: str) -> str:
        while group[name] != name:
            name = group[name]
        return name

    for op in pointwise.values():
        for a in op.args:
            if a in pointwise and kernel.stages[a] == kernel.stages[op.name]:
                first, second = sorted((find(a), find(op.name)), key=list(pointwise).index)
                group[second] = first
    stored = {s.value for s in kernel.stores}
    out: list[ThreadGraph] = []
    for root in pointwise:
        if find(root) != root:
            continue
        inside = tuple(n for n in pointwise if find(n) == root)
        reads = dict.fromkeys(a for n in inside for a in pointwise[n].args if a not in inside)
        leaves = tuple(n for n in inside if n in stored or any(u not in inside for u in kernel.users[n]))
        out.append(ThreadGraph(inside, tuple(reads), leaves))
    return tuple(out)
