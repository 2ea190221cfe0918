"""One region on one device: its program, and the functions that run in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from mirage_jax.compiler.inputs import one_set
from mirage_jax.compiler.winner import Family, Winner
from mirage_jax.config import Options
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.hardware.gpus import AbsentGpu
from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.partition.product_boundaries import DotSizes
from mirage_jax.jaxpr_frontend.partition.program import Bind, FlatEqn
from mirage_jax.jaxpr_frontend.translate.rules import PRODUCT_PRIMITIVES
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.mugraph.footprint import Footprint, footprint
from mirage_jax.mugraph.graph import KernelGraph, Library, Precision, Schedule
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.mugraph.views import View

SPLIT_PRODUCTS = 3  # of TF32, for one of float32 (`Precision.SPLIT_ALL`)


def precisions(region: Region) -> Sequence[Precision]:
    """How precise a region's kernels may be, from the fastest on. The float gate asks for XLA's own accuracy."""
    asked = region.in_float32
    return tuple(p for p in Precision if (p >= Precision.SPLIT_ALL if asked else p < Precision.FLOAT32))


def as_asked(region: Region, device: DeviceModel) -> DeviceModel:
    """The device as it multiplies float32: where the program asks for more than TF32, by three products for one."""
    if not region.in_float32 or not device.is_gpu:
        return device
    return replace(device, matrix_flops_f32=device.matrix_flops_f32 / SPLIT_PRODUCTS, float32_parts=2)


@dataclass
class RegionOnDevice:
    """A region, the device that it is decided for, and the user's options."""

    region: Region
    platform: str
    device: Any
    options: Options

    @cached_property
    def reference(self) -> KernelGraph:
        """The region's program over as few axes as possible; the search, the gates and the cache key use it."""
        return simplify_axes(self.region.graph)

    @property
    def text(self) -> str:
        """The subject of the decision as text: the reference, its views of arrays, and the user's equations."""
        return self.region.annotated(self.reference)

    @cached_property
    def products(self) -> float:
        """Operations of the matrix products in the user's equations; a muGraph may have folded some away."""
        return sum(map(_product_flops, self.region.equations))

    @cached_property
    def before(self) -> Footprint:
        """Bytes and operations of the program itself."""
        f = footprint(self.reference)
        return replace(f, flops=max(f.flops, self.products))

    @cached_property
    def specs(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shapes and dtypes of the region's inputs."""
        avals = [self.region.avals[b.value] for b in self.region.inputs]
        return [(tuple(a.shape), np.dtype(a.dtype)) for a in avals]

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Random inputs of the region, on its device."""
        with jax.default_device(self.device):
            return one_set(tuple(jax.ShapeDtypeStruct(*spec) for spec in self.specs), seed)

    def compiled(self, f: Callable[..., Any], options: dict[str, Any] | None = None) -> Callable[..., Any]:
        """Compile a function of the region's values for its device."""
        here = SingleDeviceSharding(self.device)
        types = tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in self.specs)
        return jax.jit(f).lower(*types).compile(options)

    def winner(self, graph: KernelGraph, schedule: Schedule, family: str) -> Winner:
        """Wrap a graph over the reference's axes so that it takes the region's arrays."""
        own = self.region.graph
        libraries = {x.tensor for k in graph.kernels if isinstance(k, Library) for x in k.loads}
        parts = self._parts if family == Family.KERNELS and self.platform == "cuda" else {}
        views = tuple(
            view if t.name in libraries else parts.get(t.name, view)
            for t, view in zip(own.inputs, self._reshapes, strict=True)
        )
        shapes_out = tuple(_shape(own, own.tensors[n].axes) for n in own.outputs)
        capability = self.device.capability if isinstance(self.device, AbsentGpu) else None
        asked = self.region.in_float32
        return Winner(graph, schedule, views, shapes_out, Family(family), self.platform, capability, asked)

    @property
    def multiplies_in_tf32(self) -> bool:
        """Whether XLA multiplies float32 as TF32."""
        return self.platform != "cpu" and not self.region.in_float32

    @property
    def precisions(self) -> Sequence[Precision]:
        """How precise its kernels may be, from the fastest on."""
        return precisions(self.region)

    @cached_property
    def _reshapes(self) -> list[View]:
        """Views from the inputs of the region's graph to the inputs of the reference."""
        pairs = zip(self.region.graph.inputs, self.reference.inputs, strict=True)
        return [View(_shape(self.region.graph, x.axes), (), _shape(self.reference, y.axes)) for x, y in pairs]

    @cached_property
    def _parts(self) -> dict[str, View]:
        """Inputs that kernels read where they lie, in operands that are larger."""
        inputs = zip(self.region.graph.inputs, self._reshapes, strict=True)
        partial = self.region.partial
        views = {t.name: replace(partial[t.name], shape=y.shape) for t, y in inputs if t.name in partial}
        return {name: view for name, view in views.items() if view.place is not None}

    # ------------------------------------------------------------------ functions of the region's JAX values

    def xla(self, *values: jax.Array) -> list[jax.Array]:
        """Run the region's own equations."""
        return list(self.region.reference(*values, bind=self.bound(jax_compat.bind_alone)))

    def unfused(self, *values: jax.Array) -> list[jax.Array]:
        """Run the region's own equations one by one, each result rounded to its type."""
        return list(self.region.reference(*values, bind=self.bound(jax_compat.bind_unfused)))

    def bound(self, bind: Bind) -> Bind:
        """How the device evaluates one of its equations."""
        return bind

    def runs(self, winner: Winner) -> Callable[..., list[jax.Array]]:
        """How the device evaluates a winner."""
        return winner.run

    def ours(self, winner: Winner) -> Callable[..., list[jax.Array]]:
        """Make the function that runs a winner in place of the region."""

        def run(*values: jax.Array) -> list[jax.Array]:
            return list(self.region.finish(self.runs(winner)(*self.region.prepare(values, winner.in_place))))

        return run


def _shape(graph: KernelGraph, axes: Sequence[str]) -> tuple[int, ...]:
    return tuple(graph.extent(a) for a in axes)


def _product_flops(eqn: FlatEqn) -> float:
    return DotSizes.of(eqn).flops if eqn.primitive in PRODUCT_PRIMITIVES else 0.0
