"""Programs whose kernels the float gate refused to the last one: some are as accurate as XLA's code."""

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
