"""The targets of a search: the outputs of a reference as normal forms, and its batch axes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mirage_jax.errors import UnsupportedError
from mirage_jax.mugraph.graph import Axis, KernelGraph
from mirage_jax.mugraph.operators import operator
from mirage_jax.search.enumerate.axioms import Axioms
from mirage_jax.search.enumerate.normal_form import Expressions, Poly

MAX_SUM_TERMS = 64  # products in a sum that is searched
MAX_TILE_RANK = 2  # axes along which a tile has more than one element
MANY_TENSORS = 3  # with too many axes for a tile, whose common axis is taken one by one


def express(reference: KernelGraph, e: Expressions) -> dict[str, Poly]:
    """Compute the normal form of every tensor of a graph of library operators, by name.

    Raises `UnsupportedError` if a value has none, or one of too many terms.
    """
    known = {t.name: e.atom(t.name, t.axes) for t in reference.inputs}
    for k in reference.kernels:
        values: dict[str, Poly] = {}
        for load in k.loads:
            names = dict(zip(reference.tensors[load.tensor].axes, load.axes, strict=True))
            values[load.name] = e.rename(known[load.tensor], names)
        for op in k.ops:
            p = operator(op.op).meaning(e, *(values[a] for a in op.args), **op.attributes)
            if len(e.poly(p)) > MAX_SUM_TERMS:
                raise UnsupportedError(f"a value expands to a sum of more than {MAX_SUM_TERMS} products")
            values[op.name] = p
        known |= {s.tensor.name: values[s.value] for s in k.stores}
    return known


def batch_axes(
    reference: KernelGraph, targets: list[Poly], axioms: Axioms, reduced: frozenset[Axis]
) -> frozenset[Axis]:
    """Choose the axes along which tiles have one element, so that tiles keep two other axes.

    Such an axis is in every output and never reduced. It is in every large tensor, or it is needed to bound the rank.
    The last axis of an input comes last, because neighbours are read together. Where tensors still have too many axes,
    those go first that most of them have, such as the batch of an attention whose decay has heads only. A tensor that
    is summed over several axes may then give one of these: a loop takes its elements one by one. So scales that groups
    of weights share are applied after the product of a group.
    """
    e = axioms.e
    free = frozenset[Axis].intersection(*(e.axes(p) for p in targets)) - reduced
    reads = _reads(reference)
    shapes = [frozenset(axes) for axes in reads if len(axes) > 1] + [e.axes(p) for p in targets]
    large = [s for s in shapes if len(s) > MAX_TILE_RANK]
    last = {axes[-1] for axes in reads if len(axes) > MAX_TILE_RANK}
    order = sorted(free, key=lambda a: (a in last, reference.extent(a), a))
    batch = _in_every_large_tensor(large, order) if large else frozenset[Axis]()
    for shape in sorted(large, key=lambda s: (-len(s), sorted(s))):
        while len(shape - batch) > MAX_TILE_RANK:
            too_wide = [s - batch for s in large if len(s - batch) > MAX_TILE_RANK]
            choices = _candidates(shape - batch, reduced, free, too_wide)
            if not choices:
                break
            batch |= {min(choices, key=lambda a: (reference.extent(a), a))}
    return batch


def _reads(reference: KernelGraph) -> list[tuple[Axis, ...]]:
    """The axes under which inputs are read: a program may read one under several names."""
    inputs = {t.name for t in reference.inputs}
    found = ((x.tensor, x.axes) for k in reference.kernels for x in k.loads if x.tensor in inputs)
    return [axes for _, axes in dict.fromkeys(found)]


def _candidates(
    axes: frozenset[Axis], reduced: frozenset[Axis], free: frozenset[Axis], too_wide: Sequence[frozenset[Axis]]
) -> frozenset[Axis]:
    """Axes of a tensor that may become batch axes: the free ones that most of several tensors with too many axes have,
    or summed ones if there are several, or free ones. A summed axis that all of many tensors have goes first, if no
    free one is in all: the batch of attention whose bias gets a gradient.
    """
    counts = Counter(a for shape in too_wide for a in shape & free)
    most = max((counts[a] for a in axes & free), default=0)
    in_all = reduced & frozenset[Axis].intersection(*too_wide)
    if in_all and len(too_wide) >= MANY_TENSORS and most < len(too_wide):
        return in_all
    if most > 1:
        return frozenset(a for a in axes & free if counts[a] == most)
    summed = axes & reduced
    return summed if len(summed) > 1 else axes & free


def _in_every_large_tensor(large: list[frozenset[Axis]], order: list[Axis]) -> frozenset[Axis]:
    """The first axes that all these tensors have, as long as each keeps enough others."""
    batch = frozenset[Axis]()
    for a in order:
        if all(a in s and len(s - batch) > MAX_TILE_RANK for s in large):
            batch |= {a}
    return batch
