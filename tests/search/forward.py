"""An independent enumeration of one kernel, forwards as Mirage does it: any operator on any values made so far.

It shares the normal form, as the value of an expression, with the search, but neither backward rules nor the dynamic
program. It is slow: for few operators only. Unguided, it keeps whatever it makes; guided, only values in `goal`.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from mirage_jax.mugraph.graph import origin
from mirage_jax.mugraph.operators import operator
from mirage_jax.search.enumerate.axioms import LOOP, Decomposition, kind
from mirage_jax.search.enumerate.kernels import KernelTables
from mirage_jax.search.enumerate.normal_form import Poly

type Key = tuple[str, tuple[Poly, ...], tuple[str, ...]]  # operator, operands, axes: scalars ride for free
type Made = tuple[Poly, Key]


class Forward:
    """Counts the operator DAGs of at most `max_ops` operators that make `target` from `inputs`."""

    def __init__(
        self, f: KernelTables, target: Poly, loop: str | None, unary: set[Decomposition], goal: frozenset[Poly] | None
    ) -> None:
        self.f, self.e, self.loop, self.goal = f, f.axioms.e, loop, goal
        self.target, self.unary = target, unary
        self.table: dict[tuple[Poly, ...], list[Made]] = {}

    def count(self, inputs: list[Poly], max_ops: int) -> dict[int, int]:
        """{number of operators: number of DAGs}"""
        found: set[frozenset[Made]] = set()
        seen: set[frozenset[Made]] = set()
        stack: list[frozenset[Made]] = [frozenset()]
        while stack:
            dag = stack.pop()
            for new in self.extensions([*inputs, *(p for p, _ in dag)]):
                more = dag | {new}
                values = {p for p, _ in more}
                if len(values) < len(more) or len(more) == len(dag) or more in seen:
                    continue
                seen.add(more)
                used = {a for _, (_, args, _) in more for a in args}
                unused = values - used
                if self.target in values:
                    if unused == {self.target} and self.legal(more):
                        found.add(more)
                elif len(more) < max_ops and len(unused) - 1 <= max_ops - len(more):  # an operator has two operands
                    stack.append(more)
        return dict(sorted(Counter(map(len, found)).items()))

    def extensions(self, values: list[Poly]) -> Iterator[Made]:
        for x in values:
            yield from self.made((x,))
        for x, y in combinations(sorted(values), 2):
            yield from self.made((x, y))
        for x in values:
            yield from self.made((x, x))

    def made(self, args: tuple[Poly, ...]) -> list[Made]:
        """All operators on these operands whose results are tiles larger than the operands: nothing cancels."""
        if args not in self.table:
            good = [(self.e.affine_parts(p)[0], key) for p, key in self.results(*args)]
            size, axes = self.e.size, self.f.tile_axes
            self.table[args] = [
                (p, key)
                for p, key in dict.fromkeys(good)
                if len(axes(p)) <= 2 and all(size(a) < size(p) for a in args) and (self.goal is None or p in self.goal)
            ]
        return self.table[args]

    def results(self, x: Poly, y: Poly | None = None) -> Iterator[Made]:
        e = d = self.e
        if y is None:
            for axis in self.reducible(x, x):
                yield d.sum(x, (axis,)), ("acc" if kind(axis) == "l" else "sum", (x,), (axis,))
            for s in self.unary:
                yield operator(s.op).meaning(d, x, **dict(s.attrs)), (s.op + str(s.attr("exponent", "")), (x,), ())
            return
        both = (x, y)
        yield d.mul(x, y), ("mul", both, ())
        shared = [a for a in self.reducible(x, y) if kind(a) == "t"]
        for n in range(1, len(shared) + 1):
            for axes in combinations(shared, n):
                yield d.dot(x, y, axes), ("dot", both, axes)
        if x != y:
            yield d.add(x, y), ("add", both, ())
            for over, under in ((x, y), (y, x)):
                if not any(t == e.one for t, _ in e.poly(under)):
                    yield d.mul(over, d.power(under, -1)), ("div", (over, under), ())  # type: ignore[arg-type]

    def reducible(self, x: Poly, y: Poly) -> list[str]:
        """Axes of every term; of a copy only beside its original, since else the copy could have been the original."""
        terms = [t for t, _ in (*self.e.poly(x), *self.e.poly(y))]
        every = frozenset.intersection(*map(self.e.term_axes, terms))
        return sorted(a for a in every if a == origin(a) or origin(a) in self.e.axes(x) | self.e.axes(y))

    def legal(self, dag: frozenset[Made]) -> bool:
        """One loop, used; nothing of a loop step outlives it; a tile is summed before the steps are."""
        if self.loop is None:
            return True
        ops = dict(dag)
        if not any(op == "acc" for op, _, _ in ops.values()):
            return False

        def depth(p: Poly) -> int:
            if p not in ops:
                return 0
            op, args, _ = ops[p]
            return max(map(depth, args)) + (op == "acc")

        sums = [(p, axes[0]) for p, (op, _, axes) in ops.items() if op == "acc"]
        whole = all(a.replace(LOOP, "") not in self.e.axes(p) for p, a in sums)
        return max(map(depth, ops)) == 1 and whole and self.loop + LOOP not in map(origin, self.e.axes(self.target))
