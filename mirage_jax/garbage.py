"""Python's garbage collector, kept out of where it finds nothing."""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Generator[None]:
    """No search for cycles of garbage. What makes many small objects without cycles sets it off, and then it looks at
    all that is alive in the process, the user's program included, again and again for nothing: for a search of millions
    of tuples that takes as long as the search itself.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
