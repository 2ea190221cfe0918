"""All exceptions of the package. Messages say what we found, and how to fix it.

Policy: only `UsageError` reaches a user by default. Everything else is caught at the border of the optimizer,
logged once with its reason, and the user's own program runs; `strict=True` raises it instead.
"""

import unicodedata


class MirageError(Exception):
    """Base class of all errors of mirage_jax."""


class UsageError(MirageError, ValueError, TypeError):
    """The caller passed an invalid value; the message says which, and which values are allowed."""


class GraphError(MirageError):
    """A muGraph is not well formed."""


class ParseError(MirageError):
    """The text of a muGraph cannot be read; the message says where, and the expected form."""


class UnsupportedError(MirageError):
    """A region or a kernel is outside of what a stage can express; the region stays with XLA."""


class VerificationError(MirageError):
    """A certificate cannot be issued: the graphs differ, or the error bound misses its target."""


class DifferentError(VerificationError):
    """The graphs are different functions: in the shapes of inputs or outputs, or in what they compute."""


class LoweringError(MirageError):
    """A kernel could not be generated, compiled or launched."""


class KernelFault(LoweringError):
    """A kernel touched memory that is not its own, or did not write each element of its results once."""


class CacheError(MirageError):
    """A cache entry is broken or does not belong to its key; always treated as a miss."""


class TrialError(MirageError):
    """No process can be made to work that tries variants; they are tried in the user's process then."""


def is_out_of_memory(text: str) -> bool:
    """Whether an error of XLA or CUDA says that the device had no memory left."""
    said = text.lower().replace("_", " ")
    return "out of memory" in said or "resource exhausted" in said


def in_one_line(error: BaseException) -> str:
    """What kind of error it is, and the first line of what it says, as a terminal may show it."""
    return f"{type(error).__name__}: {without_kind(error)}"


def without_kind(error: BaseException) -> str:
    """The first line of what an error says, as a terminal may show it."""
    return printable(str(error).partition("\n")[0])


def printable(value: str) -> str:
    """The text with every character escaped that could do more on a terminal than be seen: controls, directions."""
    return value if value.isprintable() else "".join(map(_seen, value))


def _seen(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode("ascii")
