"""The documents are true: README's Python runs, links lead somewhere, options and operators are all in their tables."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from mirage_jax import config
from mirage_jax.cli import OK, build_parser, main
from mirage_jax.jaxpr_frontend.rules import RULES
from mirage_jax.mugraph.operators import FUNCTIONS, OPERATORS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def operators() -> str:
    """docs/operators.md, from the table of operators."""
    lines = [
        "# Operators",
        "",
        "Generated from `mugraph/operators.py`; `./scripts/test tests/test_docs.py --update-golden` writes it anew.",
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
        "Pointwise functions, uninterpreted in proofs; those of one operand act on `scale * x + offset`:",
        ", ".join(f"`{f.name}`" + (f" ({f.arity})" if f.arity > 1 else "") for f in FUNCTIONS.values()) + ".",
        "",
        "JAX primitives that regions may have; [layers.md](layers.md) says what becomes of layers, and what stays out:",
        ", ".join(f"`{name}`" for name in sorted(RULES)) + ".",
    ]
    return "\n".join(lines) + "\n"


def test_operators(request: pytest.FixtureRequest) -> None:
    file = ROOT / "docs" / "operators.md"
    if request.config.getoption("--update-golden"):
        file.write_text(operators())
    assert file.read_text() == operators(), f"{file} is out of date: run this with --update-golden"


def test_python_in_the_readme_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert blocks
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert len(namespace["report"].regions) == 1  # type: ignore[attr-defined]
    assert [g.shape for g in namespace["gradients"]] == [(4, 1024, 32)] * 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda f: f.name)
def test_links(file) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", file.read_text()):
        if not link.startswith("https://"):
            assert (file.parent / link).exists(), f"{file.name} links to {link}, which is not there"


def test_every_option_is_in_the_readme() -> None:
    for field in fields(config.Options):
        assert f"| `{field.name}` |" in README, field.name


@pytest.mark.parametrize("line", re.findall(r"python -m mirage_jax (.+?)(?:`|  #|\n)", README))
def test_commands_of_the_readme_are_accepted(line) -> None:
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line)]
    assert build_parser().parse_args(words).run is not None


def test_the_preview_in_the_readme_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    command, after = re.split(r"`\n", README[README.index("mirage_jax preview ") + len("mirage_jax ") :], maxsplit=1)
    assert main([word.strip('"') for word in re.findall(r'"[^"]*"|\S+', command)]) == OK
    printed = iter(capsys.readouterr().out.splitlines())
    for block in re.findall(r"^```\n(.*?)^```$", after, re.DOTALL | re.MULTILINE)[:2]:
        for line in block.splitlines():
            assert line.startswith("certified: ") or line in printed, f"not printed, or in another order: {line}"
