"""Mutations: small changes of a muGraph that should make it compute something else, to test the verifier.

Input: a right muGraph. Output: wrong ones, close to it (mutation testing: DeMillo, Lipton, Sayward 1978). The table
`MUTATIONS` has one record per operator: M* change the computation, S* the schedule. Some mutants are not well formed,
and some compute the same after all; callers have to sort both out (`audit.mutants` does, by the checker and by
float64).

A rule sees one operator and yields *terms* that take its place. Mistakes that named axes cannot express have no rule:
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
from itertools import combinations, product
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
    """`name` is the number that reports use, `change` tells the change: before -> after."""

    name: str
    change: str
    edits: Edits

    def mutants(self, graph: KernelGraph) -> Iterator[KernelGraph]:
        """Build all mutants of `graph` by this operator."""
        for edit in self.edits(graph):
            yield edit()

    def applies(self, graph: KernelGraph) -> bool:
        """Whether the operator has any mutant of `graph`."""
        return next(self.edits(graph), None) is not None

    def draw(self, graph: KernelGraph, rng: Random) -> KernelGraph | None:
        """Build one mutant; None if the operator does not apply."""
        edits = list(self.edits(graph))
        return rng.choice(edits)() if edits else None

    def __str__(self) -> str:
        return f"{self.name} {self.change}"


# --- terms, which take the place of operators


@dataclass(frozen=True)
class Term:
    """An operator whose arguments are values of the kernel, by name, or terms."""

    op: str
    args: tuple[str | Term, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()


def term(op: str, *args: str | Term, **attrs: Attr) -> Term:
    """Make a term."""
    return Term(op, args, tuple(sorted(attrs.items())))


def like(op: Op, *args: str | Term, **attrs: Attr) -> Term:
    """Make a term of the same operator on other arguments or with other attributes."""
    return Term(op.op, args or op.args, tuple(sorted((op.attributes | attrs).items())))


@dataclass(frozen=True)
class Place:
    """An operator where it stands."""

    graph: KernelGraph
    kernel: BlockGraph
    op: Op

    def axes(self, value: str) -> set[Axis]:
        """The axes of a value of the kernel."""
        return set(self.kernel.axes_of[value])

    def maker(self, value: str | Term, *ops: str) -> Op | None:
        """The operator that computes a value, if it is one of `ops` (by default any); None for a loaded value."""
        return next((o for o in self.kernel.ops if o.name == value and (not ops or o.op in ops)), None)

    def first_maker(self, *ops: str) -> Op | None:
        """The operator that computes the first argument, if it is one of `ops`."""
        return self.maker(self.op.args[0], *ops) if self.op.args else None

    def with_argument(self, i: int, new: str | Term) -> Term:
        """The operator with another argument number i."""
        return like(self.op, *exchange(self.op.args, i, new))

    @property
    def as_large(self) -> list[str]:
        """The arguments that have the axes of the result, each once."""
        return [a for a in dict.fromkeys(self.op.args) if self.axes(a) == set(self.op.axes)]

    @property
    def reduced(self) -> tuple[Axis, ...]:
        """The axes that the operator reduces."""
        axes = self.op.attributes.get("axes", ())
        return axes if isinstance(axes, tuple) else ()

    def extent(self, axes: Sequence[Axis]) -> int | None:
        """Count the indices of these axes; None if one is a part axis, which has no extent."""
        return None if any(map(is_part, axes)) else math.prod(map(self.graph.extent, axes))


type Rule = Callable[[Place], Iterator[Term]]


def operators(rule: Rule, whole: bool = False) -> Edits:
    """Apply a rule at every operator of every kernel; `whole`: without grid and loop, so that any axis is reducible."""

    def edits(graph: KernelGraph) -> Iterator[Edit]:
        for n, kernel in enumerate(graph):
            block = as_whole(kernel) if whole else as_block(kernel)
            for i, op in enumerate(block.ops):
                for new in rule(Place(graph, block, op)):
                    yield partial(_replaced, graph, n, block, i, new)

    return edits


def as_block(kernel: Kernel) -> BlockGraph:
    """Turn a library operator into a kernel of one block, which can get more operators."""
    if isinstance(kernel, BlockGraph):
        return kernel
    return BlockGraph(kernel.name, (), None, kernel.loads, kernel.ops, kernel.stores)


def as_whole(kernel: Kernel) -> BlockGraph:
    """Do the computation in one block without a loop (parts of a split axis stay on the grid)."""
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
    """Infer the axes of all values of a kernel again; an order that fits stays."""
    axes, ops = {x.name: x.axes for x in kernel.loads}, list[Op]()
    for op in kernel.ops:
        want = operator(op.op).infer(tuple(axes[a] for a in op.args), op.attributes)
        axes[op.name] = op.axes if set(op.axes) == set(want) else want
        ops.append(replace(op, axes=axes[op.name]))
    return replace(kernel, ops=tuple(ops))


def with_kernel(graph: KernelGraph, n: int, kernel: Kernel) -> KernelGraph:
    """Put another kernel in the place of kernel n."""
    return replace(graph, kernels=exchange(graph.kernels, n, kernel))


def exchange[T](items: Sequence[T], i: int, new: T) -> tuple[T, ...]:
    """Put another item in the place of item i."""
    return (*items[:i], new, *items[i + 1 :])


def _swap[T](items: Sequence[T], i: int, j: int) -> tuple[T, ...]:
    return exchange(exchange(items, i, items[j]), j, items[i])


def _blocks(graph: KernelGraph) -> Iterator[tuple[int, BlockGraph]]:
    return enumerate(map(as_block, graph))


# --- the computation: operators and their arguments


def _is_commutative(op: Op) -> bool:
    a = op.attributes
    return op.op in ("mul", "dot", *SYMMETRIC, *SEMILATTICES) or (op.op == "add" and a.get("ca", 1) == a.get("cb", 1))


def _swapped_operands(p: Place) -> Iterator[Term]:
    if not _is_commutative(p.op):
        yield from (like(p.op, *_swap(p.op.args, i, j)) for i, j in combinations(range(len(p.op.args)), 2))


def _other_value(p: Place) -> Iterator[Term]:
    before = [x.name for x in p.kernel.loads]
    before += [o.name for o in p.kernel.ops[: p.kernel.ops.index(p.op)]]
    for i, arg in enumerate(p.op.args):
        for other in before:
            if other != arg and p.axes(other) == p.axes(arg):
                yield p.with_argument(i, other)


def _dropped(p: Place) -> Iterator[Term]:
    if p.op.op not in ACCUMULATORS and p.op.head() != "affine":
        yield from (term("affine", a) for a in p.as_large)


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


# Moduli, which count as zero for somebody: Mirage's primes and their products, and a Mersenne prime of 61 bits.
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
    free = sorted(set.intersection(*map(p.axes, p.op.args)) - set(p.reduced))
    for i in range(len(p.reduced)):
        rest = (*p.reduced[:i], *p.reduced[i + 1 :])
        yield from (like(p.op, axes=(*rest, new)) for new in free)
        if rest:
            yield like(p.op, axes=rest)
    yield from (like(p.op, axes=(*p.reduced, new)) for new in free)


def _is_function(op: Op | None) -> bool:
    """One argument, not linear."""
    if op is None or len(op.args) != 1 or not operator(op.op).pointwise:
        return False
    return op.op != "affine" or bool(op.attributes.get("offset", 0))


def _moved_reduction(p: Place) -> Iterator[Term]:
    """sum(f(x)) <-> f(sum(x))"""
    inner = p.first_maker()
    if inner is not None:
        is_outside = p.op.op in ("sum", "acc") and _is_function(inner)
        if is_outside or (_is_function(p.op) and inner.op in ("sum", "acc")):
            yield like(inner, like(p.op, inner.args[0]))


def _other_power(p: Place) -> Iterator[Term]:
    if p.op.op == "pow":
        e = Fraction(p.op.attributes["exponent"])  # type: ignore[arg-type]
        yield from (like(p.op, exponent=new) for new in (-e, 2 * e, e / 2))


def _other_count(p: Place) -> Iterator[Term]:
    extents = {n for _, n in p.graph.extents if n > 1}
    for (key, v), n in product(_numbers(p.op), extents):
        if abs(v) in (n, Fraction(1, n)):
            news = (n - 1, n + 1, 1) if abs(v) == n else (Fraction(1, n - 1), Fraction(1, n + 1), 1)
            sign = 1 if v > 0 else -1
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
    inner = p.first_maker("add", "mul")
    if inner is not None and (_is_function(p.op) or p.op.op == "exps"):
        yield like(inner, *(like(p.op, a, *p.op.args[1:]) for a in inner.args))


def _ratio_of_sums(p: Place) -> Iterator[Term]:
    if p.op.op == "sum" and (d := p.first_maker("div")):
        yield term("div", *(like(p.op, a) for a in d.args))
    if p.op.op == "div":
        x, y = p.op.args
        yield from _sum_of_ratios(p, x, y, lambda y: y)
    if p.op.op == "mul":  # by a power of a sum
        for x, y in (p.op.args, p.op.args[::-1]):
            if power := p.maker(y, "pow"):
                yield from _sum_of_ratios(p, x, power.args[0], partial(like, power))


def _sum_of_ratios(p: Place, x: str, y: str, f: Callable[[str], str | Term]) -> Iterator[Term]:
    """(sum x) f(sum y) -> sum x f(y)"""
    left, right = (p.maker(value, "sum", "acc", "accs") for value in (x, y))
    if left is not None and right is not None:
        yield like(left, like(p.op, left.args[0], f(right.args[0])), *left.args[1:])


def _exponential_of_sum(p: Place) -> Iterator[Term]:
    if p.op.op == "sum" and (e := p.first_maker("exp", "exps")):
        yield like(e, like(p.op, e.args[0]), *e.args[1:])
    if p.op.op == "mul" and all(p.maker(a, "exp", "exps") for a in p.op.args):
        yield term("add", *p.op.args)


def _rank_one(p: Place) -> Iterator[Term]:
    n = p.extent(p.reduced)
    if p.op.op == "dot" and n is not None:
        product = term("mul", *(term("sum", a, axes=p.reduced) for a in p.op.args))
        yield term("affine", product, scale=Fraction(1, n))


def _for_special_inputs(p: Place) -> Iterator[Term]:
    """True where inputs are positive, or equal to each other."""
    for i, a in enumerate(p.op.args):
        yield p.with_argument(i, term("abs", a))
    if p.op.op in ("abs", "maximum"):
        yield from (term("affine", a) for a in p.op.args if p.axes(a) == set(p.op.axes))
    if len(p.op.args) == 2 and p.op.args[0] != p.op.args[1]:
        yield from (like(p.op, a, a) for a in p.op.args)


# --- the computation: loads, outputs, axes


def _other_tensor(graph: KernelGraph) -> Iterator[Edit]:
    known = list(graph.inputs)
    for n, block in _blocks(graph):
        shapes = [_shape(graph, load.axes) for load in block.loads]
        for i, load in enumerate(block.loads):
            for t in known:
                if t.name != load.tensor and _shape(graph, t.axes) == shapes[i]:
                    yield partial(_with_load, graph, n, block, i, replace(load, tensor=t.name))
        for i, j in combinations(range(len(block.loads)), 2):
            if block.loads[i].tensor != block.loads[j].tensor and shapes[i] == shapes[j]:
                yield partial(_exchanged, graph, n, block, i, j)
        known += [s.tensor for s in block.stores]


def _shape(graph: KernelGraph, axes: Sequence[Axis]) -> list[int | Axis]:
    return [_size(graph, a) for a in axes]


def _size(graph: KernelGraph, axis: Axis) -> int | Axis:
    return axis if is_part(axis) else graph.extent(axis)


def _with_load(graph: KernelGraph, n: int, block: BlockGraph, i: int, load: Load) -> KernelGraph:
    return with_kernel(graph, n, retyped(replace(block, loads=exchange(block.loads, i, load))))


def _exchanged(graph: KernelGraph, n: int, block: BlockGraph, i: int, j: int) -> KernelGraph:
    loads = list(block.loads)
    loads[i], loads[j] = (replace(loads[a], tensor=loads[b].tensor) for a, b in ((i, j), (j, i)))
    return with_kernel(graph, n, replace(block, loads=tuple(loads)))


def _swapped_outputs(graph: KernelGraph) -> Iterator[Edit]:
    for i, j in combinations(range(len(graph.outputs)), 2):
        yield partial(replace, graph, outputs=_swap(graph.outputs, i, j))
    for n, block in _blocks(graph):
        for i, j in combinations(range(len(block.stores)), 2):
            values = _swap([s.value for s in block.stores], i, j)
            stores = tuple(map(Store, (s.tensor for s in block.stores), values))
            yield partial(with_kernel, graph, n, replace(block, stores=stores))


def _transposed(graph: KernelGraph) -> Iterator[Edit]:
    for n, i, block, load in _loads(graph):
        for axes in _swaps(graph, load.axes):
            yield partial(_with_load, graph, n, block, i, replace(load, axes=axes))


def _loads(graph: KernelGraph) -> Iterator[tuple[int, int, BlockGraph, Load]]:
    """All loads, with the numbers of kernel and load."""
    return ((n, i, block, load) for n, block in _blocks(graph) for i, load in enumerate(block.loads))


def _swaps(graph: KernelGraph, axes: tuple[Axis, ...]) -> Iterator[tuple[Axis, ...]]:
    """Two dimensions of equal extent exchanged."""
    for i, j in combinations(range(len(axes)), 2):
        if _size(graph, axes[i]) == _size(graph, axes[j]):
            yield _swap(axes, i, j)


def _renamed_axis(graph: KernelGraph) -> Iterator[Edit]:
    for n, i, block, load in _loads(graph):
        names = sorted(_axes(block) - set(load.axes))
        for (k, old), new in product(enumerate(load.axes), names):
            if _size(graph, new) == _size(graph, old):
                yield partial(_with_load, graph, n, block, i, replace(load, axes=exchange(load.axes, k, new)))


def _axes(block: BlockGraph) -> set[Axis]:
    return {a for axes in block.axes_of.values() for a in axes}


def _exchanged_axes(graph: KernelGraph) -> Iterator[Edit]:
    """All reductions of a kernel over one axis are over another."""
    for n, block in enumerate(map(as_whole, graph)):
        reduced = {a for o in block.ops for a in Place(graph, block, o).reduced}
        for a, b in product(sorted(reduced), sorted(_axes(block))):
            if a != b:
                yield partial(_over_other_axis, graph, n, block, {a: b, b: a})


def _over_other_axis(graph: KernelGraph, n: int, block: BlockGraph, to: dict[Axis, Axis]) -> KernelGraph:
    def moved(op: Op) -> Op:
        """Reduce the other axis."""
        axes = op.attributes.get("axes")
        if not isinstance(axes, tuple):
            return op
        new = op.attributes | {"axes": tuple(to.get(a, a) for a in axes)}
        return replace(op, attrs=tuple(sorted(new.items())))

    return with_kernel(graph, n, retyped(replace(block, ops=tuple(map(moved, block.ops)))))


# --- schedules


def _transposed_store(graph: KernelGraph) -> Iterator[Edit]:
    """Stores of results that a later kernel reads."""
    for n, block in _blocks(graph):
        for i, store in enumerate(block.stores):
            swaps = _swaps(graph, store.tensor.axes) if store.tensor.name not in graph.outputs else ()
            for axes in swaps:
                stores = exchange(block.stores, i, Store(replace(store.tensor, axes=axes), store.value))
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
        if m := p.maker(a, "shift"):
            other = like(m, scale=2 * Fraction(m.attributes.get("scale", 1)))  # type: ignore[arg-type]
            yield p.with_argument(i, other)
    if p.op.op == "last":
        yield term("acc", p.op.args[0])


def _into_the_loop(p: Place) -> Iterator[Term]:
    """f(acc x, acc y) -> acc f(x, y): done in each step instead of once."""
    states = [p.maker(a, "acc", "accs") for a in p.op.args]
    first = next(filter(None, states), None)
    if first is not None and p.op.op not in ACCUMULATORS:
        args = [m.args[0] if m is not None else a for m, a in zip(states, p.op.args, strict=True)]
        yield like(first, like(p.op, *args), *first.args[1:])


def _index_of_the_tile(p: Place) -> Iterator[Term]:
    if p.op.op == "iota":
        yield term("affine", like(p.op), scale=ZERO)


def _other_loop_bounds(graph: KernelGraph) -> Iterator[Edit]:
    for n, kernel in enumerate(graph):
        if isinstance(kernel, Library) or kernel.loop is None:
            continue
        rows = [a for a in kernel.grid if not is_part(a)]
        for new in _changed_loop_bounds(kernel.loop_bounds, rows):
            yield partial(with_kernel, graph, n, replace(kernel, loop_bounds=new))


def _changed_loop_bounds(span: LoopBounds | None, rows: Sequence[Axis]) -> Iterator[LoopBounds]:
    if span is None:  # steps are left out where none may be
        yield from (LoopBounds(a, *bounds) for a in rows for bounds in ((None, 0), (-1, 1)))
        return
    yield from (replace(span, low=low, high=high) for low, high in _nearby_bounds(span.low, span.high))
    yield from (replace(span, axis=a) for a in rows if a != span.axis)


def _nearby_bounds(low: int | None, high: int | None) -> Iterator[tuple[int | None, int | None]]:
    """Bounds that are shorter by one step, start or end elsewhere, or are mirrored."""
    shorter = (low, high and high - 1), (low and low + 1, high)
    for new in (*shorter, (low, -1 if high == 0 else high), (0, high)):
        if new != (low, high) and _has_steps(*new):
            yield new
    mirrored = (None if high is None else -high, None if low is None else -low)
    if mirrored != (low, high):
        yield mirrored


def _has_steps(low: int | None, high: int | None) -> bool:
    """Whether there are bounds, and steps between them."""
    if low is None or high is None:
        return low is not high
    return low <= high


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
    Mutation("S9", "the index inside the tile for the index of the axis", operators(_index_of_the_tile)),
    Mutation("S11", "a span too short, mirrored or around another axis", _other_loop_bounds),
    Mutation("S12", "masked elements are 0 for -inf, or another number", operators(_other_padding)),
)


def _both(graph: KernelGraph, first: Edits, second: Rule) -> Iterator[Edit]:
    yield from first(graph)
    yield from operators(second)(graph)
