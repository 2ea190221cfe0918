"""Searches the regions of a program before their turn comes, each in a process of its own.

A search needs one core and no GPU. What follows it, timing variants, needs the GPU and few cores. So while XLA's code
and the first regions are timed, the other regions are searched, and when their turn comes the candidates are there. How
good they look by the cost model then decides whose turn it is (`budget_split.shares`).
"""

from __future__ import annotations

import logging
import math
import queue
from collections.abc import Mapping
from concurrent.futures import Future, wait

from mirage_jax.errors import in_one_line
from mirage_jax.interruptible import POLL_SECONDS, background
from mirage_jax.search.decompose.subprocesses import FAILURES, Found, Processes, SubSearch

log = logging.getLogger("mirage_jax.search")


class SearchAhead:
    """Searches that run in processes, in the order in which they are given, `workers` at a time."""

    def __init__(self, tasks: Mapping[str, SubSearch], workers: int) -> None:
        """tasks: by the region's text."""
        self._processes = Processes()
        self._futures: dict[str, Future[Found]] = {text: Future() for text in tasks}
        self._todo = queue.SimpleQueue[tuple[Future[Found], SubSearch]]()
        for text, task in tasks.items():
            self._todo.put((self._futures[text], task))
        for _ in range(min(workers, len(tasks))):
            background(self._work)

    def _work(self) -> None:
        while True:
            try:
                future, task = self._todo.get_nowait()
            except queue.Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._processes.found(task))
            except BaseException as why:
                future.set_exception(why)
                if not isinstance(why, FAILURES):  # such as that a region is not searched: who asks will see it
                    raise
                log.info("a search ahead failed: %s", in_one_line(why))

    def take(self, text: str) -> Found | None:
        """Wait for what is found for a region; None if its search has not begun, or has failed."""
        future = self._futures.get(text)
        if future is None or future.cancel():
            return None
        while not future.done():
            wait([future], POLL_SECONDS)
        return None if future.cancelled() or future.exception() is not None else future.result()

    def best(self, text: str) -> float | None:
        """Give the seconds of the best candidate by the cost model: infinity if there is none; None while unknown."""
        future = self._futures.get(text)
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            return None
        return min((c.seconds for c in future.result()[0]), default=math.inf)

    def end(self) -> None:
        """End all searches. Those that have not begun never do."""
        for future in self._futures.values():
            future.cancel()
        self._processes.end()
