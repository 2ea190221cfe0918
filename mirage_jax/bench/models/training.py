"""AdamW, and the training step around a loss: ``step(state, batch) -> (state, loss)``, whose state may be donated.

Moments are in float32, for weights of any dtype (Loshchilov and Hutter, arXiv 1711.05101).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mirage_jax.bench.models.layers import widen

RATE, DECAY, EPSILON = 1e-4, 0.01, 1e-8
BETA1, BETA2 = 0.9, 0.95


class TrainState(NamedTuple):
    """The state that training changes. The moments are running means of gradients and of their squares."""

    weights: Any
    first: Any
    second: Any
    count: jax.Array


def start(weights: Any) -> TrainState:
    """Make the state of training: weights, moments, number of steps."""
    zeros = lambda: jax.tree.map(lambda w: jnp.zeros_like(widen(w)), weights)  # noqa: E731
    return TrainState(weights, zeros(), zeros(), jnp.zeros((), jnp.int32))


def adamw(state: TrainState, gradients: Any) -> TrainState:
    """Update weights by AdamW (Loshchilov and Hutter, 2019)."""
    count = state.count + 1
    unbias1, unbias2 = 1 - BETA1**count, 1 - BETA2**count
    first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * widen(g), state.first, gradients)
    second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * widen(g) ** 2, state.second, gradients)

    def move(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        direction = (m / unbias1) / (jnp.sqrt(v / unbias2) + EPSILON) + DECAY * widen(w)
        return (widen(w) - RATE * direction).astype(w.dtype)

    return TrainState(jax.tree.map(move, state.weights, first, second), first, second, count)


def train_step(loss: Callable[[Any, Any], jax.Array]) -> Callable[[TrainState, Any], tuple[TrainState, jax.Array]]:
    """The step that lowers ``loss(weights, batch)``."""

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state.weights, batch)
        return adamw(state, gradients), value

    return step
