"""Programs that ask for float32 products, where XLA's default on GPUs is TF32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxpr_frontend.replacing import analysis, random
from lower.kernels import PROGRAMS

import mirage_jax
from mirage_jax.compiler import tuning
from mirage_jax.compiler.region import RegionOnDevice, as_asked, precisions
from mirage_jax.compiler.winner import Family, Winner
from mirage_jax.config import Options
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.mugraph.graph import KernelSchedule, Precision, Schedule
from mirage_jax.search.candidates import Candidate

X, W = random(8, 16), random(16, 16, seed=1)


def products(precision):
    """Two products, the first of which asks for nothing."""
    return lambda x, w: jnp.tanh(x @ w) @ jnp.dot(w, w, precision=precision)


@pytest.mark.parametrize(
    ("precision", "asked"),
    [(None, False), ("high", False), ("highest", True), (jax.lax.DotAlgorithmPreset.F32_F32_F32, True)],
    ids=str,
)
def test_what_asks(precision, asked: bool) -> None:
    (region,) = analysis(products(precision), X, W).regions
    assert region.in_float32 == asked
    assert precisions(region) == ((Precision.SPLIT_ALL, Precision.FLOAT32) if asked else tuple(Precision)[:-1])
    slower = as_asked(region, DEVICES["H200"]).matrix_flops_f32 < DEVICES["H200"].matrix_flops_f32
    assert slower == asked and as_asked(region, DEVICES["CPU"]) == DEVICES["CPU"]


def test_narrow_operands_have_products_without_rounding_anyway() -> None:
    narrow = lambda x, w: jnp.dot(jnp.tanh(x), w, precision="highest")  # noqa: E731
    (region,) = analysis(narrow, X.astype("bfloat16"), W.astype("bfloat16")).regions
    assert not region.in_float32


def test_the_default_counts() -> None:
    with jax.default_matmul_precision("highest"):
        (region,) = analysis(lambda x, w: jnp.tanh(x @ w) @ w, X, W).regions
    assert region.in_float32


def test_library_products_ask_for_it_too() -> None:
    (region,) = analysis(products("highest"), X, W).regions
    place = RegionOnDevice(region, "cpu", jax.devices()[0], Options())
    schedule = Schedule((KernelSchedule(),) * len(place.reference.kernels))
    winner = place.winner(place.reference, schedule, Family.ALGEBRA)
    assert winner.in_float32
    args = [jnp.zeros(shape, dtype) for shape, dtype in place.specs]
    assert str(jax.make_jaxpr(place.ours(winner))(*args)).count("HIGHEST") == 2 * 3  # operands of three products
    assert Winner.from_json(winner.to_json(), "cpu").in_float32


def test_kernels_split_operands_or_use_no_matrix_units() -> None:
    """A candidate has the precisions that give it different kernels, of those that its region may have."""
    program = PROGRAMS["rmsnorm"]("f32")
    candidate = Candidate(program.graph, program.schedule, 1e-6, "kernels")
    (asking,) = analysis(products("highest"), X, W).regions
    (usual,) = analysis(products(None), X, W).regions
    assert tuning.precisions(candidate, precisions(asking)) == [Precision.SPLIT_ALL, Precision.FLOAT32]
    assert tuning.precisions(candidate, precisions(usual))[0] == Precision.FAST


def test_they_run(tmp_path) -> None:
    lora = lambda x, w, a: jnp.dot(x, w, precision="highest") + jnp.dot(jnp.dot(x, a, precision="highest"), a.T)  # noqa: E731
    args = (random(64, 64), random(64, 64, seed=2), random(64, 4, seed=3))
    optimized = mirage_jax.optimize(lora, cache_dir=tmp_path, budget="2s")
    np.testing.assert_allclose(optimized(*args), jax.jit(lora)(*args), rtol=1e-5, atol=1e-4)
    assert "precision" not in str(optimized.explain(*args))
