"""Programs whose kernels the float gate refused to the last one: some are as accurate as XLA's code."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirage_jax.audit.differential import Setting, examine

pytest.importorskip("triton")


def mixture(x: jax.Array, logits: jax.Array, mean: jax.Array, log_scale: jax.Array) -> jax.Array:
    """The log-likelihood of points under a mixture of Gaussians, as libraries write it."""
    scale = jnp.exp(log_scale)
    each = -0.5 * ((x[:, None] - mean) / scale) ** 2 - jnp.log(scale)
    return jax.nn.logsumexp(jax.nn.log_softmax(logits) + each.sum(-1), -1)


def test_kernels_of_a_mixture() -> None:
    """They keep a running maximum beside a deviation that has none, and the square of a quotient stays one."""
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(shape).astype(np.float32) for shape in ((64, 4), (8,), (8, 4), (8, 4))]
    setting = Setting("H200", interpret=True, seconds=30.0, states=100_000)
    outcome = examine(lambda optimizer: optimizer(mixture), args, setting)
    assert not outcome.problems and outcome.accepted == outcome.regions == 1
    assert outcome.counts["interpreted"] > 0


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Causal attention with a mask besides, of 0 and 1 for each pair, which is added to the logits."""
    bias = ((1 - seen) * -1e9)[None, None]
    return jax.nn.dot_product_attention(q[None, :, None], k[None, :, None], v[None, :, None], bias, is_causal=True)


def test_a_mask_of_zeros_and_ones_leaves_logits_their_digits() -> None:
    """1e9 (seen + 1e-9 s) - 1e9 has no digit of s of a pair that is seen. Rows without such a pair excused all."""
    rng = np.random.default_rng(17)
    q, k, v = (jnp.asarray(rng.standard_normal((17, 2)), jnp.bfloat16) for _ in range(3))
    seen = jnp.asarray(rng.random((17, 17)) < 0.7, jnp.bfloat16)
    setting = Setting("H200", seconds=30.0, states=100_000)
    outcome = examine(lambda optimizer: optimizer(masked_attention), (q, k, v, seen), setting)
    assert not outcome.problems and outcome.accepted == outcome.regions == 1


def _masked(c: jax.Array, x: jax.Array) -> jax.Array:
    return x - jnp.where(c, x, 0)


def _clipped(c: jax.Array, x: jax.Array) -> jax.Array:
    return x - jnp.clip(x, -5, 5)


@pytest.mark.parametrize("rest", [_masked, _clipped])
def test_what_cancels_exactly_stays_zero(rest: Any) -> None:
    """A sum of two such differences, which other orders of addition leave with a rounding."""

    def f(c: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        t = rest(c, x)
        return jnp.matmul(jnp.concatenate([-t[:, 17:], t[:, :17]], -1) + t, w, precision="highest")

    def program(optimize: Any) -> Any:
        return jax.grad(lambda c, x, w: jnp.sum(optimize(f)(c, x, w) ** 2), (1, 2))

    rng = np.random.default_rng(0)
    c = jnp.asarray(rng.random(33) < 0.8)
    args = [c, *(rng.standard_normal(shape).astype(np.float32) for shape in ((7, 33), (33, 33)))]
    outcome = examine(program, args, Setting("H200", gate=False, seconds=5.0, states=1000, remat=True))
    assert not outcome.problems and outcome.accepted
