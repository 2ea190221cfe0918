"""Kernels where they belong: between guard zones on a GPU, against float64 and XLA, and a hundred times over."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower.programs import PROGRAMS, RAGGED, Program

from mirage_jax.audit.redzones import run_guarded
from mirage_jax.compiler.winner import KERNEL_OPTIONS
from mirage_jax.lower.launch import run_cuda
from mirage_jax.mugraph import evaluate
from mirage_jax.verify import float_gate

TOLERANCE = {"f16": 2e-3, "bf16": 1.6e-2, "f32": 1e-2}  # of the largest output; products of f32 are in tf32
REPEATS = 100

everything = pytest.mark.parametrize(
    ("name", "dtype", "ragged"),
    [(name, dtype, ragged) for name in PROGRAMS for dtype in TOLERANCE for ragged in (False, True)],
    ids=lambda x: {False: "divisible", True: "ragged"}.get(x, x),
)


@functools.cache
def made(name: str, dtype: str, ragged: bool) -> tuple[Program, Callable[..., list[jax.Array]]]:
    """A program, and its kernels as they are launched for users."""
    program = PROGRAMS[name](dtype, **(RAGGED[name] if ragged else {}))
    return program, jax.jit(lambda *xs: run_cuda(program.graph, program.schedule, xs, None, options=KERNEL_OPTIONS))


def gate(program: Program, name: str, run: Callable[..., list]) -> None:
    """The float gate on one class of inputs, as for a winner: XLA is plain JAX on the program's own operators."""
    specs = [
        ([program.graph.extent(a) for a in t.axes], x.dtype)
        for t, x in zip(program.graph.inputs, program.inputs(), strict=True)
    ]
    inputs = float_gate.input_classes(specs, 0)[name]
    with np.errstate(all="ignore"):
        exact = evaluate.run(program.graph, inputs)
    xla = jax.jit(lambda *xs: evaluate.run(program.graph, xs, xp=jnp, dtype=None))(*inputs)
    spread = 2.0 if name in float_gate.DEGENERATE else 1.0
    for r, x, c in zip(exact, xla, run(*inputs), strict=True):
        verdict = float_gate.float_gate(r, np.asarray(x), np.asarray(c), spread=spread)
        assert verdict.passed, f"{name}: {'; '.join(verdict.reasons)}"


@pytest.mark.gpu
@everything
def test_between_guard_zones(name: str, dtype: str, ragged: bool) -> None:
    """Nothing outside is touched, everything inside is written, and zones change no bit of the result."""
    program, run = made(name, dtype, ragged)
    inputs = program.inputs()
    plain = [np.asarray(y) for y in run(*inputs)]
    guarded = run_guarded(program.graph, program.schedule, inputs, options=KERNEL_OPTIONS)
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
    program, run = made(name, dtype, ragged)
    for inputs in float_gate.CLASSES:
        gate(program, inputs, run)
