"""`superoptimize`: the best muGraph of one function within hints, through every gate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deciding import assert_same, chain, measured, operands

import mirage_jax
from mirage_jax import UsageError, superoptimize
from mirage_jax.best_graphs import Hints
from mirage_jax.compiler.tuning_session import TuningSession
from mirage_jax.mugraph.graph import BlockGraph

ARGS = operands()


def named(v, a, b):
    return {"y": chain(b, a, v)}


def gram(x, w):
    return jnp.exp((x @ w).sum(-1, keepdims=True)) * (x @ w)


def test_the_best_graph_is_proven_and_runs() -> None:
    with measured(2.0):
        found = superoptimize(chain, *ARGS)
    assert found.certificate.bound <= 1e-12 and "passed on 19 input classes" in found.decision.gate
    assert found.speedup == 2.0 and found.variants[0].graph == found.graph.graph
    assert found.graph.equals(chain, *ARGS, inputs=(0, 1, 2))
    assert_same(found(*ARGS), chain(*ARGS), 1e-3)
    assert "chain: 2.00x over XLA" in str(found) and str(found.graph) in str(found)
    assert repr(found) == "<mirage_jax superoptimized: chain, 2.00x over XLA>"


def test_arguments_in_another_order_and_named_results() -> None:
    a, b, v = ARGS
    with measured(2.0):
        found = superoptimize(named, (48,), (48, 48), jax.ShapeDtypeStruct((48, 48), jnp.float32))
        assert_same(found(v, a, b), named(v, a, b), 1e-3)
        f = mirage_jax.optimize(named)
        pinned = f.explain(v, a, b).regions[0].pin(found.graph)
    assert pinned.decision.winner.graph == found.graph.graph
    with pytest.raises(UsageError, match=r"superoptimize: found the arrays float32\[48, 48\]"):
        found(a, b, v)


def test_the_program_itself_is_a_candidate() -> None:
    found = superoptimize(lambda x, y: x @ y, (8, 8), (8, 8))
    assert [k.name for k in found.graph.graph.kernels] == ["t0"] and found.speedup is not None


def test_hints_limit_kernels_of_a_gpu_that_is_not_here(tmp_path) -> None:
    found = superoptimize(
        gram, (64, 64), (64, 32), device="H200", kernels=1, grid="i", tiles={"i": (16, 32)}, budget=10
    )
    (kernel,) = found.graph.graph.kernels
    assert isinstance(kernel, BlockGraph) and kernel.grid == ("i",)
    assert "not measured: it is estimated at " in found.report.regions[0].decision.why
    page = found.report.save(tmp_path / "page.html").read_text()
    assert "@triton.jit" in page and "Exact check" in page and "After" in page and page.count("<svg") == 2
    assert dict(found.graph.schedule.kernels[0].tiles)["i"] in (16, 32)
    assert found.speedup is None and "not measured" in found.decision.why
    x, w = (jnp.asarray(np.random.default_rng(0).normal(size=s) / 8, "float32") for s in ((64, 64), (64, 32)))
    assert_same(found(x, w), gram(x, w), 1e-3)


def test_nothing_that_a_gate_refuses_is_returned(monkeypatch) -> None:
    monkeypatch.setattr(TuningSession, "gate", lambda self, winner, only=(): (False, "too far off"))
    with pytest.raises(UsageError, match=r"refused by the float gate 2\); the last one: too far off"):
        superoptimize(chain, *ARGS)


def test_hints_that_exclude_everything_are_an_error() -> None:
    with pytest.raises(UsageError, match="2 candidates were found, and none is within the hints"):
        superoptimize(chain, *ARGS, kernels=1)


def test_hints_without_limits() -> None:
    program = superoptimize(chain, *ARGS).graph.graph
    hints = Hints.of(None, None, None, program)
    assert hints.grid == {"i", "j", "k"} and hints.allow(program)
