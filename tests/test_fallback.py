"""Where JAX lacks what the optimizer needs, programs run as under plain `jax.jit`."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from mirage_jax import children, fallback

PROGRAM = """
import jax
from jax.{module} import {name}
import jax.{module} as module
del module.{name}
import mirage_jax
@mirage_jax.optimize
def f(x):
    return x + 1
@mirage_jax.optimize(static_argnums=1, budget="3s")
def g(x, n):
    return x * n
assert f(1.0) == 2.0 and g(2.0, 3) == 6.0 and isinstance(f, mirage_jax.Optimized)
assert "plain jax.jit" in str(f.explain(1.0)) and "plain jax.jit" in str(mirage_jax.tune(f, 1.0))
with mirage_jax.disabled():
    assert f(1.0) == 2.0
try:
    mirage_jax.optimize(buget=3)
except mirage_jax.UsageError as why:
    print(why)
"""


@pytest.mark.parametrize(
    ("module", "name"), [("extend.core", "create_call_primitive"), ("interpreters.mlir", "register_lowering")]
)
def test_a_missing_name_is_one_line_and_plain_jit(module: str, name: str) -> None:
    env = {**os.environ, "PYTHONPATH": children.ROOT, "JAX_PLATFORMS": "cpu"}
    code = PROGRAM.format(module=module, name=name)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert fallback.JAX_VERSIONS in line and jax.__version__ in line and name in line
    assert "Did you mean 'budget'" in done.stdout


def test_versions_are_those_of_the_project() -> None:
    """`scripts/raise-jax` raises the bound in both places, when the suite passes with a newer one."""
    project = tomllib.loads((Path(children.ROOT) / "pyproject.toml").read_text())["project"]
    wanted = [x for x in project["dependencies"] if re.match(r"jax\b", x)]
    assert wanted == [f"jax{fallback.JAX_VERSIONS}"]
    extras = [x for group in project["optional-dependencies"].values() for x in group if x.startswith("jax[")]
    assert extras and all(fallback.JAX_VERSIONS in x for x in extras)
