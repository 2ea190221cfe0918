"""What becomes of real programs: how many regions, what is left out, and that graphs mean what programs mean."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxpr_frontend.frontend_programs import PROGRAMS, Program
from jaxpr_frontend.replacing import Replacing, analysis, assert_close, optimized, oracle

from mirage_jax.bench import steps
from mirage_jax.jaxpr_frontend.capture.lowering import LoweringPlan, mirage_region_p
from mirage_jax.jaxpr_frontend.jax_compat import Literal
from mirage_jax.jaxpr_frontend.partition.reasons import Code


@pytest.mark.parametrize("name", PROGRAMS)
def test_forward(name: str, golden: Callable[[str], None]) -> None:
    program, compiler = PROGRAMS[name], Replacing()
    have = optimized(program.fn, compiler)(*program.args)
    assert_close(have, jax.jit(program.fn)(*program.args), program.tolerance)
    (region,) = compiler.regions
    left_out = analysis(program.fn, *program.args).left_out
    frequencies = {"pow"} if name == "rope" else set()  # 10000 ** (i / n): the exponent is no literal
    assert {x.primitive for x in left_out if x.code != Code.NO_HEAVY_OP} == frequencies
    golden(str(region.graph))


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradient(name: str) -> None:
    program, compiler = PROGRAMS[name], Replacing()
    grad = _gradient(program)
    have, want = optimized(grad, compiler)(*program.args), jax.jit(grad)(*program.args)
    assert_close(have, want, program.tolerance)
    assert 1 <= len(compiler.regions) <= 6
    codes = {x.code for x in analysis(grad, *program.args).left_out}
    assert codes <= {Code.NO_HEAVY_OP, Code.UNSUPPORTED_PRIMITIVE, Code.RANK0, Code.DTYPE, Code.PARAMETERS}


def _gradient(program: Program) -> Callable[..., object]:
    """Gradients with respect to all floating operands of a sum with fixed, uneven weights."""

    def loss(*args):
        def weighted(y):
            return jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.size)).reshape(y.shape))

        return sum(map(weighted, jax.tree.leaves(program.fn(*args))))

    floats = [n for n, a in enumerate(program.args) if all(jnp.issubdtype(x, jnp.inexact) for x in jax.tree.leaves(a))]
    return jax.grad(loss, floats)


@pytest.mark.parametrize("name", [n for n, p in PROGRAMS.items() if p.tolerance < 1e-2])
def test_reference_in_double_precision(name: str) -> None:
    """`reference` runs the original equations on the values of a region's inputs; the graph agrees with it."""
    program, compiler = PROGRAMS[name], Replacing()
    optimized(program.fn, compiler).lower(*program.args)
    (region,) = compiler.regions
    rng = np.random.default_rng(1)
    values = [jnp.asarray(rng.integers(-4, 9, b_shape(region, b)) / 8, b.dtype) for b in region.inputs]
    assert_close(oracle(region, values), region.reference(*values))


def b_shape(region, boundary):
    return region.avals[boundary.value].shape


def test_layers_are_one_structure() -> None:
    """Equal layers give equal graphs, whatever they are called."""
    program = PROGRAMS["gated mlp"]
    x, w, v = program.args

    def model(x, weights):
        for first, second, down in weights:
            x = x + program.fn(x, first, second) @ down
        return x

    down = jnp.ones((16, 32))
    found = analysis(model, x, [(w, v, down)] * 6, max_ops=7)
    assert len(found.regions) == 6
    assert len({str(r.graph) for r in found.regions}) == 1
    assert len({r.where for r in found.regions}) == 1


def test_what_stays_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is built of its own equations; where something happens in order it is traced."""

    def layers(x, w, loud=False):
        def layer(x, w):
            y = jax.nn.softmax(jnp.sort(x @ w))
            if loud:
                jax.debug.callback(lambda y: None, y)
            return y @ w.T, None

        return jax.jit(jnp.sort)(jax.lax.scan(layer, layer(x, w[0])[0], w)[0])

    x, w = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(((4, 6), (2, 6, 6))))
    traced: list[int] = []
    run = LoweringPlan.run
    monkeypatch.setattr(LoweringPlan, "run", lambda self, *args: traced.append(1) or run(self, *args))
    for loud in (False, True):
        compiler = Replacing()
        y = optimized(functools.partial(layers, loud=loud), compiler)(x, w)
        np.testing.assert_allclose(y, layers(x, w), rtol=2e-5, atol=1e-5)
        assert len(compiler.regions) >= 2 and bool(traced) == loud


@pytest.mark.parametrize("name", ["bert_train", "lora_train", "llama_decode_b1"])
def test_built_programs_make_each_value_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where several regions have the same constant beside them."""
    built: list[Any] = []
    as_jaxpr = LoweringPlan.as_jaxpr
    monkeypatch.setattr(LoweringPlan, "as_jaxpr", lambda self, like: built.append(as_jaxpr(self, like)) or built[-1])
    step = steps.step("models", name, small=True)
    optimized(step.fn).lower(*jax.eval_shape(step.draw, jax.random.key(0)))
    (jaxpr,) = built
    known = {*jaxpr.invars, *jaxpr.constvars}
    for eqn in jaxpr.eqns:
        assert all(isinstance(v, Literal) or v in known for v in eqn.invars), eqn
        assert known.isdisjoint(eqn.outvars), eqn
        known.update(eqn.outvars)
    assert any(eqn.primitive is mirage_region_p for eqn in jaxpr.eqns)
