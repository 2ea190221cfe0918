"""Python's garbage collector, kept out of where it finds nothing."""

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

_lock = threading.Lock()
_inside, _enabled = 0, False  # how many are inside, and whether the first one found it at work


@contextmanager
def no_collection() -> Generator[None]:
    """No search for cycles of garbage. What makes many small objects without cycles sets it off, and then it looks at
    all that is alive in the process, the user's program included, again and again for nothing: for a search of millions
    of tuples that takes as long as the search itself. The last thread inside leaves it as the first one found it.
    """
    global _inside, _enabled
    with _lock:
        if _inside == 0:
            _enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _enabled:
                gc.enable()
