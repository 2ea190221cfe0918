"""Kernel level: sequences of kernels that produce all outputs of a region (Mirage, OSDI'25, section 4.1).

A plan is found backwards. Of the tensors still to be produced take the largest, and choose tensors to produce together
with it. Choose one of the cuts that `KernelTables.kernels` found for them, and go on with the tensors that the kernel
loads. No kernel loads a tensor that a later one makes: it would be made twice. Splitting an axis over the grid
(split-K, split-KV) is not a rule but another target, ``k -> (k.g, k)``. Such a variant keeps a plan only if some tensor
is a partial sum; else it would repeat an unsplit plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

from mirage_jax.mugraph.graph import PART_SUFFIX, Axis
from mirage_jax.search.enumerate.kernels import EMPTY, KernelTables, Leaves
from mirage_jax.search.enumerate.normal_form import Poly, memo

type Cut = tuple[Leaves, Leaves]  # (outputs, loaded intermediates) of one kernel
type Plan = tuple[Cut, ...]  # last kernel first


@dataclass
class Plans:
    """Enumerates the plans of one variant of a region."""

    tables: KernelTables
    targets: frozenset[Poly]
    split: Axis | None = None
    _memo: defaultdict[str, dict[object, object]] = field(default_factory=lambda: defaultdict(dict))

    @memo
    def loadable(self, outs: Leaves) -> tuple[Leaves, ...]:
        """List the sets of tensors that a kernel with these outputs may load."""
        f = self.tables
        loops = f.loops_for(outs)
        return tuple(dict.fromkeys(leaves for x in loops for leaves in f.kernels(outs, x, f.space.max_loaded)))

    @memo
    def structures(self, outs: Leaves, leaves: Leaves) -> int:
        """Count the operator DAGs, loop axes and optional grid axes that realize a kernel with this cut."""
        f = self.tables
        dags = sum(f.dags(outs, x, leaves).total() for x in f.loops_of(outs, leaves))
        return dags and dags * 2 ** len(f.grid_for(outs, leaves)[1])

    def with_kernels(self, n: int) -> Iterator[tuple[Plan, int]]:
        """Yield (plan, number of structures it stands for) for all plans of exactly n kernels."""
        yield from self._extend(self.targets, EMPTY, n, False)

    def _extend(self, todo: Leaves, made: Leaves, kernels_left: int, partial: bool) -> Iterator[tuple[Plan, int]]:
        """Kernels for `todo`; `made` is what the kernels after them make."""
        f = self.tables
        max_outputs = max(f.space.max_outputs, len(self.targets))
        if kernels_left == 1:  # this one makes all that is left, from the region's inputs
            if len(todo) <= max_outputs and (partial or self.split is None) and (here := self.structures(todo, EMPTY)):
                yield ((todo, EMPTY),), here
            return
        top = max(todo, key=f.order)
        others = sorted(todo - {top}, key=f.order)
        for n in range(min(max_outputs, len(todo))):
            for together in combinations(others, n):
                outs = frozenset((top, *together))
                for leaves in self.loadable(outs):
                    left = (todo - outs) | leaves
                    if (
                        not left.isdisjoint(made | outs)
                        or len(left) > max(f.space.max_loaded, len(self.targets))
                        or not left
                        or not (here := self.structures(outs, leaves))
                    ):
                        continue
                    for tail, count in self._extend(
                        left, made | outs, kernels_left - 1, partial or self._partial(leaves)
                    ):
                        yield ((outs, leaves), *tail), here * count

    def _partial(self, leaves: Leaves = EMPTY) -> bool:
        if self.split is None:
            return False
        axes = self.tables.axioms.e.axes
        return any(self.split + PART_SUFFIX in axes(p) and self.split not in axes(p) for p in leaves)
