"""The progress line: silent where nobody watches, one line where somebody does."""

import io

import pytest
from rich.console import Console

from mirage_jax import progress


@pytest.mark.parametrize("terminal", [False, True])
def test_only_on_a_terminal(terminal, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=out, force_terminal=terminal, width=80))
    with progress.line() as say:
        progress.searching(say, 30.0)(41_000, 12.3e-6, 3.0)
    text = out.getvalue()
    assert bool(text) == terminal
    if terminal:
        assert "41k states" in text and "12.3 us" in text and "3s of 30s" in text


def test_beside_another_live_display(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    with console.status("the program's own"), progress.line() as say:
        say("unheard")


def test_measuring() -> None:
    said: list[str] = []
    tell = progress.measuring(said.append, 3)
    for seconds in (None, 2e-6, 1e-6):
        tell(seconds)
    assert said == [
        "measuring | 1 of 3 variants | 1 failed",
        "measuring | 2 of 3 variants | best 2.0 us | 1 failed",
        "measuring | 3 of 3 variants | best 1.0 us | 1 failed",
    ]
