"""Which equations of explicitly divided arrays are local, and that regions of local ones compute the right thing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxpr_frontend.replacing import Replacing, assert_close, optimized, random

from mirage_jax.jaxpr_frontend.capture.sharding import is_local
from mirage_jax.jaxpr_frontend.partition.program import flatten

X, Y, W = (8, 4, 6), (8, 6, 4), (6, 4)
D, T, DT, BOTH = P("d"), P(None, "t"), P("d", "t"), P(("d", "t"))


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    return jax.make_mesh((4, 2), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)


def put(mesh: Mesh, spec: P, x: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


def product(over: Any, batch: Any, spec: P | None = None) -> Callable[..., Any]:
    return lambda x, y: lax.dot_general(x, y, (over, batch), out_sharding=spec)


# The function of one equation, its operands as shape and division, and whether it is local.
EQUATIONS: dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], P]], bool]] = {
    "pointwise": (jnp.sin, [(X, DT)], True),
    "pointwise, two": (lax.add, [(X, DT), (X, DT)], True),
    "pointwise, with a copy": (lax.add, [(X, DT), (X, D)], False),
    "pointwise, of size one": (lax.add, [(X, DT), ((1, 1, 6), P())], True),
    "pointwise, with a number": (lambda x: x * 2, [(X, DT)], True),
    "sum over what is whole": (lambda x: lax.reduce_sum(x, (2,)), [(X, DT)], True),
    "sum over what is divided": (lambda x: lax.reduce_sum(x, (1,)), [(X, DT)], False),
    "maximum over what is divided": (lambda x: lax.reduce_max(x, (0,)), [(X, D)], False),
    "transpose": (lambda x: lax.transpose(x, (1, 2, 0)), [(X, DT)], True),
    "reshape of what is whole": (lambda x: lax.reshape(x, (8, 24)), [(X, D)], True),
    "reshape that joins": (lambda x: lax.reshape(x, (32, 6), out_sharding=D), [(X, D)], False),
    "reshape that splits": (lambda x: lax.reshape(x, (4, 2, 24), out_sharding=D), [(X, D)], False),
    "new dimension": (lambda x: lax.expand_dims(x, (1,)), [(X, DT)], True),
    "dimension of one removed": (lambda x: lax.squeeze(x, (1,)), [((8, 1, 6), D)], True),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (8, 4, 6), (0,), out_sharding=DT), [((8,), D)], True),
    "product": (product(((2,), (0,)), ((), ())), [(X, DT), (W, P())], True),
    "product, divided columns": (product(((2,), (0,)), ((), ())), [(X, D), (W, T)], True),
    "product, batch": (product(((2,), (1,)), ((0,), (0,))), [(X, D), (Y, D)], True),
    "product over what is divided": (
        product(((2,), (0,)), ((), ()), D), [(X, P("d", None, "t")), (W, P("t"))], False,
    ),
    "positions of what is whole": (lambda: lax.broadcasted_iota("float32", X, 2, out_sharding=DT), [], True),
    "positions of what is divided": (lambda: lax.broadcasted_iota("float32", X, 0, out_sharding=D), [], False),
    "slice of what is whole": (lambda x: lax.slice(x, (0, 0), (6, 2)), [(W, P())], True),
    "slice of what is beside it": (lambda x: lax.slice(x, (0, 0, 0), (8, 4, 2)), [(X, D)], False),
    "concatenation": (lambda x: lax.concatenate([x, x], 0), [(X, T)], False),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUATIONS)
def test_is_local(name: str, mesh: Mesh) -> None:
    fn, operands, want = EQUATIONS[name]
    with jax.set_mesh(mesh):
        program = flatten(jax.make_jaxpr(fn)(*(put(mesh, spec, jnp.ones(shape)) for shape, spec in operands)))
    assert all(map(is_local, program.eqns)) == want


def norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def block(x: Any, w: Any) -> Any:
    return jax.nn.silu(norm(x) @ w)


def attention(x: Any, w: Any) -> Any:
    q = x @ w
    scores = jnp.einsum("bqd,bkd->bqk", q, q) / 2
    scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), scores, -jnp.inf)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), q)


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *args: jnp.sum(f(*args) ** 2), (0, 1))


PROGRAMS = {
    "block": (block, [D, DT, BOTH, P()]),
    "attention": (attention, [D, BOTH]),
    "gradient": (gradient(block), [D, DT]),
}


@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, (_, specs) in PROGRAMS.items() for spec in specs])
def test_regions_of_parts(name: str, spec: P, mesh: Mesh) -> None:
    fn, _ = PROGRAMS[name]
    compiler, args = Replacing(), (random(*X), random(*W))
    with jax.set_mesh(mesh):
        placed = put(mesh, spec, args[0]), put(mesh, P(), args[1])
        have, want = optimized(fn, compiler)(*placed), jax.jit(fn)(*placed)
        assert jax.tree.map(jax.typeof, have) == jax.tree.map(jax.typeof, want)
    assert_close(have, fn(*args))
    assert compiler.regions
