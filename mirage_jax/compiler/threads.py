"""Work on threads of their own: interruptible, and with JAX's settings, which are each thread's own."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import jax

AGAIN = 2.0  # seconds after which it is told again, if it goes on: sooner would interrupt its tidying up
PATIENCE = 10.0  # seconds that interrupted work has to end


@contextmanager
def unchecked(x64: bool) -> Iterator[None]:
    """JAX as the user has set it, but infinities and NaN are no errors (some inputs have them), nor are transfers."""
    with jax.enable_x64(x64), jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        yield


def as_here[**P, T](work: Callable[P, T]) -> Callable[P, T]:
    """The same for another thread, `unchecked` like this one."""
    x64 = jax.config.jax_enable_x64

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with unchecked(x64):
            return work(*args, **kwargs)

    return run


def apart[T](work: Callable[[], T]) -> T:
    """The result of `work`, done on a thread of its own: JAX operations in a lowering rule are traced, not run.

    An interrupt of the waiting thread is passed on to the working one, and raised when that has ended.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as why:
            done.set_exception(why)

    thread = threading.Thread(target=run, name="mirage_jax", daemon=True)
    thread.start()
    try:
        return done.result()
    finally:
        until, again = time.monotonic() + PATIENCE, 0.0
        while thread.is_alive() and time.monotonic() < until:
            if not done.done() and time.monotonic() >= again:
                again = time.monotonic() + AGAIN
                number = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(KeyboardInterrupt))
            thread.join(0.1)
