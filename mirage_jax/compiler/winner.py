"""Runs in the place of a region, on every platform, and prints its kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from mirage_jax.lower.runtime import launch
from mirage_jax.lower.triton.frame import EmitOptions as EmitOptions
from mirage_jax.mugraph import evaluate
from mirage_jax.mugraph.comparisons import compared_with_themselves
from mirage_jax.mugraph.domains.floats import FloatDomain, NamedArray
from mirage_jax.mugraph.footprint import Footprint, footprint
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, Library, Precision, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.thread_fusion import thread_graphs
from mirage_jax.mugraph.schedule_json import schedule_from_json, schedule_to_json
from mirage_jax.mugraph.views import View

# XLA's default on GPUs is tf32 too; where the program asks for more, schedules say so (`Precision`).
KERNEL_EMIT_OPTIONS = EmitOptions(dot_precision="tf32")


def as_precise(schedule: Schedule, precise: Precision) -> Schedule:
    """The schedule with all of its kernels as precise as that."""
    return replace(schedule, kernels=tuple(replace(k, precise=precise) for k in schedule.kernels))


class Family(StrEnum):
    """How a winner runs: as generated kernels, or as library operators that XLA runs in another order."""

    KERNELS = "kernels"
    ALGEBRA = "algebra"


@dataclass(frozen=True)
class _UnderXla(FloatDomain):
    """Floats under XLA, which takes x 2 c for x (2 c): infinite if c, outside of the region, is a mask's number."""

    def mul(self, x: NamedArray, y: NamedArray) -> NamedArray:
        """Multiply; a factor beyond 1 stays by itself, in the type of the product: 16-bit floats may not hold it."""
        if isinstance(x.array, int | float) and abs(x.array) > 1 and hasattr(y.array, "dtype"):
            wide = self._array(self._real(y).array).dtype
            x = NamedArray((), lax.optimization_barrier(jnp.asarray(x.array, wide)))
        return super().mul(x, y)


@dataclass(frozen=True)
class Winner:
    """A muGraph that runs in place of a region. It takes and returns arrays in the layout of the region's graph.

    The exception are operands that its kernels read in place, through a view: it takes these whole. `in_float32`:
    library products of float32 are no TF32.
    """

    graph: KernelGraph
    schedule: Schedule
    views: tuple[View, ...]  # from what it takes to the inputs of its graph
    shapes_out: tuple[tuple[int, ...], ...]
    family: Family
    platform: str
    capability: int | None = None  # of a GPU that need not be here, 90 for 9.0; None asks the one that is
    in_float32: bool = False

    def to_json(self) -> dict[str, Any]:
        """Write the graph as text, the schedule, the family and the views, for another process."""
        return {
            "graph": str(self.graph),
            "schedule": schedule_to_json(self.schedule),
            "family": self.family,
            "views": {name: view.to_json() for name, view in self.options.views},
            "in_float32": self.in_float32,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], platform: str) -> Self:
        """A winner over its graph's own inputs and outputs, without the border of a region."""
        graph = parse(value["graph"])
        tensors = [graph.tensors[n] for n in graph.outputs]
        shapes_in, shapes_out = (tuple(tuple(map(graph.extent, t.axes)) for t in ts) for ts in (graph.inputs, tensors))
        own = {name: View.from_json(view) for name, view in value["views"].items()}
        views = tuple(own.get(t.name, View(n, (), n)) for t, n in zip(graph.inputs, shapes_in, strict=True))
        schedule, family = schedule_from_json(value["schedule"]), Family(value["family"])
        return cls(graph, schedule, views, shapes_out, family, platform, in_float32=value["in_float32"])

    @property
    def options(self) -> EmitOptions:
        """Options for the emitter: tf32 products, and operands that are read in place."""
        cut = tuple((t.name, view) for t, view in zip(self.graph.inputs, self.views, strict=False) if view.cuts)
        return replace(KERNEL_EMIT_OPTIONS, views=cut)

    @property
    def footprint(self) -> Footprint:
        """Bytes, operations and launches."""
        whole = footprint(self.graph, self.schedule.part_counts)
        return replace(whole, kernels=len(self.schedule.waves(self.graph)))

    @property
    def together(self) -> str:
        """Which of its kernels are one launch."""
        waves = (wave for wave in self.schedule.waves(self.graph) if len(wave) > 1)
        return ", ".join(" + ".join(self.graph.kernels[n].name for n in wave) for wave in waves)

    @property
    def readable(self) -> str:
        """The text of the kernels; for algebra, the muGraph that JAX runs operator by operator."""
        threads = [f"{k.name}: {t}" for k in self.graph.kernels if isinstance(k, BlockGraph) for t in thread_graphs(k)]
        head = "".join(f"# {line}\n" for line in (*str(self.graph).splitlines(), *threads))
        return head + "\n\n".join(self._texts)

    @property
    def kernel_digest(self) -> str:
        """Tells texts of generated kernels apart; the same for all algebra, which has none."""
        return hashlib.sha256("\n\n".join(self._texts).encode()).hexdigest()[:16]

    @cached_property
    def _texts(self) -> list[str]:
        """The text of each kernel."""
        launches = launch.launches(self.graph, self.schedule, self.options) if self.has_kernels else ()
        return [x.text for x in launches if not isinstance(x, Library)]

    @property
    def in_place(self) -> frozenset[str]:
        """Inputs that are parts of what it takes."""
        return frozenset(name for name, _ in self.options.views)

    def portable(self, *arrays: jax.Array, domain: Callable[..., FloatDomain] = _UnderXla) -> list[jax.Array]:
        """Run as plain JAX, on any backend; `domain` is what its operators mean."""
        tensors = [view.of(x) for view, x in zip(self.views, arrays, strict=True)]
        widen = self.platform == "cpu"
        with self._products():
            return self._shaped(evaluate.run(self.graph, tensors, xp=jnp, dtype=None, widen=widen, domain=domain))

    def _kernels(self, *arrays: jax.Array) -> list[jax.Array]:
        floats = FloatDomain(jnp, once=compared_with_themselves(self.graph))
        named = zip(self.graph.inputs, self.views, arrays, strict=True)
        given = [floats.held(t.name, x if view.cuts else view.of(x)) for t, view, x in named]
        libraries = _run_library(self.graph, floats)
        with self._products():
            results = launch.run_cuda(
                self.graph, self.schedule, given, libraries, compute_capability=self.capability, options=self.options
            )
        return self._shaped(results)

    def _products(self) -> AbstractContextManager[Any]:
        """The precision of library products while they are traced."""
        return jax.default_matmul_precision("highest") if self.in_float32 else nullcontext()

    @property
    def has_kernels(self) -> bool:
        """Whether the winner has generated code; else it has library operators only, which XLA runs best."""
        return self.family == Family.KERNELS

    @property
    def cuda(self) -> Callable[..., list[jax.Array]] | None:
        """Return the function that launches the Triton kernels; None if there are none."""
        return self._kernels if self.has_kernels else None

    @property
    def run(self) -> Callable[..., list[jax.Array]]:
        """Return the function for the winner's own platform."""
        return self._kernels if self.platform == "cuda" and self.has_kernels else self.portable

    def _shaped(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        return [jnp.reshape(y, shape) for y, shape in zip(results, self.shapes_out, strict=True)]


def _run_library(graph: KernelGraph, floats: FloatDomain) -> Callable[..., Any]:
    """Runs one library operator of a graph with XLA, which computes tensors held by `floats` once."""

    def run(kernel: Any, tensors: Mapping[str, Any]) -> Any:
        inputs = tuple(graph.tensors[n] for n in dict.fromkeys(load.tensor for load in kernel.loads))
        alone = KernelGraph(inputs, (kernel,), (kernel.result.name,), graph.extents)
        result = evaluate.run(alone, [tensors[t.name] for t in inputs], xp=jnp, dtype=None)[0]
        return floats.held(kernel.result.name, result)

    return run
