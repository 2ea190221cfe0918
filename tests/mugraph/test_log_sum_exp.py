"""Logarithms of sums of exponentials: where their shift is joined to them, and where it is not."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxpr_frontend.frontend_programs import random

from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.domains.floats import FloatDomain, NamedArray
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.log_sum_exp import differences_first, join_shifts
from mirage_jax.verify.equivalence.certificate import Fingerprint

LOG_SUM = """mugraph {
  extents i=5 n=7
  input x: f32[i,n]
  input y: f32[i]
  library m: f32[i] = max{axes=(n)} x[i,n]
  library d: f32[i,n] = add{cb=-1} x[i,n] m[i]
  library p: f32[i,n] = exp d[i,n]
  library l: f32[i] = sum{axes=(n)} p[i,n]
  library g: f32[i] = log l[i]
  library O: f32[i] = add g[i] m[i]
  output O
}"""

JOINED = {
    "plain": {},
    "the other way": {"add g[i] m[i]": "add m[i] g[i]"},
    "weighted": {"sum{axes=(n)} p[i,n]": "dot{axes=(n)} p[i,n] p[i,n]"},
    "abs": {"g: f32[i] = log l[i]": "a: f32[i] = abs l[i]\nlibrary g: f32[i] = log a[i]"},
    "subtracted from the logits": {"O: f32[i] = add g[i] m[i]": "O: f32[i,n] = add{cb=-1} d[i,n] g[i]"},
    "scaled": {"exp d[i,n]": "exp{scale=3/2} d[i,n]", "add g[i] m[i]": "add{cb=3/2} g[i] m[i]"},
    "subtracted from the scaled logits": {
        "exp d[i,n]": "exp{scale=3/2} d[i,n]",
        "O: f32[i] = add g[i] m[i]": "O: f32[i,n] = add{ca=3/2, cb=-1} d[i,n] g[i]",
    },
    "transposed": {"O: f32[i] = add g[i] m[i]": "O: f32[n,i] = add{cb=-1} d[i,n] g[i]"},
}
LEFT = {
    "another shift": {"add g[i] m[i]": "add g[i] y[i]"},
    "nothing subtracted": {"exp d[i,n]": "exp x[i,n]"},
    "scaled": {"log l[i]": "log{scale=2} l[i]"},
    "a multiple of the shift": {"add g[i] m[i]": "add{cb=2} g[i] m[i]"},
    "another multiple": {"exp d[i,n]": "exp{scale=3} d[i,n]", "add g[i] m[i]": "add{cb=2} g[i] m[i]"},
    "subtracted from others": {"O: f32[i] = add g[i] m[i]": "O: f32[i] = add{cb=-1} y[i] g[i]"},
}


def changed(changes: dict[str, str]) -> KernelGraph:
    text = LOG_SUM
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return parse(text)


def operators(graph: KernelGraph) -> list[str]:
    return [k.ops[0].op for k in graph.kernels]


@pytest.mark.parametrize("name", JOINED)
def test_joined(name: str) -> None:
    graph = changed(JOINED[name])
    joined = join_shifts(graph)
    check_graph(joined)
    assert {"logs", "lesslogs"} & {*operators(joined)} and not {"log", "abs"} & {*operators(joined)}
    arrays = [np.random.default_rng(0).standard_normal(s) for s in ((5, 7), (5,))]
    for x, y in zip(run(graph, arrays), run(joined, arrays), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    graph = changed(LEFT[name])
    assert not {"logs", "lesslogs"} & {*operators(join_shifts(graph))}


def test_abs_of_what_may_be_negative_stays() -> None:
    lines = ("t: f32[i] = mul l[i] y[i]", "library a: f32[i] = abs t[i]", "library g: f32[i] = log a[i]")
    graph = changed({"g: f32[i] = log l[i]": "\n".join(lines)})
    assert "abs" in operators(join_shifts(graph))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.nn.logsumexp(x, axis=-1),
        jax.nn.log_softmax,
        lambda x: jax.scipy.special.logsumexp(x, axis=0, keepdims=True),
    ],
)
def test_functions_of_jax(fn) -> None:
    (region,) = analyse(jax.make_jaxpr(fn)(random(4, 8)).jaxpr).regions
    assert {"logs", "lesslogs"} & {*operators(region.graph)} and "log" not in operators(region.graph)


def test_infinities() -> None:
    """Relative to an infinite maximum a sum is no number, its logarithm is infinite all the same."""
    domain = FloatDomain(jnp, None)
    total, shift = (NamedArray(("i",), jnp.array(a, "float32")) for a in ([np.nan, 0.0, 2.0], [np.inf, -1e38, 1.0]))
    got = domain.log_product(total, shift).array
    np.testing.assert_allclose(got, [np.inf, -np.inf, 1 + np.log(2.0)], rtol=1e-6)


def test_one_logarithm_with_a_shift_read_in_two_ways() -> None:
    """The same numbers subtracted as they are, and transposed: two different results."""
    text = """mugraph {
      extents i=3 n=5
      input x: f32[i,i',n]
      input m: f32[i,i']
      library d: f32[i,i',n] = add{cb=-1} x[i,i',n] m[i,i']
      library p: f32[i,i',n] = exp d[i,i',n]
      library l: f32[i,i'] = sum{axes=(n)} p[i,i',n]
      library g: f32[i,i'] = log l[i,i']
      library e: f32[i,i',n] = add{cb=-1} x[i,i',n] m[i',i]
      library A: f32[i,i',n] = add{cb=-1} d[i,i',n] g[i,i']
      library B: f32[i,i',n] = add{cb=-1} e[i,i',n] g[i,i']
      output A B
    }"""
    graph = parse(text)
    joined = join_shifts(graph)
    check_graph(joined)
    arrays = [np.random.default_rng(0).standard_normal(s) for s in ((3, 3, 5), (3, 3))]
    for x, y in zip(run(graph, arrays), run(joined, arrays), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)


# ---------------------------------------------------------------------- the order of subtractions

LOG_SOFTMAX = changed(JOINED["subtracted from the logits"])
LAST = "  library O: f32[i,n] = lesslogs x[i,n] l[i] m[i]"
DIFFERENCES = {  # how a candidate may say x - log(l) - m: text in place of the last line, and the factor
    "by XLA": ("library g: f32[i] = logs l[i] m[i]\n  library O: f32[i,n] = add{cb=-1} x[i,n] g[i]", 1),
    "by XLA, negated": ("library g: f32[i] = logs l[i] m[i]\n  library O: f32[i,n] = add{ca=-1} x[i,n] g[i]", -1),
    "by XLA, the other way": ("library g: f32[i] = logs l[i] m[i]\n  library O: f32[i,n] = add{ca=-1} g[i] x[i,n]", 1),
    "in a kernel": (
        """kernel k grid(i,n) {
        %x = load x[i,n]
        %l = load l[i]
        %m = load m[i]
        %g[i] = logs %l %m
        %o[i,n] = add{ca=1/2, cb=-1/2} %x %g
        store O: f32[i,n] = %o
      }""",
        0.5,
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_candidate_subtracts_in_the_order_of_the_program(name: str) -> None:
    """x - (log(l) + m) has no log(l) where x and m are the lowest number."""
    text, factor = DIFFERENCES[name]
    program = join_shifts(LOG_SOFTMAX)
    assert LAST in str(program)
    candidate = parse(str(program).replace(LAST, text))
    ordered = differences_first(candidate, program)
    check_graph(ordered)
    assert "lesslogs" in str(ordered) and "= logs" not in str(ordered)
    assert Fingerprint(candidate)(ordered)
    x = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    x[1], x[3] = np.finfo(np.float32).min, 1e6 + x[3]
    (want,) = (factor * y for y in run(LOG_SOFTMAX, [x, np.zeros(5)]))
    (have,) = run(ordered, [x, np.zeros(5, np.float32)], xp=jnp, dtype=None)
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_a_program_that_adds_the_shift_first_keeps_its_order() -> None:
    """x - logsumexp(x) as it is written: rounding of the sum is the program's own."""
    lines = "O: f32[i,n] = add{cb=-1} x[i,n] s[i]"
    graph = changed({"library O: f32[i] = add g[i] m[i]": f"library s: f32[i] = add g[i] m[i]\n  library {lines}"})
    joined = join_shifts(graph)
    assert "logs" in operators(joined) and differences_first(joined, joined) == joined


def test_a_logarithm_that_others_read_stays() -> None:
    program = join_shifts(LOG_SOFTMAX)
    text = str(program).replace(LAST, DIFFERENCES["by XLA"][0])
    candidate = parse(text.replace("output O", "output O g"))
    assert operators(differences_first(candidate, program))[-2:] == ["logs", "lesslogs"]


def test_shifts_of_integers() -> None:
    """Constants of a mask are Python's integers until they meet an array of floats."""
    x = NamedArray(("i", "n"), np.array([[0, -60000], [-60000, -60000]]))
    shift = FloatDomain(np, None).shift(x, ("n",))
    np.testing.assert_array_equal(shift.array, np.array([0, -60000], "float32"), strict=True)


def test_a_shift_that_did_not_move_changes_nothing() -> None:
    """Whatever a compiler makes of the product with the degree."""
    graph = parse("""mugraph {
      extents i=64
      input x: f32[i]
      input m: f32[i]
      library y: f32[i] = rescale{degree=3} x[i] m[i] m[i]
      output y
    }""")
    x = np.float32(np.random.default_rng(0).standard_normal(64))
    (y,) = jax.jit(lambda x, m: run(graph, [x, m], xp=jnp, dtype=None))(x, np.float32(1e10) * x)
    np.testing.assert_array_equal(y, x)


def gradient_of_logsumexp(x: jax.Array, g: jax.Array) -> jax.Array:
    """Of its exponentials, as JAX writes it: the sum's abs has a sign that is always plus."""
    return jax.vjp(lambda x: jax.nn.logsumexp(x, axis=-1), x)[1](g)[0]


def gradient_of_mean(x: jax.Array, g: jax.Array) -> jax.Array:
    """As a loss has it: one number over the sum is a power of it."""
    return jax.grad(lambda x: jax.nn.logsumexp(x, axis=-1).mean())(x * g[:, None])


@pytest.mark.parametrize("gradient", [gradient_of_logsumexp, gradient_of_mean])
def test_signs_of_sums_are_not_asked_for(gradient: Callable[..., jax.Array]) -> None:
    """NaN stays NaN: what the sign chooses from is made of the sum."""
    x, g = np.random.default_rng(0).standard_normal((5, 7)).astype("f4"), np.ones(5, "f4")
    (region,) = analyse(jax.make_jaxpr(gradient)(x, g)).regions
    assert not {"le", "lt", "abs"} & {*operators(region.graph)}
    x[2, 3] = np.nan
    arrays = [{(5, 7): x, (5,): g}[tuple(map(region.graph.extent, t.axes))] for t in region.graph.inputs]
    np.testing.assert_allclose(run(region.graph, arrays)[0], gradient(x, g), rtol=1e-5)


def test_signs_that_choose_something_else_stay() -> None:
    """A sum that is not a number chooses the other value: what is not made of it would be one."""

    def chosen(x: jax.Array, g: jax.Array) -> jax.Array:
        total = jnp.exp(x - x.max(-1, keepdims=True)).sum(-1)
        return jnp.log(total) + (jnp.where(total >= 0, g, 0) - jnp.where(total >= 0, 0, g))

    x, g = np.random.default_rng(0).standard_normal((5, 7)).astype("f4"), np.ones(5, "f4")
    (region,) = analyse(jax.make_jaxpr(chosen)(x, g)).regions
    assert "le" in operators(region.graph)
