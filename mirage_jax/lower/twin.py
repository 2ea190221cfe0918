"""The exact check of generated kernels: the text that will be compiled, run on numbers without rounding.

Input: a graph and its schedule. Output: how the kernels' results differ from those of the graph, or "". Both sides
compute on `mugraph.exact`: the text in the interpreter, block by block, with its own index arithmetic, masks, loops and
constants; the graph by `mugraph.evaluate`, under the same schedule. They share neither code nor order of evaluation,
and must agree in every bit; so what a tolerance would forgive (a lane too many in a large sum, a rescaling forgotten
where maxima hardly move) is caught as surely as a wrong stride. The interpreter checks every access to memory on top
(`interpreter_memory`).

This is Mirage's question to its code generator (VERIFICATION 2.3), asked of the real text and not of a second one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mirage_jax.errors import KernelFault
from mirage_jax.lower.launch import sources
from mirage_jax.lower.triton_interpreter import interpret_sources
from mirage_jax.lower.triton_source import DEFAULT, KernelSource, Options
from mirage_jax.mugraph import exact
from mirage_jax.mugraph.arrays import Named, is_float, numpy_dtype
from mirage_jax.mugraph.evaluate import evaluate
from mirage_jax.mugraph.exact_domain import ExactDomain
from mirage_jax.mugraph.graph import KernelGraph, Library, Schedule, Tensor


def disagreement(graph: KernelGraph, schedule: Schedule, options: Options = DEFAULT, seed: int = 0) -> str:
    """Run the kernels and the graph on the same numbers at the graph's own extents; "" if all outputs agree."""
    return difference(graph, schedule, sources(graph, schedule, options), seed)


def difference(graph: KernelGraph, schedule: Schedule, texts: Sequence[KernelSource | None], seed: int = 0) -> str:
    """The same for given texts."""
    rng = np.random.default_rng(seed)
    inputs = {t.name: _random(t, graph, rng) for t in graph.inputs}
    with np.errstate(all="ignore"):
        named = [Named(t.axes, inputs[t.name]) for t in graph.inputs]
        expected = [x.array for x in evaluate(graph, named, ExactDomain(), schedule)]
    try:
        results = interpret_sources(graph, texts, inputs, _library(graph), exact=True)
    except KernelFault as fault:
        return str(fault)
    # where a loop has no step at all, its shift is any number
    shifts = not any(k.span for k in graph)
    for name, have, want in zip(graph.outputs, results, expected, strict=True):
        wrong = exact.differences(have, want, shifts) if have.dtype == exact.EXACT else have != want
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            return f"{int(wrong.sum())} of {wrong.size} elements of {name} differ from the graph's, the first at {at}"
    return ""


def _random(tensor: Tensor, graph: KernelGraph, rng: np.random.Generator) -> Any:
    shape = tuple(graph.extent(a) for a in tensor.axes)
    dtype = numpy_dtype(tensor.dtype)
    if is_float(dtype):
        return exact.random_numbers(rng, shape)
    return np.asarray(rng.random(shape) < 0.8 if tensor.dtype == "bool" else rng.integers(0, 4, shape), dtype)


def _library(graph: KernelGraph) -> Callable[[Library, Mapping[str, Any]], Any]:
    """Runs one library operator on exact numbers."""

    def run(kernel: Library, tensors: Mapping[str, Any]) -> Any:
        inputs = tuple(graph.tensors[n] for n in dict.fromkeys(load.tensor for load in kernel.loads))
        alone = KernelGraph(inputs, (kernel,), (kernel.result.name,), graph.extents)
        named = [Named(t.axes, tensors[t.name]) for t in inputs]
        with np.errstate(all="ignore"):
            return evaluate(alone, named, ExactDomain())[0].array

    return run
