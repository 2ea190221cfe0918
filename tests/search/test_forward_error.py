"""Candidates that lose digits are seen in float32, and the search also finds what keeps them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from search.references import H200, region

from mirage_jax.compiler.tuning_session import SPACE
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.search.driver import search
from mirage_jax.search.forward_error import ForwardError

PULLED = """
mugraph {
  extents a=4096 i=4096 j=3
  input x: DTYPE[i,j]
  input w: DTYPE[i]
  library gap: f32[i,j,a] = add{cb=-1} x[i,j] x[a,j]
  library far: f32[i,a] = dot{axes=(j)} gap[i,j,a] gap[i,j,a]
  library near: f32[i,a] = pow{exponent=-3/2, offset=1/100} far[i,a]
  library weight: f32[i,a] = mul near[i,a] w[i]
"""
AS_WRITTEN = PULLED + "library each: f32[i,a,j] = mul weight[i,a] gap[i,j,a]\n"
AS_WRITTEN += "library out: f32[a,j] = sum{axes=(i)} each[i,a,j]\noutput out\n}"
REORDERED = AS_WRITTEN.replace("mul near[i,a] w[i]", "mul w[i] near[i,a]")
DISTRIBUTED = (
    PULLED
    + """
  library all: f32[a,j] = dot{axes=(i)} weight[i,a] x[i,j]
  library total: f32[a] = sum{axes=(i)} weight[i,a]
  library own: f32[a,j] = mul total[a] x[a,j]
  library out: f32[a,j] = add{cb=-1} all[a,j] own[a,j]
  output out
}
"""
)


def graph(text: str, dtype: str = "f32") -> KernelGraph:
    return parse(text.replace("DTYPE", dtype))


def without_products(text: str) -> str:
    """With sums in place of matrix products, which a GPU would round anyway."""
    square = (
        "library square: f32[i,j,a] = mul gap[i,j,a] gap[i,j,a]\n  library far: f32[i,a] = sum{axes=(j)} square[i,j,a]"
    )
    return text.replace("library far: f32[i,a] = dot{axes=(j)} gap[i,j,a] gap[i,j,a]", square)


def test_what_loses_digits() -> None:
    """A point that pulls itself: two large terms cancel, where the program multiplies by zero."""
    error = ForwardError(graph(without_products(AS_WRITTEN)))
    assert error.is_larger(graph(DISTRIBUTED)) and not error.is_larger(graph(REORDERED))


PROJECTED = """
mugraph {
  extents a=4096 i=4096 j=3
  input x: DTYPE[i,j]
  input v: DTYPE[a,j]
"""
OF_DIFFERENCES = PROJECTED + "library gap: f32[i,j,a] = add{cb=-1} x[i,j] x[a,j]\n"
OF_DIFFERENCES += "library out: f32[i,a] = dot{axes=(j)} gap[i,j,a] v[a,j]\noutput out\n}"
DIFFERENCE_OF_PRODUCTS = (
    PROJECTED
    + """
  library one: f32[i,a] = dot{axes=(j)} x[i,j] v[a,j]
  library other: f32[a] = dot{axes=(j)} x[a,j] v[a,j]
  library out: f32[i,a] = add{cb=-1} one[i,a] other[a]
  output out
}
"""
)


def test_what_rounds_more_anyway_loses_none() -> None:
    """XLA's code rounds operands of products to TF32."""
    assert not ForwardError(graph(OF_DIFFERENCES)).is_larger(graph(DIFFERENCE_OF_PRODUCTS))


def test_operands_of_16_bits_are_not_rounded_again() -> None:
    """Differences of numbers of 16 bits are exact in float32; weights that a product rounds to 16 bits are not."""
    text = without_products(AS_WRITTEN)
    assert ForwardError(graph(text, "bf16")).is_larger(graph(DISTRIBUTED, "bf16"))


GRADIENT = """mugraph {
  extents i=64 j=64 k=16
  input q: bf16[i,k]
  input x: bf16[j,k]
  input v: bf16[j,k]
  input g: bf16[i,k]
  library s: f32[i,j] = dot{axes=(k)} q[i,k] x[j,k]
  library m: f32[i] = max{axes=(j)} s[i,j]
  library d: f32[i,j] = add{cb=-1} s[i,j] m[i]
  library p: f32[i,j] = exp d[i,j]
  library l: f32[i] = sum{axes=(j)} p[i,j]
  library w: f32[i,j] = div p[i,j] l[i]
  library h: f32[i,j] = dot{axes=(k)} g[i,k] v[j,k]
  library hw: f32[i,j] = mul h[i,j] w[i,j]
  library t: f32[i] = sum{axes=(j)} hw[i,j]
"""
OF_WEIGHTS = """  library c: f32[i,j] = add{cb=-1} h[i,j] t[i]
  library e: f32[i,j] = mul c[i,j] w[i,j]
  library out: bf16[i,k] = dot{axes=(j)} e[i,j] x[j,k]
  output out
}"""
OF_SUMS = """  library a: f32[i,k] = dot{axes=(j)} hw[i,j] x[j,k]
  library b: f32[i,k] = dot{axes=(j)} w[i,j] x[j,k]
  library tb: f32[i,k] = mul t[i] b[i,k]
  library out: bf16[i,k] = add{cb=-1} a[i,k] tb[i,k]
  output out
}"""


def test_a_gradient_of_attention() -> None:
    """Where one logit dominates, what is left of two rounded sums is noise."""
    error = ForwardError(parse(GRADIENT + OF_WEIGHTS))
    assert error.is_larger(parse(GRADIENT + OF_SUMS)) and not error.is_larger(parse(GRADIENT + OF_WEIGHTS))


def test_a_part_is_given_the_numbers_of_its_region() -> None:
    """The sum of a row and its parts cancel in the region; among numbers drawn one by one they do not."""
    whole = parse(GRADIENT + OF_WEIGHTS)
    head, own, changed = (
        "mugraph {\n  extents i=64 j=64 k=16\n  input p: f32[i,j]\n  input l: f32[i]\n  input t: f32[i]\n"
        "  input x: bf16[j,k]\n  input v: bf16[j,k]\n  input g: bf16[i,k]\n",
        "  library w: f32[i,j] = div p[i,j] l[i]\n  library h: f32[i,j] = dot{axes=(k)} g[i,k] v[j,k]\n" + OF_WEIGHTS,
        "  library n: f32[i,k] = div g[i,k] l[i]\n  library h: f32[i,j] = dot{axes=(k)} n[i,k] v[j,k]\n"
        "  library r: f32[i] = div t[i] l[i]\n" + OF_WEIGHTS.replace("h[i,j] t[i]", "h[i,j] r[i]").replace("w[", "p["),
    )
    part, other = parse(head + own), parse(head + changed)
    assert ForwardError(part, whole).is_larger(other) and not ForwardError(part).is_larger(other)


def test_only_results_of_products_are_rounded() -> None:
    """A product beside it excuses no other result."""
    beside = "library beside: f32[a] = dot{axes=(i)} weight[i,a] w[i]\noutput beside out"
    own, other = (text.replace("output out", beside) for text in (without_products(AS_WRITTEN), DISTRIBUTED))
    assert ForwardError(graph(own)).is_larger(graph(other))


def test_points_near_each_other() -> None:
    """At normal points, few of which are near, both would be as good."""
    weighted = "library out: f32[a,j] = sum{axes=(i)} each[i,a,j]"
    text = without_products(AS_WRITTEN).replace("exponent=-3/2, offset=1/100", "exponent=2, offset=1")
    assert weighted in text
    error = ForwardError(graph(text))
    assert error.is_larger(graph(DISTRIBUTED.replace("exponent=-3/2, offset=1/100", "exponent=2, offset=1")))
    error = ForwardError(graph(text))
    error._draws = error._draws[:1]  # only normal numbers
    assert not error.is_larger(graph(DISTRIBUTED.replace("exponent=-3/2, offset=1/100", "exponent=2, offset=1")))


def test_where_small_extents_do_not_suit_nobody_can_say() -> None:
    """A graph of other inputs, say."""
    other = graph(DISTRIBUTED.replace("input w: DTYPE[i]", "input w: DTYPE[j]").replace("w[i]", "w[j]"))
    assert not ForwardError(graph(without_products(AS_WRITTEN))).is_larger(other)


@pytest.mark.parametrize("points", [1024, 8192])
def test_the_search_finds_what_keeps_them(points: int) -> None:
    """It costs no more than twice the cheapest, which does not."""

    def pull(x: jax.Array, w: jax.Array) -> jax.Array:
        gap = x[None] - x[:, None]
        return jnp.sum((w * (jnp.sum(gap * gap, -1) + 1e-2) ** -1.5)[..., None] * gap, 1)

    reference = simplify_axes(region(pull, (points, 3), (points,)).graph)
    error = ForwardError(reference)
    kernels = [c for c in search(reference, H200, SPACE, seconds=40.0)[0] if c.family == "kernels"]
    keep = [c for c in kernels if not error.is_larger(c.graph)]
    assert len(keep) < len(kernels), "else there is nothing to be seen here"
    assert keep and keep[0].seconds < 2 * kernels[0].seconds


def test_short_sums_of_products_are_vector_work() -> None:
    """The product of differences with a vector of three numbers costs no more than two products without them."""

    def along(x: jax.Array, v: jax.Array) -> jax.Array:
        gap = x[:, None] - x[None]
        return jnp.sum(jnp.sum(gap * v[None], -1) * jnp.exp(-jnp.sum(gap * gap, -1)), 1)

    reference = simplify_axes(region(along, (4096, 3), (4096, 3)).graph)
    space = replace(SPACE, max_kernels=1, splits=False)
    kernels = [c for c in search(reference, H200, space, seconds=20.0)[0] if c.family == "kernels"]
    assert not ForwardError(reference).is_larger(kernels[0].graph)


def test_truth_values_are_stored_in_one_byte() -> None:
    """As the gradient of a minimum stores which element it was."""

    def shares(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        far = jnp.sum(jnp.square(x[:, None] - y), -1)
        at = (far == jnp.min(far, 1, keepdims=True)).astype(jnp.float32)
        return jnp.sum(at, 1), jnp.sum(at, 0)

    reference = simplify_axes(region(shares, (4096, 3), (4096, 3)).graph)
    found = [c for c in search(reference, H200, SPACE, seconds=20.0)[0] if c.family == "kernels"]
    stored = [s.tensor for c in found for k in c.graph.kernels for s in k.stores if len(s.tensor.axes) == 2]
    truths = [t for t in stored if t.dtype == "bool"]
    assert truths
