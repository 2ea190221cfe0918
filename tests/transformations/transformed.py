"""Transformations of a function of three arrays. Each is two cases: ``t(jit(f))`` ("inside") and ``jit(t(f))``."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from transformations.cases import (
    DECIDED,
    Case,
    Jit,
)
from transformations.functions import (
    bent,
    layers,
    repeated,
    squares,
    sums,
    twice,
    wave,
)

policies = jax.checkpoint_policies
type Transformation = Callable[[Callable[..., Any]], Callable[..., Any]]


def in_axes(f: Any) -> Any:
    """Other axes of the operands and of the result than the first."""

    def mapped(a: Any, b: Any, v: Any) -> Any:
        over = jax.vmap(f, (2, None, 1), out_axes=1)
        return over(jnp.stack([a, -a], 2), b, jnp.stack([v, 2 * v], 1))

    return mapped


def alternating(f: Any) -> Any:
    def step(i: Any, c: Any, a: Any, b: Any) -> Any:
        return jax.lax.cond(i % 2 == 0, lambda c: f(a, b, c), lambda c: c, c)

    return lambda a, b, v: jax.lax.fori_loop(0, 3, lambda i, c: step(i, c, a, b), v)


def name_saved(f: Any) -> Any:
    with_name = lambda *x: jnp.tanh(checkpoint_name(f(*x), "product"))  # noqa: E731
    return jax.grad(squares(jax.checkpoint(with_name, policy=policies.save_only_these_names("product"))), 2)


def evaluated(f: Any) -> Any:
    """Through the text of its jaxpr's object, as tools that rewrite jaxprs do."""

    def run(*x: Any) -> Any:
        jaxpr = jax.make_jaxpr(f)(*x)
        return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *x)[0]

    return run


REVERSE, FORWARD, GPU = {"gradient": "reverse"}, {"gradient": "forward"}, {"gpu": True}

TRANSFORMATIONS: dict[str, tuple[Transformation, dict[str, Any]]] = {
    "nothing": (lambda f: f, REVERSE | GPU),
    "grad": (lambda f: jax.grad(squares(f), (0, 1, 2)), GPU),
    "grad of one": (lambda f: jax.grad(squares(f), 1), FORWARD),
    "value_and_grad": (lambda f: jax.value_and_grad(squares(f), 2), {}),
    "grad and more": (lambda f: jax.grad(lambda *x: (squares(f)(*x), {"x": x[2] + 1}), has_aux=True), {}),
    "jvp": (lambda f: lambda *x: jax.jvp(f, x, x), REVERSE),
    "vjp": (lambda f: lambda *x: jax.vjp(f, *x)[1](x[2]), GPU),
    "jacfwd": (lambda f: jax.jacfwd(f, 2), {}),
    "jacrev": (lambda f: jax.jacrev(f, 2), GPU),
    "hessian": (lambda f: jax.hessian(squares(f), 2), {"looser": 10.0}),
    "linearize": (lambda f: lambda *x: jax.linearize(f, *x)[1](*x), GPU),
    "vmap": (lambda f: lambda a, b, v: jax.vmap(f, (None, None, 0))(a, b, twice(v)), REVERSE | GPU),
    "vmap with axes": (in_axes, {}),
    "vmap of vmap": (
        lambda f: lambda a, b, v: jax.vmap(jax.vmap(f, (None, None, 0)), (0, None, None), -1)(twice(a), b, twice(v)),
        GPU | {"promise": DECIDED},
    ),
    "vmap with a named axis": (
        lambda f: lambda a, b, v: jax.vmap(lambda x: jax.lax.psum(f(a, b, x), "i"), axis_name="i")(twice(v)),
        {},
    ),
    "vmap of grad": (lambda f: lambda a, b, v: jax.vmap(jax.grad(squares(f), 2), (None, None, 0))(a, b, twice(v)), {}),
    "grad of vmap": (
        lambda f: jax.grad(lambda a, b, v: jax.vmap(squares(f), (None, None, 0))(a, b, twice(v)).sum(), (0, 2)),
        {},
    ),
    "scan": (repeated, REVERSE | GPU),
    "scan over layers": (layers, REVERSE | GPU),
    "scan, reversed and unrolled": (lambda f: layers(f, reverse=True, unroll=2), {}),
    "scan of vmap": (lambda f: lambda a, b, v: repeated(jax.vmap(f, (None, None, 0)))(a, b, twice(v)), {}),
    "map": (lambda f: lambda a, b, v: jax.lax.map(lambda x: f(a, b, x), twice(v)), {}),
    "map in batches": (lambda f: lambda a, b, v: jax.lax.map(lambda x: f(a, b, x), twice(v), batch_size=2), {}),
    "cond": (lambda f: lambda a, b, v: jax.lax.cond(v[0] > -9, f, lambda a, b, v: v, a, b, v), REVERSE | GPU),
    "switch": (lambda f: lambda a, b, v: jax.lax.switch(1, [lambda x: x, lambda x: f(a, b, x), lambda x: -x], v), {}),
    "vmap of cond": (
        lambda f: lambda a, b, v: jax.vmap(lambda x: jax.lax.cond(x[0] > 0, lambda: f(a, b, x), lambda: x))(twice(v)),
        {},
    ),
    "while": (
        lambda f: lambda a, b, v: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: f(a, b, c) + 10, v),
        FORWARD | GPU,
    ),
    "condition of while": (
        lambda f: lambda a, b, v: jax.lax.while_loop(lambda c: f(a, b, c).sum() < 3, lambda c: c + 1, v),
        {},
    ),
    "fori_loop": (lambda f: lambda a, b, v: jax.lax.fori_loop(0, 3, lambda i, c: f(a, b, c) + i, v), {}),
    "cond in fori_loop": (alternating, {}),
    "checkpoint": (lambda f: jax.grad(squares(jax.checkpoint(f)), (0, 2)), GPU),
    "checkpoint, products saved": (
        lambda f: jax.grad(squares(jax.checkpoint(f, policy=policies.dots_saveable)), (0, 2)),
        {"promise": DECIDED},  # the product is asked for: it has to be computed
    ),
    "checkpoint, nothing saved": (
        lambda f: jax.grad(squares(jax.checkpoint(f, policy=policies.nothing_saveable)), 1),
        {},
    ),
    "checkpoint, a name saved": (name_saved, {}),
    "checkpoint in scan": (lambda f: jax.grad(squares(layers(jax.checkpoint(f, prevent_cse=False))), (0, 2)), GPU),
    "custom_vjp": (lambda f: lambda *x: wave(f(*x)), REVERSE),
    "custom_jvp": (lambda f: lambda *x: bent(f(*x)), FORWARD),
    "closed over": (lambda f: lambda a, b, v: jax.grad(lambda s: f(a * s, b, v).sum())(2.0), GPU),
    "vmap over what is closed over": (
        lambda f: lambda a, b, v: jax.vmap(lambda s: f(a, b * s, v))(jnp.arange(1.0, 3.0)),
        {},
    ),
    "stop_gradient": (lambda f: jax.grad(squares(lambda a, b, v: f(jax.lax.stop_gradient(a), b, v)), (0, 2)), {}),
    "make_jaxpr": (evaluated, {}),
    "vectorize": (lambda f: jnp.vectorize(f, signature="(n,m),(m,k),(n)->(k)"), {}),
    "closure_convert": (
        lambda f: lambda a, b, v: (lambda g, extra: g(v, *extra))(*jax.closure_convert(lambda x: f(a, b, x), v)),
        {},
    ),
    "linear_transpose": (
        lambda f: lambda a, b, v: jax.linear_transpose(jax.linearize(f, a, b, v)[1], a, b, v)(v),
        {},
    ),
}


def cases() -> Iterator[Case]:
    for name, (transform, options) in TRANSFORMATIONS.items():

        def inside(jit: Jit, transform: Transformation = transform) -> Any:
            return transform(jit(sums))

        def outside(jit: Jit, transform: Transformation = transform) -> Any:
            return jit(transform(sums))

        yield Case(f"{name}, inside", inside, **options)
        once = {k: v for k, v in options.items() if k != "gradient"}
        yield Case(f"{name}, outside", outside, why="" if "promise" in options else "optimized: ", **once)
