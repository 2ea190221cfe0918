"""Compares an optimized function with plain `jax.jit` on the user's own arguments: the option `check`.

A call that is checked returns the result of plain jit, so it is right whatever the comparison says. Where results
differ, plain jit runs from then on for arguments of these shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import jax

from mirage_jax import agreement
from mirage_jax.errors import UsageError, VerificationError, in_one_line
from mirage_jax.jaxpr_frontend import flax_modules

log = logging.getLogger("mirage_jax")

type Function = Callable[..., Any]
type Copied = Callable[[Any, Any], tuple[Any, Any]]


@dataclass
class SelfCheck:
    """Compares calls of one function, and remembers the result for each kind of arguments.

    Args:
        name: the function's name, for the message.
        mode: "first" compares the first call with each kind of arguments, "always" compares every call.
        strict: raise where results differ, instead of a warning and plain jit.
    """

    name: str
    mode: str
    strict: bool = False
    _agree: dict[Hashable, bool] = field(default_factory=dict, init=False)

    def call(self, ours: Function, plain: Function, copied: Copied, args: Any, kwargs: Any) -> Any:
        """Call `ours`, or compare it with `plain` and return the result of `plain`.

        `copied`: copies arguments that a call consumes, for `ours`.

        Raises:
            VerificationError: the results differ, and `strict` is set.
        """
        kind = _kind_of(args, kwargs)
        if (agree := self._agree.get(kind)) is False:
            return plain(*args, **kwargs)
        if agree and self.mode == "first":
            return ours(*args, **kwargs)
        own_args, own_kwargs = copied(args, kwargs)
        found, why = None, ""
        try:
            found = ours(*own_args, **own_kwargs)
        except UsageError:
            raise
        except Exception as error:
            why = f"it fails: {in_one_line(error)}"
        wanted = plain(*args, **kwargs)
        self._note(kind, why or agreement.difference(found, wanted))
        return wanted

    def _note(self, kind: Hashable, why: str) -> None:
        self._agree[kind] = not why
        if not why:
            return
        text = f"{self.name} differs from plain jit: {why}"
        if self.strict:
            raise VerificationError(text)
        log.warning("%s; plain jit runs for these shapes; mirage_jax.bisect finds the region", text)


def _kind_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """The structure of arguments, with the types of arrays and floats, and all other values."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    return structure, tuple(map(_kind_of_leaf, leaves))


def _kind_of_leaf(x: Any) -> Hashable:
    if flax_modules.is_module(x):
        return type(x)
    return jax.typeof(x) if hasattr(x, "dtype") or isinstance(x, float) else x
