"""What a type checker sees of optimized functions; lines that end in `# error` must be errors, and no others."""

from typing import assert_type

import jax

from mirage_jax import Budget, optimize


@optimize
def f(x: jax.Array, n: int, *, flag: bool = False) -> jax.Array:
    return x * n


@optimize(budget="1m30s", remat=True, devices=0, static_argnames="n")
def g(x: jax.Array) -> tuple[jax.Array, int]:
    return x, 1


class Model:
    @optimize
    def __call__(self, x: jax.Array) -> jax.Array:
        return x

    @optimize(on_miss="fallback")
    def step(self, x: jax.Array, n: int) -> int:
        return n


def use(x: jax.Array, model: Model) -> None:
    assert_type(f(x, 3, flag=True), jax.Array)
    assert_type(g(x), tuple[jax.Array, int])
    assert_type(model(x), jax.Array)
    assert_type(model.step(x, n=3), int)
    assert_type(optimize(g, budget=Budget("30s"))(x), tuple[jax.Array, int])
    assert_type(f.explain(x, 3).name, str)
    f(x, "3")  # error
    f(x)  # error
    g(x, flag=1)  # error
    model.step(x)  # error
    optimize(f, buget="3s")  # error
    optimize(f, budget=[3])  # error
    Budget(None)  # error
