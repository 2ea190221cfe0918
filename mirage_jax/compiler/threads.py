"""Work on threads of their own: interruptible, and with JAX's settings, which are each thread's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager

import jax

from mirage_jax.interruptible import POLL_SECONDS, background, interrupt

TIDY_SECONDS = 0.5  # seconds that interrupted work may take to tidy up, before whoever waits goes on
REPEAT_SECONDS = 2.0  # seconds after which it is told again, if it goes on: sooner would interrupt its tidying up
MAX_INTERRUPT_SECONDS = 60.0  # seconds after which nobody tells it any more


@contextmanager
def unchecked(x64: bool) -> Iterator[None]:
    """JAX as the user has set it, but infinities and NaN are no errors (some inputs have them), nor are transfers."""
    with jax.enable_x64(x64), jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        yield


def as_here[**P, T](work: Callable[P, T]) -> Callable[P, T]:
    """The same for another thread, `unchecked` like this one, and with the settings that cache keys have."""
    x64, precision = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with unchecked(x64), jax.default_matmul_precision(precision):
            return work(*args, **kwargs)

    return run


def apart[T](work: Callable[[], T]) -> T:
    """The result of `work`, done on a thread of its own: JAX operations in a lowering rule are traced, not run.

    An interrupt of the waiting thread is passed on to the working one, and raised when that has ended, or soon: inside
    of XLA a thread hears nothing for seconds, and nothing that it does then counts.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as why:
            done.set_exception(why)

    thread = background(run)
    try:
        while not done.done():
            wait([done], POLL_SECONDS)
        return done.result()
    finally:
        if not done.done():
            interrupt(thread)
            thread.join(TIDY_SECONDS)
            if thread.is_alive():
                threading.Thread(target=_insist, args=(thread,), name="mirage_jax", daemon=True).start()


def _insist(thread: threading.Thread) -> None:
    """Interrupt it again, in case that was lost, until it ends."""
    until = time.monotonic() + MAX_INTERRUPT_SECONDS
    while time.monotonic() < until:
        thread.join(REPEAT_SECONDS)
        if not thread.is_alive():
            return
        interrupt(thread)
