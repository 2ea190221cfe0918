"""Cases on eight devices: `shard_map`, arrays that are divided explicitly, arrays that XLA divides as it likes."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transformations.cases import (
    DECIDED,
    WINS,
    XLA,
    Case,
    Jit,
    Promise,
)
from transformations.functions import (
    MATRICES,
    linear_attention,
    normal,
    squares,
    sums,
)

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
BATCHES = tuple(normal(8, 2, 64, 4, seed=n) for n in range(3))
BATCH, HEADS, ROWS, NOTHING = P("d"), P("d", "t"), P(("d", "t")), P()

type Specs = tuple[P | None, ...]  # None: not placed on the mesh


def mesh(kind: AxisType) -> Mesh:
    return jax.make_mesh((4, 2), ("d", "t"), axis_types=(kind, kind))


def placed(kind: AxisType, specs: Specs, args: tuple[Any, ...] = BATCHES) -> list[jax.Array]:
    each = zip(args, specs, strict=True)
    return [x if s is None else jax.device_put(x, NamedSharding(mesh(kind), s)) for x, s in each]


def cases() -> Iterator[Case]:
    options: dict[str, Any] = {"eager": True, "devices": 8}
    for name, (make, specs, args, promise) in IN_SHARD_MAP.items():
        yield Case(f"shard_map{name}", on_devices(AUTO, specs, make), args, promise, **options)
    for name, (make, specs, promise) in EXPLICITLY.items():
        yield Case(f"explicit{name}", on_devices(EXPLICIT, specs, make), BATCHES, promise, **options)
    for name, make in AUTOMATICALLY.items():
        yield Case(f"automatic{name}", on_devices(AUTO, (HEADS,) * 3, make), BATCHES, XLA, **options)


def on_devices(kind: AxisType, specs: Specs, make: Callable[[Jit], Any]) -> Callable[[Jit], Any]:
    """What `make(jit)` gives for operands on a mesh of this kind, under that mesh."""

    def on_mesh(jit: Jit) -> Any:
        def run(*args: Any) -> Any:
            with jax.set_mesh(mesh(kind)):
                return make(jit)(*placed(kind, specs, args))

        return run

    return on_mesh


def batches(q: Any, k: Any, v: Any) -> Any:
    return jax.vmap(linear_attention)(q, k, v)


def derivatives(f: Any) -> Any:
    return jax.grad(squares(f), (0, 1, 2))


def iterated(f: Any) -> Any:
    return lambda q, k, v: jax.lax.scan(lambda c, _: (f(c, k, v), None), q, length=2)[0]


# Inside of shard_map shapes are local: always optimized.


def mapped(f: Any, inputs: Any = HEADS, outputs: Any = HEADS, **options: Any) -> Any:
    return jax.shard_map(f, in_specs=inputs, out_specs=outputs, **options)


def summed_batches(q: Any, k: Any, v: Any) -> Any:
    return jax.lax.psum(batches(q, k, v), "d")


def summed(a: Any, b: Any, v: Any) -> Any:
    return jax.lax.psum(sums(a, b, v), ("d", "t"))


def mean_in_a_loop(a: Any, b: Any, v: Any) -> Any:
    return jax.lax.fori_loop(0, 2, lambda _, c: jax.lax.pmean(sums(a, b, c), ("d", "t")), v)


DATA = (normal(512, 64), *MATRICES[1:])
REPLICATED: Specs = (ROWS, NOTHING, NOTHING)

IN_SHARD_MAP: dict[str, tuple[Callable[[Jit], Any], Specs, tuple[Any, ...], Promise]] = {
    ", inside": (lambda jit: mapped(jit(batches)), (HEADS,) * 3, BATCHES, WINS),
    ", outside": (lambda jit: jit(mapped(batches)), (HEADS,) * 3, BATCHES, WINS),
    ", unchecked": (lambda jit: jit(mapped(batches, check_vma=False)), (HEADS,) * 3, BATCHES, WINS),
    ", grad of it": (lambda jit: jit(derivatives(mapped(batches))), (HEADS,) * 3, BATCHES, WINS),
    ", grad inside": (lambda jit: mapped(jit(derivatives(batches))), (HEADS,) * 3, BATCHES, WINS),
    ", scan": (lambda jit: jit(mapped(iterated(batches))), (HEADS,) * 3, BATCHES, WINS),
    ", psum": (lambda jit: jit(mapped(summed_batches, outputs=P(None, "t"))), (HEADS,) * 3, BATCHES, WINS),
    ", sums": (lambda jit: jit(mapped(summed, REPLICATED, NOTHING)), REPLICATED, DATA, WINS),
    ", grad of sums": (lambda jit: jit(derivatives(mapped(summed, REPLICATED, NOTHING))), REPLICATED, DATA, WINS),
    ", mean in a loop": (
        lambda jit: jit(mapped(mean_in_a_loop, REPLICATED, NOTHING, check_vma=False)),
        REPLICATED, DATA, WINS,
    ),
    ", not over all axes": (
        lambda jit: jit(mapped(batches, BATCH, BATCH, axis_names={"d"})),
        (BATCH,) * 3, BATCHES, XLA,
    ),
}  # fmt: skip


# Divided explicitly: optimized where what is divided is like a batch.


def with_weights(q: Any, k: Any, v: Any) -> Any:
    """Whose gradient by `v` is a sum over devices."""
    return batches(q, k, k) * v.sum(0)


def over_keys(q: Any, k: Any, v: Any) -> Any:
    """The second product sums over a divided dimension, and has to say how its result is divided."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    return jnp.einsum("bhqk,bhkd->bhqd", scores, v, out_sharding=BATCH)


def causal(q: Any, k: Any, v: Any) -> Any:
    """Positions of queries are counted, and divided."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    kept = jax.lax.broadcasted_iota("int32", scores.shape, 2, out_sharding=P("d", None, "t"))
    return jnp.einsum("bhqk,bhkd->bhqd", jnp.where(kept > 5, scores, 0), v)


KEYS, QUERIES = P("d", None, "t"), P(None, None, ("d", "t"))

EXPLICITLY: dict[str, tuple[Callable[[Jit], Any], Specs, Promise]] = {
    "": (lambda jit: jit(batches), (HEADS,) * 3, WINS),
    ", one axis": (lambda jit: jit(batches), (BATCH,) * 3, WINS),
    ", one dimension by both axes": (lambda jit: jit(batches), (ROWS,) * 3, WINS),
    ", not divided": (lambda jit: jit(batches), (NOTHING,) * 3, WINS),
    ", grad": (lambda jit: jit(derivatives(batches)), (HEADS,) * 3, WINS),
    ", grad of it": (lambda jit: jax.jit(derivatives(jit(batches))), (HEADS,) * 3, WINS),
    ", sum over devices in the gradient": (lambda jit: jit(derivatives(with_weights)), (HEADS,) * 3, WINS),
    ", vmap": (lambda jit: jax.vmap(jit(linear_attention), 1, 1), (BATCH,) * 3, WINS),
    ", scan": (lambda jit: jit(iterated(batches)), (HEADS,) * 3, WINS),
    ", queries": (lambda jit: jit(batches), (KEYS, BATCH, BATCH), WINS),
    ", rows of queries": (lambda jit: jit(batches), (QUERIES, NOTHING, NOTHING), WINS),
    ", others not placed": (lambda jit: jit(batches), (QUERIES, None, None), WINS),
    ", grad, others not placed": (lambda jit: jit(derivatives(batches)), (QUERIES, None, None), DECIDED),
    ", keys": (lambda jit: jit(over_keys), (BATCH, KEYS, KEYS), DECIDED),
    ", positions": (lambda jit: jit(causal), (KEYS, BATCH, BATCH), DECIDED),
    ", shard_map": (lambda jit: jit(mapped(batches)), (HEADS,) * 3, WINS),
    ", checkpoint": (lambda jit: jit(derivatives(jax.checkpoint(batches))), (HEADS,) * 3, WINS),
    ", divided anew": (lambda jit: jit(lambda *x: batches(*jax.sharding.reshard(x, (BATCH,) * 3))), (HEADS,) * 3, WINS),
}  # fmt: skip


# Divided by XLA: left to it.


def rows() -> NamedSharding:
    return NamedSharding(mesh(AUTO), BATCH)


def given_rows(jit: Jit) -> Any:
    return lambda *x: jit(batches, in_shardings=(rows(),) * 3)(*(jax.device_put(a, rows()) for a in x))


AUTOMATICALLY: dict[str, Callable[[Jit], Any]] = {
    "": lambda jit: jit(batches),
    ", grad": lambda jit: jit(derivatives(batches)),
    ", scan": lambda jit: jit(iterated(batches)),
    ", in_shardings": given_rows,
    ", out_shardings": lambda jit: jit(batches, out_shardings=rows()),
    ", constraint": lambda jit: jit(lambda *x: jax.lax.with_sharding_constraint(batches(*x), rows())),
}
