"""Bounds of every number and text that is read from a file or another process.

What is read may be damaged, or written by somebody else. A value out of bounds is a `CacheError`, and the entry a miss;
no reader has to think of `10**400`, of a date in the year 9999, or of a text that moves the cursor of a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mirage_jax.errors import CacheError, printable

MAX_WARPS = 32  # of a block: CUDA's limit of 1,024 threads
MAX_STAGES = 8  # of a pipeline of loads; the tuner tries at most 6
MAX_TILE = 1 << 15  # elements along one axis: as many as a block may keep of one value
MAX_PARTS = 1 << 12  # of a split axis
MAX_PROGRAMS = 1 << 16  # that share the blocks of a grid; a device has a few hundred
MAX_KERNELS = 256  # of a graph; a region has at most a few dozen operators
MAX_SECONDS = 1e5  # that one run of a region may be said to take: a day
MAX_UNIX_SECONDS = 1e11  # seconds since 1970
MAX_CLOCK_SKEW_SECONDS = 86400.0  # seconds that the clock which dated an entry may be ahead of ours
MAX_TEXT_CHARS = 4096  # characters of one text for people
MAX_TEXTS_PER_FIELD = 64  # in one field
MAX_TIMED_VARIANTS = 20_000  # variants of one region that were timed
MAX_STRUCTURES = 256  # muGraphs without sizes in one entry


def whole(name: str, value: object, least: int, most: int) -> int:
    """A whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CacheError(f"{name}: found {brief(value)}; allowed are whole numbers from {least} to {most}")
    return value


def power_of_two(name: str, value: object, most: int) -> int:
    """1, 2, 4, .. up to `most`."""
    number = whole(name, value, 1, most)
    if number & (number - 1):
        raise CacheError(f"{name}: found {number}; allowed are powers of two up to {most}")
    return number


def real(name: str, value: object, most: float) -> float:
    """A number from 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise CacheError(f"{name}: found {brief(value)}; allowed are numbers from 0 to {most:g}")
    return float(value)


def flag(name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise CacheError(f"{name}: found {brief(value)}; allowed are true and false")
    return value


def text(name: str, value: object) -> str:
    """A text for people, as a terminal may show it."""
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS:
        raise CacheError(f"{name}: found {brief(value)}; allowed is a text of at most {MAX_TEXT_CHARS} characters")
    return printable(value)


def items(name: str, value: object, most: int) -> Sequence[Any]:
    """A list of at most so many."""
    if not isinstance(value, list) or len(value) > most:
        raise CacheError(f"{name}: found {brief(value)}; allowed is a list of at most {most}")
    return value


def mapping(name: str, value: object, most: int = MAX_TEXTS_PER_FIELD) -> Mapping[str, Any]:
    """An object of at most so many fields."""
    if not isinstance(value, dict) or len(value) > most:
        raise CacheError(f"{name}: found {brief(value)}; allowed is an object of at most {most} fields")
    return value


def brief(value: object) -> str:
    """A value as one short line, with its type where that does not show."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"a number of {value.bit_length()} bits"
    try:
        line = printable(" ".join(repr(value).split()))
    except Exception:  # whatever it is, it is about to be refused; Python does not write out the longest numbers
        line = "something"
    shown = line if len(line) <= 80 else line[:77] + "..."
    return shown if value is None or type(value) in (bool, int, float, str) else f"{shown} ({type(value).__name__})"
