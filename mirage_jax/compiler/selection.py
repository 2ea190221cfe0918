"""Which regions the options `skip` and `only` leave to XLA.

A selector is a source line, ``model.py:41`` with as much of the path as tells files apart, or the key of a region, as
`explain` prints it, or its first digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mirage_jax.config import Options, is_source_line

SKIPPED = "skipped by the option skip"
NOT_CHOSEN = "skipped by the option only, which does not name it"

_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::\d+)?(?: \(.*\))?")


def why_skipped(options: Options, where: Sequence[str], key: str) -> str:
    """Say why a region stays with XLA; an empty text if the options leave it to the optimizer.

    Args:
        options: the user's; only `skip` and `only` matter.
        where: the region's source lines, as in ``model.py:41:4 (f)``.
        key: its cache key; empty if there is none.
    """
    if is_named(options.skip, where, key):
        return SKIPPED
    if options.only is not None and not is_named(options.only, where, key):
        return NOT_CHOSEN
    return ""


def is_named(selectors: Iterable[str], where: Sequence[str], key: str) -> bool:
    """Whether some selector is about a region with these lines and this key."""
    return any(is_line_of(s, where) or is_key(s, key) for s in selectors)


def is_line_of(selector: str, where: Iterable[str]) -> bool:
    """Whether a selector is one of these source lines."""
    if not is_source_line(selector):
        return False
    file, _, line = selector.rpartition(":")
    return any(found["line"] == line and _ends(found["file"], file) for found in map(_PLACE.fullmatch, where) if found)


def is_key(selector: str, key: str) -> bool:
    """Whether a selector is this key, or its beginning."""
    return not is_source_line(selector) and key.startswith(selector.lower())


def _ends(path: str, tail: str) -> bool:
    """Whether a path ends with a file's name, or with some directories and the name."""
    path, tail = (text.replace("\\", "/").removeprefix("./") for text in (path, tail))
    return path == tail or path.endswith("/" + tail)
