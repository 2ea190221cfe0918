"""Kernels that do not fit the device, as trials have shown: no other variant with such a kernel is tried.

Variants differ in the sizes of one kernel or a few, so that many have the kernel that made one of them fail. Each
process that tries them would find out anew, and they would take the places of variants that run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

from mirage_jax.compiler.winner import Winner
from mirage_jax.lower.runtime.aot import refused_kernel
from mirage_jax.lower.triton.frame import name_in_text
from mirage_jax.mugraph.graph import BlockGraph


@dataclass
class RefusedKernels:
    """Why kernels were refused, by their sizes, and with how many stages. More stages take more memory."""

    found: dict[Hashable, tuple[int, str]] = field(default_factory=dict)

    def learn(self, winner: Winner, why: str) -> None:
        """Remember the kernel that a variant failed for, if `why` says that one does not fit."""
        name = refused_kernel(why)
        for kernel, key, stages in _kernels(winner):
            if name_in_text(kernel) == name and stages < self.found.get(key, (stages + 1, ""))[0]:
                self.found[key] = stages, why

    def why(self, winner: Winner) -> str:
        """Why a variant would fail; empty if nothing is known against it."""
        known = ((self.found.get(key), stages) for _, key, stages in _kernels(winner))
        return next((seen[1] for seen, stages in known if seen is not None and stages >= seen[0]), "")


def _kernels(winner: Winner) -> Iterator[tuple[BlockGraph, Hashable, int]]:
    """The kernels of a variant, each with what its resources depend on and its stages."""
    graph, schedule = winner.graph, winner.schedule
    for kernel, sizes in zip(graph.kernels, schedule.kernels, strict=True):
        if isinstance(kernel, BlockGraph):
            tensors = tuple(graph.tensors[load.tensor] for load in kernel.loads)
            yield kernel, (kernel, tensors, replace(sizes, num_stages=0), schedule.parts), sizes.num_stages
