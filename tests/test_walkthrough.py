"""docs/walkthrough.md prints what it says: its Python blocks run in order, each followed by its output."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "walkthrough.md"
# A block of Python and, if it prints anything, the block of text behind it.
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE)


def run(page: str) -> str:
    """The page with every output block replaced by the output of the Python block before it."""
    namespace: dict[str, Any] = {"__name__": "walkthrough"}

    def replaced(block: re.Match[str]) -> str:
        printed = io.StringIO()
        line = page[: block.start("code")].count("\n")
        code = compile("\n" * line + block["code"], str(PAGE), "exec")  # with the page's line numbers in tracebacks
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        text = "\n".join(row.rstrip() for row in printed.getvalue().strip().splitlines())
        output = f"\n```text\n{text}\n```\n" if text else ""
        return f"```python\n{block['code']}```\n{output}"

    return BLOCK.sub(replaced, page)


def test_every_block_of_output_has_its_code() -> None:
    page = PAGE.read_text()
    assert len(re.findall(r"^```text$", page, re.MULTILINE)) == sum(
        m["output"] is not None for m in BLOCK.finditer(page)
    )


def test_the_walkthrough_prints_what_it_says(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("triton")  # the exact check runs kernels in its interpreter
    page = PAGE.read_text()
    printed = run(page)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(printed)
        return
    assert printed == page, "run this with --update-golden, and read what has changed"


def test_an_output_that_is_not_printed_is_noticed() -> None:
    page = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"
    assert run(page) == page.replace("3", "2")
