"""The other way to divide a region that is too wide: by outputs, each with all values that it needs.

Windows cut a region at tensors, which then lie in memory. That is wrong where these are the largest tensors of all,
such as the weights of an attention, from which its gradients are made. The *output slice* of an output is the program
that computes it alone. Slices overlap, and each computes shared values from the inputs. So a kernel for the gradient
of the keys recomputes the weights tile by tile, as FlashAttention's backward pass does (Dao, 2023).

A slice may stop at a *waist* instead: a product that costs little to store, or an operand of several products that is
no larger than an input. The waist is then an output of its own. It also stops at another output from which its own
follows without a product: the gradient of a bias is a sum of one that is stored anyway.

Kernels that come out equal in several slices, such as row sums, run once (`joined`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain

from mirage_jax.mugraph.graph import BlockGraph, Kernel, KernelGraph, KernelSchedule, Library, Schedule, Tensor
from mirage_jax.mugraph.passes.merge_axes import sink_renames
from mirage_jax.search.candidates import Candidate
from mirage_jax.search.decompose.windows import elements, prefixed

PRODUCTS, SUMS = frozenset({"dot"}), frozenset({"dot", "sum"})  # operators that make waists


def waists(reference: KernelGraph, made_by: Set[str] = PRODUCTS) -> tuple[str, ...]:
    """Products that later products read, and that are no larger than the largest input or output; or sums too.

    To store them costs little: projections, which a library computes best, and the result of an attention from which
    its gradients are made. Weights of an attention are larger, and no waist.
    """
    largest = max(elements(reference, name) for name in (*(t.name for t in reference.inputs), *reference.outputs))
    products: dict[str, frozenset[str]] = {}  # by tensor: the products that it is made of, up to the next ones
    read = set[str]()
    for k in reference.kernels:
        made_of = frozenset[str]().union(*(products.get(x.tensor, ()) for x in k.loads))
        is_product = any(op.op in made_by for op in k.ops)
        if is_product:
            read |= made_of
        for s in k.stores:
            products[s.tensor.name] = frozenset({s.tensor.name}) if is_product else made_of
    small = (name for name in products if name in read and elements(reference, name) <= largest)
    return tuple(name for name in small if name not in reference.outputs)


def shared_operands(reference: KernelGraph) -> tuple[str, ...]:
    """Values larger than all outputs that several products read, but no larger than an input they are made of.

    To read one costs no more than to make it again, as the gradient of a cross-entropy by its logits, from which those
    of features and weights are made.
    """
    readers = _products_that_read(reference)
    largest = _largest_inputs(reference)
    given = {*(t.name for t in reference.inputs), *reference.outputs}
    shared = [name for name, n in readers.items() if n > 1 and name not in given]
    least = max(elements(reference, name) for name in reference.outputs)  # what is small is made again as cheaply
    return tuple(name for name in shared if least < elements(reference, name) <= largest[name])


def followed(reference: KernelGraph) -> dict[str, tuple[str, ...]]:
    """Find the outputs that follow from others without a product, and from which.

    By output: the other outputs, or what these are multiples of. A multiple that is stored for another output serves
    its own, too.
    """
    multiples = {name: _multiple_of(reference, name) for name in reference.outputs}
    found = {name: _without_products(reference, name, multiples) for name in reference.outputs}
    stored = set(chain(*found.values()))
    own = {name: (m,) for name, m in multiples.items() if m in stored - {name}}
    return {name: of for name, of in (found | own).items() if of}


def _without_products(reference: KernelGraph, output: str, multiples: Mapping[str, str]) -> tuple[str, ...]:
    """The multiples of other outputs from which an output follows without the products that it takes from inputs."""
    others = {multiple for name, multiple in multiples.items() if name != output} - {output}
    rest = output_slice(reference, output, tuple(others))
    if _has_products(rest) or not _has_products(output_slice(reference, output)):
        return ()
    return tuple(t.name for t in rest.inputs if t.name in others)


def _multiple_of(reference: KernelGraph, output: str) -> str:
    """The tensor that an output multiplies by a constant, in the same type; the output itself if there is none."""
    made = {k.name: k for k in reference.kernels if isinstance(k, Library)}.get(output)
    if made is None or made.op.op != "affine" or made.op.number("offset", 0):
        return output
    (of,) = (reference.tensors[load.tensor] for load in made.loads)
    return of.name if of not in reference.inputs and of.dtype == made.result.dtype else output


def _has_products(graph: KernelGraph) -> bool:
    return any(op.op in PRODUCTS for k in graph.kernels for op in k.ops)


def _products_that_read(reference: KernelGraph) -> Counter[str]:
    """The number of products that read each tensor."""
    products = [k for k in reference.kernels if not PRODUCTS.isdisjoint(op.op for op in k.ops)]
    return Counter(name for k in products for name in {x.tensor for x in k.loads})


def _largest_inputs(reference: KernelGraph) -> dict[str, int]:
    """Elements of the largest input that each tensor is made of."""
    largest = {t.name: elements(reference, t.name) for t in reference.inputs}
    for k in reference.kernels:
        most = max((largest[x.tensor] for x in k.loads), default=0)
        largest.update((s.tensor.name, most) for s in k.stores)
    return largest


def output_slice(reference: KernelGraph, output: str, stored: Collection[str] = ()) -> KernelGraph:
    """Extract the program that computes one output of a graph of library operators from inputs and `stored` tensors.

    A value that is also an output may have other axes there than where it is read.
    """
    needed, kernels = {output}, list[Kernel]()
    given = {*stored} - {output}
    for k in reversed(reference.kernels):
        if not (needed - given).isdisjoint(s.tensor.name for s in k.stores):
            kernels.append(k)
            needed.update(x.tensor for x in k.loads)
    inputs = [t for t in reference.inputs if t.name in needed]
    inputs += [reference.tensors[name] for name in stored if name in needed & given]
    return sink_renames(KernelGraph(tuple(inputs), tuple(reversed(kernels)), (output,), reference.extents))


def joined(reference: KernelGraph, found: Sequence[Sequence[Candidate]]) -> Candidate | None:
    """Join the best candidates of all slices; None if some slice has none, or if no candidate has kernels."""
    chosen: list[Candidate] = []
    parts: dict[str, int] = {}
    for candidates in found:
        for c in candidates:
            if all(parts.get(axis, n) == n for axis, n in c.schedule.parts):  # an axis has one number of parts
                chosen.append(c)
                parts |= dict(c.schedule.parts)
                break
        else:
            return None
    if all(c.family == "algebra" for c in chosen):
        return None
    join = _Join(reference)
    for n, c in enumerate(chosen):
        join.add(c, f"c{n}")
    graph = KernelGraph(reference.inputs, tuple(join.kernels), reference.outputs, reference.extents)
    schedule = Schedule(tuple(join.sizes), tuple(sorted(parts.items())))
    single = tuple(sorted({a for c in chosen for a in c.single}))
    seconds = sum(c.seconds for c in chosen)  # counts shared kernels repeatedly: too high an estimate loses less
    return Candidate(graph, schedule, seconds, "kernels", tuple(join.others), single)


class _Join:
    """Kernels of several graphs over the same inputs, equal ones only once."""

    def __init__(self, reference: KernelGraph) -> None:
        self.taken = {*(t.name for t in reference.inputs), *reference.tensors}
        self.kernels: list[Kernel] = []
        self.sizes: list[KernelSchedule] = []
        self.others: list[tuple[KernelSchedule, ...]] = []
        self.known: dict[object, tuple[Tensor, ...]] = {}

    def add(self, c: Candidate, prefix: str) -> None:
        """Add a candidate's kernels; intermediates get names with this prefix."""
        names: dict[str, str] = {}  # of the candidate's intermediates
        for i, kernel in enumerate(c.graph.kernels):
            made = prefixed(kernel, prefix, self.taken, names)
            key = (_unnamed(made), c.schedule.kernels[i])
            stored = [s.tensor.name for s in kernel.stores]
            is_known = key in self.known and self.taken.isdisjoint(stored)
            if not is_known:
                self.known[key] = tuple(s.tensor for s in made.stores)
                self.kernels.append(made)
                self.sizes.append(c.schedule.kernels[i])
                self.others.append(c.alternatives_of(i))
            names |= {name: same.name for name, same in zip(stored, self.known[key], strict=True)}


def _unnamed(kernel: Kernel) -> object:
    """A kernel without its own name and its stores' names: equal for kernels that do the same in the same way.

    Numbers of values, and the order of loads, are as one search writes them; another search writes them the same way.
    """
    is_block = isinstance(kernel, BlockGraph)
    stores = tuple((s.value if is_block else "", s.tensor.axes, s.tensor.dtype) for s in kernel.stores)
    if isinstance(kernel, Library):
        return kernel.loads, replace(kernel.op, name=""), stores
    return kernel.grid, kernel.loop, kernel.loads, kernel.ops, stores, kernel.loop_bounds
