"""Which values may be kept relative to a running maximum, and which exponentials have to stay together."""

from fractions import Fraction as Q

import jax
import jax.numpy as jnp
import pytest
from search.expressions import extent

from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.search.driver import search
from mirage_jax.search.enumerate.axioms import Axioms
from mirage_jax.search.enumerate.kernels import KernelTables, Space
from mirage_jax.search.enumerate.normal_form import Expressions, Poly
from mirage_jax.search.enumerate.shift_degrees import NONE, ShiftDegrees
from mirage_jax.verify.equivalence.certificate import certify


class Softmax:
    """softmax(x + bias) v over j, piece by piece."""

    def __init__(self, bias: bool = False, row_factors_leave_logs: bool = False) -> None:
        self.e = Expressions(extent, row_factors_leave_logs=row_factors_leave_logs)
        d = self.d = self.e
        self.x, self.b = self.e.atom("x", ("i", "j")), self.e.atom("b", ("j",))
        self.v = self.e.atom("w", ("j", "k"))
        self.p = d.exp(d.add(self.x, self.b) if bias else self.x)
        self.l = d.sum(self.p, ("j",))
        self.o = d.dot(self.p, self.v, ("j",))
        self.y = d.mul(self.o, d.power(self.l, Q(-1)))
        self.shift_degrees = ShiftDegrees(self.e, (self.y,))

    def degree(self, p: Poly) -> Q | None:
        """In the one group; None: not homogeneous."""
        found = self.shift_degrees.degree(p)
        return None if found is None else dict(found).get(0, Q(0))


def test_degrees() -> None:
    """exp 1, row sum 1, weighted sum 1, reciprocal -1, the quotient 0: it does not depend on the maximum."""
    s = Softmax()
    d = s.d
    assert [s.degree(p) for p in (s.x, s.p, s.l, s.o, d.power(s.l, Q(-1)), s.y)] == [0, 1, 1, 1, -1, 0]
    assert s.degree(d.power(s.l, Q(-1, 2))) == Q(-1, 2)
    assert s.degree(d.add(s.p, d.constant(Q(1)))) is None
    assert s.degree(d.add(s.l, d.mul(s.l, s.b))) == 1
    assert s.degree(d.function("tanh", [s.p])) is None and s.degree(d.function("tanh", [s.y])) == 0


def test_row_sums_relative_to_their_maximum() -> None:
    """exp(-max(x)) has degree -1, and so sum(exp(x - max(x))) has degree 0, whatever is subtracted meanwhile."""
    s = Softmax()
    d, top = s.d, s.d.maximum(s.x, ("j",))
    below = d.exp(d.scale(top, Q(-1)))
    total = d.mul(s.l, below)
    assert total == d.sum(d.exp(d.add(s.x, d.scale(top, Q(-1)))), ("j",)), "the same normal form"
    shift_degrees = ShiftDegrees(s.e, (s.y, top, total))
    assert shift_degrees.shifted == {0} and not shift_degrees.splits_a_group(below)
    degrees = [dict(shift_degrees.degree(p) or ()).get(0, Q(0)) for p in (below, total, d.mul(below, below))]
    assert degrees == [-1, 0, -2]
    assert shift_degrees.is_of_maximum(below) and not shift_degrees.is_of_maximum(total)


def test_only_what_cancels_is_shifted() -> None:
    """exp(x) v has no division by the row sum: nothing can be subtracted from x."""
    s = Softmax()
    for target in (s.o, s.l, s.d.add(s.y, s.l), s.d.add(s.p, s.d.constant(Q(1)))):
        shift_degrees = ShiftDegrees(s.e, (target,))
        assert not shift_degrees.shifted and shift_degrees.degree(s.o) == NONE
    assert s.shift_degrees.shifted == {0}
    both = ShiftDegrees(s.e, (s.y, s.l))  # one output needs the plain exponential
    assert not both.shifted


def test_degrees_survive_splitting_an_axis() -> None:
    s = Softmax()
    for part in (".l", ".g"):
        split = [s.e.split(p, "j", ("j" + part, "j")) for p in (s.o, s.l, s.y)]
        assert [s.degree(p) for p in split] == [1, 1, 0]


def test_exponentials_multiplied_together_stay_together() -> None:
    """exp(x) exp(b) would be fine in algebra, and 0 times infinity in floats."""
    s = Softmax(bias=True)
    assert s.d.mul(s.d.exp(s.x), s.d.exp(s.b)) == s.p
    assert s.shift_degrees.splits_a_group(s.d.exp(s.x)) and s.shift_degrees.splits_a_group(s.d.exp(s.b))
    assert not any(map(s.shift_degrees.splits_a_group, (s.p, s.l, s.o, s.y, s.x)))
    f = KernelTables(Axioms(s.e), s.shift_degrees, Space(), frozenset())
    assert f.legal(s.p) and not f.legal(s.d.exp(s.x)) and f.stats["exp group split"] == 1


def test_two_softmaxes_are_two_groups() -> None:
    s = Softmax()
    other = s.d.exp(s.d.mul(s.d.constant(Q(1, 2)), s.v))
    z = s.d.mul(other, s.d.power(s.d.sum(other, ("k",)), Q(-1)))
    shift_degrees = ShiftDegrees(s.e, (s.y, z))
    assert len(shift_degrees.groups) == 2 and shift_degrees.shifted == {0, 1}
    degrees = [dict(shift_degrees.degree(p) or ()) for p in (s.p, other)]
    assert degrees[0].keys() != degrees[1].keys() and all(set(x.values()) == {1} for x in degrees)


def test_exponentials_that_occur_in_other_company_are_computed_plainly() -> None:
    """exp(x + b) + exp(x + c): both sums may be exponents, but no one else, and no maximum is subtracted."""
    s = Softmax()
    d, c = s.d, s.d.atom("c", ("i",))
    one, other = d.exp(d.add(s.x, s.b)), d.exp(d.add(s.x, c))
    shift_degrees = ShiftDegrees(s.e, (d.dot(d.add(one, other), s.v, ("j",)),))
    assert not shift_degrees.shifted
    assert not any(map(shift_degrees.splits_a_group, (one, other, d.add(one, other), d.sum(other, ("j",)))))
    assert all(map(shift_degrees.splits_a_group, (d.exp(s.x), d.exp(s.b), d.exp(d.add(s.b, c)))))


def test_squares_have_one_name_before_and_after_a_split() -> None:
    """(x - y)^2 is (y - x)^2, and which of both is kept changes when an axis is split."""
    for first, second in (("x", "y"), ("y", "x")):
        e = Expressions(extent)
        x, y = e.atom(first, ("i", "j")), e.atom(second, ("k", "j"))
        distance = e.sum(e.power(e.add(x, e.scale(y, Q(-1))), Q(2)), ("j",))
        near = e.exp(e.add(distance, e.atom("c", ("i",))))
        shift_degrees = ShiftDegrees(e, (e.sum(near, ("i",)),))
        for axis in ("i", "j", "k"):
            assert not shift_degrees.splits_a_group(e.split(near, axis, (axis + ".l", axis)))


def test_exponentials_of_maxima_have_one_name_before_and_after_a_split() -> None:
    """The steps of a loop are no part of the name, and the axes of a maximum are: rows and columns are two groups."""
    e = Expressions(extent)
    x, y = e.atom("x", ("i", "j")), e.atom("y", ("i", "j"))
    rows, columns = (e.exp(e.function("tanh", [e.maximum(x, axes)])) for axes in (("j",), ("i",)))
    weighted = [(e.mul(rows, y), ("i",)), (e.mul(columns, y), ("j",))]
    shift_degrees = ShiftDegrees(e, tuple(e.mul(p, e.power(e.sum(p, axes), Q(-1))) for p, axes in weighted))
    assert len(shift_degrees.groups) == 2 and shift_degrees.degree(rows) != shift_degrees.degree(columns)
    for p in (rows, columns):
        for part in (".l", ".g"):
            split = e.split(e.split(p, "j", ("j" + part, "j")), "i", ("i" + part, "i"))
            assert split != p and shift_degrees.degree(split) == shift_degrees.degree(p) != NONE


def test_one_group_without_a_degree_leaves_the_others_theirs() -> None:
    """As in the log-likelihood of a mixture: log s and (x / s)^2, of a deviation s = exp(z), stand in one sum."""
    e = Expressions(extent)
    x, z = e.atom("x", ("i", "j")), e.atom("z", ("j",))
    deviation = e.exp(z)
    scaled = e.mul(x, e.power(deviation, Q(-1)))
    logits = e.add(e.scale(e.mul(scaled, scaled), Q(-1, 2)), e.scale(e.function("log", [deviation]), Q(-1)))
    likelihood = e.function("log", [e.sum(e.exp(logits), ("j",))])
    shift_degrees = ShiftDegrees(e, (likelihood,))
    (group,) = shift_degrees.shifted
    assert len(shift_degrees.groups) == 2 and shift_degrees.degree(likelihood) == NONE
    assert dict(shift_degrees.degree(e.exp(logits)) or ()) == {group: Q(1)}
    assert ShiftDegrees(e, (likelihood, e.exp(logits))).shifted == frozenset()


def guarded(d: Expressions, log: Poly) -> Poly:
    return d.function("where", (d.function("isfinite", (log,)), log, d.constant(Q(0))))


@pytest.mark.parametrize("choice", [lambda d, log: log, guarded])
def test_exponentials_relative_to_their_own_logarithm_are_one_operator(choice) -> None:
    """exp(x - L) v with L = log(sum(exp(x))): x may be shifted inside of L, and exp(-L) is nothing by itself."""
    s = Softmax()
    d, log = s.d, s.d.function("log", (s.l,))
    below = d.exp(d.scale(choice(d, log), Q(-1)))
    weights = d.mul(s.p, below)
    shift_degrees = ShiftDegrees(s.e, (d.dot(weights, s.v, ("j",)),))
    assert shift_degrees.shifted == {0}
    assert [dict(shift_degrees.degree(p) or ()) for p in (s.p, s.l, log, weights)] == [{0: 1}, {0: 1}, {}, {}]
    assert shift_degrees.splits_a_group(below) and not shift_degrees.splits_a_group(weights)
    assert not shift_degrees.splits_a_group(s.e.split(weights, "j", ("j.l", "j")))


def test_exponentials_relative_to_a_guarded_maximum_are_one_operator() -> None:
    """As jax.nn.logsumexp keeps them for its gradient, beside the logarithm."""
    s = Softmax()
    d, log = s.d, s.d.function("log", (s.l,))
    below = d.exp(d.scale(guarded(d, d.maximum(s.x, ("j",))), Q(-1)))
    kept = d.mul(s.p, below)
    shift_degrees = ShiftDegrees(s.e, (kept, d.sum(kept, ("j",)), log))
    assert shift_degrees.shifted == {0}
    assert [dict(shift_degrees.degree(p) or ()) for p in (s.p, s.l, kept, log)] == [{0: 1}, {0: 1}, {}, {}]
    assert shift_degrees.splits_a_group(below) and not shift_degrees.splits_a_group(kept)


def test_logarithms_in_the_logits_of_another_softmax_stay_members() -> None:
    """A softmax over j of x - L, with L of other logits: it may be shifted itself, and nothing in it is normalized."""
    s = Softmax()
    d = s.d
    other = d.exp(s.v)
    log = d.function("log", (d.sum(other, ("k",)),))
    weights = d.exp(d.add(s.x, d.scale(log, Q(-1))))
    shift_degrees = ShiftDegrees(s.e, (d.mul(weights, d.power(d.sum(weights, ("j",)), Q(-1))),))
    assert shift_degrees.shifted == {0, 1} and not shift_degrees.plain
    degrees = [dict(shift_degrees.degree(p) or ()) for p in (weights, other)]
    assert degrees[0].keys() != degrees[1].keys() and all(set(x.values()) == {1} for x in degrees)


def test_row_factors_leave_logarithms() -> None:
    """log(sum_j exp(x + r)) = log(sum_j exp(x) exp(r)) with r of the row: a softmax over j has no exp(r), and an
    exponential relative to the maximum of x + r has.
    """
    s = Softmax(row_factors_leave_logs=True)
    d, r = s.d, s.d.atom("r", ("i",))
    log = d.function("log", (d.sum(d.exp(d.add(s.x, r)), ("j",)),))
    assert log == d.log_product(s.l, r) != d.function("log", (s.l,))
    shift_degrees = ShiftDegrees(s.e, (log, s.y))
    assert shift_degrees.shifted == {0} and shift_degrees.groups == [frozenset({"x"})]
    (step,) = Axioms(s.e).steps(log)
    assert (step.op, step.args) == ("logs", (s.l, r)) and step.normal_form(s.e) == log
    plain = d.function("log", (d.exp(r),))
    assert s.e.only_base(plain) == ("f", "log", (d.exp(r),), ())
    below_maximum = d.exp(d.add(s.x, r, d.scale(d.maximum(d.add(s.x, r), ("j",)), Q(-1))))
    assert ShiftDegrees(s.e, (log, below_maximum)).plain
    as_it_is = Softmax()
    d, r = as_it_is.d, as_it_is.d.atom("r", ("i",))
    logits = d.add(as_it_is.x, r)
    log = d.function("log", (d.sum(d.exp(logits), ("j",)),))
    below_maximum = d.exp(d.add(logits, d.scale(d.maximum(logits, ("j",)), Q(-1))))
    assert not ShiftDegrees(d, (log, below_maximum)).plain and ShiftDegrees(d, (log, as_it_is.y)).plain


def softmax(d, v):
    return jax.nn.softmax(-d, -1) @ v


def regression(d, v):
    """0/0 where all distances are large."""
    weights = jnp.exp(-d)
    return (weights @ v) / jnp.sum(weights, -1, keepdims=True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("program", [softmax, regression])
def test_programs_without_a_maximum_stay_without_a_shift(program, dtype: str) -> None:
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((256, 1024), (1024, 8))]
    (region,) = analyse(jax.make_jaxpr(program)(*shapes)).regions
    found, _ = search(region.graph, DEVICES["H200"], Space(), 20.0)
    fused = [str(c.graph) for c in found if c.family == "kernels" and len(c.graph.kernels) <= 2]
    assert fused and all(("shift" in text) == (program is softmax) for text in fused)


def policy(x, v):
    return jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True)) @ v


def transport(x, v):
    """A step of Sinkhorn's iteration and its gradient, as ott writes them."""
    log = jax.nn.logsumexp((x + jnp.sum(v, -1)[None]) / 4, -1)
    log = jnp.where(jnp.isfinite(log), log, 0.0)
    return log, jnp.exp((x + jnp.sum(v, -1)[None]) / 4 - log[:, None]) @ v


def mixture(x, v):
    """The likelihood and its gradient, of points whose squared lengths are the same for all components."""
    near = lambda x: -jnp.sum(x * x, -1)[:, None] + x @ v.T  # noqa: E731
    return jax.value_and_grad(lambda x: jax.nn.logsumexp(near(x), -1).sum())(x[:, :8])


def kept_for_a_gradient(x, v):
    """What jax.nn.logsumexp keeps, where another function takes the gradient."""
    top = jnp.max(x, -1, keepdims=True)
    below = jnp.exp(x - jnp.where(jnp.isfinite(top), top, 0.0))
    return below, jnp.sum(below, -1), jax.nn.logsumexp(x, -1) + v[:, 0].sum()


@pytest.mark.parametrize("program", [policy, transport, mixture, kept_for_a_gradient])
def test_logarithms_beside_their_softmax_keep_their_shift(program) -> None:
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((256, 64), (64, 8))]
    region = max(analyse(jax.make_jaxpr(program)(*shapes)).regions, key=lambda r: len(r.equations))
    found, _ = search(region.graph, DEVICES["H200"], Space(), 20.0)
    best = next(c.graph for c in found if c.family == "kernels")
    assert "shift" in str(best)
    certify(region.graph, best)


def test_without_shifts_no_value_has_a_degree() -> None:
    s = Softmax()
    plain = ShiftDegrees(s.e, (s.y,), may_shift=False)
    assert plain.groups and not plain.shifted and plain.degree(s.y) == NONE
