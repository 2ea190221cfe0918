"""What docs/extending.md shows, each in a process of its own, and what registration refuses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mirage_jax
from mirage_jax import children, extension_modules
from mirage_jax.cache import settings
from mirage_jax.errors import UsageError
from mirage_jax.hardware import device_model, gpus
from mirage_jax.mugraph.operators import FUNCTIONS

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
MODULES = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))
MOST_LINES = 30

USES = {
    "tangent": """
f = lambda x, w: jnp.tan(x @ w) @ w.T
(region,) = analyse(jax.make_jaxpr(f)(X, W)).regions
assert "tan" in region.primitives
""",
    "cube_root": """
f = lambda x, w: jnp.cbrt(x @ w) @ w.T
(region,) = analyse(jax.make_jaxpr(f)(X, W)).regions
assert "cbrt" in region.primitives
found = mirage_jax.superoptimize(f, X, W, device="H200", budget=mirage_jax.Budget(3, workers=2))
assert "cbrt" in str(found) and "passed" in str(found), found
""",
    "our_gpu": """
found = mirage_jax.superoptimize(lambda x, w: jax.nn.softmax(x @ w) @ w.T, X, W, device="RTX 6000 Ada", budget="2s")
assert "kernel" in str(found), found
""",
    "annotated": """
from mirage_jax.lower.runtime.launch import sources
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.graph import KernelSchedule, Schedule
graph = parse('''mugraph {
  extents i=64
  input x: f32[i]
  kernel k0 grid(i) {
    %x = load x[i]
    %y[i] = exp %x
    store y: f32[i] = %y
  }
  output y
}''')
for warps in (4, 8):
    (source,) = sources(graph, Schedule((KernelSchedule((("i", 32),), num_warps=warps),)))
    assert source.text.startswith("# 8 warps") == (warps == 8) == (source.backend == "annotated"), source
from mirage_jax.verify.exact.exact_check import exact_check
assert exact_check(graph, Schedule((KernelSchedule((("i", 32),), num_warps=8),))) == ""
""",
}
PREPARED = """
import sys
sys.path.insert(0, {folder!r})
import {module}
import jax, jax.numpy as jnp
import mirage_jax
from mirage_jax.jaxpr_frontend.partition.regions import analyse
X, W = jnp.ones((64, 64)), jnp.ones((64, 64))
"""


def test_the_page_has_one_of_each() -> None:
    text = "".join(MODULES.values())
    assert set(MODULES) == set(USES)
    assert all(f"mirage_jax.register_{kind}(" in text for kind in ("operator", "rule", "device", "backend"))
    assert all(len(code.splitlines()) <= MOST_LINES for code in MODULES.values())


@pytest.mark.parametrize("name", MODULES)
def test_it_works(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(MODULES[name])
    code = PREPARED.format(folder=str(tmp_path), module=name) + USES[name]
    env = children.environment({"MIRAGE_JAX_CACHE_DIR": str(tmp_path)})
    done = subprocess.run(children.python(code), env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "process failed" not in done.stderr  # processes that search load it too


def test_other_processes_load_it_from_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a directory that only this process looks into."""
    monkeypatch.setattr(extension_modules, "_modules", {})
    (file := tmp_path / "somewhere.py").write_text("print('loaded')\n")
    assert "extensions" not in dict(settings("cpu"))
    extension_modules.add("somewhere", str(file))
    done = subprocess.run(
        children.python(extension_modules.loading() + "print('ran')"), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["loaded", "ran"]
    before = dict(settings("cpu"))["extensions"]
    file.write_text("print('changed')\n")
    assert dict(settings("cpu"))["extensions"] != before


def test_a_script_registers_no_code(tmp_path: Path) -> None:
    code = "import mirage_jax\nmirage_jax.register_rule('tan', None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "register_rule: called in a script or a notebook" in done.stderr


def test_what_is_taken_is_said() -> None:
    with pytest.raises(UsageError, match="register_rule: tanh has a rule"):
        mirage_jax.register_rule("tanh", lambda builder, result, x: x)
    with pytest.raises(UsageError, match="operator tanh is registered twice"):
        mirage_jax.register_operator(FUNCTIONS["tanh"])
    with pytest.raises(UsageError, match="register_device: H200 is known"):
        mirage_jax.register_device("H200", capability=90, processors=132, clock=1e9, bandwidth=4e12)
    with pytest.raises(UsageError, match=r"found clock=0; allowed are positive numbers"):
        mirage_jax.register_device("H2000", capability=90, processors=132, clock=0, bandwidth=4e12)


def test_a_device_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension_modules, "_notes", [])
    monkeypatch.setattr(gpus, "GPUS", dict(gpus.GPUS))
    monkeypatch.setattr(device_model, "DEVICES", dict(device_model.DEVICES))
    mirage_jax.register_device("H2000", capability=90, processors=132, clock=1e9, bandwidth=4e12)
    assert device_model.DEVICES["H2000"].blocks == 132 and dict(settings("cuda"))["extensions"]
