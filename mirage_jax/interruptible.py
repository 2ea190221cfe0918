"""Work on several threads, such that an interrupt of whoever waits for it is noticed at once.

Python raises an interrupt in a thread when that thread runs again, and one that waits for a lock, a pool or a process
does not. So waits come in slices. Whoever is interrupted does not wait for a thread that is inside of XLA's compiler
either: it ends when the compiler does, and nothing that it did counts. Only the end of Python waits for it, since C++
that returns to a Python which is no more ends the process with an abort. A callback of the garbage collector, or a
`__del__`, may swallow an interrupt; so threads are interrupted until they end.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

POLL_SECONDS = 0.05  # seconds of waiting at a time
REPEAT_SECONDS = 2.0  # seconds after which a thread is interrupted again: sooner would interrupt its tidying up
MAX_REPEAT_SECONDS = 60.0  # seconds after which it is left alone
MAX_EXIT_SECONDS = 20.0  # seconds that the end of Python waits for threads

_threads = weakref.WeakSet[threading.Thread]()


def background(work: Callable[[], object]) -> threading.Thread:
    """A thread that does this, and that an interrupt may end."""

    def run() -> None:
        with suppress(KeyboardInterrupt):
            work()

    _wait_at_the_end()
    thread = threading.Thread(target=run, name="mirage_jax", daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


@functools.cache
def _wait_at_the_end() -> None:
    """What is registered late is called early: JAX is still there."""

    def wait() -> None:
        threads = list(_threads)
        for thread in threads:
            interrupt(thread)
        _insist(threads, MAX_EXIT_SECONDS)

    atexit.register(wait)


def interrupt(thread: threading.Thread) -> None:
    """Have a thread raise `KeyboardInterrupt` as soon as it runs Python again."""
    if thread.is_alive():
        number = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(KeyboardInterrupt))


def insist(threads: Iterable[threading.Thread]) -> None:
    """Interrupt threads again that do not end, from a thread of its own: nobody waits."""
    if alive := [thread for thread in threads if thread.is_alive()]:
        repeat = threading.Thread(target=_insist, args=(alive, MAX_REPEAT_SECONDS), name="mirage_jax", daemon=True)
        repeat.start()


def _insist(threads: list[threading.Thread], seconds: float) -> None:
    """Wait until interrupted threads have ended, for so many seconds at most, and interrupt them again meanwhile."""
    until = time.monotonic() + seconds
    while threads and (now := time.monotonic()) < until:
        again = min(now + REPEAT_SECONDS, until)
        for thread in threads:
            thread.join(max(0.0, again - time.monotonic()))
        threads = [thread for thread in threads if thread.is_alive()]
        for thread in threads:
            interrupt(thread)


def spread[X, Y](
    work: Callable[[X], Y], items: Sequence[X], threads: int, end: Callable[[], object] = lambda: None
) -> list[Y]:
    """The results of `work` for each item, in order, with so many threads.

    An exception or an interrupt is raised at once, after `end`, which may make the other threads end.
    """
    todo, done = queue.SimpleQueue[tuple[int, X]](), queue.SimpleQueue[tuple[int, Y | None, BaseException | None]]()
    for numbered in enumerate(items):
        todo.put(numbered)

    def run() -> None:
        while True:
            try:
                n, item = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((n, work(item), None))
            except BaseException as why:
                done.put((n, None, why))
                return

    running: list[threading.Thread] = []
    found: dict[int, Y | None] = {}
    try:
        running += [background(run) for _ in range(min(threads, len(items)))]
        while len(found) < len(items):
            try:
                n, result, why = done.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if why is not None:
                raise why
            found[n] = result
    except BaseException:
        end()
        for thread in running:
            interrupt(thread)
        insist(running)
        raise
    return [found[n] for n in range(len(items))]  # type: ignore[misc]
