"""Cuts the equations that a muGraph can express into pieces of the size of a region.

Equations are clustered (clusters.py). A large cluster, or one of matrix products that are better kept apart
(product_boundaries.py), is divided where the fewest bytes cross, never between a cast or a broadcast and the one
operator that reads it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mirage_jax.jaxpr_frontend.partition.clusters import Dependencies, convex_clusters, divide
from mirage_jax.jaxpr_frontend.partition.eligibility import Eligibility
from mirage_jax.jaxpr_frontend.partition.product_boundaries import ProductBoundaries
from mirage_jax.jaxpr_frontend.partition.program import FlatEqn, FlatProgram, bytes_of
from mirage_jax.jaxpr_frontend.partition.reasons import Code
from mirage_jax.jaxpr_frontend.translate import rules

type Piece = tuple[int, ...]
type Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class CutContext:
    """What one cut of a program reads. `known` has the pieces of clusters by their form, and outlives the cut."""

    eligibility: Eligibility
    dependencies: Dependencies
    max_ops: int
    known: dict[Hashable, list[Piece]]

    @property
    def program(self) -> FlatProgram:
        """The program that is cut."""
        return self.eligibility.program

    @property
    def eqns(self) -> Sequence[FlatEqn]:
        """The equations of the program."""
        return self.program.eqns

    @cached_property
    def weights(self) -> list[int]:
        """Count what each equation adds to the size of a region: 0 for layouts, casts, masks and literal operands."""
        return [int(not _is_weightless(self.eligibility, n)) for n in range(len(self.eqns))]

    def weight(self, positions: Iterable[int]) -> int:
        """Sum the weights of equations."""
        return sum(map(self.weights.__getitem__, positions))


def _is_weightless(e: Eligibility, n: int) -> bool:
    eqn = e.eqns[n]
    if n in e.constants or eqn.primitive in rules.LAYOUT_PRIMITIVES:
        return True
    if eqn.primitive in ("add", "sub", "mul", "div"):
        return e.has_literal_operand(eqn)
    return eqn.primitive == "max" and any(not isinstance(a, int) and float(a.val) == -math.inf for a in eqn.inputs)


def pieces(c: CutContext) -> tuple[list[Piece], set[int]]:
    """Cut a program into pieces; also return the equations of those that no kernel computes faster than libraries.

    A piece without a contraction is no region, but regions may make its values again. Gives concatenations that a
    product reads across a border their reason to stay with XLA.
    """
    e = c.eligibility
    members = e.members
    borders = ProductBoundaries(c.program, members)
    for n in _concatenated_operands(e, borders):
        e.reasons[n] = Code.LAYOUT, "what a product reads is put together: a border"
    clusters = _clusters(c, members, borders)
    apart = _by_cluster(clusters, {(first, then) for first, _, then in borders.pairs})
    cut = (_cut(c, cluster, apart[cluster]) if e.has_contraction(cluster) else [cluster] for cluster in clusters)
    found = list(itertools.chain.from_iterable(cut))
    unpaid = itertools.filterfalse(borders.pays, filter(e.has_contraction, found))
    unprofitable = set(itertools.chain(*unpaid))
    return [p for p in found if p[0] not in unprofitable], unprofitable


def _concatenated_operands(e: Eligibility, borders: ProductBoundaries) -> set[int]:
    """Concatenations that products read across a border."""
    makers = {maker for _, maker, _ in borders.pairs}
    return {n for maker in makers for n in _concatenation(e, maker)}


def _clusters(c: CutContext, members: Sequence[int], borders: ProductBoundaries) -> list[Piece]:
    at_operands = {(maker, then) for _, maker, then in borders.pairs if borders.at_operand(then)}
    members = [n for n in members if n not in c.eligibility.reasons]
    return convex_clusters(c.dependencies, members, [eqn.scope for eqn in c.eqns], at_operands)


def _concatenation(e: Eligibility, n: int) -> Iterator[int]:
    """The concatenation that an equation is, or shows."""
    while e.is_view(n) and (above := e.program.producers.get(e.eqns[n].reads[0])) is not None:
        n = above
    if e.eqns[n].primitive in rules.SLICING_PRIMITIVES and e.eqns[n].primitive != "slice":
        yield n


def _by_cluster(clusters: Iterable[Piece], pairs: Iterable[tuple[int, int]]) -> Mapping[Piece, Pairs]:
    """For each cluster the pairs that are in it."""
    found: dict[Piece, list[tuple[int, int]]] = {cluster: [] for cluster in clusters}
    cluster_of = {n: cluster for cluster in found for n in cluster}
    for first, then in pairs:
        cluster = cluster_of.get(first)
        if cluster is not None and cluster is cluster_of.get(then):
            found[cluster].append((first, then))
    return found


def _cut(c: CutContext, cluster: Piece, apart: Pairs) -> Iterator[Piece]:
    """The pieces of a cluster. Clusters of equal layers are cut once.

    Their equations are of one form, count alike, and have the same transposed products, waits and pairs apart.
    """
    at = {n: i for i, n in enumerate(cluster)}
    form = _form(c, cluster, at, apart)
    if form not in c.known:
        c.known[form] = [tuple(map(at.__getitem__, piece)) for piece in _pieces_of(c, cluster, apart)]
    return (tuple(map(cluster.__getitem__, piece)) for piece in c.known[form])


def _form(c: CutContext, cluster: Piece, at: Mapping[int, int], apart: Pairs) -> Hashable:
    """All that decides how a cluster is cut, with equations by their places `at` in it."""
    products, before = c.eligibility.transposed_products, c.dependencies.before
    waiting = [(i, before[n]) for n, i in at.items() if c.eqns[n].after]
    return (
        c.eligibility.forms.piece(cluster, c.program.crossing(cluster)),
        tuple(map(c.weights.__getitem__, cluster)),
        tuple((i, at.get(products[n])) for n, i in at.items() if n in products),
        tuple((i, *sorted(at.get(p, -1) for p in earlier)) for i, earlier in waiting),
        tuple(sorted((at[a], at[b]) for a, b in apart)),
    )


def _pieces_of(c: CutContext, cluster: Piece, apart: Pairs) -> Iterator[Piece]:
    is_small = c.weight(cluster) <= c.max_ops and not apart
    for segment in [cluster] if is_small else _divide(c, cluster, apart):
        kept = _without_last_parts(c, segment)
        yield from [segment] if is_small and kept == segment else _connected(c.dependencies, kept)


def _without_last_parts(c: CutContext, segment: Piece) -> Piece:
    """A segment without equations at its end that only take its results apart or join them, which XLA does as well.

    Slices stay if what they leave out need not be computed then.
    """
    inside, last, dropped = set(segment), set[int](), set[int]()
    for n in reversed(segment):
        after = inside.intersection(c.dependencies.after[n])
        if c.eqns[n].primitive in rules.LAYOUT_PRIMITIVES and last >= after:
            last.add(n)
    for n in sorted(last):
        is_part = c.eqns[n].primitive in rules.SLICING_PRIMITIVES and not _is_less(c, n, last)
        if is_part or not dropped.isdisjoint(c.dependencies.before[n]):
            dropped.add(n)
    return tuple(n for n in segment if n not in dropped)


def _is_less(c: CutContext, n: int, last: Collection[int]) -> bool:
    """Whether a slice, with others at the end of a region, shows less than all of the value that it is a slice of."""
    if c.eqns[n].primitive != "slice":
        return False
    (value,) = c.eqns[n].reads
    readers = c.program.readers[value]
    shown = sum(bytes_of(c.eqns[r].out_avals[0]) for r in readers if r >= 0)
    if shown >= bytes_of(c.program.avals[value]):
        return False
    return all(r in last and c.eqns[r].primitive == "slice" for r in readers)


def _connected(dependencies: Dependencies, segment: Sequence[int]) -> list[Piece]:
    """Parts of a segment that share no value of its own."""
    part_of: dict[int, list[int]] = {}
    for n in sorted(segment):
        part_of[n] = part = [n]
        for p in dependencies.before[n]:
            other = part_of.get(p, part)
            if other is not part:
                part, less = (part, other) if len(part) > len(other) else (other, part)
                part += less
                part_of.update(dict.fromkeys(less, part))
    return [tuple(sorted(part)) for part in {id(part): part for part in part_of.values()}.values()]


# --- where a large cluster is divided


def _divide(c: CutContext, cluster: Piece, apart: Pairs) -> list[Piece]:
    order = _groups(c, cluster)
    group_of = {n: g for g, group in enumerate(order) for n in group}
    weights = list(map(c.weight, order))
    crossing = _crossing_bytes(c, cluster, group_of, weights)
    return divide(order, weights, crossing, c.max_ops, [(group_of[a], group_of[b]) for a, b in apart])


def _crossing_bytes(c: CutContext, cluster: Piece, group_of: Mapping[int, int], weights: Sequence[int]) -> list[int]:
    """The bytes that a cut before each group makes a kernel write and another one read."""
    reach = list(itertools.accumulate(weights, initial=0))
    last: dict[int, int] = {}  # value -> last group that reads it, or a view of it
    for n in cluster:
        for v in map(c.eligibility.source, c.eqns[n].reads):
            last[v] = max(last.get(v, 0), group_of[n])
    change = [0] * (len(weights) + 2)  # of the bytes that cross, from one cut to the next
    for v in c.program.made_by(cluster):
        start, end = group_of[c.program.producers[v]], last.get(v, -1)
        if end <= start:
            continue
        size = bytes_of(c.program.avals[v])
        # No segment reaches further: what lives longer is stored and loaded wherever the cuts are. So a cut in
        # one layer costs what it costs in an equal one, however much the first keeps for a backward pass.
        change[min(end, max(start + 1, bisect_left(reach, reach[end] - c.max_ops)))] += size
        change[end + 1] -= size
        if c.program.readers[v] <= group_of.keys():  # else it is stored anyway
            change[start + 1] += size
            change[max(start + 2, min(end + 1, bisect_right(reach, reach[start] + c.max_ops)))] -= size
    return list(itertools.accumulate(change))


def _groups(c: CutContext, cluster: Piece) -> list[list[int]]:
    """A topological order in which layouts and casts stand next to the operator that they serve, as one group."""
    inside, products = set(cluster), c.eligibility.transposed_products
    anchor = _anchors(c, cluster)
    rank = {n: int(n == weighty) for n, weighty in anchor.items()}
    for n in cluster:
        if n not in anchor:
            above = (anchor[p] for p in c.dependencies.before[n] if p in inside)
            anchor[n] = products[n] if products.get(n) in inside else max(above, default=n)
    placed = sorted(cluster, key=lambda n: (anchor[n], rank.get(n, 2), n))
    return [list(group) for _, group in itertools.groupby(placed, key=anchor.__getitem__)]


def _anchors(c: CutContext, cluster: Piece) -> dict[int, int]:
    """For equations that a weighty one depends on the first such; a weighty equation is its own."""
    inside, products = set(cluster), c.eligibility.transposed_products
    anchors: dict[int, int] = {}
    for n in reversed(cluster):
        if products.get(n) in inside:
            continue
        below = [anchors[m] for m in c.dependencies.after[n] if m in anchors]
        if c.weights[n]:
            anchors[n] = n
        elif below:
            anchors[n] = min(below)
    return anchors
