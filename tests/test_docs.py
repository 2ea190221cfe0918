"""The documents are true: their Python runs and prints what they say, links lead somewhere, tables are complete."""

import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from deciding import measured

from mirage_jax import config
from mirage_jax.cli import OK, build_parser, main
from mirage_jax.jaxpr_frontend.translate.rules import RULES
from mirage_jax.mugraph.operators import FUNCTIONS, OPERATORS

ROOT = Path(__file__).parent.parent


def commands_in(text: str) -> list[str]:
    """Arguments of each ``python -m mirage_jax`` that is meant to be typed as it stands."""
    found = re.findall(r"python -m\s+mirage_jax\s+([^`]+?)(?:`|  #|\n(?=```|python|$))", text)
    return [" ".join(line.split()) for line in found]


DOCS = ROOT / "docs"
QUICKSTART, DEBUGGING, CONTROL, DEPLOYING = (
    DOCS / f"{name}.md" for name in ("quickstart", "debugging", "control", "deploying")
)
DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), ROOT / "results" / "README.md"])
COMMANDS = sorted({line for file in DOCUMENTS for line in commands_in(file.read_text())})


def operators() -> str:
    """docs/operators.md, from the table of operators."""
    lines = [
        "# Operators",
        "",
        "Generated from `mirage_jax/mugraph/operators.py`: `./scripts/test tests/test_docs.py --update-golden`.",
        "",
        "| operator | operands | attributes | meaning |",
        "|---|---|---|---|",
    ]
    for op in OPERATORS.values():
        if op.name not in FUNCTIONS:
            optional = [f"{name}={value}" for name, value in op.defaults.items()]
            lines.append(f"| `{op.name}` | {op.arity} | {', '.join((*op.required, *optional))} | {op.summary} |")
    lines += [
        "",
        "Pointwise functions, uninterpreted in proofs. Functions of one operand act on `scale * x + offset`:",
        ", ".join(f"`{f.name}`" + (f" ({f.arity})" if f.arity > 1 else "") for f in FUNCTIONS.values()) + ".",
        "",
        "JAX primitives that regions may have. [Layers](layers.md) shows them in layers, and says why others stay out:",
        ", ".join(f"`{name}`" for name in sorted(RULES)) + ".",
    ]
    return "\n".join(lines) + "\n"


def test_operators(request: pytest.FixtureRequest) -> None:
    file = ROOT / "docs" / "operators.md"
    if request.config.getoption("--update-golden"):
        file.write_text(operators())
    assert file.read_text() == operators(), f"{file} is out of date: run this with --update-golden"


def blocks(file: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", file.read_text(), re.DOTALL | re.MULTILINE)


def run(file: Path) -> dict[str, Any]:
    """The names that the Python blocks of a document leave behind."""
    namespace: dict[str, Any] = {"__name__": file.stem}
    found = blocks(file, "python")
    assert found
    for block in found:
        exec(compile(block, file.name, "exec"), namespace)
    return namespace


def without_numbers(line: str) -> str:
    """Times and seeds differ from run to run."""
    return re.sub(r"\d[\d.,]*(e-\d+)?", "#", line)


def test_the_readme_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    with measured(2.0):  # the page has a winner, which a busy machine may not measure
        run(ROOT / "README.md")
    printed = iter(map(without_numbers, capsys.readouterr().out.splitlines()))
    (excerpt,) = blocks(ROOT / "README.md", "text")
    for line in excerpt.splitlines():
        assert without_numbers(line) in printed, f"not printed, or in another order: {line}"


def test_python_in_the_quickstart_runs() -> None:
    names = run(QUICKSTART)
    assert len(names["report"].regions) == 1
    assert [g.shape for g in names["gradients"]] == [(4, 1024, 32)] * 3


def test_python_about_control_runs() -> None:
    names = run(CONTROL)
    assert names["kept"].options.skip == (names["key"][:12],)
    assert not names["found"] and names["found"].of == 1
    assert [d.why for r in names["same"].explain(*(names[x] for x in "qkv")).regions for d in [r.decision]] == [
        "pinned in pins.toml, not measured"
    ]
    assert names["verdict"].passed and not names["wrong"].passed


def test_python_about_deploying_runs() -> None:
    pytest.importorskip("jax_triton")
    pytest.importorskip("jax_plugins")
    names = run(DEPLOYING)
    assert names["restored"].platforms == ("cuda",) and "@__gpu$xla.gpu.ptx(" in names["restored"].mlir_module()


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: f.name)
def test_links(file: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", file.read_text()):
        if not link.startswith("https://"):
            assert (file.parent / link).exists(), f"{file.name} links to {link}, which is not there"


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: f.name)
def test_modules_and_files_that_are_named_exist(file: Path) -> None:
    for name in re.findall(r"`((?:mirage_jax|tests|examples|results|scripts)/[\w./-]+)`", file.read_text()):
        assert (ROOT / name).exists() or (ROOT / f"{name}.py").exists(), f"{file.name} names {name}, which is not there"


def test_every_option_is_in_the_quickstart() -> None:
    for field in fields(config.Options):
        assert f"| `{field.name}` |" in QUICKSTART.read_text(), field.name


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_accepted(line: str) -> None:
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line)]
    assert build_parser().parse_args(words).run is not None


def test_the_preview_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    command, kernel = next(
        (command, kernel)
        for command, kernel in pairwise(blocks(DEBUGGING, ""))
        if command.startswith("python -m mirage_jax preview")
    )
    (line,) = commands_in(command)
    assert main([word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line)]) == OK
    printed = iter(capsys.readouterr().out.splitlines())
    for row in kernel.splitlines():
        assert row in printed, f"not printed, or in another order: {row}"


def test_rows_of_the_comparison_have_a_verdict() -> None:
    rows = re.findall(r"^\| (.*) \|$", (DOCS / "comparison.md").read_text(), re.MULTILINE)
    assert len(rows) > 15
    for row in rows:
        question, verdict, *cells = row.split(" | ")
        assert (question.endswith("?") and verdict in ("ahead", "level", "behind")) or question == "you ask", row
        assert len(cells) == 5 or question == "you ask", row
