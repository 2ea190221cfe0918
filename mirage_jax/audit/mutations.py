"""Mutations: small changes of a muGraph that should make it compute something else, to test what tests candidates.

Input: a right muGraph. Output: wrong ones, near to it (mutation testing: DeMillo, Lipton, Sayward 1978). One record per
operator in the table `MUTATIONS`: M* change what is computed, S* how it is scheduled. Some of their graphs are not well
formed, and some compute the same after all; who uses them has to sort both out (`audit.mutants` does, by the checker
and by float64).

A rule sees one operator and yields *terms* that take its place. What cannot be written with named axes has no rule:
grid dimensions or an imap swapped (maps are read off axes; M17 and M18 rename these), a tile's offset off by one, the
first step repeated, a tail without its mask, `<=` for `<` in it (tails are shorter slices). Such mistakes are made in
generated code, where `audit.lowering` makes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import combinations
from random import Random

from mirage_jax.mugraph.domains.finite_field import SEMILATTICES, SYMMETRIC
from mirage_jax.mugraph.graph import (
    Attr,
    Axis,
    BlockGraph,
    Kernel,
    KernelGraph,
    Library,
    Load,
    LoopBounds,
    Op,
    Store,
    is_part,
)
from mirage_jax.mugraph.operators import ACCUMULATORS, FUNCTIONS, ONE, ZERO, operator

type Edit = Callable[[], KernelGraph]  # builds one mutant; choosing one of many should not build the others
type Edits = Callable[[KernelGraph], Iterator[Edit]]


@dataclass(frozen=True)
class Mutation:
    """`name` is the number that reports use, `change` what is done: before -> after."""

    name: str
    change: str
    edits: Edits

    def mutants(self, graph: KernelGraph) -> Iterator[KernelGraph]:
        """All mutants of `graph` by this operator."""
        for edit in self.edits(graph):
            yield edit()

    def applies(self, graph: KernelGraph) -> bool:
        return next(self.edits(graph), None) is not None

    def draw(self, graph: KernelGraph, rng: Random) -> KernelGraph | None:
        """One of them; None if the operator does not apply."""
        edits = list(self.edits(graph))
        return rng.choice(edits)() if edits else None

    def __str__(self) -> str:
        return f"{self.name} {self.change}"


# --- terms: what takes the place of an operator


@dataclass(frozen=True)
class Term:
    """An operator whose arguments are values of the kernel, by name, or terms."""

    op: str
    args: tuple[str | Term, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()


def term(op: str, *args: str | Term, **attrs: Attr) -> Term:
    return Term(op, args, tuple(sorted(attrs.items())))


def like(op: Op, *args: str | Term, **attrs: Attr) -> Term:
    """The same operator on other arguments or with other attributes."""
    return Term(op.op, args or op.args, tuple(sorted((op.attributes | attrs).items())))


@dataclass(frozen=True)
class Place:
    """An operator where it stands."""

    graph: KernelGraph
    kernel: BlockGraph
    op: Op

    def axes(self, value: str) -> set[Axis]:
        return set(self.kernel.axes_of[value])

    def maker(self, value: str | Term) -> Op | None:
        """The operator that computes a value; None for what is loaded."""
        return next((o for o in self.kernel.ops if o.name == value), None)

    @property
    def reduced(self) -> tuple[Axis, ...]:
        axes = self.op.attributes.get("axes", ())
        return axes if isinstance(axes, tuple) else ()

    def extent(self, axes: Sequence[Axis]) -> int | None:
        """Number of indices of these axes; None if a part axis, which has no extent of its own, is among them."""
        return None if any(map(is_part, axes)) else math.prod(map(self.graph.extent, axes))


type Rule = Callable[[Place], Iterator[Term]]


def operators(rule: Rule, whole: bool = False) -> Edits:
    """The rule at every operator of every kernel; `whole`: of kernels without grid and loop, where every axis can be
    reduced.
    """

    def edits(graph: KernelGraph) -> Iterator[Edit]:
        for n, kernel in enumerate(graph):
            block = as_whole(kernel) if whole else as_block(kernel)
            for i, op in enumerate(block.ops):
                for new in rule(Place(graph, block, op)):
                    yield partial(_replaced, graph, n, block, i, new)

    return edits


def as_block(kernel: Kernel) -> BlockGraph:
    """A library operator as a kernel of one block, into which operators can be put."""
    if isinstance(kernel, BlockGraph):
        return kernel
    return BlockGraph(kernel.name, (), None, kernel.loads, kernel.ops, kernel.stores)


def as_whole(kernel: Kernel) -> BlockGraph:
    """The same computation as one block without a loop (parts of a split axis stay on the grid)."""
    block = as_block(kernel)
    if any(map(is_part, block.grid)):
        return block
    ops = tuple(Op(o.name, "affine", o.args[:1], o.axes) if o.op in ACCUMULATORS else o for o in block.ops)
    return replace(block, grid=(), loop=None, loop_bounds=None, ops=ops)


def _replaced(graph: KernelGraph, n: int, block: BlockGraph, i: int, new: Term) -> KernelGraph:
    taken, made = set(block.axes_of), list[Op]()

    def emit(t: str | Term, name: str = "") -> str:
        if isinstance(t, str):
            return t
        args = tuple(emit(a) for a in t.args)
        if not name:
            name = next(f"m{k}" for k in range(len(taken) + 1) if f"m{k}" not in taken)
        taken.add(name)
        made.append(Op(name, t.op, args, (), t.attrs))
        return name

    emit(new, block.ops[i].name)
    return with_kernel(graph, n, retyped(replace(block, ops=(*block.ops[:i], *made, *block.ops[i + 1 :]))))


def retyped(kernel: BlockGraph) -> BlockGraph:
    """The kernel with the axes of its values inferred again; an order that fits is kept."""
    axes, ops = {x.name: x.axes for x in kernel.loads}, list[Op]()
    for op in kernel.ops:
        want = operator(op.op).infer(tuple(axes[a] for a in op.args), op.attributes)
        axes[op.name] = op.axes if set(op.axes) == set(want) else want
        ops.append(replace(op, axes=axes[op.name]))
    return replace(kernel, ops=tuple(ops))


def with_kernel(graph: KernelGraph, n: int, kernel: Kernel) -> KernelGraph:
    return replace(graph, kernels=(*graph.kernels[:n], kernel, *graph.kernels[n + 1 :]))


# --- what is computed: operators and their arguments


def _swapped_operands(p: Place) -> Iterator[Term]:
    op, a = p.op, p.op.attributes
    same = op.op in ("mul", "dot", *SYMMETRIC, *SEMILATTICES) or (op.op == "add" and a.get("ca", 1) == a.get("cb", 1))
    for i, j in combinations(range(len(op.args)), 2):
        if not same:
            args = list(op.args)
            args[i], args[j] = args[j], args[i]
            yield like(op, *args)


def _other_value(p: Place) -> Iterator[Term]:
    before = [x.name for x in p.kernel.loads]
    before += [o.name for o in p.kernel.ops[: p.kernel.ops.index(p.op)]]
    for i, arg in enumerate(p.op.args):
        for other in before:
            if other != arg and p.axes(other) == p.axes(arg):
                yield like(p.op, *p.op.args[:i], other, *p.op.args[i + 1 :])


def _dropped(p: Place) -> Iterator[Term]:
    if p.op.op not in ACCUMULATORS and p.op.head() != "affine":
        yield from (term("affine", a) for a in dict.fromkeys(p.op.args) if p.axes(a) == set(p.op.axes))


def _twice(p: Place) -> Iterator[Term]:
    if operator(p.op.op).pointwise and p.op.args:
        yield like(p.op, like(p.op), *p.op.args[1:])


def _minus(p: Place) -> Iterator[Term]:
    for key, default in (("ca", ONE), ("cb", ONE), ("offset", ZERO)):
        value = p.op.attributes.get(key, default)
        if key in operator(p.op.op).defaults and isinstance(value, Fraction | int) and value:
            yield like(p.op, **{key: -value})


PRODUCTS = {"mul": ("div", "add"), "div": ("mul",), "add": ("mul",)}


def _other_product(p: Place) -> Iterator[Term]:
    yield from (term(new, *p.op.args) for new in PRODUCTS.get(p.op.op, ()))


def _other_reduction(p: Place) -> Iterator[Term]:
    if p.op.op in ("sum", "max"):
        yield term("max" if p.op.op == "sum" else "sum", *p.op.args, axes=p.reduced)


def _other_exponential(p: Place) -> Iterator[Term]:
    scale, ln2 = Fraction(p.op.attributes.get("scale", 1)), Fraction(math.log(2))  # type: ignore[arg-type]
    if p.op.op == "exp":
        yield like(p.op, scale=scale * ln2)
        yield Term("affine", p.op.args, p.op.attrs)
    if p.op.op == "exps":
        x, m = p.op.args
        yield like(p.op, x, term("affine", m, scale=ln2), scale=scale * ln2)
        yield term("add", x, m, ca=scale, cb=Fraction(-1))


def _other_function(p: Place) -> Iterator[Term]:
    here = FUNCTIONS.get(p.op.op)
    if here is None:
        return
    for f in FUNCTIONS.values():
        if f.arity == here.arity and f.name != here.name:
            yield Term(f.name, p.op.args, p.op.attrs)
    if here.name == "maximum":
        yield term("minimum", like(p.op), term("const", value=Fraction(6)))  # relu -> relu6
    if here.name == "logistic":  # silu -> the approximation of gelu
        yield like(p.op, scale=Fraction(p.op.attributes.get("scale", 1)) * Fraction(851, 500))  # type: ignore[arg-type]


def _numbers(op: Op) -> Iterator[tuple[str, Fraction]]:
    """Numeric attributes, those left out included."""
    for key, value in {**operator(op.op).defaults, **op.attributes}.items():
        if isinstance(value, Fraction | int):
            yield key, Fraction(value)


def _other_attribute(p: Place) -> Iterator[Term]:
    for key, v in _numbers(p.op):
        for new in (-v, ZERO, ONE, v / 10, v + Fraction(1, 8)):
            if new != v and (key != "exponent" or new):
                yield like(p.op, **{key: new})


# What has been taken for zero by somebody: Mirage's primes and their products, and a Mersenne prime of 61 bits.
MODULI = (227, 113, 227 * 113, 167 * 83, 13861, 2**61 - 1)


def _other_constant(p: Place) -> Iterator[Term]:
    for key, v in _numbers(p.op):
        added = MODULI if key != "exponent" else (83, 113)
        for new in (2 * v, v * Fraction(1025, 1024), *(v + m for m in added)):
            if new != v:
                yield like(p.op, **{key: new})


def _other_reduced_axis(p: Place) -> Iterator[Term]:
    if not p.reduced:
        return
    free = set.intersection(*(p.axes(a) for a in p.op.args)) - set(p.reduced)
    for old in p.reduced:
        rest = tuple(a for a in p.reduced if a != old)
        yield from (like(p.op, axes=(*rest, new)) for new in sorted(free))
        if rest:
            yield like(p.op, axes=rest)
    yield from (like(p.op, axes=(*p.reduced, new)) for new in sorted(free))


def _is_function(op: Op | None) -> bool:
    """One argument, not linear."""
    if op is None or len(op.args) != 1 or not operator(op.op).pointwise:
        return False
    return op.op != "affine" or bool(op.attributes.get("offset", 0))


def _moved_reduction(p: Place) -> Iterator[Term]:
    inner = p.maker(p.op.args[0]) if p.op.args else None
    if inner is None:
        return
    if p.op.op in ("sum", "acc") and _is_function(inner):  # sum(f(x)) -> f(sum(x))
        yield like(inner, like(p.op, inner.args[0]))
    if _is_function(p.op) and inner.op in ("sum", "acc"):
        yield like(inner, like(p.op, inner.args[0]))


def _other_power(p: Place) -> Iterator[Term]:
    if p.op.op == "pow":
        e = Fraction(p.op.attributes["exponent"])  # type: ignore[arg-type]
        yield from (like(p.op, exponent=new) for new in (-e, 2 * e, e / 2))


def _other_count(p: Place) -> Iterator[Term]:
    extents = {n for _, n in p.graph.extents if n > 1}
    for key, v in _numbers(p.op):
        for n in extents:
            if abs(v) in (n, Fraction(1, n)):
                sign = 1 if v > 0 else -1
                news = (n - 1, n + 1, 1) if abs(v) == n else (Fraction(1, n - 1), Fraction(1, n + 1), 1)
                yield from (like(p.op, **{key: sign * Fraction(new)}) for new in news if abs(v) != new)
    n = p.extent(p.reduced)
    if p.op.op == "sum" and n is not None:
        yield term("affine", like(p.op), scale=Fraction(1, n))


def _eps_outside(p: Place) -> Iterator[Term]:
    a = p.op.attributes
    eps, e = a.get("offset", ZERO), a.get("exponent")
    if p.op.op == "pow" and eps and e in (Fraction(1, 2), Fraction(-1, 2)):
        root = like(p.op, exponent=Fraction(1, 2), offset=ZERO)
        outside = term("affine", root, offset=eps)
        yield outside if e == Fraction(1, 2) else term("pow", outside, exponent=Fraction(-1))


def _unmasked(p: Place) -> Iterator[Term]:
    if p.op.op in ("where", "mask"):
        yield term("affine", p.op.args[1])
    if p.op.op in ("and", "or"):
        yield from (term("affine", a) for a in p.op.args if p.axes(a) == set(p.op.axes))


def _index_off_by_one(p: Place) -> Iterator[Term]:
    if p.op.op == "iota":
        yield from (term("affine", like(p.op), offset=Fraction(by)) for by in (-1, 1))
    if p.op.op in ("lt", "le"):
        yield term("le" if p.op.op == "lt" else "lt", *p.op.args)


def _added_twice(p: Place) -> Iterator[Term]:
    if p.op.op == "add":
        for key in ("ca", "cb"):
            yield like(p.op, **{key: 2 * Fraction(p.op.attributes.get(key, 1))})  # type: ignore[arg-type]


def _distributed(p: Place) -> Iterator[Term]:
    inner = p.maker(p.op.args[0]) if p.op.args else None
    if inner is not None and inner.op in ("add", "mul") and (_is_function(p.op) or p.op.op == "exps"):
        yield like(inner, *(like(p.op, a, *p.op.args[1:]) for a in inner.args))


def _ratio_of_sums(p: Place) -> Iterator[Term]:
    makers = [p.maker(a) for a in p.op.args]
    if p.op.op == "sum" and (d := makers[0]) is not None and d.op == "div":
        yield term("div", *(like(p.op, a) for a in d.args))
    if p.op.op == "div":
        yield from _sum_of_ratios(p, makers[0], makers[1], lambda y: y)
    if p.op.op == "mul":  # by a power of a sum
        for x, power in (makers, makers[::-1]):
            if power is not None and power.op == "pow":
                yield from _sum_of_ratios(p, x, p.maker(power.args[0]), partial(like, power))


def _sum_of_ratios(p: Place, x: Op | None, y: Op | None, f: Callable[[str], str | Term]) -> Iterator[Term]:
    """(sum x) f(sum y) -> sum x f(y)"""
    if x is not None and y is not None and {x.op, y.op} <= {"sum", "acc", "accs"}:
        yield like(x, like(p.op, x.args[0], f(y.args[0])), *x.args[1:])


def _exponential_of_sum(p: Place) -> Iterator[Term]:
    makers = [p.maker(a) for a in p.op.args]
    if p.op.op == "sum" and (e := makers[0]) is not None and e.op in ("exp", "exps"):
        yield like(e, like(p.op, e.args[0]), *e.args[1:])
    if p.op.op == "mul" and all(m is not None and m.op in ("exp", "exps") for m in makers):
        yield term("add", *p.op.args)


def _rank_one(p: Place) -> Iterator[Term]:
    n = p.extent(p.reduced)
    if p.op.op == "dot" and n is not None:
        product = term("mul", *(term("sum", a, axes=p.reduced) for a in p.op.args))
        yield term("affine", product, scale=Fraction(1, n))


def _for_special_inputs(p: Place) -> Iterator[Term]:
    """True where inputs are positive, or equal to each other."""
    for i, a in enumerate(p.op.args):
        yield like(p.op, *p.op.args[:i], term("abs", a), *p.op.args[i + 1 :])
    if p.op.op in ("abs", "maximum"):
        yield from (term("affine", a) for a in p.op.args if p.axes(a) == set(p.op.axes))
    if len(p.op.args) == 2 and p.op.args[0] != p.op.args[1]:
        yield from (like(p.op, a, a) for a in p.op.args)


# --- what is computed: loads, outputs, axes


def _other_tensor(graph: KernelGraph) -> Iterator[Edit]:
    known = list(graph.inputs)
    for n, kernel in enumerate(graph):
        block = as_block(kernel)
        for i, load in enumerate(block.loads):
            have = [_size(graph, a) for a in load.axes]
            for t in known:
                if t.name != load.tensor and [_size(graph, a) for a in t.axes] == have:
                    yield partial(_with_load, graph, n, block, i, replace(load, tensor=t.name))
        for i, j in combinations(range(len(block.loads)), 2):
            x, y = block.loads[i], block.loads[j]
            if x.tensor != y.tensor and [_size(graph, a) for a in x.axes] == [_size(graph, a) for a in y.axes]:
                yield partial(_exchanged, graph, n, block, i, j)
        known += [s.tensor for s in kernel.stores]


def _size(graph: KernelGraph, axis: Axis) -> int | Axis:
    return axis if is_part(axis) else graph.extent(axis)


def _with_load(graph: KernelGraph, n: int, block: BlockGraph, i: int, load: Load) -> KernelGraph:
    loads = (*block.loads[:i], load, *block.loads[i + 1 :])
    return with_kernel(graph, n, retyped(replace(block, loads=loads)))


def _exchanged(graph: KernelGraph, n: int, block: BlockGraph, i: int, j: int) -> KernelGraph:
    loads = list(block.loads)
    loads[i], loads[j] = (replace(loads[a], tensor=loads[b].tensor) for a, b in ((i, j), (j, i)))
    return with_kernel(graph, n, replace(block, loads=tuple(loads)))


def _swapped_outputs(graph: KernelGraph) -> Iterator[Edit]:
    for i, j in combinations(range(len(graph.outputs)), 2):
        outputs = list(graph.outputs)
        outputs[i], outputs[j] = outputs[j], outputs[i]
        yield partial(replace, graph, outputs=tuple(outputs))
    for n, kernel in enumerate(graph):
        block = as_block(kernel)
        for i, j in combinations(range(len(block.stores)), 2):
            stores = list(block.stores)
            stores[i], stores[j] = (replace(stores[a], value=stores[b].value) for a, b in ((i, j), (j, i)))
            yield partial(with_kernel, graph, n, replace(block, stores=tuple(stores)))


def _transposed(graph: KernelGraph) -> Iterator[Edit]:
    for n, kernel in enumerate(graph):
        block = as_block(kernel)
        for i, load in enumerate(block.loads):
            for axes in _swaps(graph, load.axes):
                yield partial(_with_load, graph, n, block, i, replace(load, axes=axes))


def _swaps(graph: KernelGraph, axes: tuple[Axis, ...]) -> Iterator[tuple[Axis, ...]]:
    """Two dimensions of equal extent exchanged."""
    for i, j in combinations(range(len(axes)), 2):
        if _size(graph, axes[i]) == _size(graph, axes[j]):
            yield tuple(axes[{i: j, j: i}.get(k, k)] for k in range(len(axes)))


def _renamed_axis(graph: KernelGraph) -> Iterator[Edit]:
    for n, kernel in enumerate(graph):
        block = as_block(kernel)
        names = sorted({a for axes in block.axes_of.values() for a in axes})
        for i, load in enumerate(block.loads):
            for old in load.axes:
                for new in names:
                    if new not in load.axes and _size(graph, new) == _size(graph, old):
                        axes = tuple(new if a == old else a for a in load.axes)
                        yield partial(_with_load, graph, n, block, i, replace(load, axes=axes))


def _exchanged_axes(graph: KernelGraph) -> Iterator[Edit]:
    """All reductions of a kernel over one axis are over another."""
    for n, kernel in enumerate(graph):
        block = as_whole(kernel)
        reduced = {a for o in block.ops for a in Place(graph, block, o).reduced}
        names = {a for axes in block.axes_of.values() for a in axes}
        for a in sorted(reduced):
            for b in sorted(names - {a}):
                yield partial(_over_other_axis, graph, n, block, {a: b, b: a})


def _over_other_axis(graph: KernelGraph, n: int, block: BlockGraph, to: dict[Axis, Axis]) -> KernelGraph:
    def moved(op: Op) -> Op:
        axes = op.attributes.get("axes")
        if not isinstance(axes, tuple):
            return op
        new = op.attributes | {"axes": tuple(to.get(a, a) for a in axes)}
        return replace(op, attrs=tuple(sorted(new.items())))

    return with_kernel(graph, n, retyped(replace(block, ops=tuple(map(moved, block.ops)))))


# --- schedules


def _transposed_store(graph: KernelGraph) -> Iterator[Edit]:
    """Stores of results that a later kernel reads."""
    for n, kernel in enumerate(graph):
        block = as_block(kernel)
        for i, store in enumerate(block.stores):
            if store.tensor.name not in graph.outputs:
                for axes in _swaps(graph, store.tensor.axes):
                    new = Store(replace(store.tensor, axes=axes), store.value)
                    stores = (*block.stores[:i], new, *block.stores[i + 1 :])
                    yield partial(with_kernel, graph, n, replace(block, stores=stores))


def _one_step(p: Place) -> Iterator[Term]:
    if p.op.op in ("acc", "accs"):
        yield term("last", p.op.args[0])


def _step_repeated(p: Place) -> Iterator[Term]:
    if p.op.op in ("acc", "accs"):
        yield term("add", like(p.op), term("last", p.op.args[0]))


def _starts_at_one(p: Place) -> Iterator[Term]:
    if p.op.op in ("acc", "accs"):
        yield term("affine", like(p.op), offset=ONE)


def _not_rescaled(p: Place) -> Iterator[Term]:
    if p.op.op == "accs":
        yield term("acc", p.op.args[0])
    if p.op.op == "rescale":
        yield term("affine", p.op.args[0])
    if p.op.op in ("accs", "rescale"):
        yield from (like(p.op, degree=Fraction(d)) for d in (-1, 0, 2))


def _other_shift(p: Place) -> Iterator[Term]:
    for i, a in enumerate(p.op.args):
        m = p.maker(a)
        if m is not None and m.op == "shift":
            other = like(m, scale=2 * Fraction(m.attributes.get("scale", 1)))  # type: ignore[arg-type]
            yield like(p.op, *p.op.args[:i], other, *p.op.args[i + 1 :])
    if p.op.op == "last":
        yield term("acc", p.op.args[0])


def _into_the_loop(p: Place) -> Iterator[Term]:
    """f(acc x, acc y) -> acc f(x, y): done in each step instead of once."""
    makers = [p.maker(a) for a in p.op.args]
    states = [m for m in makers if m is not None and m.op in ("acc", "accs")]
    if states and p.op.op not in ACCUMULATORS:
        args = [m.args[0] if m is not None and m in states else a for m, a in zip(makers, p.op.args, strict=True)]
        yield like(states[0], like(p.op, *args), *states[0].args[1:])


def _index_of_the_tile(p: Place) -> Iterator[Term]:
    if p.op.op == "iota":
        yield term("affine", like(p.op), scale=ZERO)


def _other_loop_bounds(graph: KernelGraph) -> Iterator[Edit]:
    for n, kernel in enumerate(graph):
        if isinstance(kernel, Library) or kernel.loop is None:
            continue
        rows = [a for a in kernel.grid if not is_part(a)]
        for new in _loop_bounds(kernel.loop_bounds, rows):
            yield partial(with_kernel, graph, n, replace(kernel, loop_bounds=new))


def _loop_bounds(loop_bounds: LoopBounds | None, rows: Sequence[Axis]) -> Iterator[LoopBounds]:
    if loop_bounds is None:  # steps are left out where none may be
        for a in rows:
            yield LoopBounds(a, None, 0)
            yield LoopBounds(a, -1, 1)
        return
    low, high = loop_bounds.low, loop_bounds.high
    for new in ((low, high and high - 1), (low and low + 1, high), (low, -1 if high == 0 else high), (0, high)):
        if new != (low, high) and new != (None, None) and (None in new or new[0] <= new[1]):  # type: ignore[operator]
            yield replace(loop_bounds, low=new[0], high=new[1])
    mirrored = (None if high is None else -high, None if low is None else -low)
    if mirrored != (low, high):
        yield replace(loop_bounds, low=mirrored[0], high=mirrored[1])
    yield from (replace(loop_bounds, axis=a) for a in rows if a != loop_bounds.axis)


def _other_padding(p: Place) -> Iterator[Term]:
    zero, huge = term("const", value=ZERO), term("const", value=Fraction(-(10**9)))
    if p.op.op == "mask":
        yield from (term("where", *p.op.args, other) for other in (zero, huge))
    if p.op.op == "where":
        c, x, _ = p.op.args
        yield from (term("where", c, x, other) for other in (zero, huge))
        yield term("mask", c, x)


MUTATIONS: tuple[Mutation, ...] = (
    Mutation("M1", "f(x, y) -> f(y, x)", operators(_swapped_operands)),
    Mutation("M2", "load x -> load y; f(x) -> f(y) of another value", lambda g: _both(g, _other_tensor, _other_value)),
    Mutation("M3", "two outputs or stores exchanged", _swapped_outputs),
    Mutation("M4", "f(x) -> x", operators(_dropped)),
    Mutation("M5", "f(x, y) -> f(f(x, y), y)", operators(_twice)),
    Mutation("M6", "x + y -> x - y", operators(_minus)),
    Mutation("M7", "x * y <-> x / y, x + y", operators(_other_product)),
    Mutation("M8", "sum <-> max", operators(_other_reduction)),
    Mutation("M9", "exp -> exp2, identity", operators(_other_exponential)),
    Mutation("M10", "another function: silu -> gelu, relu -> relu6, ...", operators(_other_function)),
    Mutation("M11", "another bound, eps or scale", operators(_other_attribute)),
    Mutation("M12", "c -> 2 c, c (1 + 2^-10), c + p, c + p q", operators(_other_constant)),
    Mutation("M13", "reduced over another axis", operators(_other_reduced_axis, whole=True)),
    Mutation("M14", "sum f(x) <-> f(sum x)", operators(_moved_reduction)),
    Mutation("M15", "sqrt <-> rsqrt", operators(_other_power)),
    Mutation("M16", "mean <-> sum, n -> n - 1", operators(_other_count)),
    Mutation("M17", "an operand transposed", _transposed),
    Mutation("M18", "broadcast along another axis", _renamed_axis),
    Mutation("M19", "every reduction over k -> over i: by column, not by row", _exchanged_axes),
    Mutation("M20", "sqrt(x + eps) -> sqrt(x) + eps", operators(_eps_outside)),
    Mutation("M21", "where(c, x, y) -> x", operators(_unmasked)),
    Mutation("M22", "an index off by one, < <-> <=", operators(_index_off_by_one)),
    Mutation("M23", "x + y -> x + 2 y", operators(_added_twice)),
    Mutation("M24", "f(x + y) -> f(x) + f(y)", operators(_distributed)),
    Mutation("M25", "sum x / y <-> sum x / sum y", operators(_ratio_of_sums)),
    Mutation("M26", "sum exp x -> exp sum x", operators(_exponential_of_sum)),
    Mutation("M27", "sum x y -> sum x sum y / n: right for rank one", operators(_rank_one)),
    Mutation("M28", "right for positive or equal inputs", operators(_for_special_inputs)),
    Mutation("S2", "a result stored transposed", _transposed_store),
    Mutation("S3", "acc -> last: one step only", operators(_one_step)),
    Mutation("S4", "acc x -> acc x + last x: the last step twice", operators(_step_repeated)),
    Mutation("S5", "an accumulator that starts at 1", operators(_starts_at_one)),
    Mutation("S6", "accs -> acc, rescale x -> x, another degree", operators(_not_rescaled)),
    Mutation("S7", "a use of the running shift reads another", operators(_other_shift)),
    Mutation("S8", "f(acc x) -> acc f(x)", operators(_into_the_loop)),
    Mutation("S9", "the index inside the tile for that of the axis", operators(_index_of_the_tile)),
    Mutation("S11", "a span too short, mirrored or around another axis", _other_loop_bounds),
    Mutation("S12", "what is masked is 0 for -inf, or another number", operators(_other_padding)),
)


def _both(graph: KernelGraph, first: Edits, second: Rule) -> Iterator[Edit]:
    yield from first(graph)
    yield from operators(second)(graph)
