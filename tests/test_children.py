"""Processes of ours run nothing that happens to lie where the user is, and end when their parent does."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from mirage_jax import children

PLANTED = ("numpy", "jax", "mirage_jax", "sitecustomize", "usercustomize", "json", "queue", "runpy", "multiprocessing",
           "jax_plugins", "triton", "torch", "platformdirs")  # fmt: skip

PARENT = """
import sys
import mirage_jax, numpy, jax
from mirage_jax import children
"""
SEARCH = """
from mirage_jax.search.decompose import subprocesses
from mirage_jax.mugraph.parser import parse
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.search.enumerate.kernels import Space
TEXT = '''mugraph {
  extents i=64 j=64 k=64
  input x: f32[i,j]
  input y: f32[j,k]
  library t: f32[i,k] = dot{axes=(j)} x[i,j] y[j,k]
  output t
}'''
part = subprocesses.SubSearch(parse(TEXT), DEVICES["CPU"], Space(), 1000, ("algebra",), 5.0)
subprocesses._Processes().search(part)
"""
WORKER = """
from mirage_jax.compiler.isolation.parent import Session
with Session() as session:
    assert session._ready().ready
"""
POOL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
if __name__ == "__main__":
    with children.safe_pool(), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(len, "abc").result() == 3
"""
START = """
import json, subprocess
from mirage_jax.bench.start import CHILD
code = CHILD.rpartition("start.child")[0]
subprocess.run(children.python(code), env=children.environment({}), check=True)
"""


def run(code: str, folder: Path, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A user's script, which lies elsewhere, run from a folder in which the names of modules are taken."""
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + ' ')\n")
    (folder / "jax_plugins").mkdir()
    (folder / "jax_plugins" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('plugin ')\n")
    script = tmp_path / "script.py"
    script.write_text(PARENT + code)
    env = {**os.environ, "PYTHONPATH": children.ROOT, "JAX_PLATFORMS": "cpu", **variables}
    return subprocess.run([sys.executable, script], cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_nothing_in_the_current_directory_runs(tmp_path) -> None:
    """Not in a search, nor where variants are tried, nor in a pool, nor in a benchmark's process."""
    (folder := tmp_path / "here").mkdir()
    indented = "".join(f"    {line}\n" for line in (SEARCH + WORKER + START).splitlines())
    done = run(f"{POOL}{indented}", folder, tmp_path)  # a pool runs what is not under its condition once more
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_a_plain_child_would_run_it(tmp_path) -> None:
    """What the others show is not for lack of bait."""
    (folder := tmp_path / "here").mkdir()
    run("import subprocess; subprocess.run([sys.executable, '-m', 'mirage_jax.search'], input='', text=True)",
        folder, tmp_path)  # fmt: skip
    assert "mirage_jax" in (tmp_path / "ran").read_text()


@pytest.mark.parametrize("path", ["", ".", "{here}"])
def test_variables_that_mean_the_current_directory(path: str, tmp_path, monkeypatch) -> None:
    """An empty part of PYTHONPATH does, and is easily made by mistake."""
    (tmp_path / "lib").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([path.format(here=tmp_path), str(tmp_path / "lib")]))
    assert children.environment({})["PYTHONPATH"] == str(tmp_path / "lib")
    assert not {"", ".", str(tmp_path)} & set(children.safe_path())
    monkeypatch.setenv("PYTHONPATH", path.format(here=tmp_path))
    assert "PYTHONPATH" not in children.environment({})


def test_a_child_has_this_package_and_path(tmp_path, monkeypatch) -> None:
    """Whatever else is installed by that name."""
    (tmp_path / "mirage_jax.py").write_text("raise SystemExit('another one')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    code = "import json, sys, mirage_jax; print(json.dumps([mirage_jax.__file__, sys.path, sys.argv[1:]]))"
    done = subprocess.run(children.python(code, "a", "b"), env=children.environment({}), capture_output=True, text=True)
    file, path, arguments = json.loads(done.stdout)
    assert Path(file).parents[1] == Path(children.ROOT) and path == children.safe_path() and arguments == ["a", "b"]


def test_from_a_zip_file(tmp_path) -> None:
    package = Path(children.ROOT) / "mirage_jax"
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as file:
        for source in package.rglob("*.py"):
            file.write(source, source.relative_to(children.ROOT))
    (folder := tmp_path / "here").mkdir()
    done = run(f"assert '.zip' in children.ROOT\n{SEARCH}", folder, tmp_path, PYTHONPATH=str(tmp_path / "all.zip"))
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_a_search_ends_with_its_parent(tmp_path) -> None:
    """Even if that is killed: nobody reads what it would find."""
    code = SEARCH.replace("subprocesses._Processes().search(part)", "")
    code += f"""
import subprocess, time
command = children.python('''
import os, time
from mirage_jax.children import end_with_standard_input
end_with_standard_input()
open({str(tmp_path / "child")!r} + ".tmp", "w").write(str(os.getpid()))
os.rename({str(tmp_path / "child")!r} + ".tmp", {str(tmp_path / "child")!r})
time.sleep(60)
''')
subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
time.sleep(60)
"""
    script = tmp_path / "script.py"
    script.write_text(PARENT + code)
    env = {**os.environ, "PYTHONPATH": children.ROOT, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen([sys.executable, script], env=env, cwd=tmp_path) as parent:
        until = time.monotonic() + 60
        while not (tmp_path / "child").exists() and time.monotonic() < until:
            time.sleep(0.05)
        child = int((tmp_path / "child").read_text())
        parent.send_signal(signal.SIGKILL)
    until = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < until, "it goes on"
        time.sleep(0.02)
