"""What equations are but for the values that they read and make, so that equal layers are looked at once.

The form of an equation is a number: primitive, parameters, types and literals. The form of a piece of a program is the
forms of its equations with its values numbered in order of appearance; pieces of one form have the same translation.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from mirage_jax.jaxpr_frontend.flat import FlatEqn
from mirage_jax.jaxpr_frontend.jax_compat import JaxprEqn, Literal, has_context


class Forms:
    """Numbers for the forms of one program's equations."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, tuple[JaxprEqn, int]] = {}  # by identity; the equation is kept, so that no other gets it

    def equation(self, eqn: JaxprEqn) -> int:
        """Calls of one cached function share its equations, so most are known by identity."""
        if (known := self._known.get(id(eqn))) is not None:
            return known[1]
        inputs = tuple([_literal(v) if isinstance(v, Literal) else v.aval for v in eqn.invars])
        outputs = tuple([v.aval for v in eqn.outvars])
        key: Hashable = (eqn.primitive.name, tuple(eqn.params.items()), inputs, outputs, has_context(eqn))
        try:
            number = self._numbers.setdefault(key, len(self._numbers))
        except TypeError:  # a parameter that has no hash: the equation is like no other
            number = self._numbers.setdefault(("alone", id(eqn)), len(self._numbers))
        self._known[id(eqn)] = eqn, number
        return number

    def piece(self, eqns: Sequence[FlatEqn], results: Sequence[int]) -> Hashable:
        """Of equations in their order, of which `results` are wanted."""
        names: dict[int, int] = {}
        form: list[Hashable] = []
        for eqn in eqns:
            form.append(self.equation(eqn.eqn))
            for v in eqn.reads:
                form.append(names.setdefault(v, len(names)))
            for v in eqn.outputs:
                names[v] = len(names)
        return tuple(form), tuple(names[v] for v in results)


def _literal(literal: Any) -> Hashable:
    """By its bytes: nan is nan, and -0.0 is not 0.0."""
    value = np.asarray(literal.val)
    return value.dtype, value.tobytes(), literal.aval
