"""Work on several threads, such that an interrupt of whoever waits for it is noticed at once.

Python raises an interrupt in a thread when that thread runs again, and a thread that waits for a lock, a pool or a
process does not. So waits come in slices. Threads are daemons: one that is inside of XLA's compiler ends when that
does, and nobody waits for it, neither the caller nor Python at its end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

SLICE = 0.05  # seconds of waiting at a time


def spread[X, Y](
    work: Callable[[X], Y], items: Sequence[X], threads: int, end: Callable[[], object] = lambda: None
) -> list[Y]:
    """The results of `work` for each item, in order, with so many threads.

    What one of them raises, and an interrupt, is raised at once, after `end`, which may make the others end.
    """
    if not items:
        return []
    todo, done = queue.SimpleQueue[tuple[int, X]](), queue.SimpleQueue[tuple[int, Y | None, BaseException | None]]()
    for numbered in enumerate(items):
        todo.put(numbered)
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            try:
                n, item = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((n, work(item), None))
            except BaseException as why:
                done.put((n, None, why))

    for _ in range(min(threads, len(items))):
        threading.Thread(target=run, name="mirage_jax", daemon=True).start()
    found: dict[int, Y | None] = {}
    try:
        while len(found) < len(items):
            try:
                n, result, why = done.get(timeout=SLICE)
            except queue.Empty:
                continue
            if why is not None:
                raise why
            found[n] = result
    except BaseException:
        is_over.set()
        end()
        raise
    return [found[n] for n in range(len(items))]  # type: ignore[misc]
