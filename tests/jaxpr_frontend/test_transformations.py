"""Every JAX transformation of a captured function gives what it gives for the function, with regions replaced."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from jaxpr_frontend.replacing import Evaluated, Replacing, analysis, assert_close, optimized, random

from mirage_jax.jaxpr_frontend.capture import lowering
from mirage_jax.jaxpr_frontend.partition.reasons import Code
from mirage_jax.mugraph.graph import KernelGraph

X, W1, W2, G = random(8, 16), random(16, 32), random(32, 16), random(16)
ARGS = (X, W1, W2, G)
QKV = tuple(random(8, 16, seed=n) for n in range(3))
LAYERS = (random(4, 16, 32), random(4, 32, 16), random(4, 16))


def mlp(x, w1, w2, g):
    normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * g
    return jax.nn.silu(normed @ w1) @ w2


def attention(q, k, v):
    s = q @ k.T / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    s = jnp.where(jnp.tril(jnp.ones(s.shape, bool)), s, -jnp.inf)
    return jax.nn.softmax(s) @ v


def squares(fn):
    return lambda *args: jnp.sum(fn(*args) ** 2)


def layers(fn):
    return lambda x, *stack: jax.lax.scan(lambda c, p: (c + fn(c, *p), None), x, stack)[0]


type Transformation = Callable[[Callable[..., Any]], Callable[..., Any]]

# Each takes the function (captured or not) to what is compared, called with ARGS.
TRANSFORMATIONS: dict[str, Transformation] = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(squares(f), (0, 1, 2, 3)),
    "grad of one argument": lambda f: jax.grad(squares(f), 1),
    "jvp": lambda f: lambda *a: jax.jvp(f, a, a),
    "jacfwd": lambda f: lambda x, *w: jax.jacfwd(f)(x[:2], *w),
    "jacrev": lambda f: lambda x, *w: jax.jacrev(f)(x[:2], *w),
    "hessian": lambda f: jax.hessian(squares(f), 3),
    "linearize": lambda f: lambda *a: jax.linearize(f, *a)[1](*a),
    "vmap": lambda f: lambda x, *w: jax.vmap(f, (0, None, None, None))(jnp.stack([x, 2 * x]), *w),
    "vmap of weights": lambda f: (
        lambda x, w, *r: jax.vmap(f, (None, 1, None, None), 2)(x, jnp.stack([w, 2 * w], 1), *r)
    ),
    "vmap of grad": lambda f: lambda x, *w: jax.vmap(jax.grad(squares(f), 1), (0, None, None, None))(x[:, None], *w),
    "checkpoint": lambda f: jax.grad(squares(jax.checkpoint(f)), (0, 1)),
    "checkpoint with policy": lambda f: jax.grad(
        squares(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)), (0, 1)
    ),
    "cond in fori": lambda f: (
        lambda x, *w: jax.lax.fori_loop(
            0, 3, lambda i, c: jax.lax.cond(i % 2 == 0, lambda c: c + f(c, *w), lambda c: c, c), x
        )
    ),
    "scan": lambda f: lambda x, *_: layers(f)(x, *LAYERS),
    "grad of scan": lambda f: lambda x, *_: jax.grad(lambda *a: layers(f)(*a).sum(), (0, 1))(x, *LAYERS),
    "grad of scan of checkpoint": lambda f: (
        lambda x, *_: jax.grad(lambda *a: layers(jax.checkpoint(f, prevent_cse=False))(*a).sum(), (0, 1))(x, *LAYERS)
    ),
    "linear transpose": lambda f: lambda x, *w: jax.linear_transpose(lambda v: f(x, w[0], v, w[2]), w[1])(x),
    "eval_shape": lambda f: lambda *a: jnp.zeros(jax.eval_shape(f, *a).shape),
    "nested": lambda f: lambda *a: optimized(lambda *b: f(*b) + 1)(*a),
    "keyword arguments": lambda f: lambda x, *w: f(x, w1=w[0], w2=w[1], g=w[2]),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformation(name: str) -> None:
    compiler, transform = Replacing(), TRANSFORMATIONS[name]
    have = jax.jit(transform(optimized(mlp, compiler)))(*ARGS)
    assert_close(have, transform(mlp)(*ARGS), 1e-3 if name == "hessian" else 1e-4)
    assert compiler.regions or name in ("eval_shape", "nested", "cond in fori")


def test_gradient_of_attention() -> None:
    have = jax.jit(jax.grad(squares(optimized(attention)), (0, 1, 2)))(*QKV)
    assert_close(have, jax.grad(squares(attention), (0, 1, 2))(*QKV))


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_inside(prevent_cse: bool) -> None:
    """Checkpoint, scan, cond and while inside of the captured function; their bodies are regions too."""

    def fn(x, *stack):
        y = jax.lax.scan(jax.checkpoint(lambda c, p: (c + mlp(c, *p), None), prevent_cse=prevent_cse), x, stack)[0]
        y = jax.lax.cond(y[0, 0] > 0, lambda y: y @ y.T, lambda y: y @ y.T + 1, y)
        return jax.lax.fori_loop(0, 2, lambda i, c: c @ c / 100, y)

    compiler = Replacing()
    assert_close(optimized(fn, compiler)(X, *LAYERS), fn(X, *LAYERS))
    assert len(compiler.regions) >= 4
    grad = jax.grad(lambda *a: layers(jax.checkpoint(mlp, prevent_cse=prevent_cse))(*a).sum(), (0, 1))
    assert_close(optimized(grad)(X, *LAYERS), grad(X, *LAYERS))


def mesh(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((4,), ("d",), axis_types=(kind,))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma: bool) -> None:
    compiler = Replacing()

    def mapped(fn):
        specs = (P("d"), P(), P(), P())
        over = jax.shard_map(
            lambda *a: fn(*a), mesh=mesh(AxisType.Auto), in_specs=specs, out_specs=P("d"), check_vma=check_vma
        )
        return jax.jit(over)

    assert_close(mapped(optimized(mlp, compiler))(*ARGS), mlp(*ARGS))
    assert compiler.regions
    have = jax.jit(jax.grad(squares(mapped(optimized(mlp))), (0, 1)))(*ARGS)
    assert_close(have, jax.grad(squares(mlp), (0, 1))(*ARGS))
    inside = Replacing()
    assert_close(optimized(mapped(mlp), inside)(*ARGS), mlp(*ARGS))
    assert inside.regions, "shapes are local inside of shard_map: its body is optimized"


def test_collectives() -> None:
    def inner(x, w):
        return jax.lax.psum(x @ w, "d")

    def mapped(fn):
        return jax.jit(jax.shard_map(fn, mesh=mesh(AxisType.Auto), in_specs=(P(None, "d"), P("d")), out_specs=P()))

    assert_close(mapped(optimized(inner))(X, W1), X @ W1)
    assert_close(jax.grad(squares(mapped(optimized(inner))))(X, W1), jax.grad(squares(jnp.matmul))(X, W1))


def test_collectives_have_a_reason_of_their_own() -> None:
    """Naming a mesh axis is no effect: what nobody reads is left out, and nothing keeps an order that it need not."""

    def inner(x, w):
        y = jax.nn.softmax(x @ w)
        jax.lax.all_gather(y, "d")  # nobody reads it
        parts = (jax.lax.psum_scatter(y, "d", tiled=True), jax.lax.ppermute(y, "d", [(0, 1)]), jax.lax.pmax(y, "d"))
        return sum(p.sum() for p in parts) + jax.lax.axis_index("d")

    specs = {"in_specs": (P(None, "d"), P("d")), "out_specs": P(), "check_vma": False}
    mapped = jax.shard_map(inner, mesh=mesh(AxisType.Auto), **specs)
    found = {x.primitive: x.code for x in analysis(mapped, X, W1).left_out}
    assert {p for p, code in found.items() if code == Code.COLLECTIVE} == {"reduce_scatter", "ppermute", "pmax"}
    assert found["axis_index"] == Code.UNSUPPORTED_PRIMITIVE and "all_gather" not in found


def test_effects_keep_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []

    def fn(x, w):
        io_callback(lambda _: seen.append(1), None, x[0, 0], ordered=True)
        y = x @ w
        jax.debug.print("half way {}", y.shape[0])
        io_callback(lambda _: seen.append(2), None, y[0, 0], ordered=True)
        return y @ w.T

    compiler = Replacing()
    assert_close(optimized(fn, compiler)(X, W1), X @ W1 @ W1.T)
    jax.effects_barrier()
    assert seen == [1, 2]
    assert "half way 8" in capsys.readouterr().out
    assert len({r.text for r in compiler.regions}) == 1, "an effect beside the products does not part them"


def test_random_numbers_references_and_integers() -> None:
    def noisy(key, x, w):
        return jax.random.bernoulli(key, 0.5, x.shape) * x @ w

    key = jax.random.key(0)
    assert_close(optimized(noisy)(key, X, W1), noisy(key, X, W1))

    def stateful(x, w):
        ref = jax.new_ref(x)
        return optimized(lambda r, w: r[...] @ w)(ref, w)

    assert_close(jax.jit(stateful)(X, W1), X @ W1)

    def embed(ids, table):
        return table[ids] @ table.T

    ids, table = jnp.arange(4), random(8, 16)
    assert_close(optimized(embed)(ids, table), embed(ids, table))
    have = jax.grad(lambda t: optimized(embed)(ids, t).sum())(table)
    assert_close(have, jax.grad(lambda t: embed(ids, t).sum())(table))


def test_unused_outputs_are_not_computed() -> None:
    compiler = Replacing()
    both = optimized(lambda x, w: (x @ w, jnp.exp(x) @ w), compiler)
    assert_close(jax.jit(lambda x, w: both(x, w)[0])(X, W1), X @ W1)
    assert [r.primitives for r in compiler.regions] == [("dot_general",)]


def test_second_order_gradients() -> None:
    check_grads(optimized(mlp), ARGS, order=2, modes=("fwd", "rev"), atol=0.1, rtol=0.1)


@dataclass(frozen=True, eq=False)
class WithKernel:
    """Remembers whether its kernels were lowered."""

    graph: KernelGraph
    lowered: list[int] = field(default_factory=list)
    in_place: tuple[str, ...] = ()

    def portable(self, *tensors: Any) -> list[Any]:
        return Evaluated(self.graph).portable(*tensors)

    def cuda(self, *tensors: Any) -> list[Any]:
        self.lowered.append(1)
        return self.portable(*tensors)


def test_exported_programs_have_no_kernels(caplog: pytest.LogCaptureFixture) -> None:
    """Their custom calls are not among those that `jax.export` allows."""
    made: list[WithKernel] = []

    class Kernels(Replacing):
        def compile_region(self, region, platforms=()):
            made.append(WithKernel(region.graph))
            return made[-1]

    lowering.warn_once.cache_clear()
    jax.export.export(optimized(mlp, Kernels()), platforms=["cuda"])(*ARGS)
    assert made and not any(m.lowered for m in made)
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == ["an exported program has no kernels"]
    optimized(mlp, Kernels()).trace(*ARGS).lower(lowering_platforms=("cuda",))
    assert any(m.lowered for m in made)


def test_programs_that_are_to_have_kernels_are_exported_with_them() -> None:
    made: list[WithKernel] = []

    @dataclass(frozen=True, eq=False)
    class Kernels(Replacing):
        exports_kernels: bool = True

        def compile_region(self, region, platforms=()):
            made.append(WithKernel(region.graph))
            return made[-1]

    jax.export.export(optimized(mlp, Kernels()), platforms=["cuda"])(*ARGS)
    assert made and all(m.lowered for m in made)
