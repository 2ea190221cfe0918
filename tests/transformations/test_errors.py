"""Wrong use of an optimized function gets the error that `jax.jit` gives: the same type and the same first line."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformations.cases import (
    Jit,
)
from transformations.comparing import error_of
from transformations.functions import (
    MATRICES,
    N,
    squares,
    sums,
    wave,
)

import mirage_jax

A, B, V = MATRICES
INTEGERS = np.arange(N, dtype="int32")


def called(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: f(*args, **kwargs)


def donated_twice(jit: Jit) -> Any:
    f, x = jit(lambda x: sums(x, B, V)[:, None] * x, donate_argnums=0), jnp.asarray(A)
    f(x)
    return lambda: f(x)


def leaked(jit: Jit) -> Any:
    kept: list[Any] = []
    jit(lambda x: [kept.append(x), sums(x, B, V)][1])(A)
    return lambda: kept[0] + 1


def leak_checked(jit: Jit) -> Any:
    kept: list[Any] = []

    def run() -> Any:
        with jax.checking_leaks():
            return jit(lambda x: [kept.append(x), sums(x, B, V)][1])(A)

    return run


def within(manager: Callable[[], Any], f: Callable[..., Any], *args: Any) -> Callable[[Jit], Any]:
    def make(jit: Jit) -> Any:
        def run() -> Any:
            with manager():
                return jax.block_until_ready(jit(f)(*args))

        return run

    return make


def raising(*_: Any) -> Any:
    raise ZeroDivisionError("in the user's callback")


def with_callback(a: Any) -> Any:
    return jax.pure_callback(raising, jax.ShapeDtypeStruct((N,), "float32"), sums(a, B, V))


def branching(a: Any) -> Any:
    return a if sums(a, B, V)[0] > 0 else -a


def wrong_carry(f: Any) -> Any:
    return jax.lax.scan(lambda c, _: (f(A, B, c)[:3], None), V, length=2)


ERRORS: dict[str, Callable[[Jit], Callable[[], Any]]] = {
    "shape": lambda jit: called(jit(sums), A, B[1:], V),
    "shape, inside of vmap": lambda jit: called(jax.vmap(jit(sums), (0, None, None)), A, B[1:], V),
    "too few": lambda jit: called(jit(sums), A, B),
    "too many": lambda jit: called(jit(sums), A, B, V, V),
    "unknown keyword": lambda jit: called(jit(sums), A, B, V, w=V),
    "given twice": lambda jit: called(jit(sums), A, B, V, a=A),
    "an object": lambda jit: called(jit(sums), A, B, object()),
    "a text": lambda jit: called(jit(sums), A, B, "v"),
    "a result that is no array": lambda jit: called(jit(lambda *x: "text"), *MATRICES),
    "condition on a value": lambda jit: called(jit(branching), A),
    "number of a value": lambda jit: called(jit(lambda a: range(int(a.sum()))), A),
    "array of a value": lambda jit: called(jit(lambda a: np.asarray(a)), A),
    "shape of a value": lambda jit: called(jit(lambda n: jnp.ones(n)), 3),
    "boolean mask": lambda jit: called(jit(lambda a: a[a > 0] @ B), A),
    "leaked": leaked,
    "leak, checked": leak_checked,
    "grad of a vector": lambda jit: called(jax.grad(jit(sums)), *MATRICES),
    "grad of a vector, outside": lambda jit: called(jit(jax.grad(sums)), *MATRICES),
    "grad by an integer": lambda jit: called(jax.grad(jit(lambda n: sums(A, B, n).sum())), INTEGERS),
    "grad by what is not there": lambda jit: called(jax.grad(squares(jit(sums)), 5), *MATRICES),
    "grad of an integer": lambda jit: called(jax.grad(jit(lambda v: sums(A, B, v).sum().astype(int))), V),
    "jacfwd by an integer": lambda jit: called(jax.jacfwd(jit(lambda n: sums(A, B, n))), INTEGERS),
    "tangents of another type": lambda jit: called(jax.jvp, jit(sums), MATRICES, (A, B, V.astype("float16"))),
    "tangents of another shape": lambda jit: called(jax.jvp, jit(sums), MATRICES, (A, B, V[1:])),
    "cotangents of another shape": lambda jit: called(jax.vjp(jit(sums), *MATRICES)[1], V[1:]),
    "cotangents of another type": lambda jit: called(jax.vjp(jit(sums), *MATRICES)[1], INTEGERS),
    "cotangents in a tree": lambda jit: called(jax.vjp(jit(sums), *MATRICES)[1], (V, V)),
    "jvp of custom_vjp": lambda jit: called(jax.jvp, jit(lambda v: wave(sums(A, B, v))), (V,), (V,)),
    "vjp of while": lambda jit: called(
        jax.grad(lambda v: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: jit(sums)(A, B, c) + 10, v).sum()), V
    ),
    "vjp of while, outside": lambda jit: called(
        jit(jax.grad(lambda v: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: sums(A, B, c) + 10, v).sum())), V
    ),
    "transpose of what is not linear": lambda jit: called(jax.linear_transpose(jit(sums), *MATRICES), V),
    "vmap, sizes": lambda jit: called(jax.vmap(jit(sums), (0, None, 0)), A, B, V[1:]),
    "vmap, rank": lambda jit: called(jax.vmap(jit(sums), (None, None, 3)), *MATRICES),
    "vmap, in_axes": lambda jit: called(jax.vmap(jit(sums), (0, 0)), *MATRICES),
    "vmap, out_axes": lambda jit: called(jax.vmap(jit(sums), (0, None, None), None), A[None], B, V),
    "unknown axis": lambda jit: called(jit(lambda v: jax.lax.psum(v, "i")), V),
    "scan, carry": lambda jit: called(wrong_carry, jit(sums)),
    "scan, carry, outside": lambda jit: called(jit(lambda: wrong_carry(sums))),
    "cond, branches": lambda jit: called(jit(lambda v: jax.lax.cond(v[0] > 0, lambda: sums(A, B, v), lambda: v[0])), V),
    "while, carry": lambda jit: called(
        jit(lambda v: jax.lax.while_loop(lambda c: c.sum() < 1, lambda c: c @ A @ c, v)), V
    ),
    "fori_loop, bounds": lambda jit: called(jit(lambda v: jax.lax.fori_loop(0.0, 3, lambda _, c: c, sums(A, B, v))), V),
    "static, unhashable": lambda jit: called(jit(lambda v, n: sums(A, B, v), static_argnums=1), V, [1]),
    "static, out of range": lambda jit: called(lambda: jit(sums, static_argnums=7)(*MATRICES)),
    "static, unknown name": lambda jit: called(lambda: jit(sums, static_argnames="w")(*MATRICES)),
    "donated, out of range": lambda jit: called(lambda: jit(sums, donate_argnums=7)(*MATRICES)),
    "donated and static": lambda jit: called(lambda: jit(sums, donate_argnums=0, static_argnums=0)(*MATRICES)),
    "donated twice": donated_twice,
    "compiled, another shape": lambda jit: called(jit(sums).lower(*MATRICES).compile(), A[1:], B, V),
    "compiled, another tree": lambda jit: called(jit(sums).lower(*MATRICES).compile(), A, B),
    "exported for another platform": lambda jit: called(
        jax.export.export(jit(sums), platforms=("tpu",))(*MATRICES).call, *MATRICES
    ),
    "exported, another shape": lambda jit: called(jax.export.export(jit(sums))(*MATRICES).call, A[1:], B, V),
    "symbolic, undecided": lambda jit: called(
        jax.export.export(jit(sums)), jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, m"), "float32"), B, V
    ),
    "key as a number": lambda jit: called(jit(lambda k: sums(A, B, V) * k), jax.random.key(0)),
    "callback": lambda jit: called(lambda: jax.block_until_ready(jit(with_callback)(A))),
    "nan": within(lambda: jax.debug_nans(True), lambda v: sums(A, B, jnp.log(v)), -np.abs(V)),
    "promotion of types": within(lambda: jax.numpy_dtype_promotion("strict"), sums, A, B.astype("float16"), V),
    "promotion of ranks": within(lambda: jax.numpy_rank_promotion("raise"), sums, *MATRICES),
    "transfer": within(lambda: jax.transfer_guard("disallow"), sums, *MATRICES),
    "eval_shape": lambda jit: called(jit(sums).eval_shape, A, B[1:], V),
    "lower": lambda jit: called(jit(sums).lower, A, B[1:], V),
    "checkpoint, static": lambda jit: called(jax.checkpoint(jit(branching)), A),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error(name: str) -> None:
    optimize = lambda f, **options: mirage_jax.optimize(f, on_miss="fallback", **options)  # noqa: E731
    want, have = error_of(ERRORS[name](jax.jit)), error_of(ERRORS[name](optimize))
    assert have == want
    assert "mirage" not in have[1]
