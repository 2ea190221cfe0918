"""Times of regions from profiles: their names are in the compiled programs, and profiles name the instructions."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from mirage_jax import cli, optimize
from mirage_jax.bench import region_times as module
from mirage_jax.bench.region_times import operations, own_times, region_times, scopes_of
from mirage_jax.compiler.inputs import one_set
from mirage_jax.timing import time_steps

SHAPES = [jax.ShapeDtypeStruct((256, 16), jnp.float32)] * 3


def two_regions(q, k, v):
    """The second product is for the first matrix; only the first region has another order of evaluation."""
    s = jnp.sort((q @ k.T) @ v, 0)
    return jax.nn.gelu(s).sum(-1)


def looped(q, k, v):
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ k.T) @ v, q)


@pytest.fixture
def optimized(tmp_path: Path):
    return lambda f: optimize(f, on_miss="heuristic", cache_dir=tmp_path / "cache", strict=True)


def test_regions_of_a_step(optimized, tmp_path: Path) -> None:
    found = region_times(optimized(two_regions), SHAPES, tmp_path / "out")
    first, second, other = found.times
    assert first.scope.startswith("mirage_test_region_times_") and first.runs_as == "algebra"
    assert second.runs_as == "XLA's code" and other.region == "other operations"
    assert all(t.xla > 0 and t.ours > 0 for t in found.times) and not found.note
    assert all(list((tmp_path / "out" / label).rglob("*.xplane.pb")) for label in ("xla", "mirage"))


def test_regions_in_loops_have_names(optimized, tmp_path: Path) -> None:
    found = region_times(optimized(looped), SHAPES, tmp_path)
    assert len(found.times) == 2 and found.times[0].xla > 0


def test_without_names_in_the_profile(optimized, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "operations", lambda data: iter(()))
    found = region_times(optimized(two_regions), SHAPES, tmp_path)
    assert "names no operations" in found.note and len(found.times) == 2
    assert all(t.xla > 0 and t.ours > 0 for t in found.times)


def test_lowered_code_has_the_names_of_optimized_regions(optimized) -> None:
    text = optimized(two_regions).lower(*SHAPES).compile().as_text()
    assert "mirage_test_region_times_" in text


HLO = """
%fused (p: f32[2]) -> f32[2] {
  %p = f32[2] parameter(0)
  %a.1 = f32[2] add(%p, %p), metadata={op_name="jit(f)/mirage_model_41_0f3a9c/add"}
  ROOT %m = f32[2] multiply(%a.1, %a.1), metadata={op_name="jit(f)/mirage_model_41_0f3a9c/mul"}
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2] parameter(0), metadata={op_name="x"}
  %dot.1 = f32[2] dot(%x, %x)
  %fusion.2 = f32[2] fusion(%dot.1), kind=kLoop, calls=%fused
  ROOT %sort.3 = f32[2] sort(%fusion.2), metadata={op_name="jit(f)/sort"}
}
"""


def test_scopes_of_instructions() -> None:
    scopes = scopes_of(HLO)
    ours = {name for name, scope in scopes.items() if scope == "mirage_model_41_0f3a9c"}
    assert ours == {"p", "a.1", "m", "fusion.2", "dot.1"} and scopes["sort.3"] == scopes["x"] == ""


def test_times_without_the_events_inside() -> None:
    """A loop of ten nanoseconds that runs two operations, then one more."""
    events = [(0, 10, "while"), (1, 4, "a"), (5, 7, "b"), (12, 15, "c")]
    assert {name: round(s * 1e9) for name, s in own_times(events)} == {"while": 5, "a": 3, "b": 2, "c": 3}


def test_on_a_gpu_only_the_device_counts() -> None:
    """A profile of a GPU: the host launches the operations, and a loop is in the name of those that it runs."""

    data = SimpleNamespace(planes=[plane("/host:CPU", "fusion.2", 9), plane("/device:GPU:0", "while.3/fusion.2", 4)])
    assert [(name, round(s * 1e9)) for name, s in operations(data)] == [("fusion.2", 4)]


def plane(name: str, op: str, ns: int, line: str = "Stream #14(Compute)") -> SimpleNamespace:
    event = SimpleNamespace(start_ns=0, duration_ns=ns, stats=[("hlo_op", op)] if op else [])
    return SimpleNamespace(name=name, lines=[SimpleNamespace(name=line, events=[event])])


def test_no_time_of_a_gpu_is_lost() -> None:
    """A kernel without the name of an instruction takes time; so does one that starts before the last has ended."""
    data = SimpleNamespace(planes=[plane("/device:GPU:0", "", 7), plane("/device:GPU:0", "", 9, line="XLA Modules")])
    assert [(name, round(s * 1e9)) for name, s in operations(data)] == [("", 7)]
    events = [(0, 10, "a"), (9, 30, "b"), (30, 35, "c")]
    assert {name: round(s * 1e9) for name, s in own_times(events)} == {"a": 9, "b": 21, "c": 5}


@pytest.mark.gpu
def test_all_of_a_step_is_in_the_table(optimized, tmp_path: Path) -> None:
    """The rows add up to the time of the device."""

    def attention(q, k, v):
        return jax.nn.softmax(jnp.tanh(q @ jnp.swapaxes(k, 1, 2)), -1) @ v

    shapes = [jax.ShapeDtypeStruct((16, 1024, 64), jnp.bfloat16)] * 3
    found = region_times(optimized(attention), shapes, tmp_path / "out")
    given = one_set(tuple(shapes), 0)
    whole = time_steps({"xla": partial(jax.jit(attention), *given)}, 1, 5)["xla"].seconds
    assert sum(t.xla for t in found.times) == pytest.approx(whole, rel=0.2)


def test_the_command(capsys, tmp_path: Path) -> None:
    program = "mirage_jax.bench.programs:matrix_matrix_vector"
    options = ["--on-miss", "heuristic", "--cache-dir", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    assert cli.main(["trace", program, "f32[64,64] f32[64,64] f32[64]", *options]) == cli.OK
    out, err = capsys.readouterr()
    assert "algebra" in out and "mirage_programs_" in out and str(tmp_path / "out") in err.replace("\n", "")
    assert cli.main(["trace", program, "f32[64,64] f32[64,64] f32[64]", *options, "--json"]) == cli.OK
    assert json.loads(capsys.readouterr().out)["times"][0]["runs_as"] == "algebra"
