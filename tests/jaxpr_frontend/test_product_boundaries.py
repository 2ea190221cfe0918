"""Matrix products that no kernel does better together are in regions of their own; nothing here is computed."""

import jax
import jax.numpy as jnp

from mirage_jax.jaxpr_frontend.partition.reasons import Code
from mirage_jax.jaxpr_frontend.partition.regions import Analysis, analyse
from mirage_jax.mugraph.graph import KernelGraph


def analysed(fn, *shapes: tuple[int, ...], dtype="bfloat16") -> Analysis:
    return analyse(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes)))


def operators(graph: KernelGraph) -> list[str]:
    return [op.op for k in graph.kernels for op in k.ops]


def products(fn, *shapes: tuple[int, ...], dtype="bfloat16") -> list[int]:
    """How many matrix products each region has."""
    return [operators(r.graph).count("dot") for r in analysed(fn, *shapes, dtype=dtype).regions]


def mlp(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ a) @ b


def attention(x: jax.Array, wq: jax.Array, wk: jax.Array, wv: jax.Array, wo: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("bte,ehd->bthd", x, w) for w in (wq, wk, wv))
    return jnp.einsum("bthd,hde->bte", jax.nn.dot_product_attention(jnp.sin(q), k, v), wo)


def of_width(batch: int, length: int, heads: int, d: int) -> list[tuple[int, ...]]:
    e = heads * d
    return [(batch, length, e), *[(e, heads, d)] * 3, (heads, d, e)]


def test_scores_stay_and_projections_are_apart() -> None:
    """What is pointwise between a projection and the scores stays with the projection; large products with nothing
    around them are left to XLA.
    """
    found = analysed(attention, *of_width(1, 2048, 32, 128))
    (scores,) = [r for r in found.regions if "exp" in operators(r.graph)]
    assert operators(scores.graph).count("dot") == 2 and "sin" not in operators(scores.graph)
    assert [x.primitive for x in found.left_out if x.code is Code.LIBRARY].count("dot_general") == 3


def test_what_is_small_is_one_region() -> None:
    (region,) = analysed(attention, *of_width(1, 64, 2, 16)).regions
    assert operators(region.graph).count("dot") == 6


def test_products_of_a_wide_mlp_are_apart_at_any_number_of_rows() -> None:
    for rows, each in ((1, [1, 1]), (8, [1, 1]), (4096, [1])):  # of many rows, the second is left to XLA
        assert products(mlp, (rows, 4096), (4096, 16384), (16384, 4096)) == each


def test_a_narrow_mlp_is_one_region() -> None:
    assert products(mlp, (16, 8192), (8192, 8), (8, 8192)) == [2]


def test_decoding_keeps_scores() -> None:
    def decode(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v)

    assert products(decode, (8, 1, 32, 128), (8, 4096, 8, 128), (8, 4096, 8, 128)) == [2]


def test_what_algebra_may_change_is_one_region() -> None:
    n = 4096
    assert products(lambda a, b, v: (a @ b) @ v, (n, n), (n, n), (n, 1)) == [2]
    assert products(lambda x, w, a, b: x @ w + (x @ a) @ b, (n, n), (n, n), (n, 16), (16, n)) == [3]
    assert products(lambda x, w, v: x @ w + x @ v, (n, n), (n, n), (n, n)) == [2]
    assert products(lambda q, k, v: (q @ k.T) @ v, (n, 64), (n, 64), (n, 64)) == [2]


def test_a_large_product_is_left_to_libraries() -> None:
    n = 8192
    found = analysed(lambda x, w: x @ w, (n, n), (n, n))
    assert not found.regions and [x.code for x in found.left_out] == [Code.LIBRARY]
    assert products(lambda x, w: x @ w, (8, n), (n, n)) == [1]  # bound by memory
    assert products(lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), (n, 1024), (1024, n), (1024, n)) == [2]


def test_transposes_of_products_stay_with_them() -> None:
    """The projection of an attention's output contracts one axis: heads and their elements together."""
    found = analysed(attention, *of_width(8, 1024, 8, 64), dtype="float16")
    for region in found.regions:
        for kernel in region.graph.kernels:
            for op in kernel.ops:
                axes = op.attributes.get("axes", ())
                assert op.op != "dot" or (isinstance(axes, tuple) and len(axes) == 1)
