"""docs/tour.ipynb and docs/session.md run as they stand, and print what they say but for numbers."""

import ast
import contextlib
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from mirage_jax.cli import main

DOCS = Path(__file__).parent.parent / "docs"
NOTEBOOK, SESSION = DOCS / "tour.ipynb", DOCS / "session.md"


def shape(text: str) -> list[str]:
    """Lines without what differs from run to run: numbers, keys, the width of columns."""
    text = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b", "#", text)
    text = re.sub(r"\d[\d.,]*(e[-+]?\d+)?", "#", text)
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def run_cell(source: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell as a notebook does, and return its outputs in the notebook's format."""
    tree = ast.parse(source, NOTEBOOK.name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
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


def test_the_notebook_prints_what_it_says(request: pytest.FixtureRequest) -> None:
    page = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in page["cells"] if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {"__name__": "tour"}
    update = request.config.getoption("--update-golden")
    for number, cell in enumerate(cells, 1):
        outputs = run_cell("".join(cell["source"]), namespace)
        if update:
            cell |= {"outputs": outputs, "execution_count": number}
            for output in outputs:
                output |= {"execution_count": number} if "data" in output else {}
        assert shapes(outputs) == shapes(cell["outputs"]), "run this with --update-golden, and read what has changed"
    if update:
        NOTEBOOK.write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n")


def test_the_notebook_names_no_path_of_a_machine() -> None:
    text = NOTEBOOK.read_text()
    assert not re.search(r"/(?:home|tmp|root|work|usr|Users)/|[A-Z]:\\\\", text)
    assert len(text) < 200_000


def commands() -> list[tuple[str, str]]:
    """The commands of the session, each with the excerpt of its output."""
    blocks = re.findall(r"^```console\n(.*?)^```$", SESSION.read_text(), re.DOTALL | re.MULTILINE)
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", "".join(blocks), re.MULTILINE)
    assert len(found) > 10
    return found


def test_the_session_prints_what_it_says(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("triton")  # for `preview`
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "model", None)  # another test may have a module of this name
    del sys.modules["model"]
    key = ""
    for command, excerpt in commands():
        if command.startswith("cat "):
            Path(command.removeprefix("cat ")).write_text(excerpt)
            continue
        program, *words = shlex.split(re.sub(r"\b[0-9a-f]{12}\b", key, command))
        assert program == "mirage-jax"
        assert main(words) == ("check-xla" in words)
        printed = capsys.readouterr().out
        if words[:2] == ["cache", "list"]:
            (key,) = re.findall(r"(\w+) │ win", printed)
        lines = iter(shape(printed))
        for line in shape(excerpt):
            assert line in lines, f"{command}: not printed, or in another order: {line}\n{printed}"
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
