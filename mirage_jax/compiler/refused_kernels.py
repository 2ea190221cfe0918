"""Launches that do not fit the device, as trials have shown: no other variant with such a one is tried.

Variants differ in the sizes of one kernel or a few, so that many have the kernel that made one of them fail. Each
process that tries them would find out anew, and they would take the places of variants that run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

from mirage_jax.compiler.winner import Winner
from mirage_jax.lower.runtime.aot import refused_kernel
from mirage_jax.lower.triton.frame import name_in_text
from mirage_jax.lower.triton.horizontal_fusion import joint_name
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, Tensor


@dataclass
class RefusedKernels:
    """Why launches were refused, by the sizes of their kernels, and with how many stages.

    More stages take more memory.
    """

    found: dict[Hashable, tuple[int, str]] = field(default_factory=dict)

    def learn(self, winner: Winner, why: str) -> None:
        """Remember the launch that a variant failed for, if `why` says that one does not fit."""
        refused = refused_kernel(why)
        for name, key, stages in _launches(winner):
            if name == refused and stages < self.found.get(key, (stages + 1, ""))[0]:
                self.found[key] = stages, why

    def why(self, winner: Winner) -> str:
        """Why a variant would fail; empty if nothing is known against it."""
        known = ((self.found.get(key), stages) for _, key, stages in _launches(winner))
        return next((seen[1] for seen, stages in known if seen is not None and stages >= seen[0]), "")


def _launches(winner: Winner) -> Iterator[tuple[str, Hashable, int]]:
    """The launches of a variant: each one's name, what its resources depend on, and its stages."""
    graph, schedule = winner.graph, winner.schedule
    for wave in schedule.waves(graph):
        kernels = [(k, schedule.kernels[n]) for n in wave if isinstance(k := graph.kernels[n], BlockGraph)]
        if kernels:
            name = joint_name([name_in_text(kernel) for kernel, _ in kernels])
            key = tuple((k, _loaded(k, graph), replace(sizes, num_stages=0)) for k, sizes in kernels)
            yield name, (key, schedule.parts), max(sizes.num_stages for _, sizes in kernels)


def _loaded(kernel: BlockGraph, graph: KernelGraph) -> tuple[Tensor, ...]:
    return tuple(graph.tensors[load.tensor] for load in kernel.loads)
