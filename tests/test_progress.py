"""Progress: one line on a terminal, a bar in a notebook, a line of log every ten seconds elsewhere."""

import io
import logging

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


def test_a_line_of_log_every_ten_seconds(caplog) -> None:
    times = iter(range(0, 100, 4))
    with caplog.at_level(logging.INFO, "mirage_jax"):
        say = progress.logged(lambda: next(times))
        for n in range(8):
            say(f"step {n}")
    assert [r.getMessage() for r in caplog.records] == ["step 2", "step 5"]
    assert {r.name for r in caplog.records} == {"mirage_jax.search"}


def test_a_bar() -> None:
    out = io.StringIO()
    with progress.bar(Console(file=out, force_terminal=True, width=100)) as say:
        say("proving")
        progress.searching(say, 30.0)(41_000, None, 15.0)
        progress.measuring(say, 2)(1e-6)
    assert "measuring | 1 of 2 variants" in out.getvalue() and "\u2501" in out.getvalue()


def test_a_notebook_without_widgets_has_no_bar(monkeypatch, caplog) -> None:
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=io.StringIO(), force_jupyter=True))
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, "mirage_jax"), progress.line() as say:
        say("not yet")
    assert not caplog.records


def test_beside_another_live_display(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    with console.status("the program's own"), progress.line() as say:
        say("unheard")


def test_two_regions_at_a_time_share_no_line(monkeypatch) -> None:
    outs: list[io.StringIO] = []

    def console(**_):
        outs.append(io.StringIO())
        return Console(file=outs[-1], force_terminal=True, width=80)

    monkeypatch.setattr(progress, "Console", console)
    for _ in range(2):
        with progress.line() as say, progress.line() as other:
            say("first")
            other("second")
    assert len(outs) == 2 and all("first" in out.getvalue() for out in outs)


def test_measuring() -> None:
    said: list[str] = []
    tell = progress.measuring(lambda text, done=None: said.append(text), 3)
    for seconds in (None, 2e-6, 1e-6):
        tell(seconds)
    assert said == [
        "measuring | 1 of 3 variants | 1 failed",
        "measuring | 2 of 3 variants | best 2.0 us | 1 failed",
        "measuring | 3 of 3 variants | best 1.0 us | 1 failed",
    ]
