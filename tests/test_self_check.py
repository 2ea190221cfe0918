"""The option `check` compares calls with plain jit, and leaves functions that differ to it."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deciding import measured
from test_bisection import ARGS, layers, optimized, spoil

import mirage_jax
from mirage_jax.agreement import difference
from mirage_jax.errors import UsageError, VerificationError

SUBTLY = "21/20"  # by less than what is found where a function is measured as a whole


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if "differs from plain jit" in r.getMessage()]


@pytest.mark.parametrize("mode", ["first", "always"])
def test_a_wrong_region_is_left_to_plain_jit(mode, caplog) -> None:
    f, report = optimized(check=mode)
    spoil(f, report.optimized[1], by=SUBTLY)
    plain = jax.jit(layers)(*ARGS)
    with caplog.at_level(logging.WARNING, "mirage_jax"), measured(2.0):  # else plain jit may be the faster one
        results = [f(*ARGS) for _ in range(3)]
    assert all(np.array_equal(y, plain) for y in results)
    (line,) = warnings(caplog)
    assert "layers differs from plain jit: output 0 differs by up to" in line and "mirage_jax.bisect" in line


def test_right_regions_run(monkeypatch, caplog) -> None:
    """Only checked calls run both programs."""
    f, _ = optimized(check="first")
    compared: list[object] = []
    monkeypatch.setattr("mirage_jax.agreement.difference", lambda *results: compared.append(results) or "")
    plain = jax.jit(layers)(*ARGS)
    with caplog.at_level(logging.WARNING, "mirage_jax"):
        first, second = f(*ARGS), f(*ARGS)
    assert len(compared) == 1 and not warnings(caplog)
    assert np.array_equal(first, plain) and difference(second, plain) == ""
    always, _ = optimized(check="always")
    always(*ARGS), always(*ARGS)
    assert len(compared) == 3


def test_each_kind_of_arguments_is_checked(monkeypatch) -> None:
    compared: list[object] = []
    monkeypatch.setattr("mirage_jax.agreement.difference", lambda *results: compared.append(results) or "")
    f = mirage_jax.optimize(lambda x, n, a: n * x + a, check="first", on_miss="fallback", static_argnums=1)
    x = jnp.ones((4, 4))
    for args in ((x, 1, 0.5), (x, 1, 0.25), (x, 2, 0.5), (x[0], 2, 0.5), (x.astype("bfloat16"), 2, 0.5)):
        f(*args)
    assert len(compared) == 4  # another float is the same program


def test_what_fails_is_left_to_plain_jit(monkeypatch, caplog) -> None:
    f, _ = optimized(check="first")

    def fail(*args):
        raise RuntimeError("no kernel image")

    f._jit = fail
    with caplog.at_level(logging.WARNING, "mirage_jax"):
        assert np.array_equal(f(*ARGS), jax.jit(layers)(*ARGS))
    assert "it fails: RuntimeError: no kernel image" in warnings(caplog)[0]


def test_donated_arguments_are_taken_once() -> None:
    f, _ = optimized(check="first", donate_argnums=(2,))
    a, b, v = ARGS
    given = jnp.array(v)
    assert difference(f(a, b, given), jax.jit(layers)(*ARGS)) == ""
    assert not v.is_deleted()


def test_strict_raises() -> None:
    f, report = optimized(check="first", strict=True)
    spoil(f, report.optimized[0], by=SUBTLY)
    with pytest.raises(VerificationError, match="output 0 differs by up to"), measured(2.0):
        f(*ARGS)


def test_traced_calls_are_not_compared() -> None:
    f, report = optimized(check="always", strict=True)
    spoil(f, report.optimized[0])
    jax.jit(f)(*ARGS)
    with mirage_jax.disabled():
        assert np.array_equal(f(*ARGS), jax.jit(layers)(*ARGS))


def test_wrong_values_are_refused() -> None:
    with pytest.raises(UsageError, match=r"check: 'once'\. Allowed: first, always"):
        mirage_jax.optimize(layers, check="once")
