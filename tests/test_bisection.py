"""`bisect` finds the region that changes a result; the results of functions are compared by type."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deciding import chain, measured, operands

import mirage_jax
from mirage_jax import UsageError
from mirage_jax.agreement import difference
from mirage_jax.mugraph.parser import parse

ARGS = A, B, V = operands(16)


def layers(a, b, v):
    x = chain(a, b, v)
    x = jnp.sort(x)
    x = (a @ (2 * b)) @ x
    x = jnp.sort(x)
    x = (a @ (3 * b)) @ x
    x = jnp.sort(x)
    return (a @ (5 * b)) @ x


def optimized(fn=layers, **options):
    f = mirage_jax.optimize(fn, **options)
    with measured(2.0):
        report = f.explain(*ARGS)
    return f, report


def spoil(f, *regions, by="2"):
    """Give regions a winner that makes twice the result, or another multiple, as a wrong kernel might."""
    for region in regions:
        memo = region.reference, "cpu"
        decision = f.compiler.decisions[memo]
        graph = parse(multiplied(str(decision.winner.graph), by))
        f.compiler.decisions[memo] = replace(decision, winner=replace(decision.winner, graph=graph))


def multiplied(text, by):
    """The graph with its result multiplied."""
    name, axes = re.findall(r"library (\w+): f32\[(.*?)\] = ", text)[-1]
    extra = f"library worse: f32[{axes}] = affine{{scale={by}}} {name}[{axes}]"
    return re.sub(r"output \w+", f"{extra}\n  output worse", text)


@pytest.mark.parametrize("culprit", range(4))
def test_the_region_is_found(culprit) -> None:
    f, report = optimized()
    assert len(report.optimized) == 4
    spoil(f, report.optimized[culprit])
    found = mirage_jax.bisect(f, *ARGS)
    assert found and found.keys == (report.optimized[culprit].decision.key,)
    assert found.where == tuple(mirage_jax.report.places(report.optimized[culprit].where))
    assert "test_bisection.py:" in found.where[0] or "deciding.py:" in found.where[0]
    assert found.runs <= 5 and found.of == 4
    text = str(found)
    assert found.keys[0] in text and "output 0 differs by up to" in text and found.where[0] in text
    skipping = mirage_jax.optimize(layers, skip=found.keys)
    skipping.compiler.decisions = dict(f.compiler.decisions)
    assert difference(skipping(*ARGS), jax.jit(layers)(*ARGS)) == ""


def test_the_script_shows_the_difference(capsys) -> None:
    f, report = optimized()
    spoil(f, report.optimized[2])
    found = mirage_jax.bisect(f, *ARGS)
    exec(compile(found.script, "script", "exec"), {})
    (line,) = capsys.readouterr().out.splitlines()
    errors = re.findall(r"[\d.]+e[-+]\d+", line)
    assert errors[0] == errors[1], "twice the result differs by the result"


def test_regions_that_change_it_together() -> None:
    f, report = optimized()
    first, last = report.optimized[0], report.optimized[3]
    spoil(f, first, last)
    plain = jax.jit(layers)(*ARGS)
    found = mirage_jax.bisect(f, *ARGS, check=lambda ours, _: float(abs(ours).max()) < 3 * float(abs(plain).max()))
    assert set(found.keys) == {first.decision.key, last.decision.key}
    assert found.why == "the check refuses the result"


def test_nothing_is_found() -> None:
    f, _ = optimized()
    found = mirage_jax.bisect(f, *ARGS)
    assert not found and found.runs == 1 and "agrees with plain jit" in str(found)
    none = mirage_jax.bisect(mirage_jax.optimize(layers, only=[]), *ARGS)
    assert not none and "no region is optimized" in str(none)


def test_donated_arguments_are_kept() -> None:
    f, report = optimized(donate_argnums=(2,))
    spoil(f, report.optimized[1])
    assert mirage_jax.bisect(f, *ARGS).keys == (report.optimized[1].decision.key,)
    assert not V.is_deleted()


def test_wrong_use_is_one_line() -> None:
    with pytest.raises(UsageError, match="check: found 3; allowed is a function of two results"):
        mirage_jax.bisect(layers, *ARGS, check=3)
    with pytest.raises(UsageError, match="optimize: found 3"):
        mirage_jax.bisect(3, *ARGS)
    with mirage_jax.disabled(), pytest.raises(UsageError, match="turned off"):
        mirage_jax.bisect(layers, *ARGS)


@pytest.mark.parametrize(
    ("ours", "plain", "why"),
    [
        (np.float32([1, 1.0001]), np.float32([1, 1]), ""),
        (np.float32([1, 1.001]), np.float32([1, 1]), "output 0 differs by up to 1.0e-03"),
        (np.float32([1e-9, 1]), np.float32([2e-9, 1]), ""),
        (jnp.asarray([1, 1.03], jnp.bfloat16), jnp.asarray([1, 1], jnp.bfloat16), ""),
        (np.float32([1, np.nan]), np.float32([1, np.nan]), ""),
        (np.float32([1, np.nan]), np.float32([1, 1]), "is not finite"),
        (np.float32([1, np.inf]), np.float32([1, -np.inf]), "is not finite"),
        (np.int32([1, 2]), np.int32([1, 2]), ""),
        (np.int32([1, 2]), np.int32([1, 3]), "differs by up to 1.0e+00"),
        ((np.float32(1), np.float32(2)), (np.float32(1), np.float32(3)), "output 1 differs"),
        (np.float32([0]), np.float32([0]), ""),
        (np.complex64([1j]), np.complex64([2j]), "differs by up to 1.0e+00"),
        (jnp.ones(2), jnp.ones(3), "is float32[2], under jit float32[3]"),
        (jax.random.key(1), jax.random.key(1), ""),
    ],
)
def test_results_agree_within_half_of_the_digits(ours, plain, why) -> None:
    found = difference(ours, plain)
    assert (why in found) if why else (found == "")
