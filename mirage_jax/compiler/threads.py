"""Work on threads of their own: interruptible, and with JAX's settings, which are each thread's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager

import jax

from mirage_jax.interruptible import POLL_SECONDS, background, insist, interrupt

TIDY_SECONDS = 0.5  # seconds that interrupted work may take to tidy up, before whoever waits goes on


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
            insist([thread])
