"""The search misses nothing within its bounds, says why it stops, and finds the same in every process."""

import gc
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from search.forward import Forward
from search.references import H200, NAMES, TWO_KERNELS, captured, found, reference, ticking

from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.search import report as reports
from mirage_jax.search.candidates import Candidate
from mirage_jax.search.driver import search
from mirage_jax.search.enumerate.axioms import LOOP
from mirage_jax.search.enumerate.kernels import EMPTY, Space
from mirage_jax.search.enumerate.plans import Plans
from mirage_jax.search.enumerate.window_search import Search
from mirage_jax.search.report import SearchReport, StopReason

SPACE = Space(max_ops=14)
ONE_LOOP = replace(TWO_KERNELS, loops=1)


@dataclass(frozen=True)
class Job:
    """A kernel without intermediates to load: a program, its loop, and up to how many operators to enumerate."""

    program: str
    loop: str | None
    ops: int
    guided: bool = True  # enumerate only values that some DAG of the target contains


JOBS = [
    Job("lora_b1", None, 3, guided=False),
    Job("abv", None, 3, guided=False),
    Job("linear_attention", None, 3, guided=False),
    Job("linear_attention", "j", 3, guided=False),
    Job("mlp", None, 3, guided=False),
    Job("rmsnorm_b1", None, 5),
    Job("rmsnorm_b1", "j", 6),
    Job("lora_b1", None, 4),
    Job("lora_b1", "j", 6),
    Job("gated_mlp_b1", None, 5),
    Job("gated_mlp_b1", "j", 7),
    Job("gqa_b1", None, 6),
    Job("gqa_b1", "l", 7),
    Job("abv", None, 4),
    Job("abv", "j", 5),
    Job("abv", "k", 5),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda j: f"{j.program}-{j.loop}-{j.ops}{'' if j.guided else '-unguided'}")
def test_agrees_with_a_forward_enumeration(job: Job) -> None:
    s = Search(reference(job.program), H200, ONE_LOOP)
    s.start()
    (root,) = (r.value for r in s.targets)
    f = s._kernel_tables(s.targets, ONE_LOOP, s.batch)
    counted = f.dags(frozenset({root}), job.loop, EMPTY)
    expected = {n: count for n, count in counted.items() if n <= job.ops}
    target = root if job.loop is None else s.e.split(root, job.loop, (job.loop + LOOP, job.loop))
    below = f.reach(target)
    unary = {step for p in below if not f.axioms.is_input(p) for step in f.axioms.steps(p) if is_function(step.op)}
    goal = frozenset(p for p in below if f.legal(p)) if job.guided else None
    inputs = sorted(p for p in below if f.axioms.is_input(p))
    unary = {replace(u, args=()) for u in unary}
    assert Forward(f, target, job.loop, unary, goal).count(inputs, job.ops) == dict(sorted(expected.items()))
    assert expected, "nothing to compare"


def test_a_plan_makes_every_tensor_once() -> None:
    """y needs n: a kernel that makes both may not come after one that needs n as an intermediate."""

    def both(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        n = x / jnp.sum(x, -1, keepdims=True)
        return n, jnp.tanh(n * w)

    s = Search(captured(both, (16, 32), (32,)), H200, SPACE)
    s.start()
    targets = frozenset(r.value for r in s.targets)
    plans = Plans(s._kernel_tables(s.targets, SPACE, s.batch), targets)
    found = [plan for n in range(1, 4) for plan, _ in plans.with_kernels(n)]
    assert max(map(len, found)) == 3
    for plan in found:
        made = Counter(p for outs, _ in plan for p in outs)
        assert targets <= made.keys() and set(made.values()) == {1}


def is_function(op: str) -> bool:
    return op not in ("mul", "add", "sum", "acc", "dot", "div", "affine", "const", "iota", "max")


def counts(report: SearchReport) -> str:
    return f"{report.classes} classes, {report.plans} plans, {report.structures} structures, {report.windows} window"


def test_counts(golden) -> None:
    """Of every structure of the benchmark, in kernels with one loop."""
    lines = []
    for name in NAMES:
        space = replace(ONE_LOOP, max_kernels=1) if name.startswith("ntrans") else ONE_LOOP
        _, report = found(reference(name), space)
        assert report.stop is StopReason.EXHAUSTED
        lines.append(f"{name}: {counts(report)}")
    golden("\n".join(lines))


# --- determinism

SMALL = ["rmsnorm_b1", "lora_b1", "gqa_b1", "abv"]


def written(candidates: list[Candidate], report: SearchReport) -> str:
    """All that a search says but for its time."""
    lines = [f"{c.family} {c.seconds:.9e} {c.schedule} {c.graph}" for c in candidates]
    numbers = sorted(report.pruned.items()), sorted(report.fired.items()), sorted(report.dropped.items())
    return "\n".join([*lines, counts(report), f"{report.states} {report.steps} {report.priced}", str(numbers)])


def test_same_again() -> None:
    for name in SMALL:
        graph = reference(name)
        assert written(*found(graph)) == written(*found(graph))


SCRIPT = """
import sys
from search.references import found
from search.test_exhaustive import written
from mirage_jax.mugraph.parser import parse
for text in sys.stdin.read().split("\\n---\\n"):
    print(written(*found(parse(text))))
"""


def test_same_in_other_processes() -> None:
    graphs = [reference(name) for name in SMALL]
    here = "\n".join(written(*found(g)) for g in graphs)
    root = Path(__file__).parents[2]
    for seed in ("1", "2"):
        paths = os.pathsep.join((str(root), str(root / "tests")))
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
        text = "\n---\n".join(map(str, graphs))
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], input=text, env=env, capture_output=True, text=True, timeout=120, check=True
        )
        assert done.stdout.strip() == here


# --- budgets and the report


def limited(graph: KernelGraph, **limits: float) -> tuple[list[Candidate], SearchReport]:
    s = Search(graph, H200, TWO_KERNELS, **limits)  # type: ignore[arg-type]
    return s.run(), s.report


def test_exhausted() -> None:
    candidates, report = limited(reference("gqa_b1"))
    text = str(report)
    assert report.stop is StopReason.EXHAUSTED and candidates
    assert text.startswith("exhausted the space in ") and f"{report.states} states" in text
    assert f"exhaustive {TWO_KERNELS}" in text and "pruned: " in text and "axioms: cut_product" in text
    assert "plans not expressible: " in text


def test_state_budget() -> None:
    """A search that is cut short keeps what it has, and does not claim to be exhaustive."""
    graph = reference("gqa_b1")
    _, whole = limited(graph)
    kept = 0
    for states in (1, whole.states // 4, whole.states // 2, whole.states - 10):
        candidates, report = limited(graph, states=states)
        assert report.stop is StopReason.STATES and report.states <= states + 1
        assert "exhaustive" not in str(report) and str(report).startswith("state budget used up")
        assert len(candidates) >= kept
        kept = len(candidates)
    assert kept


def test_seconds_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    ticking(monkeypatch, 1.0)
    candidates, report = limited(reference("qknorm_gqa_b1"), seconds=100.0)
    assert report.stop is StopReason.SECONDS and 100.0 < report.seconds < 110.0
    assert candidates, "algebra comes first and is quick"
    _, report = limited(reference("gqa_b1"), seconds=0.0)
    assert report.stop is StopReason.SECONDS and "exhaustive" not in str(report)


@pytest.mark.parametrize("seconds", [100.0, 0.0])
def test_collects_garbage_again(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is looked for during a search, however it ends."""
    monkeypatch.setattr(reports, "PROGRESS_SECONDS", -1.0)
    seen: set[bool] = set()
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            Search(reference("lora_b1"), H200, TWO_KERNELS, seconds, notify=lambda *_: seen.add(gc.isenabled())).run()
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
    assert seen == {False}


def test_plan_limit() -> None:
    candidates, report = limited(reference("gqa_b1"), max_plans=3)
    assert report.stop is StopReason.PLANS and candidates
    assert str(report).startswith("plan limit reached")


def test_operator_limit() -> None:
    """Within three operators x W + (x A) B is one kernel as x (W + A B) only; within two it is none."""
    graph = captured(lambda x, w, a, b: x @ w + (x @ a) @ b, (16, 256), (256, 4096), (256, 16), (16, 4096))
    for limit, kernels in ((4, 1), (3, 1), (2, 2)):
        candidates, report = search(graph, H200, replace(TWO_KERNELS, max_ops=limit), 60.0)
        blocks = [c.graph for c in candidates if c.family == "kernels"]
        assert min(len(g.kernels) for g in blocks) == kernels
        assert limit == 4 or report.pruned["operator limit"] > 0
