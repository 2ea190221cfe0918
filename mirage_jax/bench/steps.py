"""Steps of models, to be timed: ``step(state, batch) -> (state, result)``, at the sizes of published models.

Suite "models" has the layers of each model in `bench.models` without embedding and head, so that figures
are per layer: training steps with AdamW, forward passes, and decoding with a full cache. The state of a step
(weights in training, the cache in decoding) is donated. Suite "compile" has a few steps with 32 layers, to be lowered
only. Suite "different" has programs without equal layers (`bench.different`), suite "whole" gradients of single layers
(`whole_programs`), suite "fields" programs of other fields (`field_programs`), suite "zoo" programs by other people's
libraries (`zoo`). `small` is the same step at sizes that a CPU can afford.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mirage_jax.bench import different, field_programs, whole_programs, zoo
from mirage_jax.bench.models import bert, bounds, chameleon, gpt2, linear_lm, llama, lora, ngpt, training, vit
from mirage_jax.bench.models.layers import Sizes, WeightDraw, squared_error, unit
from mirage_jax.config import unknown
from mirage_jax.errors import UsageError

LAYERS = 4  # enough that the first and the last do not dominate
MANY = 32

type Run = Callable[[Any, Any, jax.Array], Any]


@dataclass(frozen=True)
class ModelStep:
    """One row of the suite. `draw(key)` makes the first state and a batch. trains: it has a backward pass."""

    name: str
    fn: Callable[[Any, Any], tuple[Any, Any]]
    draw: Callable[[jax.Array], tuple[Any, Any]]
    layers: int
    trains: bool = False


def _hidden(key: jax.Array, s: Sizes, length: int | None = None) -> jax.Array:
    """Draw the output of an embedding."""
    return jax.random.normal(key, (s.batch, s.length if length is None else length, s.width), s.dtype)


def _drawn_layers(key: jax.Array, s: Sizes, init_layer: Callable[[WeightDraw, Any], Any]) -> list[Any]:
    draw = WeightDraw(key, s.dtype)
    return [init_layer(draw, s) for _ in range(s.layers)]


def _train_layers(name: str, s: Sizes, init_layer: Callable[[WeightDraw, Any], Any], run: Run) -> ModelStep:
    """A training step of layers alone, towards random results."""

    def loss(layers: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Compare the results of all layers with targets."""
        return squared_error(run(s, layers, batch[0]), batch[1])

    def draw(key: jax.Array) -> tuple[Any, Any]:
        k1, k2, k3 = jax.random.split(key, 3)
        return training.start(_drawn_layers(k1, s, init_layer)), (_hidden(k2, s), _hidden(k3, s))

    return ModelStep(name, training.train_step(loss), draw, s.layers, trains=True)


def _forward(name: str, s: Any, init: Callable[[jax.Array, Any], Any], run: Run, prepare: Any = None) -> ModelStep:
    """Layers on random data: they have no state."""

    def step(state: tuple[()], batch: tuple[Any, jax.Array]) -> tuple[tuple[()], Any]:
        """Run the layers."""
        return state, run(s, *batch)

    def draw(key: jax.Array) -> tuple[Any, Any]:
        k1, k2 = jax.random.split(key)
        x = _hidden(k2, s)
        return (), (init(k1, s), x if prepare is None else prepare(x))

    return ModelStep(name, step, draw, s.layers)


def _prefill(name: str, s: Sizes) -> ModelStep:
    return _forward(name, s, partial(_drawn_layers, init_layer=llama.init_layer), llama.read)


def _decode(name: str, s: Sizes) -> ModelStep:
    """One token more for texts that fill the cache but for one position."""

    def step(cache: llama.Cache, batch: tuple[Any, jax.Array, jax.Array]) -> tuple[llama.Cache, jax.Array]:
        """Run the layers on one more token."""
        layers, x, position = batch
        y, cache = llama.extend(s, layers, x, cache, position)
        return cache, y

    def draw(key: jax.Array) -> tuple[Any, Any]:
        k1, k2, k3 = jax.random.split(key, 3)
        keys = iter(jax.random.split(k1, 2 * s.layers))
        fill = lambda c: jax.random.normal(next(keys), c.shape, c.dtype)  # noqa: E731
        cache = jax.tree.map(fill, llama.empty_cache(s))
        return cache, (_drawn_layers(k2, s, llama.init_layer), _hidden(k3, s, 1), jnp.asarray(s.length - 1, jnp.int32))

    return ModelStep(name, step, draw, s.layers)


def _train_bert(name: str, s: Sizes) -> ModelStep:
    def draw(key: jax.Array) -> tuple[Any, Any]:
        k1, k2 = jax.random.split(key)
        return training.start(bert.init(k1, s)), bert.batch(k2, s)

    return ModelStep(name, training.train_step(partial(bert.loss, s)), draw, s.layers, trains=True)


def _train_lora(name: str, s: lora.LoraSizes) -> ModelStep:
    def draw(key: jax.Array) -> tuple[Any, Any]:
        k1, k2, k3, k4 = jax.random.split(key, 4)
        layers = lora.init(k1, s)
        return training.start(lora.init_adapters(k2, s, layers)), (layers, _hidden(k3, s), _hidden(k4, s))

    return ModelStep(name, training.train_step(partial(lora.loss, s)), draw, s.layers, trains=True)


def _timed(small: bool) -> Iterator[ModelStep]:
    def size[S: Sizes](published: S, tiny: S, **changes: int) -> S:
        return tiny if small else replace(published, layers=LAYERS, **changes)

    llama_size = size(llama.LLAMA3_8B, llama.SMALL)
    yield _decode("llama_decode_b1", replace(llama_size, batch=1))
    yield _decode("llama_decode_b8", replace(llama_size, batch=8))
    yield _prefill("llama_prefill", size(llama.LLAMA3_8B, llama.SMALL, length=2048))
    yield _train_bert("bert_train", size(bert.LARGE, bert.SMALL))
    yield _train_layers("gpt2_train", size(gpt2.MEDIUM, gpt2.SMALL, length=4096), gpt2.init_layer, gpt2.run)
    yield _train_lora("lora_train", size(lora.LLAMA3_8B, lora.SMALL))
    yield _forward("ngpt", size(ngpt.HALF_B, ngpt.SMALL), ngpt.init, ngpt.run, unit)
    yield _forward(
        "chameleon", size(chameleon.CHAMELEON_7B, chameleon.SMALL, length=2048), chameleon.init, chameleon.run
    )
    yield _train_layers("linear_train", size(linear_lm.M340, linear_lm.SMALL), linear_lm.init_layer, linear_lm.run)
    yield _forward("vit", size(vit.LARGE, vit.SMALL), partial(_drawn_layers, init_layer=vit.init_layer), vit.run)


def _compiled(small: bool) -> Iterator[ModelStep]:
    def size[S: Sizes](published: S, tiny: S, **changes: int) -> S:
        return replace(tiny, layers=MANY) if small else replace(published, layers=MANY, **changes)

    llama_size = size(llama.LLAMA3_8B, llama.SMALL)
    yield _decode("llama_decode", llama_size)
    yield _prefill("llama_prefill", size(llama.LLAMA3_8B, llama.SMALL, length=2048))
    gpt = size(gpt2.MEDIUM, gpt2.SMALL)
    yield _forward("gpt2", gpt, partial(_drawn_layers, init_layer=gpt2.init_layer), gpt2.run)
    yield _train_layers("gpt2_train", gpt, gpt2.init_layer, gpt2.run)


def _different(small: bool) -> Iterator[ModelStep]:
    for kind, body in different.KINDS.items():
        for count in different.SMALL_COUNTS if small else different.COUNTS:
            fn = lambda x, w, body=body, count=count: (x, body(count, x, w))  # noqa: E731
            yield ModelStep(f"{kind}_{count}", fn, partial(different.draw, kind, count), count)


def _whole(small: bool) -> Iterator[ModelStep]:
    s = whole_programs.SMALL if small else whole_programs.LayerSizes()
    makers = {
        "softcap_attention": lambda: whole_programs.attention_step(s),
        "kernel_regression": lambda: whole_programs.kernel_regression_step(*((64, 96) if small else (4096, 8192))),
        "retention": lambda: whole_programs.retention_step(s),
    }
    for name, make in makers.items():
        yield ModelStep(name, *make(), layers=1, trains=True)
    yield replace(_bounds("certified_training", jax.value_and_grad(bounds.loss, argnums=1), small), trains=True)


def _bounds(name: str, fn: Callable[..., Any], small: bool) -> ModelStep:
    """A function of bounds, which has no state."""
    s = bounds.SMALL if small else bounds.PUBLISHED
    return ModelStep(name, lambda state, batch: (state, fn(s, *batch)), lambda key: ((), bounds.draw(key, s)), s.layers)


def _fields(small: bool) -> Iterator[ModelStep]:
    for name, fn, draw, trains in field_programs.steps(small):
        yield ModelStep(name, fn, draw, layers=1, trains=trains)
    yield _bounds("certified_bounds", bounds.certified, small)


def _zoo(small: bool) -> Iterator[ModelStep]:
    """List all programs, then the gradients of those that have some."""
    sized = [entry.sized(small) for entry in zoo.entries()]
    for e in sized:
        yield ModelStep(e.name, e.forward, e.draw, layers=1)
    for e in filter(lambda e: e.has_gradients, sized):
        yield ModelStep(f"{e.name}_gradients", e.gradients, e.draw, layers=1, trains=True)


SUITES = {
    "models": _timed,
    "compile": _compiled,
    "different": _different,
    "whole": _whole,
    "fields": _fields,
    "zoo": _zoo,
}
STEPS = {
    (name, small): {step.name: step for step in make(small)} for name, make in SUITES.items() for small in (False, True)
}


def step(suite: str, name: str, small: bool = False) -> ModelStep:
    """Find a step of a suite. Raises `UsageError`."""
    known = STEPS[suite, small]
    if name not in known:
        raise UsageError(unknown("step", name, known))
    return known[name]


def steps(suite: str, small: bool = False) -> list[ModelStep]:
    """List all steps of a suite, in the order of the tables."""
    return list(STEPS[suite, small].values())
