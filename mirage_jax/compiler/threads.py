"""Work on a thread of its own, interruptible."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

PATIENCE = 10.0  # seconds that interrupted work has to end


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
        until = time.monotonic() + PATIENCE
        while thread.is_alive() and time.monotonic() < until:
            if not done.done():
                number = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(KeyboardInterrupt))
            thread.join(0.1)
