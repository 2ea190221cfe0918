"""Attention with masks that are written as sums, through the whole pipeline: what is accepted is as good as XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deciding import measured

import mirage_jax
from mirage_jax.compiler.tuning_session import TuningSession

N, D = 96, 16
LEAST = float(jnp.finfo("float32").min)


def _operands() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(N, D)), "float32") for _ in range(3))
    return q, k, v, jnp.asarray(rng.normal(size=D), "float32")


def _attend(q, k, v, w, bias):
    return (jax.nn.softmax(q @ k.T / 16 + bias) @ v) @ w  # so that other algebra is cheaper


def _keys(q, k, v, w):
    seen = jnp.arange(N) % 7 != 3
    return _attend(q, k, v, w, (1.0 - seen.astype("float32")) * -1e9)


def _given(q, k, v, w, mask):
    return _attend(q, k, v, w, (1.0 - mask.astype("float32")) * -1e9)


def _triangle(q, k, v, w):
    return _attend(q, k, v, w, (1.0 - jnp.tril(jnp.ones((N, N)))) * -1e9)


def _added(q, k, v, w, mask):
    return _attend(q, k, v, w, jnp.where(mask.T.T, 0.0, LEAST))


def _floats(q, k, v, w, mask):
    return _attend(q, k, v, w, (mask - 1.0) * 1e4)


LEFT_PADDED = np.tril(np.ones((N, N), bool)) & (np.arange(N) >= 5)  # the first rows are wholly masked
SOME = np.random.default_rng(1).random(N) < 0.7
MASKS = {
    "a condition": (_keys, ()),
    "booleans": (_given, (SOME,)),
    "a triangle of ones": (_triangle, ()),
    "rows that are wholly masked": (_added, (LEFT_PADDED,)),
    "ones and zeros": (_floats, (SOME.astype(np.float32),)),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_that_is_added(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """(1 - mask) * -1e9 + s is not (1e9 * mask + s) - 1e9 in floats, nor is s / 16 + b the same as (s + 16 * b) / 16
    where b is the lowest number.
    """
    monkeypatch.setattr(TuningSession, "promising", lambda *_: True)
    fn, more = MASKS[name]
    args = (*_operands(), *map(jnp.asarray, more))
    want = jax.jit(fn)(*args)
    f = mirage_jax.optimize(fn, backend="jax", strict=True, budget="10s")
    with measured(2.0):
        have = f(*args)
        (region,) = f.explain(*args).regions
    np.testing.assert_allclose(have, want, atol=1e-5)  # and NaN nowhere
    assert region.decision.winner is not None, region.decision.why


def test_bytes_are_numbers() -> None:
    """Where XLA computes for us, roots and powers of bytes are not bytes."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(0, 256, (64, 32)), "uint8")
    a, b = (jnp.asarray(rng.normal(size=s), "float32") for s in ((32, 64), (64, 2)))
    fn = lambda x, a, b: ((x.astype(jnp.float32) ** 1.5) @ a) @ b  # noqa: E731
    f = mirage_jax.optimize(fn, strict=True)
    with measured(2.0):
        have = f(x, a, b)
        (region,) = f.explain(x, a, b).regions
    assert region.decision.winner is not None, region.decision.why
    np.testing.assert_allclose(have, jax.jit(fn)(x, a, b), rtol=1e-3, atol=1.0)


PADDED = jnp.where(jnp.arange(N) < 9, LEAST, 0.0)[None]  # left padding: rows of which all that is left is as low


def _causal(s):
    i = jnp.arange(s.shape[-1])
    return jax.nn.softmax(jnp.where(i[:, None] >= i[None], s, LEAST), -1)


def _layer(q, k, v, w, bias):
    return _causal(q @ k.T / 4 + bias) @ (v @ w)


def _scanned(q, k, v, w, bias):
    mask = jnp.where(jnp.arange(N) < 9, LEAST, 0.0)[None] + 0 * bias

    def layer(x, w):
        return _layer(x, k, v, w, mask), None

    return jax.lax.scan(layer, q, jnp.stack([w, w]))[0]


def _library(q, k, v, w, bias):
    one = lambda x: x[None, :, None]  # noqa: E731
    shape = (1, 1, N, N)
    return jax.nn.dot_product_attention(one(q), one(k), one(v @ w), bias=jnp.broadcast_to(bias, shape), is_causal=True)


def _reversed(q, k, v, w, bias):
    return _layer(q, k, v, w, jax.lax.rev(bias, (1,)))


def _gradient(q, k, v, w, bias):
    return jax.grad(lambda *x: jnp.sin(jax.checkpoint(_layer)(*x, bias)).sum(), argnums=(0, 1, 2, 3))(q, k, v, w)


BORDERS = {
    "an input": (_layer, PADDED),
    "made outside of a scan": (_scanned, PADDED),
    "jax.nn": (_library, PADDED),
    "reversed": (_reversed, PADDED[:, ::-1]),
    "the gradient of a checkpointed layer": (_gradient, PADDED),
}


@pytest.mark.parametrize("name", BORDERS)
def test_padding_from_beyond_the_border_of_a_region(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row is padding, what a causal mask hides weighs as much as what it leaves: a sentinel is a number."""
    monkeypatch.setattr(TuningSession, "promising", lambda *_: True)
    fn, bias = BORDERS[name]
    q, k, v, _ = _operands()
    args = (q, k, v, jnp.asarray(np.random.default_rng(2).normal(size=(D, D)), "float32"), bias)
    want = jax.jit(fn)(*args)
    f = mirage_jax.optimize(fn, backend="jax", strict=True, budget="5s")
    with measured(2.0):
        have = f(*args)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), have, want)
