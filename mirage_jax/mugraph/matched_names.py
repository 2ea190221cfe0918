"""Gives the values of one graph the names that another graph has for the same steps, so that a diff shows less.

Input: two kernel graphs of library operators with the same inputs and outputs. Output: the second one under other
names. Names mean nothing, so the graph stays the same program.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from mirage_jax.mugraph.graph import KernelGraph, Library


def with_names_of(program: KernelGraph, graph: KernelGraph) -> KernelGraph:
    """Rename the values of `graph` as in `program`, where steps match; graphs with kernels stay as they are."""
    old, new = _operators(program), _operators(graph)
    if len(old) < len(program.kernels) or len(new) < len(graph.kernels):
        return graph
    names = _same_steps(old, new, {})
    names |= _from_outputs(old, new, names, list(zip(graph.outputs, program.outputs, strict=True)))
    names = _same_steps(old, new, names)
    return _renamed(graph, _unique(names, new, {t.name for t in program.inputs} | set(old)))


def _same_steps(old: dict[str, Library], new: dict[str, Library], names: dict[str, str]) -> dict[str, str]:
    """Add the old names of steps that are the same under these names."""
    found = dict(names)
    for kernel in new.values():
        free = [k for k in old.values() if k.name not in found.values()]
        reads_matched = all(x.tensor in found or x.tensor not in new for x in kernel.loads)
        if kernel.name not in found and reads_matched and (same := _same_step(kernel, free, found)):
            found[kernel.name] = same
    return found


def _operators(graph: KernelGraph) -> dict[str, Library]:
    return {k.name: k for k in graph.kernels if isinstance(k, Library)}


def _from_outputs(
    old: dict[str, Library], new: dict[str, Library], names: dict[str, str], pairs: list[tuple[str, str]]
) -> dict[str, str]:
    """Pair values that the same operators read, from the outputs backwards: old names by new ones."""
    found = dict[str, str]()
    while pairs:
        name, other = pairs.pop()
        is_free = name not in {*names, *found} and other not in {*names.values(), *found.values()}
        if not is_free or name not in new or other not in old:
            continue
        kernel, like = new[name], old[other]
        if (kernel.result.axes, kernel.result.dtype) != (like.result.axes, like.result.dtype):
            continue
        found[name] = other
        if kernel.op.head() == like.op.head() and len(kernel.loads) == len(like.loads):
            pairs += [(x.tensor, y.tensor) for x, y in zip(kernel.loads, like.loads, strict=True)]
    return found


def _same_step(kernel: Library, among: list[Library], names: dict[str, str]) -> str | None:
    """Find the old name of a step that is the same under these names."""
    line = _without_result(kernel, names)
    return next((k.name for k in among if _without_result(k, {}) == line), None)


def _without_result(kernel: Library, names: dict[str, str]) -> str:
    return str(_renamed_kernel(kernel, names | {kernel.name: "_"}))


def _unique(names: dict[str, str], new: dict[str, Library], used: set[str]) -> dict[str, str]:
    """Give values without a match names that no value of the program has."""
    unmatched = [name for name in new if name not in names]
    taken = used | set(unmatched)
    fresh = (name for n in count() if (name := f"m{n}") not in taken)
    return names | {name: next(fresh) for name in unmatched if name in used}


def _renamed(graph: KernelGraph, names: dict[str, str]) -> KernelGraph:
    kernels = tuple(_renamed_kernel(k, names) for k in graph.kernels if isinstance(k, Library))
    return replace(graph, kernels=kernels, outputs=tuple(names.get(n, n) for n in graph.outputs))


def _renamed_kernel(kernel: Library, names: dict[str, str]) -> Library:
    loads = tuple(replace(x, tensor=names.get(x.tensor, x.tensor)) for x in kernel.loads)
    return replace(kernel, loads=loads, result=replace(kernel.result, name=names.get(kernel.name, kernel.name)))
