"""Divide a large region into windows that can each be searched exhaustively.

The number of subexpressions of a product grows as 2^factors. So a region is hard because its products are wide, not
because it has many operators: three normalized projections inside one linear attention multiply twelve factors. A
region with too many values is *cut* at tensors: results of contractions, and values that several operators read.
Kernels between cuts form windows. Large tensors are cut last, because keeping them out of memory is a kernel's purpose.

A window is a muGraph of its own; `replace_windows` puts found graphs in the place of some windows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from mirage_jax.mugraph.footprint import flops_of
from mirage_jax.mugraph.graph import Axis, BlockGraph, Kernel, KernelGraph, Library, Store, Tensor, origin
from mirage_jax.mugraph.operators import operator

MIN_TAIL_RATIO = 8  # of the largest tensor over results that count as small
READ_FLOPS = 48.0  # operations that a GPU has done by the time in which a number is read from memory
RELATIVE = frozenset({"logs", "lesslogs"})  # read a sum and the shift that it is relative to


@dataclass(frozen=True)
class KernelWindow:
    """Kernels of a reference, by position, and the muGraph that they form."""

    positions: tuple[int, ...]
    graph: KernelGraph


def divide(reference: KernelGraph, fits: Callable[[KernelGraph], bool]) -> list[KernelWindow]:
    """Divide a graph into windows that fit, in execution order; the whole graph if it fits.

    Everything that may be cut is cut first. Then cuts are taken back, largest tensors first, as long as the joined
    windows fit: no window that fits could be joined with its neighbours. A window that does not fit even so stays.
    """
    whole = [KernelWindow(tuple(range(len(reference.kernels))), reference)]
    if fits(reference):
        return whole
    sizes = _cuttable(reference)
    cut = set(sizes)
    parts = _cut(reference, cut)
    if parts is None:
        return whole
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        joined = _cut(reference, cut - {name})
        if joined is not None and all(w in parts or fits(w.graph) for w in joined):
            cut, parts = cut - {name}, joined
    return parts


def with_copies(reference: KernelGraph) -> KernelGraph:
    """Give each reader a copy of large values made of small tensors, such as distances of all pairs of points.

    Only where making one takes no longer than reading one. Windows need not end there.
    """
    stored, kernels = _stored(reference), list(_libraries(reference))
    together = [[kernels[i] for i in sorted(_below(reference, name, stored))] for name in stored]  # each ends with it
    makers = Counter(k.name for group in together for k in group)
    if all(n == 1 for n in makers.values()):
        return reference
    single = {name for name in reference.tensors if makers[name] < 2}
    made = tuple(prefixed(k, f"{group[-1].name}_", single) for group in together for k in group)
    return replace(reference, kernels=made)


def _stored(reference: KernelGraph) -> tuple[str, ...]:
    """The values that are not made again: small ones, those that take long, and results."""
    stored: list[str] = []
    work = {k.name: flops_of(k, reference.extent) for k in reference.kernels}
    for k in _libraries(reference):
        own = [reference.kernels[i] for i in _below(reference, k.name, stored)]
        read = {x.tensor for x in chain.from_iterable(o.loads for o in own)} - {o.name for o in own}
        size, small = elements(reference, k.name), sum(elements(reference, name) for name in read)
        is_expansion = size >= MIN_TAIL_RATIO * max(small, 1) and k.name not in reference.outputs
        if not is_expansion or sum(work[o.name] for o in own) > READ_FLOPS * size:
            stored.append(k.name)
    return tuple(stored)


def before_tail(reference: KernelGraph) -> list[KernelWindow]:
    """The pointwise operators at the end whose results are all small, apart from what they are made of; none if there
    is no such end.

    One more launch costs little, and a kernel has no room for as many operators as a long end has, such as the guards
    and the damping of a potential in optimal transport.
    """
    kernels = list(_libraries(reference))
    small = max(elements(reference, name) for name in reference.tensors) // MIN_TAIL_RATIO
    rest = set[str]()  # what other operators than those of the end read
    tail = dict[str, Library]()
    for k in reversed(kernels):
        is_light = operator(k.op.op).pointwise and k.op.op not in RELATIVE
        if is_light and k.name not in rest and elements(reference, k.name) <= small:
            tail[k.name] = k
        else:
            rest.update(x.tensor for x in k.loads)
    return _before(reference, tail)


def before_reductions(reference: KernelGraph) -> list[KernelWindow]:
    """The sums and maxima behind the last product, and what follows them, apart from what they reduce; none if there
    are no such.

    Pooling of a convolution's results takes maxima along more axes than a tile of a product may have.
    """
    behind = dict[str, Library]()
    for k in _libraries(reference):
        follows = any(x.tensor in behind for x in k.loads)
        if follows and k.op.op == "dot":
            return []
        if follows or k.op.op in ("sum", "max"):
            behind[k.name] = k
    return _before(reference, behind)


def after_quotients(reference: KernelGraph) -> list[KernelWindow]:
    """Two windows: quotients with the same divisor that are added or subtracted, and all else; none if there are no
    such quotients that are made of inputs element by element.

    Where l is 0, x/l - y/l is NaN and (x - y)/l is infinite. So the float gate refuses all that divides later.
    """
    maker = {k.name: k for k in _libraries(reference)}
    first = set[int]()
    for k in maker.values():
        divisors = {_divisor(maker, x.tensor) for x in k.loads}
        if k.op.op == "add" and len(divisors) == 1 and divisors != {""}:
            first |= _pointwise_below(reference, {x.tensor for x in k.loads})
    if not first:
        return []
    rest = [n for n in range(len(reference.kernels)) if n not in first]
    read_later = {x.tensor for n in rest for x in reference.kernels[n].loads}
    return [
        _window(reference, sorted(first), read_later.union(reference.outputs)),
        _window(reference, rest, set(reference.outputs)),
    ]


def _divisor(maker: Mapping[str, Library], name: str) -> str:
    """The value by which another one is divided, or a negative power by which it is multiplied; "" if by none."""
    if (k := maker.get(name)) is None or k.op.op not in ("div", "mul"):
        return ""
    read = [x.tensor for x in k.operands]
    return read[1] if k.op.op == "div" else next((x for x in read if _is_negative_power(maker.get(x))), "")


def _is_negative_power(kernel: Library | None) -> bool:
    return kernel is not None and kernel.op.op == "pow" and kernel.op.number("exponent") < 0


def _pointwise_below(reference: KernelGraph, names: Iterable[str]) -> set[int]:
    """Positions of the kernels that compute values from inputs, if all are pointwise; else none."""
    below = set[int]().union(*(_below(reference, name, ()) for name in names))
    is_pointwise = all(operator(op.op).pointwise for n in below for op in reference.kernels[n].ops)
    return below if is_pointwise else set()


def _before(reference: KernelGraph, end: Mapping[str, Library]) -> list[KernelWindow]:
    """Windows that part the operators of the end, by name, from what they are made of; none if there is no end."""
    cut = {x.tensor for k in end.values() for x in k.loads} - {*end, *(t.name for t in reference.inputs)}
    return (_cut(reference, cut) or []) if cut else []


def elements(reference: KernelGraph, name: str) -> int:
    """Count the elements of a tensor."""
    return math.prod(map(reference.extent, reference.tensors[name].axes))


def _cuttable(reference: KernelGraph) -> dict[str, int]:
    """Elements of the tensors where a graph may be cut: results of contractions, and tensors with several readers."""
    kernels = list(_libraries(reference))
    readers = Counter(name for k in kernels for name in {x.tensor for x in k.loads})
    cuttable = (k for k in kernels if k.op.op == "dot" or readers[k.name] > 1)
    return {k.name: elements(reference, k.name) for k in cuttable if k.name not in reference.outputs}


def _libraries(graph: KernelGraph) -> Iterator[Library]:
    for k in graph.kernels:
        assert isinstance(k, Library), "windows are cut before kernels are formed"
        yield k


def _cut(reference: KernelGraph, cut: set[str]) -> list[KernelWindow] | None:
    """Windows between the cuts; None if windows would depend on each other in a circle."""
    ends = [k.name for k in reference.kernels if k.name in cut or k.name in reference.outputs]
    groups: list[tuple[set[int], set[str]]] = []  # ends that share kernels are one window
    for end in ends:
        kernels, names = _below(reference, end, ends), {end}
        for g in [g for g in groups if g[0] & kernels]:
            kernels, names = kernels | g[0], names | g[1]
            groups.remove(g)
        groups.append((kernels, names))
    return _in_order(reference, [_window(reference, sorted(kernels), names) for kernels, names in groups])


def _below(reference: KernelGraph, end: str, ends: Collection[str]) -> set[int]:
    """Positions of the kernels that compute a tensor from inputs and other ends."""
    maker = {k.name: i for i, k in enumerate(reference.kernels)}
    seen, todo = set[int](), [maker[end]]
    while todo:
        i = todo.pop()
        if i not in seen:
            seen.add(i)
            reads = (x.tensor for x in reference.kernels[i].loads)
            todo += [maker[t] for t in reads if t in maker and t not in ends]
    return seen


def _in_order(reference: KernelGraph, windows: list[KernelWindow]) -> list[KernelWindow] | None:
    """Sort windows by dependence; None if that cannot be."""
    order: list[KernelWindow] = []
    known = {t.name for t in reference.inputs}
    while windows:
        ready = next((w for w in windows if all(t.name in known for t in w.graph.inputs)), None)
        if ready is None:
            return None
        windows.remove(ready)
        order.append(ready)
        known.update(ready.graph.outputs)
    return order


def _window(reference: KernelGraph, positions: Sequence[int], outputs: set[str]) -> KernelWindow:
    kernels = tuple(reference.kernels[i] for i in positions)
    made = {k.name for k in kernels}
    reads = dict.fromkeys(x.tensor for k in kernels for x in k.loads if x.tensor not in made)
    inputs = tuple(reference.tensors[t] for t in reads)
    used = {origin(a) for k in kernels for a in _axes_named(k)}
    used |= {origin(a) for t in inputs for a in t.axes}  # a load may show them under other names
    extents = tuple((a, n) for a, n in reference.extents if a in used)
    stored = tuple(k.name for k in kernels if k.name in outputs)
    return KernelWindow(tuple(positions), KernelGraph(inputs, kernels, stored, extents))


def _axes_named(kernel: Kernel) -> Iterator[Axis]:
    """All axes that a kernel names; a sum may count an axis that no value has."""
    for value in (*kernel.loads, *kernel.ops, *(s.tensor for s in kernel.stores)):
        yield from value.axes
    for op in kernel.ops:
        for attribute in op.attributes.values():
            if isinstance(attribute, tuple):
                yield from attribute


def replace_windows(
    reference: KernelGraph, found: Mapping[int, KernelGraph], parts: list[KernelWindow]
) -> tuple[KernelGraph, list[tuple[int, int]]]:
    """Put the graphs `found` (by number of window) in place of windows of the reference.

    Also returns, for every kernel, (window, position in the window's found graph), with position -1 where the
    reference's own kernel stays.
    """
    kept = {*(t.name for t in reference.inputs), *reference.tensors}
    kernels: list[Kernel] = []
    places: list[tuple[int, int]] = []
    for n, w in enumerate(parts):
        if n in found:
            kernels += [prefixed(k, f"w{n}", kept) for k in found[n].kernels]
            places += [(n, i) for i in range(len(found[n].kernels))]
        else:
            kernels += w.graph.kernels
            places += [(n, -1)] * len(w.graph.kernels)
    return KernelGraph(reference.inputs, tuple(kernels), reference.outputs, reference.extents), places


def prefixed(kernel: Kernel, prefix: str, keep: set[str], renamed: Mapping[str, str] | None = None) -> Kernel:
    """Rename a part's intermediates to names that no other part has; `renamed` are those that have others already."""
    names = renamed or {}

    def tensor(t: Tensor) -> Tensor:
        """A stored tensor under its new name."""
        return t if t.name in keep else replace(t, name=prefix + t.name)

    def source(name: str) -> str:
        """The new name of a loaded tensor."""
        return names.get(name, name if name in keep else prefix + name)

    loads = tuple(replace(x, tensor=source(x.tensor)) for x in kernel.loads)
    if isinstance(kernel, BlockGraph):
        stores = tuple(Store(tensor(s.tensor), s.value) for s in kernel.stores)
        return replace(kernel, name=prefix + kernel.name, loads=loads, stores=stores)
    result = tensor(kernel.result)
    return replace(kernel, loads=loads, result=result, op=replace(kernel.op, name=result.name))
