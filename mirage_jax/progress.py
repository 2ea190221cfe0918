"""One line about what the optimizer is doing, on a terminal; nothing where standard error is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from rich.console import Console
from rich.errors import LiveError

type Say = Callable[[str], None]


@contextmanager
def line() -> Iterator[Say]:
    """A function that replaces the line's text; the line is gone when the block ends."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    status = console.status("mirage_jax")
    try:
        status.start()
    except LiveError:  # the program shows a live display of its own
        yield lambda _: None
        return
    try:
        yield lambda text: status.update(f"[bold]mirage_jax[/] {text}")
    finally:
        status.stop()


def searching(say: Say, budget: float) -> Callable[[int, float | None, float], None]:
    """Tells about a search: states looked at, best estimate so far, time."""

    def tell(states: int, best: float | None, elapsed: float) -> None:
        """Report a search's progress."""
        estimate = "" if best is None else f" | best estimate {best * 1e6:.1f} us"
        say(f"search | {states / 1000:.0f}k states{estimate} | {elapsed:.0f}s of {budget:g}s")

    return tell


def measuring(say: Say, total: int) -> Callable[[float | None], None]:
    """Tells about variants that are tried, each with its seconds, or None if it failed; how many, and the best."""
    lock, seconds = Lock(), list[float | None]()

    def tell(found: float | None) -> None:
        """Report one more variant."""
        with lock:  # several devices may try variants
            seconds.append(found)
            times = [s for s in seconds if s is not None]
        failed = len(seconds) - len(times)
        best = f" | best {min(times) * 1e6:.1f} us" if times else ""
        say(f"measuring | {len(seconds)} of {total} variants{best}" + (f" | {failed} failed" if failed else ""))

    return tell
