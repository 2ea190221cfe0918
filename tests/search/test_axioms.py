"""Every backward step recombines to the value that it came from, out of smaller values: rules are sound, and end."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction as Q
from itertools import islice, permutations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from search.expressions import SIZES, Tree, corners, extent, formed, tame, trees, value
from search.references import NAMES, reference

from mirage_jax.mugraph.graph import PART_SUFFIX
from mirage_jax.search.enumerate.axioms import AXIOMS, LOOP, Axiom, Axioms, Decomposition, part_of, split_sum
from mirage_jax.search.enumerate.kernels import KernelTables, Space
from mirage_jax.search.enumerate.normal_form import Expressions, Poly
from mirage_jax.search.enumerate.shift_degrees import ShiftDegrees
from mirage_jax.search.enumerate.targets import express

relaxed = settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck), derandomize=True)
SAME = (("x", ("i", "j")), ("y", ("i", "j")))  # atoms of the same axes
MOST = 60  # values looked at below one expression


def below(axioms: Axioms, p: Poly) -> list[Poly]:
    """Values reachable from p, at most MOST of them."""
    seen, todo = {p: None}, [p]
    while todo and len(seen) < MOST:
        for s in axioms.steps(todo.pop()):
            for o in s.args:
                if o not in seen:
                    seen[o] = None
                    todo.append(o)
    return list(seen)


def rank(axioms: Axioms, p: Poly) -> int:
    f = KernelTables(axioms, ShiftDegrees(axioms.e, (p,)), Space(), frozenset())
    return f.order(p)


def equal(e: Expressions, p: Poly, q: Poly, part: str) -> bool:
    """In value. Only products and powers of sums, which are not expanded, have more than one form."""
    names = [a + part + copy for a in SIZES for part in ("", LOOP, PART_SUFFIX) for copy in ("", "'", "''", 3 * "'")]
    halves = {"j": 2, "j.l": 2, "j.g": 2} if part else {}
    values = [[value(e, x, dict.fromkeys(names, n), SIZES | halves) for x in (p, q)] for n in (0, 1)]
    return all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-6) for pair in values)


def check(axioms: Axioms, p: Poly, exactly: bool = False, part: str = "") -> None:
    e = axioms.e
    for s in axioms.steps(p):
        q = s.normal_form(e)
        assert q == p or (not exactly and equal(e, q, p, part)), (
            f"{e.text(p)} is not {s.op} of {', '.join(map(e.text, s.args))}"
        )
        assert all(e.size(o) < e.size(p) or s.op == "affine" for o in s.args)


@relaxed
@given(trees())
def test_steps_recombine(tree: Tree) -> None:
    e = Expressions(extent)
    axioms = Axioms(e)
    for p in below(axioms, formed(e, tree)):
        check(axioms, p)


@relaxed
@given(trees(), st.sampled_from([LOOP, PART_SUFFIX]))
def test_steps_of_a_split_axis_recombine(tree: Tree, part: str) -> None:
    """A tile is summed before the steps are accumulated and the parts are combined."""
    e = Expressions(extent)
    axioms = Axioms(e)
    target = e.split(formed(e, tree), "j", ("j" + part, "j"))
    for p in below(axioms, target):
        check(axioms, p, part=part)
        for s in axioms.steps(p):
            gone = s.reduced
            assert all((a + LOOP in gone) == s.accumulates for a in ("j",) if a + LOOP in gone)
            if part == PART_SUFFIX and "j" in gone:
                assert all(part_of("j") not in bound for bound, _ in (e.term(t) for t, _ in e.poly(p))) or "j.g" in gone


@pytest.mark.parametrize("name", NAMES)
def test_steps_of_programs_recombine(name: str) -> None:
    graph = reference(name)
    e = Expressions(graph.extent)
    axioms = Axioms(e)
    known = express(graph, e)
    for target in graph.outputs:
        values = below(axioms, e.affine_parts(known[target])[0])
        assert len(values) < MOST
        for p in values:
            check(axioms, p, exactly=True)
        assert {p for p in values if not axioms.steps(p)} == {p for p in values if axioms.is_input(p)}


def test_steps_do_not_depend_on_the_order_of_inputs() -> None:
    """S[j] e z (p - S[j] e p), a gradient of a softmax: which of two equal sums takes which name of the axis depends on
    the order in which tensors were made known.
    """

    def steps(order: Iterable[str]) -> tuple[int, Counter[str]]:
        """Values below the gradient, and the operators that make them."""
        e = Expressions(extent)
        x = {name: e.atom(name, ("i", "j")) for name in order}
        total = e.dot(x["e"], x["p"], ("j",))
        gradient = e.dot(e.mul(x["e"], x["z"]), e.add(x["p"], e.scale(total, Q(-1))), ("j",))
        axioms = Axioms(e)
        values = below(axioms, gradient)
        assert {x["e"], x["p"], x["z"]} < {o for s in axioms.steps(gradient) for o in s.args}
        return len(values), Counter(s.op for p in values for s in axioms.steps(p))

    first, *others = map(steps, permutations("epz"))
    assert all(found == first for found in others)


def test_every_rule_and_operator_occurs() -> None:
    """Over the programs and one function of each other kind."""
    fired, ops = Counter[str](), Counter[str]()
    for name in NAMES:
        graph = reference(name)
        e = Expressions(lambda a, g=graph: g.extent(a.removesuffix(LOOP)))
        axioms = Axioms(e)
        for target in (express(graph, e)[n] for n in graph.outputs):
            for axis in (None, *graph.sizes):
                split = target if axis is None or axis in e.axes(target) else e.split(target, axis, (axis + LOOP, axis))
                ops.update(s.op for p in below(axioms, split) for s in axioms.steps(p))
        fired.update(axioms.fired)
    e = Expressions(extent)
    axioms, d = Axioms(e), e
    x, y = e.atom("x", ("i", "j")), e.atom("b", ("j",))
    for p in (
        d.maximum(x, ("j",)),
        e.split(d.maximum(x, ("j",)), "j", ("j" + LOOP, "j")),
        d.function("where", [d.function("lt", [d.iota("i"), d.iota("j")]), x, d.constant(Q(1, 2))]),
        d.power(d.add(d.mul(d.constant(Q(2)), x), y), Q(-1, 2)),
        d.add(d.mul(d.constant(Q(-3)), x), d.constant(Q(1))),
    ):
        ops.update(s.op for q in below(axioms, p) for s in axioms.steps(q))
    fired.update(axioms.fired)
    assert set(fired) == {axiom.name for axiom in AXIOMS} and all(fired.values())
    expected = "exp pow logistic max last where lt add sum acc mul div dot affine const iota"
    assert set(ops) == set(expected.split())


def test_an_axiom_is_added_from_outside() -> None:
    """max(x, y) = max(y, x): one record, and its steps recombine."""

    def swapped(e: Expressions, p: Poly) -> Iterator[Decomposition]:
        match e.only_base(p):
            case ("f", "maximum", (x, y), ()):
                yield Decomposition("maximum", (y, x))
            case _:
                return

    e = Expressions(extent)
    x, y = e.atom("a", ("i",)), e.atom("x", ("i", "j"))
    p = e.function("maximum", (x, y))
    axioms = Axioms(e, records=(*AXIOMS, Axiom("swapped", "max(x, y) = max(y, x)", swapped)))
    assert [s.args for s in axioms.steps(p)] == [(x, y), (y, x)] and axioms.fired["swapped"] == 1
    assert all(equal(e, e.function("maximum", s.args), p, "") for s in axioms.steps(p))


def test_a_square_may_be_made_of_its_root() -> None:
    """Squares of x and of exp(-z) may be infinite and zero where (x exp(-z))^2 is neither. It comes first."""
    e = Expressions(extent)
    x, z = e.atom("x", ("i", "j")), e.atom("z", ("j",))
    root = e.mul(x, e.exp(e.scale(z, Q(-1))))
    square, summed = e.mul(root, root), e.dot(root, root, ("j",))
    products = [(s.op, s.args) for p in (square, summed) for s in Axioms(e).steps(p) if s.op in ("mul", "dot")]
    assert products[0] == ("mul", (root, root)) and ("dot", (root, root)) in products
    cube = e.mul(square, x)
    assert all(root not in s.args for s in Axioms(e).steps(cube)), "only even powers have one"


def test_what_cancels_where_it_is_selected_stays_together() -> None:
    """(x - where(c, x, 0)) - (y - clip(y)) + z is 0 + z where c is true and y is not clipped: x - y + z is not."""
    e = Expressions(extent)
    x, y, c, z, s = (e.atom(name, axes) for name, axes in (*SAME, ("w", ("i", "j")), ("v", ("i", "j")), ("s", ())))
    less = lambda p, q: e.add(p, e.scale(q, Q(-1)))  # noqa: E731
    masked = less(x, e.function("where", (c, x, e.constant(0))))
    clipped = less(y, e.function("minimum", (e.function("maximum", (y, e.constant(-1))), e.constant(1))))
    whole = less(masked, clipped)
    axioms = Axioms(e)

    def parts(p: Poly) -> set[frozenset[Poly]]:
        found = [[e.monic(a)[0] for a in step.args] for step in axioms.steps(p) if step.op == "add"]
        return {frozenset(args) for args in found}

    assert parts(whole) == {frozenset(e.monic(p)[0] for p in (masked, clipped))}
    assert len(parts(masked)) == 1
    assert len(parts(e.add(whole, z))) == 3, "three terms: these two and z"
    summed = less(e.add(x, y), e.function("where", (c, e.add(x, y), z)))
    assert parts(summed) == {frozenset(e.monic(p)[0] for p in (e.add(x, y), less(summed, e.add(x, y))))}
    assert len(parts(less(e.add(x, y), e.function("where", (c, z, s))))) == 3, "nothing cancels"
    assert len(parts(less(e.add(x, y), e.function("where", (c, e.scale(x, Q(1, 2)), s))))) == 3


def test_a_sum_of_many_terms_is_split_one_way_at_a_time() -> None:
    """A search whose time is over stops in between."""
    e = Expressions(extent)
    p = e.add(*(e.function("tanh", (e.scale(e.atom("x", ("i", "j")), Q(n)),)) for n in range(1, 61)))
    assert len(list(islice(split_sum(e, p), 10))) == 10


def test_operands_are_ordered_before_results() -> None:
    """Scaling does not change a value's size, yet it must come after it."""
    e = Expressions(extent)
    axioms = Axioms(e)
    x = e.atom("x", ("i", "j"))
    (term, _), *_ = e.poly(x)
    scaled = e.make_poly([(e.make_term((), [(e.bases.id(("E", term)), Q(1))]), Q(2))])  # before exp(x) has an id
    for p in (scaled, e.function("maximum", (scaled, e.exp(x))), e.function("max", (e.scale(x, Q(-1)),), ("j",))):
        for s in axioms.steps(p):
            assert all(rank(axioms, o) < rank(axioms, p) for o in s.args)


@relaxed
@given(trees())
def test_steps_are_right_in_numbers(tree: Tree) -> None:
    """The same without trusting the constructors: operands read element by element."""
    e = Expressions(extent)
    axioms, scale = Axioms(e), tame(tree)
    p = formed(e, tree)
    axes = {a + q: 0 for a in SIZES for q in ("", "'", "''")}
    for s in axioms.steps(p):
        for corner in corners():
            at = axes | corner
            want = value(e, p, at)
            have = float(s.times) * number(e, s, at)
            assert math.isclose(have, want, rel_tol=1e-9, abs_tol=1e-9 * (1 + scale))


def number(e: Expressions, s: Decomposition, at: dict[str, int]) -> float:
    """An operator applied to numbers."""
    a = dict(s.attrs)
    if s.op in ("sum", "dot", "acc", "max"):
        x, *rest = s.reduced
        inner = Decomposition(s.op, s.args, (("axes", tuple(rest)),))
        values = [number(e, inner, at | {x: n}) for n in range(extent(x))] if rest else []
        if not rest:
            values = [math.prod(value(e, o, at | {x: n}) for o in s.args) for n in range(extent(x))]
        return max(values) if s.op == "max" else sum(values)
    xs = [value(e, o, at) for o in s.args]
    affine = lambda x: float(a.get("scale", 1)) * x + float(a.get("offset", 0))  # noqa: E731
    match s.op:
        case "const":
            return float(a["value"])
        case "affine":
            return affine(*xs)
        case "add":
            return float(a.get("ca", 1)) * xs[0] + float(a.get("cb", 1)) * xs[1]
        case "mul":
            return xs[0] * xs[1]
        case "div":
            return xs[0] / xs[1]
        case "pow":
            return affine(*xs) ** float(a["exponent"])
        case "exp":
            return math.exp(affine(*xs))
        case "tanh":
            return math.tanh(affine(*xs))
        case "maximum":
            return max(xs)
    raise AssertionError(s.op)
