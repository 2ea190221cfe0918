"""Steps of models, to be timed: ``step(state, batch) -> (state, result)``, at the sizes of published models.

Suite "models" has the layers of each model in `bench.models` without embedding and head, so that a figure per layer
means what it says: training steps with AdamW, forward passes, and decoding with a full cache. The state of a step
(weights in training, the cache in decoding) is donated. `small` is the same step at sizes that a CPU can afford.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mirage_jax.bench.models import bert, chameleon, gpt2, linear_lm, llama, lora, ngpt, training, vit
from mirage_jax.bench.models.layers import Draw, Sizes, squared_error, unit
from mirage_jax.config import unknown
from mirage_jax.errors import UsageError

LAYERS = 4  # enough that the first and the last do not dominate

type Run = Callable[[Any, Any, jax.Array], Any]


@dataclass(frozen=True)
class Step:
    """One row of the suite. `draw(key)` makes the first state and a batch."""

    name: str
    fn: Callable[[Any, Any], tuple[Any, Any]]
    draw: Callable[[jax.Array], tuple[Any, Any]]
    layers: int


def _hidden(key: jax.Array, s: Sizes, length: int | None = None) -> jax.Array:
    """What an embedding might have made."""
    return jax.random.normal(key, (s.batch, s.length if length is None else length, s.width), s.dtype)


def _drawn_layers(key: jax.Array, s: Sizes, init_layer: Callable[[Draw, Any], Any]) -> list[Any]:
    draw = Draw(key, s.dtype)
    return [init_layer(draw, s) for _ in range(s.layers)]


def _train_layers(name: str, s: Sizes, init_layer: Callable[[Draw, Any], Any], run: Run) -> Step:
    """A training step of layers alone, towards random results."""

    def loss(layers: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        return squared_error(run(s, layers, batch[0]), batch[1])

    def draw(key: jax.Array) -> tuple[Any, Any]:
        k1, k2, k3 = jax.random.split(key, 3)
        return training.start(_drawn_layers(k1, s, init_layer)), (_hidden(k2, s), _hidden(k3, s))

    return Step(name, training.train_step(loss), draw, s.layers)


def _forward(name: str, s: Sizes, init: Callable[[jax.Array], Any], run: Run, prepare: Any = None) -> Step:
    """Layers on random data: they have no state."""

    def step(state: tuple[()], batch: tuple[Any, jax.Array]) -> tuple[tuple[()], Any]:
        return state, run(s, *batch)

    def draw(key: jax.Array) -> tuple[Any, Any]:
        k1, k2 = jax.random.split(key)
        x = _hidden(k2, s)
        return (), (init(k1), x if prepare is None else prepare(x))

    return Step(name, step, draw, s.layers)


def _decode(name: str, s: Sizes) -> Step:
    """One token more for texts that fill the cache but for one position."""

    def step(cache: llama.Cache, batch: tuple[Any, jax.Array, jax.Array]) -> tuple[llama.Cache, jax.Array]:
        layers, x, position = batch
        y, cache = llama.extend(s, layers, x, cache, position)
        return cache, y

    def draw(key: jax.Array) -> tuple[Any, Any]:
        k1, k2, k3 = jax.random.split(key, 3)
        keys = iter(jax.random.split(k1, 2 * s.layers))
        fill = lambda c: jax.random.normal(next(keys), c.shape, c.dtype)  # noqa: E731
        cache = jax.tree.map(fill, llama.empty_cache(s))
        return cache, (_drawn_layers(k2, s, llama.init_layer), _hidden(k3, s, 1), jnp.asarray(s.length - 1, jnp.int32))

    return Step(name, step, draw, s.layers)


def _train_bert(name: str, s: Sizes) -> Step:
    def draw(key: jax.Array) -> tuple[Any, Any]:
        k1, k2 = jax.random.split(key)
        return training.start(bert.init(k1, s)), bert.batch(k2, s)

    return Step(name, training.train_step(partial(bert.loss, s)), draw, s.layers)


def _train_lora(name: str, s: lora.LoraSizes) -> Step:
    def draw(key: jax.Array) -> tuple[Any, Any]:
        k1, k2, k3, k4 = jax.random.split(key, 4)
        layers = lora.init(k1, s)
        return training.start(lora.init_adapters(k2, s, layers)), (layers, _hidden(k3, s), _hidden(k4, s))

    return Step(name, training.train_step(partial(lora.loss, s)), draw, s.layers)


def _register(small: bool) -> Mapping[str, Step]:
    def size[S: Sizes](published: S, tiny: S, **changes: int) -> S:
        return tiny if small else replace(published, layers=LAYERS, **changes)

    llama_size = partial(size, llama.LLAMA3_8B, llama.SMALL)
    prefill = llama_size(length=2048)
    gpt = size(gpt2.MEDIUM, gpt2.SMALL, length=4096)
    linear = size(linear_lm.M340, linear_lm.SMALL)
    sphere = size(ngpt.HALF_B, ngpt.SMALL)
    mixed = size(chameleon.CHAMELEON_7B, chameleon.SMALL, length=2048)
    image = size(vit.LARGE, vit.SMALL)
    steps = (
        _decode("llama_decode_b1", replace(llama_size(), batch=1)),
        _decode("llama_decode_b8", replace(llama_size(), batch=8)),
        _forward("llama_prefill", prefill, lambda k: _drawn_layers(k, prefill, llama.init_layer), llama.read),
        _train_bert("bert_train", size(bert.LARGE, bert.SMALL)),
        _train_layers("gpt2_train", gpt, gpt2.init_layer, gpt2.run),
        _train_lora("lora_train", size(lora.LLAMA3_8B, lora.SMALL)),
        _forward("ngpt", sphere, lambda k: ngpt.init(k, sphere), ngpt.run, unit),
        _forward("chameleon", mixed, lambda k: chameleon.init(k, mixed), chameleon.run),
        _train_layers("linear_train", linear, linear_lm.init_layer, linear_lm.run),
        _forward("vit", image, lambda k: _drawn_layers(k, image, vit.init_layer), vit.run),
    )
    return {step.name: step for step in steps}


STEPS = {False: _register(False), True: _register(True)}


def step(name: str, small: bool = False) -> Step:
    """A step by name."""
    if name not in STEPS[small]:
        raise UsageError(unknown("step", name, STEPS[small]))
    return STEPS[small][name]


def steps(small: bool = False) -> list[Step]:
    """All of them, in the order of the tables."""
    return list(STEPS[small].values())
