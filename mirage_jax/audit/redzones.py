"""Run a graph's kernels on a real GPU between guard zones, which show accesses outside of their tensors.

This is `verify.exact.interpreters.memory` for a GPU. Each tensor lies in the middle of a larger array, and a kernel is
called with pointers into the middle: by a second function around its own text, which stays as it is. Each kernel runs
once per byte of `FILLS`, with which its outputs and their guard zones are filled before. Afterwards

* the guard zones of outputs hold that byte still;
* all runs give the same bits, hence every element is written, and none depends on earlier contents;
* guard zones of inputs are NaN (integers: the byte again), so that a lane that is read from there shows in the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirage_jax.errors import KernelFault
from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.lower.runtime.launch import NUMPY_TYPES, call_kernel, check_shapes, launches
from mirage_jax.lower.triton.emitter import DEFAULT_OPTIONS, EmitOptions, KernelSource
from mirage_jax.lower.triton.two_forms import arguments
from mirage_jax.mugraph.dtypes import is_float
from mirage_jax.mugraph.graph import KernelGraph, Library, Schedule

ZONE = 1 << 14  # bytes on each side; a multiple of what loads are aligned to
FILLS = (0x5A, 0xA5)

type Launch = Callable[[KernelSource, Sequence[np.ndarray], Sequence[np.ndarray]], list[np.ndarray]]
"""Runs the text of a kernel on inputs and outputs with earlier contents; returns the outputs."""


def run_guarded(
    graph: KernelGraph,
    schedule: Schedule,
    arrays: Sequence[np.ndarray],
    run_library: Callable[[Library, Mapping[str, np.ndarray]], np.ndarray] | None = None,
    options: EmitOptions = DEFAULT_OPTIONS,
    launch: Launch | None = None,
) -> list[np.ndarray]:
    """Run the graph, each kernel between guard zones. Raises `KernelFault` if one leaves its tensors.

    `run_library` is needed if the graph has library operators; `launch` stands in for the GPU.
    """
    env = {t.name: np.asarray(a, order="C") for t, a in zip(graph.inputs, arrays, strict=True)}
    check_shapes(graph, env)
    for source in launches(graph, schedule, options):
        if isinstance(source, Library):
            if run_library is None:
                raise ValueError(f"the graph has the library operator {source}, but nothing to run it with was passed")
            env[source.name] = np.asarray(run_library(source, env), order="C")
        else:
            results = run_kernel(source, arguments(source.inputs, env), launch or launch_on_gpu)
            env |= zip(source.outputs, results, strict=True)
    return [env[name] for name in graph.outputs]


def run_kernel(source: KernelSource, inputs: Sequence[np.ndarray], launch: Launch) -> list[np.ndarray]:
    """Run one kernel; its results have to be the same for every fill. Raises `KernelFault`."""
    types = map(_type, source.dtypes[len(inputs) :])
    empty = [np.empty(shape, t) for shape, t in zip(source.shapes, types, strict=True)]
    guarded, runs = guarded_source(source), []
    for fill in FILLS:
        before = [_between(x, fill, blank=True) for x in empty]
        after = launch(guarded, [_between(x, fill) for x in inputs], before)
        for name, x, y in zip(source.outputs, before, after, strict=True):
            _check_zones(f"{source.name} with output {name}", _bits(x), _bits(y))
        runs.append([_inside(y, shape) for y, shape in zip(after, source.shapes, strict=True)])
    for name, *results in zip(source.outputs, *runs, strict=True):
        first, second = (_bits(np.ravel(x)) for x in results)
        if (wrong := np.flatnonzero(first != second)).size:
            place = tuple(map(int, np.unravel_index(wrong[0], results[0].shape)))
            raise KernelFault(
                f"{source.name}: {wrong.size} of {first.size} elements of output {name} are never written, or depend "
                f"on what was there before, the first at {place}"
            )
    return runs[0]


def guarded_source(source: KernelSource) -> KernelSource:
    """Add a caller that takes arrays with guard zones to the text of a kernel."""
    tensors = len(source.dtypes)
    names = [f"x{n}" for n in range(tensors)]
    given = [f"{x} + {_zone(_type(d))}" for x, d in zip(names, source.dtypes, strict=True)]
    name = f"{source.name}_guarded"
    caller = f"\n\n@triton.jit\ndef {name}({', '.join(names)}):\n    {source.name}({', '.join(given)})\n"
    shapes = tuple(
        (prod(shape) + 2 * _zone(_type(d)),)
        for shape, d in zip(source.shapes, source.dtypes[len(source.inputs) :], strict=True)
    )
    return replace(source, name=name, text=source.text + caller, shapes=shapes)


# ---------------------------------------------------------------------- arrays with guard zones


def _type(dtype: str) -> np.dtype:
    return np.dtype(jnp.dtype(NUMPY_TYPES[dtype]))


def _zone(dtype: np.dtype) -> int:
    """Elements of a guard zone."""
    return ZONE // dtype.itemsize


def _between(x: np.ndarray, fill: int, blank: bool = False) -> np.ndarray:
    """An input between guard zones; `blank`: an output, still empty."""
    zone, out = _zone(x.dtype), np.empty(x.size + 2 * _zone(x.dtype), x.dtype)
    out.view(np.uint8)[:] = fill & 1 if x.dtype == bool else fill
    if not blank:
        if is_float(x.dtype):
            out[:] = np.nan
        out[zone : zone + x.size] = x.reshape(-1)
    return out


def _inside(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    zone = _zone(x.dtype)
    return x[zone : zone + prod(shape)].reshape(shape)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def _check_zones(what: str, before: np.ndarray, after: np.ndarray) -> None:
    zone = ZONE // before.itemsize
    inside = np.zeros(before.shape, bool)
    inside[zone:-zone] = True
    if (wrong := np.flatnonzero((before != after) & ~inside)).size:
        places = f"elements {wrong[0] - zone} to {wrong[-1] - zone}, where there are {inside.sum()}"
        raise KernelFault(f"{what}: the kernel stores outside of it, into {wrong.size} of {places}")


# ---------------------------------------------------------------------- the launch

_guarded_p = jax_compat.create_leaf_primitive("mirage_guarded_kernel")


def _lower(context: Any, *operands: Any, out_avals: Any, source: KernelSource, compute_capability: int | None) -> Any:
    del out_avals

    def call(*arrays: jax.Array) -> list[jax.Array]:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # jax-triton prefers references
            return call_kernel(source, arrays, compute_capability=compute_capability, in_place=True)

    return jax_compat.lower_traced(call, context, operands)


jax_compat.register_lowering(_guarded_p, _lower, platform="cuda")


def guarded_call(source: KernelSource, compute_capability: int | None = None) -> Callable[..., Any]:
    """Make a guarded kernel a function of its inputs and outputs, for `jax.jit`; returns the new outputs."""

    def call(*arrays: jax.Array) -> Any:
        avals = map(jax.typeof, arrays[len(source.inputs) :])
        return _guarded_p.bind(*arrays, out_avals=tuple(avals), source=source, compute_capability=compute_capability)

    return call


def launch_on_gpu(
    source: KernelSource, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Launch a kernel on the GPU of this machine."""
    return [np.asarray(y) for y in jax.jit(guarded_call(source))(*inputs, *outputs)]
