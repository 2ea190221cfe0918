"""XLA's own accuracy: programs whose code for CPUs loses digits or overflows, and programs whose code does not."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirage_jax import cli, optimize
from mirage_jax.audit import xla
from mirage_jax.audit.xla import Cause

SHAPE = (16, 64)


def log_of_sum(x):
    return jnp.log(jnp.sum(jnp.exp(x), -1))


def variance(x):
    return jnp.mean(x * x, -1) - jnp.mean(x, -1) ** 2


def one_minus_cosine(x):
    return (1 - jnp.cos(x)) / (x * x)


def cumulative(x):
    return jnp.cumsum(x, -1)


def layer_norm(x):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)


def check(f, dtype=jnp.float32, only=()):
    return xla.check(f, [jax.ShapeDtypeStruct(SHAPE, dtype)], only)


@pytest.mark.parametrize(
    ("f", "dtype", "inputs", "cause", "operation"),
    [
        (log_of_sum, "float32", "near 100", Cause.WRITTEN, "exp at"),
        (variance, "float32", "near 1024", Cause.WRITTEN, "reduce_sum at"),
        (one_minus_cosine, "float32", "small", Cause.WRITTEN, "cos at"),
        (jnp.exp2, "bfloat16", "large logits", Cause.OPERATION, "exp2"),  # as exp of a product that is rounded
    ],
)
def test_inaccurate(f, dtype, inputs, cause, operation) -> None:
    (found,) = check(f, dtype, [inputs]).findings
    assert found.cause == cause and found.culprit.startswith(operation), str(found)
    assert found.lost == SHAPE[0] if f is log_of_sum else found.error > 4 * min(found.careful, found.written)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("f", [jax.nn.logsumexp, jax.nn.softmax, layer_norm, jax.nn.gelu, cumulative])
def test_accurate(f, dtype) -> None:
    report = check(f, dtype)
    assert not report.findings, list(map(str, report.findings))
    assert len(report.classes) >= 20 and report.largest["normal"] < 0.02


def test_a_wrong_compilation() -> None:
    """One element is off by far more than rounding explains, and no operation is to blame."""
    jaxpr = jax.jit(jax.nn.softmax).trace(jax.ShapeDtypeStruct(SHAPE, jnp.float32)).jaxpr
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    right = np.asarray(jax.jit(jax.nn.softmax)(x))
    assert not list(xla.Examined(jaxpr, [x], [right]).findings("normal"))
    wrong = right.copy()
    wrong[3, 5] *= 1 + 1e-3
    (found,) = xla.Examined(jaxpr, [x], [wrong]).findings("normal")
    assert (found.cause, found.culprit, found.lost) == (Cause.COMPILED, "", 0)


def distances(x: jax.Array) -> jax.Array:
    """Twice x, less the gradient of all distances, which two views of 2 x are made again for."""
    e = 2 * x
    far = jax.checkpoint(lambda a, b: jnp.abs(a - b))
    return e - jax.grad(lambda e: jnp.sum(far(e[:, None], e[None]), dtype="float32"))(e)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_xla_writes_over_while_it_is_read(dtype) -> None:
    """XLA for CPUs may give the result the memory of `e`, which the same loop reads through both views."""
    for found in check(distances, dtype).findings:
        assert dtype == "bfloat16" and found.cause == Cause.COMPILED and found.error > 0.1


def test_integers_are_compared() -> None:
    assert not check(lambda x: jnp.argmax(x, -1)).findings


def test_the_command(capsys) -> None:
    assert cli.main(["check-xla", "jax.nn:softmax", "f32[16,64]"]) == cli.OK
    assert "accurate (1 output on 27 classes" in capsys.readouterr().out
    assert cli.main(["check-xla", "jax.numpy:exp2", "bf16[16,64]"]) == cli.PROBLEM
    out = capsys.readouterr().out
    assert "XLA's operation" in out and "exp2" in out
    assert cli.main(["check-xla", "jax.numpy:exp2", "bf16[16,64]", "--json", "--inputs", "large logits"]) == cli.PROBLEM
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["cause"] == "XLA's operation" and finding["inputs"] == "large logits"


def test_an_optimized_function_is_checked_as_xla_compiles_it(tmp_path) -> None:
    f = optimize(lambda a, v: (a @ a) @ v, on_miss="heuristic", cache_dir=tmp_path, strict=True)
    report = xla.check(f, [jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.float32)])
    assert not report.findings and not f.compiler.decisions
