"""docs/tour.ipynb, session.md and ten-programs.md run as they stand, and print what they say but for numbers."""

import ast
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jax
import pytest
from deciding import measured

import mirage_jax
from mirage_jax.cli import main

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NOTEBOOK, SESSION, PROGRAMS = DOCS / "tour.ipynb", DOCS / "session.md", DOCS / "ten-programs.md"


def shape(text: str) -> list[str]:
    """Lines without what differs from run to run: numbers, keys, columns, steps of tuning that took long."""
    text = re.sub(r"\btime: [\d.,]+ s: .*", "time: #", text)
    text = re.sub(r"\b(?:[0-9a-f]{2}/)?(?=[0-9a-f]*\d)[0-9a-f]{8,}\b", "#", text)
    text = re.sub(r"\d[\d.,]*(e[-+]?\d+)?", "#", text)
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def run_cell(source: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell as a notebook does, and return its outputs in the notebook's format."""
    tree = ast.parse(source, NOTEBOOK.name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(tree, NOTEBOOK.name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), namespace)
    text = printed.getvalue()
    outputs: list[dict[str, Any]] = [{"name": "stdout", "output_type": "stream", "text": _lines(text)}] if text else []
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        data |= {"text/html": _lines(value._repr_html_())} if hasattr(value, "_repr_html_") else {}
        outputs.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return outputs


def _lines(text: str) -> list[str]:
    """Lines as a notebook holds them; a reader has the cache elsewhere."""
    return text.replace(os.environ["MIRAGE_JAX_CACHE_DIR"], "~/.cache/mirage_jax").splitlines(keepends=True)


def shapes(outputs: list[dict[str, Any]]) -> list[Any]:
    return [
        shape("".join(lines)) for out in outputs for lines in out.get("data", {"text": out.get("text", [])}).values()
    ]


def run_notebook(page: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each cell of code with its outputs of today."""
    namespace: dict[str, Any] = {"__name__": "tour"}
    for cell in page["cells"]:
        if cell["cell_type"] == "code":
            yield cell, run_cell("".join(cell["source"]), namespace)


def update_notebook() -> None:
    page = json.loads(NOTEBOOK.read_text())
    for number, (cell, outputs) in enumerate(run_notebook(page), 1):
        cell |= {"outputs": outputs, "execution_count": number}
        for output in outputs:
            output |= {"execution_count": number} if "data" in output else {}
    NOTEBOOK.write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n")


def as_users_do(*words: str) -> str:
    """Run Python with the compiler's flags of users, not of tests; return what it prints."""
    path = os.pathsep.join(map(str, [ROOT, ROOT / "tests", Path.cwd()]))
    env = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": path}
    return subprocess.run([sys.executable, *words], env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_the_notebook_prints_what_it_says(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        as_users_do("-c", "import test_tour; test_tour.update_notebook()")
    with measured(2.0):  # the page has a winner, which a busy machine may not measure
        for cell, outputs in run_notebook(json.loads(NOTEBOOK.read_text())):
            assert shapes(outputs) == shapes(cell["outputs"]), (
                "run this with --update-golden, and read what has changed"
            )


MACHINE_PATH = r"/(?:home|tmp|root|work|usr|Users)/|[A-Z]:\\\\"


def test_the_notebook_names_no_path_of_a_machine() -> None:
    text = NOTEBOOK.read_text()
    assert not re.search(MACHINE_PATH, text)
    assert len(text) < 200_000


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[tuple[str, str]]:
    """The commands of a page, each with the excerpt of its output."""
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", "".join(blocks(page, "console")), re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current directory, whose modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("model", "programs"):  # other tests may have modules of this name
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    return tmp_path


def test_the_session_prints_what_it_says(folder, capsys) -> None:
    pytest.importorskip("triton")  # for `preview`
    key = ""
    for command, excerpt in commands(SESSION):
        if command.startswith("cat "):
            Path(command.removeprefix("cat ")).write_text(excerpt)
            continue
        program, *words = shlex.split(re.sub(r"\b[0-9a-f]{12}\b", key, command))
        assert program == "mirage-jax"
        with measured(2.0):
            assert main(words) == ("check-xla" in words)
        printed = capsys.readouterr().out
        if words[:2] == ["cache", "list"]:
            (key,) = re.findall(r"(\w+) │ win", printed)
        lines = iter(shape(printed))
        for line in shape(excerpt):
            assert line in lines, f"{command}: not printed, or in another order: {line}\n{printed}"
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")


# Lines of a report that the page shows. Rows about equations that stay follow their heading, to the end.
SHOWN = r"(\w+: \d|whole function: \d| +(optimized|kept|what to do|elsewhere|formula|algebra|sizes|FLOP|bytes)\b).*"


def excerpt_of(report: str) -> str:
    top, heading, rows = report.partition("equations left to XLA: ")
    lines = [line for line in top.splitlines() if re.fullmatch(SHOWN, line)]
    return "\n".join([*lines, *(heading + rows).splitlines()]) + "\n"


@pytest.mark.parametrize("number", range(10))
def test_ten_programs_say_why(number, folder, capsys, request: pytest.FixtureRequest) -> None:
    (folder / "programs.py").write_text("\n\n".join(blocks(PROGRAMS, "python")))
    command, excerpt = commands(PROGRAMS)[number]
    program, *words = shlex.split(command)
    if request.config.getoption("--update-golden"):
        found = excerpt_of(as_users_do("-m", "mirage_jax", *words))
        page = PROGRAMS.read_text()
        PROGRAMS.write_text(page.replace(f"$ {command}\n{excerpt}", f"$ {command}\n{found}"))
        return
    with measured(10.0 if "linear" in command else 1.0):
        assert (program, main(words)) == ("mirage-jax", 0)
    assert shape(excerpt_of(capsys.readouterr().out)) == shape(excerpt), "run this with --update-golden"


EXAMPLE = DOCS / "example-report.html"
ATTENTIONS = """import jax


def attentions(q, k, v):
    with_softmax = jax.nn.softmax(q @ k.T / 8) @ v
    without = (q @ k.T) @ v / k.shape[0]
    return with_softmax, without
"""


def page_of(text: str) -> list[str]:
    """The lines of a page with one tag each, without numbers."""
    return shape("".join(_lines(re.sub(r"(?=<)", "\n", text))))


def test_the_example_page_is_what_is_saved(folder, request: pytest.FixtureRequest) -> None:
    (folder / "model.py").write_text(ATTENTIONS)
    words = ["explain", "model:attentions", "f32[1024,64] f32[1024,64] f32[1024,64]", "--save", "report.html"]
    if request.config.getoption("--update-golden"):
        as_users_do("-m", "mirage_jax", *words)
        EXAMPLE.write_text("".join(_lines((folder / "report.html").read_text())))
    else:
        with measured(10.0):
            assert main(words) == 0
    page = EXAMPLE.read_text()
    assert page_of((folder / "report.html").read_text()) == page_of(page), "run this with --update-golden"
    assert not re.search(MACHINE_PATH, page)


KERNELS = DOCS / "example-kernels.html"


def test_the_page_with_kernels_is_what_is_saved(folder, request: pytest.FixtureRequest) -> None:
    """`X W + (X A) B` for an H200, as in docs/walkthrough.md."""
    pytest.importorskip("triton")  # the exact check runs kernels in its interpreter
    shapes = [jax.ShapeDtypeStruct(s, "float16") for s in [(16, 256), (256, 4096), (256, 16), (16, 4096)]]
    (folder / "model.py").write_text("def lora(x, w, a, b):\n    return x @ w + (x @ a) @ b\n")
    best = mirage_jax.superoptimize(importlib.import_module("model").lora, *shapes, device="H200", kernels=1)
    text = best.report.save(folder / "lora.html").read_text()
    if request.config.getoption("--update-golden"):
        KERNELS.write_text(text)
    page = KERNELS.read_text()
    assert page_of(text) == page_of(page), "run this with --update-golden"
    assert "@triton.jit" in page and not re.search(MACHINE_PATH, page)
