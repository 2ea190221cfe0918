"""Cases that are no transformation: arguments, types, effects, contexts, stages, and other things inside of `jit`."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from transformations.cases import (
    DECIDED,
    XLA,
    Case,
    Jit,
)
from transformations.functions import (
    HEADS,
    MATRICES,
    ROWS,
    N,
    attention,
    linear_attention,
    repeated,
    squares,
    sums,
    twice,
)

A, B, V = MATRICES
KEY = np.asarray([0, 7], "uint32")


def cases() -> Iterator[Case]:
    for table in (programs, arguments, types, effects, random, contexts, stages, exported, inside):
        yield from table()


def programs() -> Iterator[Case]:
    yield Case("linear attention", lambda jit: jit(linear_attention), HEADS, gradient="reverse", gpu=True)
    yield Case(
        "linear attention, vmap",
        lambda jit: lambda *x: jax.vmap(jit(linear_attention), (0, None, None))(twice(x[0]), *x[1:]),
        HEADS,
        gpu=True,
    )
    for name, make in {
        "": lambda jit: jit(attention),
        ", grad": lambda jit: jax.grad(squares(jit(attention)), (0, 1, 2)),
        ", value_and_grad": lambda jit: jit(jax.value_and_grad(squares(attention), (0, 1, 2))),
        ", vmap": lambda jit: lambda q, k, v: jax.vmap(jit(attention), (0, None, None))(twice(q), k, v),
        ", scan": lambda jit: jit(
            lambda q, k, v: jax.lax.scan(lambda c, _: (attention(c, k, v), None), q, length=2)[0]
        ),
        ", checkpoint": lambda jit: jax.grad(squares(jit(jax.checkpoint(attention))), (0, 1, 2)),
        ", jvp": lambda jit: lambda *x: jax.jvp(jit(attention), x, x),
    }.items():
        yield Case(f"attention{name}", make, ROWS, DECIDED, gpu=True)


# Arguments and results.


class Pair(NamedTuple):
    first: Any
    second: Any


def power(x: Any, n: int, *, mode: str = "plain") -> Any:
    for _ in range(n):
        x = sums(x, x, x[0])[:, None] * x
    return x if mode == "plain" else -x


def donating(**options: Any) -> Callable[[Jit], Any]:
    """Results, and which of the operands are gone."""

    def make(jit: Jit) -> Any:
        f = jit(lambda x, g, v: x - 0.1 * sums(x, g, v), **options)

        def run(*args: Any) -> Any:
            arrays = [jnp.array(x) for x in args]
            return f(*arrays), [x.is_deleted() for x in arrays]

        return run

    return make


def with_trees(x: dict[str, Any], pair: Pair, nothing: None, *more: Any, **rest: Any) -> Any:
    y = sums(x["a"], pair.first, pair.second)
    return {"y": y, "pair": Pair(y + 1, (y, [more[0]])), "nothing": nothing, "rest": rest, "empty": ()}


def with_defaults(a: Any, b: Any = B, *, v: Any = V, scale: float = 2.0) -> Any:
    return scale * sums(a, b, v)


def arguments() -> Iterator[Case]:
    def static(a: Any, b: Any, v: Any, n: int) -> Any:
        return n * sums(a, b, v)

    numbers: dict[str, Any] = {"static_argnums": 3}
    yield Case("static_argnums", lambda jit: lambda *x: jit(static, **numbers)(*x, 3), gpu=True)
    yield Case("static_argnums, negative", lambda jit: lambda *x: jit(static, static_argnums=-1)(*x, 3))
    yield Case(
        "static_argnames", lambda jit: lambda a: jit(power, static_argnames=("n", "mode"))(a, n=2, mode="-"), (A,)
    )
    yield Case("static and by name", lambda jit: lambda a: jit(power, static_argnames="n")(a, 1), (A,))
    yield Case("static, again", lambda jit: lambda *x: [f(*x, n) for f in [jit(static, **numbers)] for n in (1, 2)])
    yield Case("donate_argnums", donating(donate_argnums=0), eager=True, gpu=True)
    yield Case("donate_argnames", donating(donate_argnames="x"), eager=True)
    yield Case("keep_unused", lambda jit: jit(lambda a, b, v, u: sums(a, b, v), keep_unused=True), (*MATRICES, V))
    yield Case("unused", lambda jit: jit(lambda a, b, v, u: sums(a, b, v)), (*MATRICES, V), gradient="reverse")
    yield Case("inline", lambda jit: jit(sums, inline=True))
    yield Case(
        "trees", lambda jit: lambda a, b, v: jit(with_trees)({"a": a}, Pair(b, v), None, v, k={"v": v}), gpu=True
    )
    yield Case("keyword arguments", lambda jit: lambda a, b, v: jit(sums)(v=v, b=b, a=a), gpu=True)
    yield Case("defaults", lambda jit: lambda a: jit(with_defaults)(a), (A,))
    yield Case("defaults that are given", lambda jit: lambda a, v: jit(with_defaults)(a, v=v, scale=3.0), (A, V))
    yield Case("partial", lambda jit: jit(functools.partial(sums, A)), (B, V))
    yield Case("captured arrays", lambda jit: jit(lambda v: sums(jnp.asarray(A), B, v)), (V,))
    yield Case("the same array twice", lambda jit: lambda a, v: jit(sums)(a, a, v), (A, V))
    yield Case("arguments returned", lambda jit: jit(lambda a, b, v: (a, sums(a, b, v), v, v)))
    yield Case("no results", lambda jit: jit(lambda *x: None), promise=XLA, eager=True)
    yield Case("no arguments", lambda jit: jit(lambda: sums(*map(jnp.asarray, MATRICES))), (), eager=True)
    yield Case("nested", lambda jit: jit(lambda *x: jit(jit(sums))(*x) + 1), gpu=True)
    yield Case("nested, grad between", lambda jit: jit(jax.grad(squares(jit(sums)), 1)))
    yield Case("nested in jax.jit", lambda jit: jit(lambda *x: jax.jit(jit(jax.jit(sums)))(*x)))
    yield Case("a method", lambda jit: Layer.made(jit).__call__, gpu=True)


class Layer:
    """Made with a decorated method."""

    @staticmethod
    def made(jit: Jit) -> Any:
        class Made:
            def __init__(self) -> None:
                self.scale = 2.0

            @functools.partial(jit, static_argnums=0)
            def __call__(self, *x: Any) -> Any:
                return self.scale * sums(*x)

        return Made()


# Types.


def types() -> Iterator[Case]:
    def cast(dtype: str) -> tuple[Any, ...]:
        return tuple(np.asarray(jnp.asarray(x, dtype)) for x in MATRICES)

    for dtype in ("bfloat16", "float16"):
        yield Case(dtype, lambda jit: jit(sums), cast(dtype), gradient="reverse", gpu=True, looser=2.0)
    yield Case(
        "float32 of bfloat16", lambda jit: jit(lambda a, b, v: sums(a.astype("float32"), b, v)), cast("bfloat16")
    )
    yield Case(
        "sums in float32",
        lambda jit: jit(lambda a, b: jnp.matmul(a, b, preferred_element_type="float32").sum(0)),
        cast("bfloat16")[:2],
        looser=10.0,
    )
    yield Case("float64 without x64", lambda jit: jit(sums), tuple(x.astype("float64") for x in MATRICES))
    integers = tuple((4 * x).astype("int32") for x in MATRICES)
    yield Case("int32", lambda jit: jit(lambda a, b: (a @ b).sum(0)), integers[:2], XLA)
    yield Case("int8", lambda jit: jit(lambda a, b: (a @ b).sum(0)), cast("int8")[:2], XLA)
    yield Case("bool", lambda jit: jit(lambda a, b, v: sums(jnp.where(a > 0, a, 0), b, v)))
    yield Case("complex", lambda jit: jit(lambda a, b: ((a + 1j) @ b).sum(0)), MATRICES[:2], XLA)
    yield Case("mixed", lambda jit: jit(sums), (integers[0], cast("bfloat16")[1], V), looser=300.0)
    yield Case("scalars", lambda jit: jit(lambda a, b, s: sums(a, b, s * jnp.ones(N)) + s), (A, B, 2.0))
    yield Case("weak types", lambda jit: jit(lambda s, n, z: (s, n * s, z + 1, jnp.sin(s) * n)), (2.0, 3, 1j), XLA)
    yield Case("weak types kept", lambda jit: jit(lambda s, x: (x * s, s + 1, jnp.tanh(s))), (2.0, V), XLA)
    yield Case(
        "weak types in bodies", lambda jit: jit(lambda s: jax.lax.fori_loop(0, 3, lambda i, c: c * 2.0, s)), (2.0,), XLA
    )
    yield Case("numpy scalars", lambda jit: jit(lambda s, x: (s * x, s + 1)), (np.float32(2), np.int8(3)), XLA)
    yield Case("no elements", lambda jit: jit(lambda x, w: jnp.tanh(x @ w).sum(0)), (A[:0], B), XLA)
    yield Case("nothing to sum", lambda jit: jit(lambda x, w: x @ w), (A[:, :0], B[:0]), XLA)
    yield Case("one row", lambda jit: jit(sums), (A[:1], B, V), DECIDED)

    def with_integers(n: Any, a: Any, b: Any, v: Any) -> Any:
        return sums(a, b, v) * n

    counted = (np.arange(N, dtype="int32"), *MATRICES)
    yield Case(
        "float0, grad", lambda jit: jax.grad(squares(jit(with_integers)), (0, 3), allow_int=True), counted, eager=True
    )
    yield Case(
        "float0, grad outside", lambda jit: jit(jax.grad(squares(with_integers), (0, 3), allow_int=True)), counted
    )
    zero = np.zeros(N, jax.dtypes.float0)
    yield Case("float0, jvp", lambda jit: lambda n, *x: jax.jvp(jit(with_integers), (n, *x), (zero, *x)), counted)
    yield Case("float0, vjp", lambda jit: lambda n, *x: jax.vjp(jit(with_integers), n, *x)[1](x[2])[1:], counted)
    yield Case("indices", lambda jit: jit(lambda i, a, b, v: sums(a[i], b, v)), counted)


# Effects.


def logging(body: Callable[[Callable[[Any], None]], Any]) -> Callable[[Jit], Any]:
    """The results of what `body(log)` makes, and what it logged."""

    def make(jit: Jit) -> Any:
        seen: list[Any] = []
        f = jit(body(lambda *x: seen.append(tuple(map(int, x)))))

        def run(*args: Any) -> Any:
            y = f(*args)
            jax.effects_barrier()
            return y, seen

        return run

    return make


def ordered_debug(log: Any) -> Any:
    def f(a: Any, b: Any, v: Any) -> Any:
        jax.debug.callback(log, 1, ordered=True)
        y = sums(a, b, v)
        jax.debug.callback(log, 2, ordered=True)
        z = jax.lax.fori_loop(0, 2, lambda i, y: [jax.debug.callback(log, 3 + i, ordered=True), sums(a, b, y)][1], y)
        jax.debug.callback(log, 5, ordered=True)
        return z

    return f


def ordered_io(log: Any) -> Any:
    def f(a: Any, b: Any, v: Any) -> Any:
        io_callback(log, None, 1, ordered=True)
        y = sums(a, b, v)
        return io_callback(lambda y: [log(2), y + 1][1], y, y, ordered=True)

    return f


def in_a_branch(log: Any) -> Any:
    def f(a: Any, b: Any, v: Any) -> Any:
        return jax.lax.cond(v[0] > -9, lambda: [jax.debug.callback(log, 1, ordered=True), sums(a, b, v)][1], lambda: v)

    return f


def effects() -> Iterator[Case]:
    yield Case("debug.callback, ordered", logging(ordered_debug), eager=True)
    yield Case("io_callback, ordered", logging(ordered_io), eager=True)
    yield Case("callback in a branch", logging(in_a_branch), eager=True)
    yield Case("debug.callback", logging(lambda log: lambda *x: [jax.debug.callback(log, 1), sums(*x)][1]), eager=True)

    def mapped(log: Any) -> Any:
        return lambda a, b, v: jax.vmap(lambda x, n: [jax.debug.callback(log, n), sums(a, b, x)][1])(
            twice(v), jnp.arange(2)
        )

    yield Case("debug.callback under vmap", logging(mapped), eager=True)

    def pure(a: Any, b: Any, v: Any) -> Any:
        y = sums(a, b, v)
        return jax.pure_callback(lambda y: np.sin(y), y, y, vmap_method="expand_dims") @ b

    yield Case("pure_callback", lambda jit: jit(pure))
    yield Case("pure_callback, vmap", lambda jit: lambda a, b, v: jax.vmap(jit(pure), (None, None, 0))(a, b, twice(v)))

    def counting(a: Any, b: Any, v: Any) -> Any:
        ref = jax.new_ref(v)
        ref[...] += sums(a, b, v)
        return ref[...]

    yield Case("a reference", lambda jit: jit(counting), gradient="reverse")

    def given(jit: Jit) -> Any:
        def add(ref: Any, a: Any, b: Any) -> Any:
            ref[...] += sums(a, b, ref[...])

        def run(a: Any, b: Any, v: Any) -> Any:
            ref = jax.new_ref(v)
            jit(add)(ref, a, b)
            return ref[...]

        return run

    yield Case("a reference that is given", given)


# Random numbers.


def random() -> Iterator[Case]:
    def dropout(key: Any, a: Any, b: Any, v: Any) -> Any:
        return sums(jnp.where(jax.random.bernoulli(key, 0.5, a.shape), a, 0), b, v)

    old = (KEY, *MATRICES)
    new: Callable[[Any], Any] = jax.random.wrap_key_data
    yield Case("old key", lambda jit: jit(dropout), old)
    yield Case("new key", lambda jit: lambda key, *x: jit(dropout)(new(key), *x), old)
    yield Case(
        "grad with key", lambda jit: lambda key, *x: jax.grad(squares(jit(dropout)), (1, 2, 3))(new(key), *x), old
    )
    yield Case(
        "vmap of keys",
        lambda jit: lambda key, *x: jax.vmap(jit(dropout), (0, None, None, None))(jax.random.split(new(key)), *x),
        old,
    )
    yield Case(
        "keys returned",
        lambda jit: lambda key, *x: jit(lambda k, *x: (jax.random.split(k), sums(*x)))(new(key), *x),
        old,
    )
    yield Case("key in scan", lambda jit: jit(lambda key, *x: noisy_layers(new(key), *x)), old)
    yield Case(
        "closed-over key", lambda jit: lambda key, *x: (lambda k: jit(lambda *x: dropout(k, *x))(*x))(new(key)), old
    )


def noisy_layers(key: Any, a: Any, b: Any, v: Any) -> Any:
    return jax.lax.scan(lambda c, k: (sums(a, b, c) + jax.random.normal(k, c.shape), None), v, jax.random.split(key))[0]


# Under a configuration.


def under(*managers: Callable[[], Any], f: Any = sums) -> Callable[[Jit], Any]:
    def make(jit: Jit) -> Any:
        def run(*args: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for manager in managers:
                    stack.enter_context(manager())
                arrays = [jnp.asarray(x) for x in args]
                return jit(f)(*arrays), jit(jax.grad(squares(f), 2))(*arrays)

        return run

    return make


def contexts() -> Iterator[Case]:
    x64 = functools.partial(jax.enable_x64, True)
    wide = tuple(x.astype("float64") for x in MATRICES)
    yield Case("x64", under(x64), wide, eager=True)
    yield Case("x64, float32", under(x64), eager=True)
    yield Case("x64, weak types", under(x64, f=lambda a, b, v: sums(a * 2, b, v / 3.0) + 1), eager=True)
    yield Case("disable_jit", under(jax.disable_jit), eager=True, promise=XLA)
    yield Case("checking_leaks", under(jax.checking_leaks), eager=True)
    yield Case("checks", under(lambda: jax.enable_checks(True)), eager=True)
    yield Case("debug_nans", under(lambda: jax.debug_nans(True)), eager=True)
    yield Case("transfer_guard", under(lambda: jax.transfer_guard_device_to_host("disallow")), eager=True)
    yield Case("strict promotion", under(lambda: jax.numpy_dtype_promotion("strict")), eager=True)
    yield Case(
        "no rank promotion",
        under(lambda: jax.numpy_rank_promotion("raise"), f=lambda a, b, v: sums(a, b, v[None])[0]),
        eager=True,
        promise=DECIDED,
    )
    yield Case("precision", under(lambda: jax.default_matmul_precision("highest")), eager=True, promise=DECIDED)
    yield Case("default_device", under(lambda: jax.default_device(jax.devices()[0])), eager=True)


# Ahead of time.


def specs(args: Any) -> Any:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]


def stages() -> Iterator[Case]:
    yield Case("lower, compile", lambda jit: lambda *x: jit(sums).lower(*x).compile()(*x), eager=True, gpu=True)
    yield Case(
        "trace, lower, compile", lambda jit: lambda *x: jit(sums).trace(*specs(x)).lower().compile()(*x), eager=True
    )
    yield Case("eval_shape", lambda jit: lambda *x: jnp.zeros_like(jax.eval_shape(jit(sums), *x)), promise=XLA)
    yield Case(
        "eval_shape of weak types",
        lambda jit: lambda x: str(jit(lambda s: (s, s * 2)).eval_shape(x)),
        (2.0,),
        XLA,
        eager=True,
    )
    yield Case("out_info", lambda jit: lambda *x: str(jit(sums).lower(*x).out_info), eager=True)
    yield Case(
        "avals",
        lambda jit: lambda *x: str(jit(sums).trace(*x).jaxpr.in_avals + jit(sums).trace(*x).jaxpr.out_avals),
        eager=True,
        promise=XLA,
    )
    yield Case(
        "donated, ahead",
        lambda jit: lambda *x: jit(sums, donate_argnums=2).lower(*x).compile().args_info[0][2].donated,
        eager=True,
    )
    yield Case(
        "compiled twice",
        lambda jit: lambda *x: [g.lower(*x).as_text() == g.lower(*x).as_text() for g in [jit(sums)]],
        eager=True,
    )


# Exported.


def exported() -> Iterator[Case]:
    def again(*platforms: str, run: bool = True) -> Callable[[Jit], Any]:
        def make(jit: Jit) -> Any:
            def through(*args: Any) -> Any:
                made = jax.export.export(jit(sums), platforms=platforms or None)(*args)
                return made.call(*args) if run else (made.platforms, str(made.out_avals))

            return through

        return make

    yield Case("export", again(), eager=True)
    yield Case("export for cpu and cuda", again("cpu", "cuda"), promise=XLA, eager=True)
    yield Case("export for cuda", again("cuda", run=False), promise=DECIDED, eager=True)

    def symbolic(jit: Jit) -> Any:
        def through(*args: Any) -> Any:
            (n,) = jax.export.symbolic_shape("n")
            made = jax.export.export(jit(sums))(jax.ShapeDtypeStruct((n, N), "float32"), *specs(args[1:]))
            return made.call(*args), made.call(args[0][:3], *args[1:]), str(made.out_avals)

        return through

    yield Case("export, symbolic", symbolic, promise=XLA, eager=True)

    def in_bytes(jit: Jit) -> Any:
        def through(*args: Any) -> Any:
            made = jax.export.deserialize(jax.export.export(jit(sums))(*args).serialize(vjp_order=1))
            return made.call(*args), jax.grad(squares(made.call), (0, 1, 2))(*args)

        return through

    yield Case("export to bytes, with gradient", in_bytes, eager=True)

    def called(jit: Jit) -> Any:
        made = jax.export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct((N,), "float32"))
        return jit(lambda a, b, v: sums(a, b, made.call(v)))

    yield Case("export inside", called)


# Other things that call functions.


@jax.custom_batching.custom_vmap
def negated(x: Any) -> Any:
    return -x


@negated.def_vmap
def _negated(_: int, is_batched: Any, x: Any) -> Any:
    return -2 * x, is_batched[0]  # another function on purpose


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled(s: float, x: Any) -> Any:
    return s * x


scaled.defvjp(lambda s, x: (s * x, None), lambda s, _, g: (3 * s * g,))


@jax.custom_gradient
def clipped(x: Any) -> Any:
    return x, lambda g: jnp.clip(g, -1e-3, 1e-3)


def inside() -> Iterator[Case]:
    yield Case(
        "custom_vjp with static arguments", lambda jit: jit(lambda *x: scaled(2.0, sums(*x))), gradient="reverse"
    )
    yield Case("custom_gradient", lambda jit: jit(lambda *x: clipped(sums(*x))), gradient="reverse")
    yield Case("custom_vmap", lambda jit: jit(lambda a, b, v: negated(sums(a, b, v))))
    yield Case(
        "custom_vmap, vmap",
        lambda jit: lambda a, b, v: jax.vmap(jit(lambda x: negated(sums(a, b, x))))(twice(v)),
    )
    yield Case("custom_vmap around it", custom_vmap_around)
    yield Case("custom_vjp around it", custom_vjp_around, gradient="reverse")
    yield Case("named_scope", lambda jit: jit(jax.named_scope("layer")(sums)))
    yield Case("optimization_barrier", lambda jit: jit(lambda *x: sums(*jax.lax.optimization_barrier(x))))
    yield Case(
        "associative_scan", lambda jit: jit(lambda a, b, v: jax.lax.associative_scan(jnp.add, twice(sums(a, b, v))))
    )
    yield Case("custom_root", lambda jit: jit(root), gradient="reverse")
    yield Case("conjugate gradients", lambda jit: jit(solved), promise=DECIDED, looser=10.0)
    yield Case("platform_dependent", lambda jit: jit(lambda *x: jax.lax.platform_dependent(*x, cpu=sums, default=sums)))
    yield Case("sorted", lambda jit: jit(lambda a, b, v: jnp.sort(sums(a, b, v))))
    yield Case(
        "scan of pairs",
        lambda jit: jit(lambda a, b, v: jax.lax.scan(lambda c, x: ((c[1], sums(a, b, c[0])), x), (v, v), twice(v))),
    )
    yield Case(
        "scan in scan",
        lambda jit: jit(lambda a, b, v: repeated(lambda *x: repeated(sums)(*x)[0])(a, b, v)),
    )
    yield Case("recursive", lambda jit: recursive(jit))


def recursive(jit: Jit) -> Any:
    f = jit(lambda a, b, v, n: v if n == 0 else f(a, b, sums(a, b, v), n - 1), static_argnums=3)
    return lambda *x: f(*x, 2)


def custom_vjp_around(jit: Jit) -> Any:
    f = jax.custom_vjp(jit(sums))
    f.defvjp(lambda *x: (jit(sums)(*x), x), jit(lambda x, g: jax.vjp(sums, *x)[1](2 * g)))
    return f


def custom_vmap_around(jit: Jit) -> Any:
    f = jax.custom_batching.sequential_vmap(lambda v: jit(sums)(A, B, v))
    return lambda a, b, v: jax.vmap(f)(twice(v))


def root(a: Any, b: Any, v: Any) -> Any:
    """x with x = v + sums(a, b, 0.1 x) / 2."""

    def f(x: Any) -> Any:
        return x - v - sums(a, b, 0.1 * x) / 2

    def solve(f: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 20, lambda _, x: x - f(x), x)

    def tangent_solve(g: Any, y: Any) -> Any:
        return jax.lax.fori_loop(0, 20, lambda _, x: x + y - g(x), y)

    return jax.lax.custom_root(f, v, solve, tangent_solve)


def solved(a: Any, b: Any, v: Any) -> Any:
    matrix = jnp.eye(N) * N + 0.1 * a @ a.T
    return jax.scipy.sparse.linalg.cg(lambda x: matrix @ x, v, maxiter=20)[0] + sums(a, b, v)
