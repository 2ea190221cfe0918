"""One region on one device, as far as a stored decision needs it: its program, and what runs in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from mirage_jax.compiler.winner import Winner
from mirage_jax.config import Options
from mirage_jax.jaxpr_frontend.flat import FlatEqn
from mirage_jax.jaxpr_frontend.translate import Region
from mirage_jax.mugraph.footprint import Footprint, footprint
from mirage_jax.mugraph.graph import KernelGraph, Schedule
from mirage_jax.mugraph.merge import simplify_axes


@dataclass
class Subject:
    """A region, the device that it is decided for, and the user's options."""

    region: Region
    platform: str
    device: Any
    options: Options

    @cached_property
    def reference(self) -> KernelGraph:
        """The region's program over as few axes as possible: what is searched, verified and keyed."""
        return simplify_axes(self.region.graph)

    @cached_property
    def products(self) -> float:
        """Operations of the matrix products in the user's equations; a muGraph may have folded some of them away."""
        return sum(map(_product_flops, self.region.equations))

    @cached_property
    def before(self) -> Footprint:
        """What the program itself moves and computes."""
        f = footprint(self.reference)
        return replace(f, flops=max(f.flops, self.products))

    def winner(self, graph: KernelGraph, schedule: Schedule, family: str, directory: Path | None = None) -> Winner:
        own = self.region.graph
        shapes_in = tuple(_shape(self.reference, t.axes) for t in self.reference.inputs)
        shapes_out = tuple(_shape(own, own.tensors[n].axes) for n in own.outputs)
        return Winner(graph, schedule, shapes_in, shapes_out, family, self.platform, directory)

    # ------------------------------------------------------------------ functions of the region's JAX values

    def xla(self, *values: jax.Array) -> list[jax.Array]:
        return list(self.region.reference(*values))

    def ours(self, winner: Winner) -> Callable[..., list[jax.Array]]:
        def run(*values: jax.Array) -> list[jax.Array]:
            return list(self.region.finish(winner.run(*self.region.prepare(values))))

        return run


def _shape(graph: KernelGraph, axes: Sequence[str]) -> tuple[int, ...]:
    return tuple(graph.extent(a) for a in axes)


def _product_flops(eqn: FlatEqn) -> float:
    if eqn.primitive != "dot_general":
        return 0.0
    ((contracted, _), _) = eqn.params["dimension_numbers"]
    left, (out,) = eqn.in_avals[0], eqn.out_avals
    return 2.0 * math.prod(out.shape) * math.prod(left.shape[i] for i in contracted)
