"""Kernels where they belong: between guard zones on a GPU, against float64 and XLA, and a hundred times over."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower.kernels import PROGRAMS, RAGGED, Program

from mirage_jax.audit.redzones import run_guarded
from mirage_jax.compiler.winner import KERNEL_EMIT_OPTIONS
from mirage_jax.lower.runtime.launch import run_cuda
from mirage_jax.lower.triton.emitter import DEFAULT_OPTIONS, EmitOptions
from mirage_jax.mugraph import evaluate
from mirage_jax.verify.floats import gate, input_classes

TOLERANCE = {"f16": 2e-3, "bf16": 1.6e-2, "f32": 1e-2}  # of the largest output; products of f32 are in tf32
REPEATS = 100

everything = pytest.mark.parametrize(
    ("name", "dtype", "ragged"),
    [(name, dtype, ragged) for name in PROGRAMS for dtype in TOLERANCE for ragged in (False, True)],
    ids=lambda x: {False: "divisible", True: "ragged"}.get(x, x),
)


@functools.cache
def made(name: str, dtype: str, ragged: bool, options: EmitOptions = KERNEL_EMIT_OPTIONS) -> tuple[Program, Any]:
    """A program, and its kernels as they are launched for users."""
    program = PROGRAMS[name](dtype, **(RAGGED[name] if ragged else {}))
    return program, jax.jit(lambda *xs: run_cuda(program.graph, program.schedule, xs, None, options=options))


def rms(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def written(name: str, ragged: bool) -> Callable[..., jax.Array]:
    """What a user would write for a program."""
    scale = float(RAGGED[name].get("scale", 1)) if ragged else 1.0

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.softmax(scale * (q @ k), -1) @ v

    return {
        "rmsnorm": lambda x, w: rms(x) @ w,
        "gated_mlp": lambda x, w1, w2: jax.nn.silu(x @ w1) * (x @ w2),
        "lora": lambda x, w, a, b: x @ w + x @ a @ b,
        "ntrans": lambda h, x, a: rms(x + a * (rms(h) - x)),
        "attention": attention,
        "split_attention": attention,
        "qknorm_attention": lambda q, k, v: attention(rms(q), k, rms(v)),
    }[name]


def refused(program: Program, plain: Callable[..., Any], run: Callable[..., Any], spread: float) -> Iterator[str]:
    """What the float gate says against a kernel, on any class of inputs, as it would of a winner."""
    specs = [(x.shape, x.dtype) for x in program.inputs()]
    for name, inputs in input_classes.input_classes(specs, 0).items():
        with np.errstate(all="ignore"):
            exact = evaluate.run(program.graph, inputs)
        wider = spread * (2.0 if name in input_classes.DEGENERATE else 1.0)
        for r, x, c in zip(exact, [plain(*inputs)], run(*inputs), strict=True):
            verdict = gate.float_gate(r, np.asarray(x), np.asarray(c), spread=wider)
            yield from (f"{name}: {why}" for why in verdict.reasons)


@pytest.mark.gpu
@everything
def test_between_guard_zones(name: str, dtype: str, ragged: bool) -> None:
    """Nothing outside is touched, everything inside is written, and zones change no bit of the result."""
    program, run = made(name, dtype, ragged)
    inputs = program.inputs()
    plain = [np.asarray(y) for y in run(*inputs)]
    guarded = run_guarded(program.graph, program.schedule, inputs, options=KERNEL_EMIT_OPTIONS)
    assert [x.tobytes() for x in guarded] == [y.tobytes() for y in plain]
    want = program.want(inputs)
    assert np.abs(plain[0].astype(np.float64) - want).max() < TOLERANCE[dtype] * np.abs(want).max()


@pytest.mark.gpu
@everything
def test_a_hundred_times(name: str, dtype: str, ragged: bool) -> None:
    program, run = made(name, dtype, ragged)
    inputs = [jnp.asarray(x) for x in program.inputs()]
    assert len({np.asarray(run(*inputs)[0]).tobytes() for _ in range(REPEATS)}) == 1


@pytest.mark.gpu
@everything
def test_as_accurate_as_xla(name: str, dtype: str, ragged: bool) -> None:
    """Products of float32 in full precision, for XLA too: TF32 would hide all other errors. What is left then of
    attention's is the scale of its exponentials, which are powers of two: one rounding more than XLA, of a size that
    grows with the logits."""
    program, run = made(name, dtype, ragged, DEFAULT_OPTIONS)
    spread = 2.0 if dtype == "f32" else 1.0
    far = ("large", "large logits") if dtype == "f32" and "attention" in name else ()
    with jax.default_matmul_precision("highest" if dtype == "f32" else "default"):
        found = list(refused(program, jax.jit(written(name, ragged)), run, spread))
    assert not [why for why in found if not (far and why.startswith(far))]
