"""Says what the optimizer is doing: a line on a terminal, a bar in a notebook, elsewhere a line of log now and then."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Protocol

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, Progress, TextColumn

log = logging.getLogger("mirage_jax.search")

LOG_SECONDS = 10.0  # between two lines of log

_is_shown = Lock()


class Say(Protocol):
    """Replaces the text that is shown; `done` is a fraction, where it is known."""

    def __call__(self, text: str, done: float | None = None) -> None: ...


def silent(text: str, done: float | None = None) -> None:
    """Say nothing."""


@contextmanager
def line() -> Iterator[Say]:
    """Give a function that replaces the text shown; the text is gone when the block ends. While another thread shows
    one, texts are logged.
    """
    if not _is_shown.acquire(blocking=False):
        yield logged()
        return
    try:
        with _line() as say:
            yield say
    finally:
        _is_shown.release()


@contextmanager
def _line() -> Iterator[Say]:
    console = Console(stderr=True)
    if console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None:
        shown = bar(console)
    elif console.is_terminal:
        shown = _status(console)
    else:
        yield logged()
        return
    try:
        say = shown.__enter__()
    except LiveError:  # the program shows a live display of its own
        yield logged()
        return
    try:
        yield say
    finally:
        shown.__exit__(None, None, None)


@contextmanager
def _status(console: Console) -> Iterator[Say]:
    with console.status("mirage_jax") as status:
        yield lambda text, done=None: status.update(f"[bold]mirage_jax[/] {text}")


@contextmanager
def bar(console: Console) -> Iterator[Say]:
    """Show a bar, which moves to and fro while nobody knows how much is done."""
    columns = TextColumn("[bold]mirage_jax"), BarColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda text, done=None: progress.update(
            task, description=text, completed=done or 0.0, total=None if done is None else 1.0
        )


def logged(now: Callable[[], float] = time.monotonic) -> Say:
    """Make a function that logs a text if the one before is long ago; whoever starts a search logs that."""
    last = now()

    def say(text: str, done: float | None = None) -> None:
        """Log the text, or leave it."""
        nonlocal last
        if now() >= last + LOG_SECONDS:
            last = now()
            log.info("%s", text)

    return say


def searching(say: Say, budget: float) -> Callable[[int, float | None, float], None]:
    """Tells about a search: states looked at, best estimate so far, time."""

    def tell(states: int, best: float | None, elapsed: float) -> None:
        """Report a search's progress."""
        estimate = "" if best is None else f" | best estimate {best * 1e6:.1f} us"
        text = f"search | {states / 1000:.0f}k states{estimate} | {elapsed:.0f}s of {budget:g}s"
        say(text, min(elapsed / budget, 1.0))

    return tell


def measuring(say: Say, total: int) -> Callable[[float | None], None]:
    """Tells about variants that are tried, each with its seconds, or None if it failed; how many, and the best."""
    lock, seconds = Lock(), list[float | None]()

    def tell(found: float | None) -> None:
        """Report one more variant."""
        with lock:  # several devices may try variants
            seconds.append(found)
            times = [s for s in seconds if s is not None]
        count = len(seconds)
        failed = count - len(times)
        best = f" | best {min(times) * 1e6:.1f} us" if times else ""
        text = f"measuring | {count} of {total} variants{best}" + (f" | {failed} failed" if failed else "")
        say(text, count / total)

    return tell
