"""Flax and equinox: modules are arguments, methods are decorated, and state comes back as `nnx.jit` brings it back."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from deciding import assert_same, chain, flops, measured, operands
from flax import linen, nnx

import mirage_jax
from mirage_jax import UsageError

A, B, V = operands()
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)
strict = functools.partial(mirage_jax.optimize, on_miss="fallback", strict=True)  # captured, and nothing searched


class Block(nnx.Module):
    """With everything that has state: running statistics, dropout, a counter, something sown."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), int))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return self.dropout(jax.nn.relu(self.norm(self.linear(x))))

    def scaled(self, x, scale, power=1):
        return self(x) * scale**power

    @strict
    def decorated(self, x):
        return self(x)


class Chain(nnx.Module):
    def __init__(self):
        self.a, self.b = nnx.Param(A), nnx.Param(B)

    def __call__(self, v):
        return chain(self.a[...], self.b[...], v)


def block() -> Block:
    return Block(nnx.Rngs(0))


def numbers(tree: Any) -> list[Any]:
    """All arrays of modules and other pytrees, keys as integers."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    arrays = [a for x in leaves for a in jax.tree.leaves(nnx.state(x) if isinstance(x, nnx.Pytree) else x)]
    return [jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in arrays]


def assert_close(have: Any, want: Any) -> None:
    for x, y in zip(numbers(have), numbers(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def assert_same_state(have: nnx.Module, want: nnx.Module) -> None:
    assert nnx.graphdef(have) == nnx.graphdef(want)
    assert_close(have, want)


def sown(model, x):
    model.sow(nnx.Intermediate, "before", x)
    return model(x)


def replaced(model, x):
    model.linear = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(3))
    return model(x)


FUNCTIONS = {
    "an argument": lambda m, x: m(x),
    "in a container": lambda m, x: (lambda layers, x: layers["first"][0](x))({"first": [m]}, x),
    "twice": lambda m, x: m(m(x)),
    "a result": lambda m, x: (m, m(x), nnx.clone(m))[1:],
    "something sown": sown,
    "another layer": replaced,
    "a gradient": lambda m, x: nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(m)[0],
    "eval mode": lambda m, x: nnx.view(m, deterministic=True, use_running_average=True)(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_state_as_under_nnx_jit(name: str) -> None:
    """Three calls: each draws another mask, statistics move, and the results are those of `nnx.jit`."""
    f, g = strict(FUNCTIONS[name]), nnx.jit(FUNCTIONS[name])
    have, want = block(), block()
    for _ in range(3):
        assert_close(f(have, X), g(want, X))
        assert_same_state(have, want)


def test_masks_and_statistics_move() -> None:
    model, f = block(), strict(lambda m, x: m(x))
    mean, first, second = model.norm.mean[...], f(model, X), f(model, X)
    assert not np.array_equal(first == 0, second == 0)
    assert not np.allclose(mean, model.norm.mean[...]) and int(model.calls[...]) == 2


def test_containers_and_keywords() -> None:
    have, want = block(), block()
    f = strict(lambda layers, *, extra, x: layers["one"][0](extra(x)))
    g = nnx.jit(lambda layers, *, extra, x: layers["one"][0](extra(x)))
    assert_same(f({"one": [have]}, extra=have, x=X), g({"one": [want]}, extra=want, x=X))
    assert_same_state(have, want)


@pytest.mark.parametrize("how", ["module", "method", "decorated", "unbound"])
def test_modules_and_their_methods(how: str) -> None:
    """The module that a function belongs to is an argument too: what is written later counts."""
    have, want = block(), block()
    f = {
        "module": strict(have),
        "method": strict(have.__call__),
        "decorated": have.decorated,
        "unbound": functools.partial(strict(Block.__call__), have),
    }[how]
    g = nnx.jit(lambda m, x: m(x))
    assert_same(f(X), g(want, X))
    for model in (have, want):
        model.linear.kernel[...] = 2 * model.linear.kernel[...]
    assert_same(f(X), g(want, X))
    assert_same_state(have, want)


def test_options_of_a_bound_method_count_without_the_module() -> None:
    model, same = block(), block()
    f = strict(model.scaled, static_argnums=(2,))
    want = nnx.jit(lambda m, x, s: m.scaled(x, s, 2))(same, X, 3.0)
    assert_same(f(X, 3.0, 2), want)
    assert strict(model, donate_argnums=0).explain(X).name == "Block"


def test_what_is_replaced_in_a_module() -> None:
    model = Chain()
    with measured(2.0):
        f = mirage_jax.optimize(lambda m, v: m(v))
        lowered = f.lower(model, V).compile()
        assert "1 optimized" in str(f.explain(model, V))
        assert mirage_jax.tune(mirage_jax.optimize(model), V).optimized
        assert lowered.cost_analysis()["flops"] < flops(jax.jit(chain), A, B, V) / 5
        assert_same(f(model, V), chain(A, B, V), 1e-3)
        assert f.eval_shape(model, V).shape == V.shape
        with mirage_jax.disabled():
            assert_same(f(model, V), chain(A, B, V))
            plain = f.lower(model, V).compile().cost_analysis()["flops"]
        assert plain > flops(jax.jit(chain), A, B, V) / 2
        f.clear_cache()
        assert_same(f(model, V), chain(A, B, V), 1e-3)


def test_inside_of_the_transformations_of_nnx() -> None:
    have, want, f = block(), block(), strict(lambda m, x: m(x))
    gradients = [
        nnx.grad(lambda m, call=call: (call(m, X) ** 3).sum())(m) for m, call in ((have, f), (want, Block.__call__))
    ]
    assert_close(*gradients)
    assert_same_state(have, want)


def test_a_training_step() -> None:
    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    models = [block(), block()]
    optimizers = [nnx.Optimizer(m, optax.adamw(1e-2), wrt=nnx.Param) for m in models]
    steps = strict(step, donate_argnums=(0, 1)), nnx.jit(step)
    for _ in range(3):
        have, want = (s(m, o, X) for s, m, o in zip(steps, models, optimizers, strict=True))
        np.testing.assert_allclose(have, want, rtol=1e-4)
    assert_same_state(*models)
    assert_close(*optimizers)


def test_state_that_was_split_off_is_a_pytree() -> None:
    definition, state = nnx.split(block())
    f = strict(lambda s, x: nnx.merge(definition, s)(x))
    assert_same(f(state, X), jax.jit(lambda s, x: nnx.merge(definition, s)(x))(state, X))
    assert_same(f(state, X), f(state, X))  # nothing comes back


class Deep(nnx.Module):
    """Layers in a scan, or one after the other."""

    def __init__(self, stacked: bool):
        make = nnx.split_rngs(splits=4)(nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs)))
        layers = make(nnx.Rngs(0))
        self.stacked = stacked
        one = (jax.tree.map(lambda x, n=n: x[n], layers) for n in range(4))
        self.layers = layers if stacked else nnx.List(one)

    def __call__(self, x):
        def layer(x, linear):
            return jax.nn.softmax(linear(x)) @ jnp.ones((8, 8))

        if self.stacked:
            return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        return functools.reduce(layer, self.layers, x)


@pytest.mark.parametrize("stacked", [True, False])
def test_layers_are_searched_once(stacked: bool) -> None:
    model = Deep(stacked)
    f = mirage_jax.optimize(model, on_miss="heuristic", strict=True)
    report = f.explain(X)
    assert_same(f(X), model(X))
    assert len(report.regions) <= (1 if stacked else 2)  # without a scan the last layer may be cut differently
    assert sum(r.occurrences for r in report.regions) >= (1 if stacked else 2)


# --- linen


class Tower(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(8)(x))
        return linen.Dropout(0.5, deterministic=not train)(x)


def test_linen() -> None:
    model = Tower()
    variables = model.init(jax.random.key(0), X, train=False)

    def train(variables, x, key):
        return model.apply(variables, x, train=True, rngs={"dropout": key}, mutable=["batch_stats"])

    have, want = (f(train)(variables, X, jax.random.key(1)) for f in (strict, jax.jit))
    assert_same(have, want)
    f = strict(model.apply, static_argnames="train")
    assert_same(f(variables, X, train=False), model.apply(variables, X, train=False))
    f = strict(lambda m, v, x: m.apply(v, x, train=False), static_argnums=0)
    assert_same(f(model, variables, X), model.apply(variables, X, train=False))


def test_methods_of_linen_modules_are_refused() -> None:
    class Product(linen.Module):
        @mirage_jax.optimize
        @linen.compact
        def __call__(self, x):
            return linen.Dense(8)(x)

    with pytest.raises(UsageError, match=r"method of the linen module .*Product; optimize .*\.apply instead"):
        Product().init(jax.random.key(0), X)


# --- equinox


def test_equinox() -> None:
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        first: Any
        second: Any

        @strict
        def __call__(self, x):
            return jax.vmap(self.second)(jax.nn.relu(jax.vmap(self.first)(x)))

    keys = jax.random.split(jax.random.key(0))
    net = Net(*(eqx.nn.Linear(8, 8, key=k) for k in keys))
    want = jax.nn.relu(X @ net.first.weight.T + net.first.bias) @ net.second.weight.T + net.second.bias
    assert_same(net(X), want, 1e-5)
    assert_same(strict(lambda n, x: n(x))(net, X), want, 1e-5)
    mlp = eqx.nn.MLP(8, 8, 16, 2, key=keys[0])  # its activation is a leaf that is no array
    arrays, rest = eqx.partition(mlp, eqx.is_array)
    f = strict(lambda arrays, x: jax.vmap(eqx.combine(arrays, rest))(x))
    assert_same(f(arrays, X), jax.vmap(mlp)(X), 1e-5)
    have, expected = (jax.grad(lambda a, g=g: g(a, X).sum())(arrays) for g in (f, f.__wrapped__))
    assert_same(have, expected, 1e-5)
