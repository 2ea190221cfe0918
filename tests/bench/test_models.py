"""Models of the benchmark are what they say, and of equal layers only one is searched."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirage_jax
from mirage_jax.bench import compile_suite, model_suite, steps
from mirage_jax.bench.models import bounds, gpt2, llama, training
from mirage_jax.bench.models.layers import apply_layers, rms_norm, stacked
from mirage_jax.compiler import Compiler
from mirage_jax.errors import UsageError
from mirage_jax.jaxpr_frontend.partition import regions
from mirage_jax.jaxpr_frontend.translate.translate import translate

TINY = dataclasses.replace(llama.SMALL, layers=1, dtype="float32", length=8)


def test_decoding_continues_a_prompt() -> None:
    """A prompt and one token decoded after it give what the longer prompt gives."""
    weights = llama.init(jax.random.key(0), TINY)
    prompt = jax.random.randint(jax.random.key(1), (2, 6), 0, TINY.vocab)
    _, cache = jax.jit(partial(llama.prefill, TINY))(weights, prompt[:, :5])
    found, cache = jax.jit(partial(llama.decode, TINY))(weights, prompt[:, 5], cache, jnp.asarray(5))
    wanted, whole = jax.jit(partial(llama.prefill, TINY))(weights, prompt)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), cache, whole)


def test_bounds_hold() -> None:
    """Whatever words lie within the radius, no margin is below its bound."""
    s = bounds.SMALL
    weights, words, _, labels = bounds.draw(jax.random.key(0), s)
    margins = jax.jit(partial(bounds.certified, s))
    exact = margins(weights, words, jnp.zeros(()), labels)
    for radius in (1e-3, 1e-2):
        lowest = margins(weights, words, jnp.asarray(radius), labels)
        assert lowest.shape == (s.batch, s.vocab) and bool(jnp.all(lowest <= exact + 1e-4))
        for key in jax.random.split(jax.random.key(1), 8):
            other = words + radius * jax.random.choice(key, jnp.array([-1.0, 1.0]), words.shape)
            assert bool(jnp.all(lowest <= margins(weights, other, jnp.zeros(()), labels) + 1e-4))


def test_bounds_without_a_radius_are_the_network() -> None:
    """The same network without intervals."""
    s = bounds.SMALL
    weights, words, _, labels = bounds.draw(jax.random.key(2), s)
    dense = lambda x, w: x @ w["w"] + w["b"]  # noqa: E731
    x = words
    for layer in weights["layers"]:
        q, k, v = (dense(x, layer[name]).reshape(*x.shape[:2], s.heads, -1) for name in ("query", "key", "value"))
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * s.head**-0.5)
        x += dense(jnp.einsum("bhqk,bkhd->bqhd", p, v).reshape(x.shape), layer["out"])
        x -= x.mean(-1, keepdims=True)
        x += dense(jax.nn.relu(dense(x, layer["up"])), layer["down"])
        x -= x.mean(-1, keepdims=True)
    x = x.mean(1)
    for layer in weights["mlp"][:-1]:
        x = jax.nn.relu(dense(x, layer))
    logits = dense(x, weights["mlp"][-1])
    wanted = jnp.take_along_axis(logits, labels[:, None], axis=1) - logits
    found = bounds.certified(s, weights, words, jnp.zeros(()), labels)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_training_lowers_the_loss() -> None:
    s = dataclasses.replace(gpt2.SMALL, layers=1, length=16, dtype="float32")
    state = training.start(gpt2.init(jax.random.key(0), s))
    text = jax.random.randint(jax.random.key(1), (s.batch, s.length + 1), 0, s.vocab)
    step = jax.jit(training.train_step(partial(gpt2.loss, s)), donate_argnums=0)
    losses = []
    for _ in range(5):
        state, loss = step(state, text)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    assert int(state.count) == 5


def _layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    h = jnp.sort(rms_norm(x, w["gain"]) @ w["up"], axis=-1)  # sorting ends a region
    return x + h @ w["down"]


def _stack(count: int) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), count)
    shapes = {"gain": (16,), "up": (16, 32), "down": (32, 16)}
    return [{n: jax.random.normal(k, shape) for n, shape in shapes.items()} for k in keys]


@pytest.mark.parametrize("arrange", [list, stacked])
def test_equal_layers_are_searched_once(arrange, monkeypatch) -> None:
    """By a Python loop or by scan: two regions or three, not two a layer."""
    layers, x = arrange(_stack(8)), jax.random.normal(jax.random.key(1), (4, 16))
    searched: list[str] = []
    search = Compiler._search

    def counted(self, attempt, *rest):
        searched.append(str(attempt.reference))
        return search(self, attempt, *rest)

    monkeypatch.setattr(Compiler, "_search", counted)
    fn = mirage_jax.optimize(partial(apply_layers, _layer), budget="1s", on_miss="heuristic", strict=True)
    np.testing.assert_allclose(fn(x, layers), apply_layers(_layer, x, layers), rtol=2e-5, atol=2e-4)
    assert 0 < len(searched) <= 4 and len(set(searched)) == len(searched)


def test_equal_layers_are_translated_once(monkeypatch) -> None:
    translated: list[int] = []

    def counted(program, eqns, *rest):
        translated.append(len(eqns))
        return translate(program, eqns, *rest)

    monkeypatch.setattr(regions, "translate", counted)
    layers, x = _stack(8), jnp.ones((4, 16))
    found = regions.analyse(jax.make_jaxpr(partial(apply_layers, _layer))(x, layers))
    assert len(found.regions) >= 9 and len(translated) <= 4
    values = [b.value for region in found.regions for b in region.outputs]
    assert len(set(values)) == len(values)  # a region that is like another has its own values
    assert all(region.where for region in found.regions)


def test_a_refusal_in_one_layer_is_one_in_all() -> None:
    """Rotated keys are stored and used: what that refuses, it refuses in each of many layers at once."""
    s = dataclasses.replace(llama.SMALL, layers=12)
    step = steps._prefill("prefill", s)
    jaxpr = jax.make_jaxpr(step.fn)(*jax.eval_shape(step.draw, jax.random.key(0)))
    found = regions.analyse(jaxpr)
    assert len({id(region.graph) for region in found.regions}) <= 6 < 24 <= len(found.regions)


# Suites.


def _candidates():
    ours = partial(mirage_jax.optimize, on_miss="fallback", strict=True)
    return {"xla": jax.jit, "mirage": ours, model_suite.REMAT: partial(ours, remat="regions")}


STEPS = {
    "decode": steps._decode("decode", dataclasses.replace(llama.SMALL, layers=1)),
    "train": steps._train_layers("train", dataclasses.replace(gpt2.SMALL, layers=1), gpt2.init_layer, gpt2.run),
}


@pytest.mark.parametrize("name", STEPS)
def test_run_step(name) -> None:
    row = model_suite.run_step(STEPS[name], _candidates(), rounds=2)
    again = {model_suite.REMAT} if name == "train" else set()
    assert not row.failures and set(row.results) == {"xla", "mirage"} | again
    xla, ours = row.results["xla"], row.results["mirage"]
    assert 0 < ours.error < 0.1 and xla.error == pytest.approx(ours.error)  # bfloat16, both the same program
    assert ours.memory == xla.memory and ours.memory.temporary > 0
    assert ours.regions.taken == 0 and ours.regions.refused > 1 and ours.regions.left_out["scalar"] > 0
    assert ours.ratio is not None and xla.ratio is None
    for label in again:
        assert 0 < row.results[label].error < 0.1
        assert row.results[label].memory == xla.memory  # without a kernel nothing is made again


def test_run_compile() -> None:
    row = compile_suite.run_compile(STEPS["decode"], _candidates(), rounds=1)
    assert not row.failures and row.results["mirage"].error is None
    assert row.results["mirage"].ratio is not None and row.results["mirage"].regions.refused > 1
    assert row.results["replaced"].ratio is not None


def test_run_different() -> None:
    step = steps.step("different", "powers_10", small=True)
    row = compile_suite.run_different(step, {"xla": jax.jit, "mirage": _candidates()["mirage"]}, rounds=1)
    assert set(row.results) == {"xla", "mirage", "replaced"} and not row.failures
    assert row.results["xla"].ratio is None and 0 < row.results["mirage"].ratio.value < math.inf


def test_every_region_is_replaced_and_computes_the_same() -> None:
    step = STEPS["decode"]
    state, batch = step.draw(jax.random.key(0))
    lowered = compile_suite.replaced(step.fn).lower(state, batch)
    assert "mirage_region" in lowered.as_text(debug_info=True)
    found, wanted = lowered.compile()(state, batch), jax.jit(step.fn)(state, batch)
    assert model_suite.worst_error(wanted, found)[0] < 0.1  # bfloat16


def test_worst_error_is_relative_to_the_largest_of_its_kind() -> None:
    reference = ({"weights": [np.array([1e-12]), np.array([4.0])]}, np.array([2.0]))
    found = ({"weights": [np.array([1e-3]), np.array([4.0])]}, np.array([2.0]))
    assert model_suite.worst_error(reference, found)[0] == pytest.approx(1e-3 / 4)
    found = ({"weights": [np.array([1e-12]), np.array([4.0])]}, np.array([1.0]))
    assert model_suite.worst_error(reference, found)[0] == 0.5
    found = ({"weights": [np.array([np.nan]), np.array([4.0])]}, np.array([2.0]))
    assert model_suite.worst_error(reference, found) == (np.inf, np.inf)


def test_steps_by_name() -> None:
    assert [s.name for s in steps.steps("models")] == [s.name for s in steps.steps("models", small=True)]
    assert all(s.layers == 32 for s in steps.steps("compile"))
    with pytest.raises(UsageError, match="Did you mean 'llama_prefill'"):
        steps.step("models", "llama_prefil")
