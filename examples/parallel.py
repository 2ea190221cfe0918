"""A training step of Llama's layers on several devices: data parallel, then tensor parallel, under `jax.shard_map`.

Data parallel: each device has its texts, and gradients are summed. Tensor parallel, as in Megatron-LM (arXiv
1909.08053): each device has its heads and its part of the MLP, and what leaves attention and MLP is summed. Inside of
`shard_map` shapes are those of one device, so regions are optimized there as on a single one.

Runs on as many devices as divide the batch and the heads: on a CPU on as many as
``XLA_FLAGS=--xla_force_host_platform_device_count=2`` makes. Weights are random, sizes as published but for 2 layers;
``--small`` is for a CPU, ``--layers 4`` and the like change one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mirage_jax
from mirage_jax.bench.beside import compare, flags
from mirage_jax.bench.models import llama, training
from mirage_jax.bench.models.layers import Sizes, WeightDraw, Weights, join_heads, rms_norm, squared_error, swiglu

PUBLISHED = replace(llama.LLAMA3_8B, layers=2, batch=2, length=2048)
COLUMNS, ROWS = P(None, "d"), P("d", None)  # of a matrix: results are divided, or what they are summed over
DIVIDED = dict.fromkeys(("query", "key", "value", "gate", "up"), COLUMNS) | {"out": ROWS, "down": ROWS}


def layer(s: Sizes, x: jax.Array, w: Weights) -> jax.Array:
    """One layer, of which this device has `s.heads` heads and `s.hidden` of the MLP."""
    q, k, v = llama.project(s, rms_norm(x, w["norm1"]), w, jnp.arange(x.shape[1]))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jax.lax.psum(join_heads(mixed) @ w["out"], "d")
    return x + jax.lax.psum(swiglu(rms_norm(x, w["norm2"]), w), "d")


def tensor_parallel_loss(s: Sizes, layers: list[Weights], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, wanted = batch
    for w in layers:
        x = layer(s, x, w)
    return squared_error(x, wanted)


def data_parallel_loss(s: Sizes, layers: list[Weights], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, wanted = batch
    return jax.lax.pmean(squared_error(llama.read(s, layers, x)[0], wanted), "d")


def main(argv: Sequence[str] | None = None) -> int:
    s, options, steps = flags(argv, __doc__, PUBLISHED, llama.SMALL)
    n = math.gcd(jax.device_count(), s.batch, s.kv_heads)
    mesh = jax.make_mesh((n,), ("d",), devices=jax.devices()[:n])
    print(f"{n} device{'s' * (n != 1)}: {mesh.devices.flat[0].device_kind}")
    draw, keys = WeightDraw(jax.random.key(0), s.dtype), jax.random.split(jax.random.key(1))
    layers = [llama.init_layer(draw, s) for _ in range(s.layers)]
    batch = tuple(jax.random.normal(k, (s.batch, s.length, s.width), s.dtype) for k in keys)

    one = replace(s, heads=s.heads // n, kv_heads=s.kv_heads // n, width=s.width // n)  # so that a head has its size
    divided = [{name: DIVIDED.get(name, P()) for name in w} for w in layers]
    whole = jax.tree.map(lambda _: P(), layers)
    differs = 0
    for title, loss, spec, data in (
        ("data parallel", partial(data_parallel_loss, s), whole, P("d")),
        ("tensor parallel", partial(tensor_parallel_loss, one), divided, P()),
    ):
        print(title)
        state_spec = training.TrainState(spec, spec, spec, P())
        step: Any = jax.shard_map(
            training.train_step(loss), mesh=mesh, in_specs=(state_spec, data), out_specs=(state_spec, P())
        )
        place = partial(jax.tree.map, lambda x, p: jax.device_put(x, NamedSharding(mesh, p)))
        args = place(training.start(layers), state_spec), place(batch, (data, data))
        plain = jax.jit(step, donate_argnums=0)
        differs |= compare(plain, mirage_jax.optimize(step, donate_argnums=0, **options), args, s, steps, stateful=True)
    return differs


if __name__ == "__main__":
    raise SystemExit(main())
