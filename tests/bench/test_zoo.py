"""The zoo lists programs of libraries that need not be there, and those that are there are captured as they are."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirage_jax
from mirage_jax.bench import compile_suite, model_suite, steps, suite, zoo
from mirage_jax.bench.zoo.entries import ZooEntry, mean_square, normal

INSTALLED = {"jax", "optax", "flax", "equinox"}  # in the environment of developers
HERE = [entry.sized(True) for entry in zoo.entries() if entry.library in INSTALLED]
STEPS = {s.name: s for s in steps.steps("zoo", small=True)}


def test_entries_are_listed_without_their_libraries() -> None:
    program = "import sys; from mirage_jax.bench import steps; print(len(steps.steps('zoo')), *sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    count, *loaded = done.stdout.split()
    libraries = {"flax", "optax", "equinox", "equimo", "haiku", "ott", "numpyro", "tinygp", "gpjax", "transformers"}
    assert int(count) == len(STEPS) and not libraries & set(loaded)


def test_there_are_as_many_as_promised() -> None:
    names = [entry.name for entry in zoo.entries()]
    gradients = [name for name, step in STEPS.items() if step.trains]
    assert len(names) == len(set(names)) >= 40 and len(gradients) >= 30
    assert [step.name for step in steps.steps("zoo")] == list(STEPS)


def test_a_missing_library_is_one_line() -> None:
    def absent(small: bool):
        import no_such_library  # type: ignore[import-not-found]

        return no_such_library.fn, normal((4,))

    entry = ZooEntry("absent_program", "no-such-library", "nowhere", absent, is_small=True)
    step = steps.ModelStep(entry.name, entry.forward, entry.draw, layers=1)
    result = suite.run_suite(
        [step, STEPS["jax_attention_decode"]], {"xla": jax.jit}, run=model_suite.run_step, rounds=1
    )
    assert result.details() == [
        "absent_program: not run: no-such-library: ModuleNotFoundError: No module named 'no_such_library'"
    ]
    assert not result.failures and result.rows[1].results["xla"].seconds > 0
    assert "| absent_program | - |" in result.to_markdown()


def test_a_library_that_fails_by_itself_is_not_ours_to_answer_for() -> None:
    broken = ZooEntry("broken", "some-library", "nowhere", lambda small: (lambda x: x.no_such_method(), normal((4,))))
    with pytest.raises(suite.NotRun, match="some-library: AttributeError"):
        broken.draw(jax.random.key(0))


def test_settings_of_a_library_end_with_its_entry() -> None:
    def setting(small: bool):
        jax.config.update("jax_default_matmul_precision", "float32")
        return jnp.sin, normal((4,))

    before = jax.config.jax_default_matmul_precision
    ZooEntry("setting", "dynamax", "nowhere", setting).draw(jax.random.key(0))
    assert jax.config.jax_default_matmul_precision == before


def test_constants_of_an_entry_outlive_the_trace_that_makes_it() -> None:
    """A mask that is made while arguments are drawn belongs to no trace."""

    def masked(small: bool):
        mask = jnp.tril(jnp.ones((4, 4)))
        return lambda x: jnp.where(mask > 0, x, 0.0), normal((4, 4))

    entry = ZooEntry("masked", "jax", "nowhere", masked)
    state, batch = jax.jit(entry.draw)(jax.random.key(0))
    _, y = jax.jit(entry.forward).lower(state, batch).compile()(state, batch)
    np.testing.assert_array_equal(y, jnp.tril(batch[0]))


def test_gradients_are_of_all_floats() -> None:
    def made(small: bool):
        fn = lambda w, i, x: w["a"][i] * x + w["b"]  # noqa: E731
        draw = lambda key: ({"a": jnp.ones(4), "b": jnp.ones(())}, jnp.arange(2), jnp.full(2, 3.0))  # noqa: E731
        return fn, draw

    entry = ZooEntry("small", "jax", "nowhere", made)
    _, (weights, index, x) = entry.gradients(*entry.draw(jax.random.key(0)))
    assert index is None and weights["a"].tolist() == [12.0, 12.0, 0.0, 0.0]
    assert weights["b"] == 8.0 and x.tolist() == [4.0, 4.0]
    assert mean_square({"a": jnp.full(3, 2.0), "b": jnp.arange(3)}) == 4.0


@pytest.mark.parametrize("entry", HERE, ids=lambda entry: entry.name)
def test_regions_compute_what_the_program_does(entry: ZooEntry) -> None:
    """In float32: not all products of bfloat16 into float32 run on a processor."""
    args = jax.tree.map(_wide, entry.draw(jax.random.key(0)))
    wanted = jax.jit(entry.gradients)(*args)
    arrays = [np.asarray(x) for x in jax.tree.leaves(wanted)]
    assert all(np.isfinite(x).all() and np.abs(x).max() > 0 for x in arrays)
    lowered = compile_suite.replaced(entry.gradients).lower(*args)
    assert "mirage_region" in lowered.as_text(debug_info=True)
    assert model_suite.worst_error(wanted, lowered.compile()(*args))[0] < 1e-4


def _wide(x: jax.Array) -> jax.Array:
    return x.astype("float32") if x.dtype == jnp.bfloat16 else x


@pytest.mark.parametrize("name", ["optax_ntxent", "nnx_lora_gradients"])
def test_entries_run_optimized(name: str) -> None:
    def ours(fn, **options):
        return mirage_jax.optimize(fn, on_miss="heuristic", budget="1s", strict=True, **options)

    row = model_suite.run_step(STEPS[name], {"xla": jax.jit, "mirage": ours}, rounds=1)
    assert not row.failures and row.results["mirage"].error < 0.05
