"""Threads that whoever waits for them can leave behind."""

import subprocess
import sys
import threading
import time

import pytest

from mirage_jax import children, interruptible
from mirage_jax.interruptible import spread


def test_results_are_in_order() -> None:
    assert spread(lambda n: time.sleep(0.02 * (3 - n)) or n * n, range(4), 4) == [0, 1, 4, 9]
    assert spread(str, [], 4) == [] and spread(str, [1, 2, 3], 1) == ["1", "2", "3"]


def test_an_error_ends_all_at_once() -> None:
    """Nobody waits for those that are at work, and what was not begun is not."""
    over, begun, ended = threading.Event(), [], []

    def work(n: int) -> None:
        begun.append(n)
        if n == 1:
            raise ValueError("no")
        over.wait(30)

    start = time.monotonic()
    with pytest.raises(ValueError, match="no"):
        spread(work, range(10), 2, lambda: ended.append(True))
    assert time.monotonic() - start < 5 and ended == [True]
    over.set()
    time.sleep(0.2)
    assert sorted(begun) == [0, 1]


class Swallows:
    """Swallows the interrupt of the thread that frees it, as a callback of the garbage collector may."""

    def __init__(self, begun: threading.Event) -> None:
        self.begun = begun

    def __del__(self) -> None:
        self.begun.set()
        while True:  # until the interrupt, which Python ignores here
            time.sleep(0.01)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_was_swallowed_is_repeated(monkeypatch) -> None:
    monkeypatch.setattr(interruptible, "REPEAT_SECONDS", 0.1)
    begun, ended = threading.Event(), threading.Event()

    def work(n: int) -> None:
        if n == 1:
            begun.wait(30)
            raise ValueError("no")
        try:
            Swallows(begun)
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    with pytest.raises(ValueError, match="no"):
        spread(work, range(2), 2)
    assert ended.wait(30)


SCRIPT = """
import threading, time
from mirage_jax import interruptible
def work():
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.01)
interruptible.background(work)
interruptible.background(lambda: (time.sleep(0.5), print("done")))
"""


def test_python_ends_when_they_have() -> None:
    """What is in C++ is waited for; what is in Python is interrupted, and says nothing."""
    command, start = children.python(SCRIPT), time.monotonic()
    done = subprocess.run(command, env=children.environment({}), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and time.monotonic() - start < interruptible.MAX_EXIT_SECONDS
    assert sys.executable == command[0]
