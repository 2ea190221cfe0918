"""Sums of products with differences: equal to the pair of sums, and more precise."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxpr_frontend.replacing import analysis

from mirage_jax.compiler.tuning_session import space_for
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.mugraph import evaluate
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.graph import KernelGraph, KernelSchedule, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.differences import with_differences_multiplied
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.search.driver import search
from mirage_jax.verify.equivalence.certificate import fingerprint
from mirage_jax.verify.exact.exact_check import exact_check

SCHEDULE = Schedule((KernelSchedule((("j", 16), ("k", 16))),))


def pair_of_sums(difference: str, product: str, multiple: str, result: str) -> KernelGraph:
    """The gradient of Gaussian kernels of all pairs of points, each kernel times a difference."""
    return parse(f"""mugraph {{
      extents i=4 j=32 k=32
      input X: f32[j,i]
      input Y: f32[k,i]
      kernel a grid(j) loop(k) {{
        %x = load X[j,i]
        %y = load Y[k,i]
        %d[j,i,k] = add{{{difference}
        %r[j,k] = dot{{axes=(i)}} %d %d
        %w[j,k] = exp{{scale=-1}} %r
        %s[j] = sum{{axes=(k)}} %w
        %t[j] = acc %s
        %p[j,i] = dot{{axes=(k)}} {product}
        %q[j,i] = acc %p
        %m[j,i] = mul {multiple}
        %z[j,i] = add{{{result}
        store Z: f32[j,i] = %z
      }}
      output Z
    }}""")


DIFFERENCES = ("cb=-1} %x %y", "cb=-1} %y %x", "ca=-1} %x %y")
RESULTS = ("cb=-1} %q %m", "cb=-1} %m %q", "ca=-3, cb=3} %q %m")
FORMS = list(product(DIFFERENCES, ("%w %y", "%y %w"), ("%t %x", "%x %t"), RESULTS))


@pytest.mark.parametrize("form", FORMS)
def test_one_sum_for_a_pair(form: tuple[str, ...]) -> None:
    before = pair_of_sums(*form)
    after = with_differences_multiplied(before)
    check_graph(after)
    (kernel,) = after.kernels
    assert [op.op for op in kernel.ops] == ["add", "dot", "exp", "dot", "acc", "affine"]
    assert fingerprint(before, after)
    assert exact_check(after, SCHEDULE) == ""
    assert with_differences_multiplied(after) == after


def test_digits_of_points_that_are_near_each_other() -> None:
    before = pair_of_sums("cb=-1} %x %y", "%w %y", "%t %x", "cb=-1} %q %m")
    rng = np.random.default_rng(0)
    points = [(100 + rng.standard_normal(shape)).astype(np.float32) for shape in ((32, 4), (32, 4))]
    (want,) = evaluate.run(before, points)
    errors = [
        np.abs(evaluate.run(g, points, dtype="float32")[0] - want).max()
        for g in (before, with_differences_multiplied(before))
    ]
    assert 100 * errors[1] < errors[0]


def sum_with_rest(term: str, result: str) -> KernelGraph:
    """A step of Stein's variational gradient: each kernel times a gradient, and a multiple of a difference."""
    return parse(f"""mugraph {{
      extents i=4 j=32 k=32
      input X: f32[j,i]
      input Y: f32[k,i]
      input U: f32[k,i]
      kernel a grid(j) loop(k) {{
        %x = load X[j,i]
        %y = load Y[k,i]
        %u = load U[k,i]
        %d[j,i,k] = add{{cb=-1}} %x %y
        %v[k,i] = add{{{term}
        %r[j,k] = dot{{axes=(i)}} %d %d
        %w[j,k] = exp{{scale=-1}} %r
        %s[j] = sum{{axes=(k)}} %w
        %t[j] = acc %s
        %p[j,i] = dot{{axes=(k)}} %w %v
        %q[j,i] = acc %p
        %m[j,i] = mul %t %x
        %z[j,i] = add{{{result}
        store Z: f32[j,i] = %z
      }}
      output Z
    }}""")


@pytest.mark.parametrize("form", [
    ("ca=-1/4} %y %u", "cb=1/4} %q %m"),
    ("cb=-1/4, ca=3} %u %y", "ca=1/2, cb=2} %m %q"),
    ("cb=-1} %y %u", "cb=-1} %m %q"),
])  # fmt: skip
def test_one_sum_for_a_pair_and_one_for_the_rest(form: tuple[str, str]) -> None:
    before = sum_with_rest(*form)
    after = with_differences_multiplied(before)
    check_graph(after)
    assert [op.op for op in after.kernels[0].ops] == ["add", "dot", "exp", "dot", "acc", "dot", "acc", "add"]
    assert fingerprint(before, after)
    assert exact_check(after, SCHEDULE) == ""
    rng = np.random.default_rng(0)
    far = [(100 + rng.standard_normal((32, 4))).astype(np.float32) for _ in range(2)]
    given = [*far, rng.standard_normal((32, 4)).astype(np.float32)]
    (want,) = evaluate.run(before, given)
    errors = [np.abs(evaluate.run(g, given, dtype="float32")[0] - want).max() for g in (before, after)]
    assert 5 * errors[1] < errors[0]


def test_other_factors_stay() -> None:
    """The multiple of x does not cancel that of y."""
    before = sum_with_rest("ca=-1/4} %y %u", "cb=1/2} %q %m")
    assert with_differences_multiplied(before) == before


def test_sums_that_no_loop_adds_up() -> None:
    """Each step of the loop has all of its own points."""
    before = parse("""mugraph {
      extents b=8 i=4 j=16 k=16
      input X: f32[j,i]
      input Y: f32[b,k,i]
      kernel a grid(j) loop(b) {
        %x = load X[j,i]
        %y = load Y[b,k,i]
        %d[j,i,b,k] = add{cb=-1} %x %y
        %r[j,b,k] = dot{axes=(i)} %d %d
        %w[j,b,k] = exp{scale=-1} %r
        %s[j,b] = sum{axes=(k)} %w
        %p[j,b,i] = dot{axes=(k)} %w %y
        %m[j,b,i] = mul %s %x
        %z[j,b,i] = add{cb=-1} %p %m
        %v[j,i] = sum{axes=(b)} %z
        %u[j,i] = acc %v
        store Z: f32[j,i] = %u
      }
      output Z
    }""")
    after = with_differences_multiplied(before)
    check_graph(after)
    assert [op.op for op in after.kernels[0].ops] == ["add", "dot", "exp", "dot", "affine", "sum", "acc"]
    assert fingerprint(before, after)


def test_the_index_of_a_sum_is_not_another_one() -> None:
    """x[k] stands outside of the sum over k: the difference of the kernel is of the same k."""
    before = parse("""mugraph {
      extents j=16 k=16
      input X: f32[k]
      input Y: f32[j,k]
      kernel a grid(j) {
        %x = load X[k]
        %y = load Y[j,k]
        %d[j,k] = add{cb=-1} %x %y
        %w[j,k] = exp %d
        %s[j] = sum{axes=(k)} %w
        %p[j] = dot{axes=(k)} %w %y
        %m[j,k] = mul %s %x
        %z[j,k] = add{cb=-1} %p %m
        store Z: f32[j,k] = %z
      }
      output Z
    }""")
    check_graph(before)
    assert with_differences_multiplied(before) == before


def test_other_sums_stay() -> None:
    """Of another weight, over another axis, or of a value that is no difference of the kernel."""
    graph = pair_of_sums("cb=-1} %x %y", "%w %y", "%t %x", "cb=-1} %q %m")
    for old, new in (
        ("sum{axes=(k)} %w", "sum{axes=(k)} %r"),
        ("%z[j,i] = add{cb=-1} %q %m", "%z[j,i] = add %q %m"),
        ("%d[j,i,k] = add{cb=-1} %x %y", "%d[j,i,k] = add %x %y"),
    ):
        assert old in str(graph)
        other = parse(str(graph).replace(old, new))
        assert with_differences_multiplied(other) == other
    text = str(graph).replace("mul %t %x", "mul %t %o").replace("%s[j] =", "%o[j,i] = affine{offset=1} %x\n    %s[j] =")
    assert with_differences_multiplied(parse(text)) == parse(text)


def test_a_search_finds_the_sum_of_products_with_differences() -> None:
    def gradient(x, y):
        return jax.grad(lambda x: jnp.sum(jnp.exp(-jnp.sum((x[:, None] - y) ** 2, -1))))(x)

    points = jax.ShapeDtypeStruct((2048, 8), "float32")
    (region,) = analysis(gradient, points, points).regions
    found, _ = search(simplify_axes(region.graph), DEVICES["H200"], space_for(region), seconds=60.0, states=20_000)
    single = [c.graph for c in found if c.family == "kernels" and len(c.graph.kernels) == 1]
    assert single
    for graph in single:
        assert with_differences_multiplied(graph) == graph
        assert [op.op for op in graph.kernels[0].ops].count("acc") == 1
