"""Cases that are no transformation."""
from collections.abc import Iterator
from transformations.cases import Case
def cases() -> Iterator[Case]:
    yield from ()
