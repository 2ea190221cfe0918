"""From a muGraph and its schedule to kernels that run inside a JAX trace.

What runs is always the text that was just generated; no file is written or read for it. The back end that wrote a text
also launches it (`lower.backends`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mirage_jax.errors import LoweringError
from mirage_jax.lower.backends import backend_of
from mirage_jax.lower.runtime import xla_launch
from mirage_jax.lower.runtime.triton_runtime import NUMPY_TYPES
from mirage_jax.lower.tiling import stored_shape
from mirage_jax.lower.triton.emitter import DEFAULT_OPTIONS, EmitOptions, KernelSource, emit
from mirage_jax.lower.triton.horizontal_fusion import Emit, join
from mirage_jax.lower.triton.two_forms import arguments
from mirage_jax.mugraph.graph import KernelGraph, Library, Schedule

if TYPE_CHECKING:
    import jax

type RunLibrary = Callable[[Library, Mapping[str, Any]], Any]
"""Runs one library operator: given it and all device tensors so far by name, returns its result."""

PACKAGES = ("triton", "jax_triton")  # what kernels run with
CUSTOM_CALLS = ("triton_kernel_call_ffi", xla_launch.TARGET)  # targets of kernels, which JAX's CUDA plugin knows
INSTALL = "pip install 'mirage-jax[triton]'"


def missing(*packages: str) -> str:
    """Name the first of some packages that is not installed; "" if all are."""
    return next((name for name in packages if find_spec(name) is None), "")


def kernel_calls(program: str) -> int:
    """Calls of kernels in a program's StableHLO."""
    return sum(program.count(f"@{name}(") for name in CUSTOM_CALLS)


def sources(
    graph: KernelGraph, schedule: Schedule, options: EmitOptions = DEFAULT_OPTIONS
) -> list[KernelSource | None]:
    """The text of every kernel by itself, in order; None for library operators."""
    alone = launches(graph, replace(schedule, joint=False), options)
    return [None if isinstance(launch, Library) else launch for launch in alone]


def launches(
    graph: KernelGraph, schedule: Schedule, options: EmitOptions = DEFAULT_OPTIONS
) -> Iterator[Library | KernelSource]:
    """What runs, in order: library operators, and texts, of several kernels each if the schedule joins them."""
    if len(schedule.kernels) != len(graph.kernels):
        raise LoweringError(f"the schedule has {len(schedule.kernels)} kernels, the graph {len(graph.kernels)}")
    for wave in schedule.waves(graph):
        members: list[Emit] = []
        for n in wave:
            kernel = graph.kernels[n]
            if isinstance(kernel, Library):
                yield kernel
            else:
                members.append(partial(emit, kernel, graph, schedule.kernels[n], schedule.part_counts))
        if members:
            yield join(members, options)


def run_cuda(
    graph: KernelGraph,
    schedule: Schedule,
    arrays: Sequence[jax.Array],
    run_library: RunLibrary,
    *,
    compute_capability: int | None = None,
    options: EmitOptions = DEFAULT_OPTIONS,
) -> list[jax.Array]:
    """Run the graph's kernels in order, inside a JAX trace; returns its outputs. Inputs in `options.views` are arrays
    of which the kernels read a part; library operators read no such inputs.

    `compute_capability` (80, 90, 100) is needed where there is no GPU to ask. Bind this in lowering rules only
    (`mlir.lower_fun`): jax-triton 0.4 has no dead-code rule that jax 0.12 accepts.
    """
    env: dict[str, Any] = {t.name: a for t, a in zip(graph.inputs, arrays, strict=True)}
    check_shapes(graph, env, options)
    for launch in launches(graph, schedule, options):
        if isinstance(launch, Library):
            env[launch.name] = run_library(launch, env)
            continue
        results = call_kernel(launch, arguments(launch.inputs, env), compute_capability=compute_capability)
        env |= zip(launch.outputs, results, strict=True)
    return [env[name] for name in graph.outputs]


def call_kernel(
    source: KernelSource,
    arrays: Sequence[jax.Array],
    *,
    compute_capability: int | None = None,
    in_place: bool = False,
) -> list[jax.Array]:
    """Launch one kernel inside a JAX trace. `in_place`: after its inputs, `arrays` has what it is to write into."""
    return backend_of(source).launch(source, arrays, compute_capability=compute_capability, in_place=in_place)


def check_shapes(graph: KernelGraph, env: Mapping[str, Any], options: EmitOptions = DEFAULT_OPTIONS) -> None:
    """Kernels trust their sizes: no array of another shape or type may reach one."""
    views = dict(options.views)
    for tensor in graph.inputs:
        view = views.get(tensor.name)
        array, shape = env[tensor.name], view.whole if view else stored_shape(tensor, graph, {})
        if tuple(array.shape) != shape or str(array.dtype) != NUMPY_TYPES.get(tensor.dtype, tensor.dtype):
            got = f"{array.dtype}{list(array.shape)}"
            raise LoweringError(f"input {tensor} should be {tensor.dtype}{list(shape)}, got {got}")
