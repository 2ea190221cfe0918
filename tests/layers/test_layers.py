"""Layers of real models: what is taken of each and of its gradient, and that both mean what they mean in plain JAX."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxpr_frontend.replacing import Replacing, analysis, assert_close, optimized
from layers.layers import LABELS, LAYERS, Layer, W, X

from mirage_jax.audit.differential import Setting, examine
from mirage_jax.jaxpr_frontend.partition.reasons import Code

QUICKLY = {"compiler_options": {"xla_backend_optimization_level": 0}}  # what is compiled here runs once
TRIVIAL = {Code.NO_HEAVY_OP, Code.RANK0}  # what XLA does as well: pointwise rests, losses


def pullback(layer: Layer) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient with respect to all floats, as a function of these and of a cotangent; and its arguments."""
    leaves, tree = jax.tree.flatten(layer.args)
    floats = [n for n, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def of(*values):
        filled = dict(zip(floats, values, strict=True))
        return layer.fn(*jax.tree.unflatten(tree, [filled.get(n, x) for n, x in enumerate(leaves)]))

    values = [leaves[n] for n in floats]
    rng = np.random.default_rng(0)
    cotangent = jax.tree.map(lambda y: jnp.asarray(rng.normal(size=y.shape), y.dtype), jax.eval_shape(of, *values))
    return lambda ct, *xs: jax.vjp(of, *xs)[1](ct), (cotangent, *values)


def outside(fn: Callable[..., Any], args: tuple[Any, ...]) -> set[str]:
    """What stays with XLA although there is a product or a reduction."""
    return {x.primitive for x in analysis(fn, *args).left_out if x.code not in TRIVIAL}


@pytest.mark.parametrize("name", LAYERS)
def test_forward(name: str) -> None:
    layer, compiler = LAYERS[name], Replacing()
    have, want = optimized(layer.fn, compiler, **QUICKLY)(*layer.args), jax.jit(layer.fn, **QUICKLY)(*layer.args)
    assert_close(have, want, layer.tolerance)
    assert len(compiler.regions) == layer.regions
    assert outside(layer.fn, layer.args) == set(layer.outside)
    inside = {p for region in compiler.regions for p in region.primitives}
    assert inside >= set(layer.inside)


@pytest.mark.parametrize("name", [n for n, layer in LAYERS.items() if layer.gradients])
def test_gradient(name: str) -> None:
    layer, compiler = LAYERS[name], Replacing()
    fn, args = pullback(layer)
    assert_close(optimized(fn, compiler, **QUICKLY)(*args), jax.jit(fn, **QUICKLY)(*args), layer.tolerance)
    assert len(compiler.regions) == layer.gradients
    assert outside(fn, args) == set(layer.outside_gradient)


@pytest.mark.parametrize("name", ["cross entropy", "cross entropy of optax"])
def test_labels_out_of_range_are_nan_as_in_jax(name: str) -> None:
    """Negative labels count from the end; what is out of range is NaN, and passes no gradient."""
    layer, compiler = LAYERS[name], Replacing()
    fn = jax.value_and_grad(layer.fn, (0, 1))
    for labels in (LABELS - 48, LABELS + 40):
        assert_close(optimized(fn, compiler)(X, W, labels), jax.jit(fn)(X, W, labels))
    assert np.isnan(optimized(fn)(X, W, LABELS + 40)[0])


def labels_of(x):
    """Labels that depend on the data, as far as a tracer knows: the rows beside them are known."""
    return LABELS + (0 * x[..., 0]).astype(int)


SIX = jnp.stack([LABELS] * 6, -1)[..., None]
PICKED = {
    "along the rows": lambda x, w: jnp.take_along_axis(jnp.tanh(x @ w), LABELS[:, :3, None].repeat(48, -1) % 16, 1),
    "several of a row": lambda x, w: jnp.take_along_axis(x @ w, LABELS[:, :, None] + jnp.arange(3) - 1, -1),
    "clipped": lambda x, w: jnp.take_along_axis(x @ w, LABELS[..., None] + 20, -1, mode="clip"),
    "in bounds": lambda x, w: jnp.take_along_axis(x @ w, LABELS[..., None], -1, mode="promise_in_bounds"),
    "batched": lambda x, w: jax.vmap(lambda x, i: jnp.take_along_axis(x @ w, i[:, None], -1))(x, LABELS),
    "under a mask": lambda x, w: jnp.take_along_axis(jnp.where(jnp.arange(48) < 40, x @ w, -9.0), LABELS[..., None], 2),
    "of a view": lambda x, w: jnp.take_along_axis(
        (x @ w).reshape(2, 16, 6, 8), jnp.stack([LABELS % 8] * 6, -1)[..., None], -1
    ),
    "of another batch": lambda x, w: jax.vmap(lambda x: jnp.take_along_axis(x @ w, LABELS[0, :, None], -1))(x),
    "at counted rows": lambda x, w: (x @ w)[jnp.arange(2)[:, None], jnp.arange(16), labels_of(x)],
    "at counted rows in another shape": lambda x, w: (x @ w)[
        jnp.arange(2).reshape(-1, 1), jnp.arange(16).reshape(1, -1), labels_of(x)
    ],
    "at counted rows of one": lambda x, w: jax.nn.log_softmax(x[0] @ w, -1)[jnp.arange(16), labels_of(x)[0]],
    "at counted rows of a batch": lambda x, w: jax.vmap(lambda y, i: y[jnp.arange(16), i])(x @ w, labels_of(x)),
    "a diagonal": lambda x, w: jnp.diagonal(jax.nn.log_softmax(x[0] @ w[:, :16], -1)),
    "always the same": lambda x, w: jnp.take(x @ w, 5, axis=-1),
}


@pytest.mark.parametrize("name", PICKED)
def test_picked(name: str) -> None:
    layer, compiler = Layer(PICKED[name], (X, W)), Replacing()
    assert_close(optimized(layer.fn, compiler)(X, W), jax.jit(layer.fn)(X, W))
    assert any("gather" in region.primitives for region in compiler.regions)
    fn, args = pullback(layer)
    assert_close(optimized(fn)(*args), jax.jit(fn)(*args))


def test_indices_into_data_stay_outside() -> None:
    for fn in (
        lambda x, w: jnp.take_along_axis(x, LABELS[..., None] % 32, -1) * (x @ w),
        lambda x, w: x[:, LABELS[0]] @ w,
        lambda x, w: (x[0] @ w)[jnp.arange(16)[::-1], labels_of(x)[0]],  # rows that do not count from 0
        lambda x, w: (x[0] @ w)[jnp.arange(12), labels_of(x)[0, :12]],  # not all rows
    ):
        compiler = Replacing()
        assert_close(optimized(fn, compiler)(X, W), jax.jit(fn)(X, W))
        assert "gather" not in {p for region in compiler.regions for p in region.primitives}


BYTES = jnp.arange(256, dtype="uint8").reshape(16, 16)
SIGNED = BYTES.astype("int8")
INTEGERS = {
    "wraps around": lambda x: (SIGNED + SIGNED * SIGNED, BYTES - 200),
    "sign of four bits": lambda x: (SIGNED << 4) >> 4,
    "high bits": lambda x: (BYTES & 0xF0, SIGNED & 0x70, SIGNED & -16, BYTES & 24),
    "shifts": lambda x: (BYTES >> 3, SIGNED >> 3, BYTES << 2, SIGNED << 1),
    "from one type to another": lambda x: (SIGNED.astype("uint8"), BYTES.astype("int8"), (BYTES > 7).astype("int8")),
    "choices": lambda x: (jnp.maximum(SIGNED, 3), jnp.where(BYTES > 9, BYTES, 7) + 250, -SIGNED),
    "rounding": lambda x: (jnp.floor(5 * x), jnp.ceil(5 * x), jnp.round(4 * x)),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_of_eight_bits(name: str) -> None:
    """As operands of a product with ones, so that every element shows."""
    x = X[0, :, :16]

    def fn(x):
        return [jnp.eye(16) @ y.astype("float32") + x @ x for y in jax.tree.leaves(INTEGERS[name](x))]

    def of(x, *integers):
        return fn(x)

    compiler = Replacing()
    assert_close(optimized(fn, compiler)(x), jax.jit(fn)(x))
    assert not outside(fn, (x,))


def test_bits_that_are_no_numbers_stay_outside() -> None:
    words = jnp.arange(256, dtype="int32").reshape(16, 16)
    for fn in (
        lambda x: x @ (words & 7).astype("float32"),
        lambda x: x @ (BYTES & 5).astype("float32"),
        lambda x: x @ (BYTES >> BYTES).astype("float32"),
        lambda x: x @ jax.lax.shift_right_logical(SIGNED, jnp.int8(1)).astype("float32"),
        lambda x: x @ (words.astype("int8")).astype("float32"),
    ):
        x = X[0, :, :16]
        assert_close(optimized(fn)(x), jax.jit(fn)(x))
        assert outside(fn, (x,)) <= {"and", "shift_right_logical", "convert_element_type"}
        assert outside(fn, (x,))


WHOLE = ["int8 weights", "int8 weights, scaled late", "packed int4 weights", "cross entropy of optax"]


@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_way(name: str, tmp_path: Path) -> None:
    """Searched, proven, gated and run, as if everything that is proven were fast."""
    layer = LAYERS[name]
    args = [np.asarray(x) for x in layer.args]
    outcome = examine(lambda optimize: optimize(layer.fn), args, Setting(cache_dir=str(tmp_path)))
    assert not outcome.problems
    assert (outcome.regions, outcome.accepted) == (1, 1)
