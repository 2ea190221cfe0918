"""Where Triton is not installed: every command does what it can, says in one line what it cannot, and exits with 0."""

import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirage_jax import cli, doctor, progress
from mirage_jax.audit import fuzz
from mirage_jax.cache import Cache, CacheKey
from mirage_jax.compiler import tuning_session as attempts
from mirage_jax.config import Options, warn_once
from mirage_jax.errors import UnsupportedError
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.lower.runtime import launch
from mirage_jax.verify.exact import exact_check
from mirage_jax.verify.exact.interpreters.triton import interpret

HIDING = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in ("triton", "jax_triton") else find(name, path, target)
PathFinder.find_spec = classmethod(find_spec)
"""
ROOT = Path(__file__).parents[1]


@pytest.fixture
def hidden(monkeypatch) -> None:
    """Hides both packages from whoever asks whether they are installed."""
    find = PathFinder.find_spec

    def find_spec(name, path=None, target=None):
        return None if name in launch.PACKAGES else find(name, path, target)

    monkeypatch.setattr(PathFinder, "find_spec", find_spec)
    for name in launch.PACKAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)


def gated(x, w):
    return jax.nn.silu(x @ w)


SKIPPED = f"triton is not installed: the text of kernels is not run in its interpreter ({launch.INSTALL})"


def test_fuzz_skips_what_needs_it(tmp_path) -> None:
    """The first program of seed 2 has kernels under the H200 model; workers are processes of their own."""
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    command = [sys.executable, "-m", "mirage_jax", "fuzz", "--programs", "1", "--seed", "2", "-q"]
    command += ["--out", str(tmp_path / "out")]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stderr.splitlines() if "riton" in line] == [SKIPPED]
    assert "tiled" in done.stdout and "interpreted" not in done.stdout


def test_what_is_skipped_is_one_line(hidden) -> None:
    assert fuzz.skipped("cpu") == SKIPPED
    assert fuzz.skipped("cuda") == f"triton is not installed: no kernel runs ({launch.INSTALL})"
    for check in (doctor.check_triton, doctor.check_gpu_lowering):
        assert check().status == "note" and "triton is not installed" in check().found


def test_a_kernel_is_not_checked_and_nothing_is_logged(hidden, caplog) -> None:
    winner = attempts.Winner(doctor.KERNEL, doctor.SCHEDULE, (), (), "kernels", "cuda")
    passed, why = exact_check.ExactGate().check(winner)
    assert passed and why == "not done: Triton is not installed" and not caplog.records
    with pytest.raises(UnsupportedError, match="Triton is not installed"):
        interpret(winner.graph, winner.schedule, [np.zeros((256, 64), "float16")])


def test_on_a_gpu_only_algebra_is_searched(hidden, caplog, tmp_path) -> None:
    warn_once.cache_clear()
    x, w = jnp.zeros((16, 256)), jnp.zeros((256, 128))
    (region,) = analyse(jax.make_jaxpr(gated)(x, w)).regions
    for _ in range(2):
        attempt = attempts.TuningSession(region, "cuda", jax.devices()[0], Options())
        key = CacheKey.here(graph=attempt.text, extents={}, backend="auto", policy="", device=attempt.device)
        found, _ = attempt.candidates(Cache(tmp_path), key, progress.silent)
        assert {c.family for c in found} == {"algebra"}
    (record,) = caplog.records
    assert record.getMessage().startswith("no kernels are tried on this GPU: triton is not installed (pip install")


def test_preview_writes_kernels_all_the_same(hidden, capsys) -> None:
    types = "f32[128,64] f32[64,64]"
    assert cli.main(["preview", f"{__name__}:gated", types, "--device", "H200", "--budget", "5s"]) == 0
    assert "@triton.jit" in capsys.readouterr().out
