"""Finds the equations of a program that a muGraph can express, and those that every region computes for itself.

Constants, iotas and values made of them are free: every region that reads one computes it again. Masks made of
integers (lengths, segments) are repeated the same way if the integers take no more bytes than the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import jax.numpy as jnp

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.capture.sharding import is_explicit, is_local
from mirage_jax.jaxpr_frontend.partition import mask_factors
from mirage_jax.jaxpr_frontend.partition.fingerprint import Forms, by_kind, surroundings
from mirage_jax.jaxpr_frontend.partition.program import FlatEqn, FlatProgram, bytes_of
from mirage_jax.jaxpr_frontend.partition.reasons import BY_ITSELF, Code, NotExpressible
from mirage_jax.jaxpr_frontend.translate import rules
from mirage_jax.mugraph.domains.floats import is_float

type Reason = tuple[Code, str]

DISABLED: Reason = (Code.DISABLED, "written inside of mirage_jax.disabled()")
INDEXING_PRIMITIVES = frozenset({"gather", "scatter-add"})


class Eligibility:
    """Equations by position: `reasons` of those that stay with XLA, `constants` and `masks` that regions may repeat.

    More reasons are found while regions are cut and translated. `refuse` then gives one to all equal equations.
    """

    def __init__(self, program: FlatProgram, sharded: bool) -> None:
        self.program, self.eqns = program, program.eqns
        self.sharded, self.is_explicit = sharded, sharded and is_explicit(program)
        self.forms = Forms(self.eqns)
        self._reason_by_form: dict[tuple[int, bool], Reason | None] = {}
        self.constants = _find_constants(self)
        reasons = {n: self.reason(n) for n in range(len(self.eqns)) if n not in self.constants}
        self.reasons = {n: reason for n, reason in reasons.items() if reason is not None}
        self.reasons |= {n: DISABLED for n in reasons if self.eqns[n].is_disabled}
        of_constants = _powers_of_constants(self)
        self.constants.difference_update(of_constants)
        self.reasons |= of_constants
        for find in (_around_gathers, _indices, _between_products, _mask_factors):
            self.reasons |= find(self)
        self.masks = _find_masks(self)

    def reason(self, n: int, scalars: bool = False) -> Reason | None:
        """Find why an equation cannot be in a muGraph, once for equations of one form. scalars: accept scalars."""
        key = self.forms.of[n], scalars
        if key not in self._reason_by_form:
            self._reason_by_form[key] = _reason(self.eqns[n], self._is_divided, scalars)
        return self._reason_by_form[key]

    def _is_divided(self, eqn: FlatEqn) -> bool:
        """Tell whether XLA divides an equation, and not into the same equation on each device."""
        return self.sharded and not (self.is_explicit and is_local(eqn))

    @property
    def members(self) -> list[int]:
        """List the equations that may be in a region and that no other region repeats."""
        excluded = {*self.constants, *self.masks, *self.reasons}
        return [n for n in range(len(self.eqns)) if n not in excluded]

    def has_contraction(self, positions: Iterable[int]) -> bool:
        """Tell whether some equation is a contraction or reduction, which makes a region worth a search."""
        return any(self.eqns[n].primitive in rules.CONTRACTION_PRIMITIVES for n in positions)

    def refuse(self, position: int, reason: NotExpressible, patient: bool) -> None:
        """Give an equation its reason, and all that are like it: the same equations of equal layers.

        If not patient, also all of its primitive that read the same values: hundreds of slices of one product.
        """
        kinds, positions_of = self._kinds if reason.code in BY_ITSELF else self._kinds_in_context
        for n in (*positions_of[kinds[position]], *(() if patient else self._siblings(position))):
            self.constants.discard(n)
            self.masks.discard(n)
            self.reasons[n] = reason.code, reason.why

    def _siblings(self, position: int) -> Iterator[int]:
        eqn = self.eqns[position]
        for v in eqn.reads:
            yield from (r for r in self.program.readers[v] if r >= 0 and self.eqns[r].primitive == eqn.primitive)

    @cached_property
    def _kinds(self) -> tuple[Sequence[Any], Mapping[Any, Sequence[int]]]:
        """What decides whether each equation is expressible by itself."""
        kinds = [(f, *map(self.is_literal, e.reads)) for f, e in zip(self.forms.of, self.eqns, strict=True)]
        return by_kind(kinds)

    @cached_property
    def _kinds_in_context(self) -> tuple[Sequence[Any], Mapping[Any, Sequence[int]]]:
        return by_kind(surroundings(self.program, self._kinds[0]))

    # --- values seen through views

    def is_literal(self, value: int) -> bool:
        """Tell whether a value is a literal, in whatever shape."""
        n = self.program.producers.get(value)
        if n is None or n not in self.constants:
            return False
        return self.eqns[n].primitive != "iota" and all(map(self.is_literal, self.eqns[n].reads))

    def has_literal_operand(self, eqn: FlatEqn) -> bool:
        """Tell whether some operand of an equation is a literal."""
        return any(not isinstance(a, int) or self.is_literal(a) for a in eqn.inputs)

    def is_view(self, n: int) -> bool:
        """Tell whether an equation only shows its operand differently, and reading the operand costs no more."""
        return n in self._views and n not in self.reasons

    @cached_property
    def _views(self) -> frozenset[int]:
        return frozenset(n for n, eqn in enumerate(self.eqns) if _shows_operand(eqn))

    def source(self, value: int) -> int:
        """Find the value that a region reads if it repeats views."""
        while (n := self.program.producers.get(value)) is not None and n not in self.constants and self.is_view(n):
            if n in self.transposed_products:
                break
            (value,) = self.eqns[n].reads
        return value

    def repeated(self, piece: Iterable[int]) -> set[int]:
        """Find the equations outside of a piece that it repeats: constants, masks, and views of what it reads."""
        found: set[int] = set()
        todo = list(piece)
        while todo:
            made = {self.program.producers.get(v) for v in self.eqns[todo.pop()].reads}
            new = {n for n in made - found if n is not None and self._is_repeatable(n)}
            found |= new
            todo += new
        return found

    def _is_repeatable(self, n: int) -> bool:
        return n in self.constants or n in self.masks or (self.is_view(n) and n not in self.transposed_products)

    @cached_property
    def transposed_products(self) -> Mapping[int, int]:
        """Map transposes of a product's only result, and the views between, to the product.

        The product is as well written in their order, and its readers elsewhere have fewer axes then.
        """
        transposes = (n for n, eqn in enumerate(self.eqns) if eqn.primitive == "transpose" and n not in self.reasons)
        return {n: product for transpose in transposes for n, product in self._chain_to_product(transpose)}

    def _chain_to_product(self, transpose: int) -> Iterator[tuple[int, int]]:
        """A transpose and the views above it, each with the product that they show; nothing if there is none."""
        chain = [transpose]
        while True:
            (value,) = self.eqns[chain[-1]].reads
            above = self.program.producers.get(value)
            if above is None or above in self.reasons or len(self.program.readers[value]) > 1:
                return
            if self.eqns[above].primitive in rules.PRODUCT_PRIMITIVES:
                yield from ((n, above) for n in chain)
                return
            if not self.is_view(above):
                return
            chain.append(above)


@cache
def _is_inexact(dtype: Any) -> bool:
    """Whether numbers of a type are rounded. Keys of random numbers have a type, too."""
    return jnp.issubdtype(dtype, jnp.inexact)


def _shows_operand(eqn: FlatEqn) -> bool:
    is_unary_view = eqn.primitive in rules.VIEWS and len(eqn.reads) == 1
    return is_unary_view and bytes_of(eqn.in_avals[0]) <= bytes_of(eqn.out_avals[0])


# --- reasons


def _reason(eqn: FlatEqn, is_divided: Callable[[FlatEqn], bool], scalars: bool) -> Reason | None:
    """Why an equation cannot be in a muGraph, as far as can be said before its region is translated."""
    if eqn.has_effects:
        return Code.EFFECT, "its effects must happen in order"
    if jax_compat.bodies(eqn.eqn):
        return Code.CONTROL_FLOW, "its body is optimized on its own"
    if jax_compat.is_collective(eqn.eqn):
        return Code.COLLECTIVE, "devices exchange values here"
    if eqn.primitive not in rules.RULES:
        return Code.UNSUPPORTED_PRIMITIVE, rules.why_not(eqn.primitive)
    if jax_compat.has_context(eqn.eqn):
        return Code.CONTEXT, "it carries XLA metadata, or the place where it is to be computed"
    if (reason := next(filter(None, map(_reason_of_type, (*eqn.in_avals, *eqn.out_avals))), None)) is not None:
        return reason
    if is_divided(eqn):
        return Code.SHARDED, "XLA divides this program over several devices and cannot divide a kernel"
    if not scalars and all(aval.shape == () for aval in eqn.out_avals):
        return Code.RANK0, "a scalar is no work for a kernel"
    return None


def _reason_of_type(aval: Any) -> Reason | None:
    if not jax_compat.is_on_device(aval):
        return Code.CONTEXT, "it is in the memory of the host"
    if not all(isinstance(n, int) for n in aval.shape):
        return Code.SYMBOLIC_DIM, f"shape {aval.shape}"
    if 0 in aval.shape:
        return Code.ZERO_SIZE, f"shape {aval.shape}"
    try:
        rules.dtype_name(aval.dtype)
    except NotExpressible as e:
        return e.code, e.why
    return None


def _powers_of_constants(e: Eligibility) -> dict[int, Reason]:
    """Powers such as 10,000 ** (i / n) for all i, which XLA computes once, and more precisely than kernels do."""
    reason = Code.PARAMETERS, "a power of constants that is not one number"
    powers = (n for n in e.constants if e.eqns[n].primitive == "pow")
    return {n: reason for n in powers if isinstance(y := e.eqns[n].inputs[1], int) and not e.is_literal(y)}


def _around_gathers(e: Eligibility) -> dict[int, Reason]:
    """Equations that fill in NaN around a gather (`jax_compat.as_fill_apart`)."""
    reason = Code.NON_FINITE, "NaN where an index is out of range"
    others = ((n, eqn) for n, eqn in enumerate(e.eqns) if eqn.primitive != "gather")
    return {n: reason for n, eqn in others if any(call.primitive.name == "gather" for call in eqn.calls)}


def _indices(e: Eligibility) -> dict[int, Reason]:
    """Equations on integers that only make indices: a region reads the index, and has fewer operators."""
    found: set[int] = set()
    todo = [q.inputs[1] for n, q in enumerate(e.eqns) if q.primitive in INDEXING_PRIMITIVES and n not in e.reasons]
    while todo:
        atom = todo.pop()
        n = e.program.producers.get(atom) if isinstance(atom, int) else None
        if n is None or n in found or n in e.constants or is_float(e.eqns[n].out_avals[0].dtype):
            continue
        found.add(n)
        todo += e.eqns[n].reads
    return dict.fromkeys(found, (Code.NO_HEAVY_OP, "an index: XLA computes it"))


def _mask_factors(e: Eligibility) -> dict[int, Reason]:
    """Equations that make a mask by a huge factor."""
    reason = Code.NO_HEAVY_OP, "a mask by a huge factor: XLA makes it, and a kernel adds it"
    return dict.fromkeys(mask_factors.factors(e.program) - e.constants, reason)


def _between_products(e: Eligibility) -> dict[int, Reason]:
    """Slices that take all of a product apart, where a product reads one of them: fused projections of attention.

    One kernel for both sides would compute the projections again and again. What parts them well, products by XLA and
    one kernel that reads three results, is no plan of the search.
    """
    slices_of: dict[int, list[int]] = {}
    for n, eqn in enumerate(e.eqns):
        if eqn.primitive == "slice" and eqn.reads and n not in e.reasons:
            slices_of.setdefault(eqn.reads[0], []).append(n)
    reason = Code.LAYOUT, "a product is taken apart into operands of other products: a border"
    found = (slices for source, slices in slices_of.items() if _feeds_products(e, source, slices))
    return {n: reason for slices in found for n in slices}


def _feeds_products(e: Eligibility, source: int, slices: Sequence[int]) -> bool:
    """Whether slices are all of a product, and a product reads one slice."""
    shown = sum(bytes_of(e.eqns[n].out_avals[0]) for n in slices)
    return (
        _is_product(e, source)
        and shown >= bytes_of(e.program.avals[source])
        and any(_is_operand(e, v) for v in e.program.made_by(slices))
    )


def _is_product(e: Eligibility, value: int) -> bool:
    """Whether a value is a contraction, seen through views and pointwise operators."""
    todo, seen = [value], {value}
    while todo:
        n = e.program.producers.get(todo.pop())
        if n is None or e.eqns[n].primitive in rules.SLICING_PRIMITIVES:
            continue
        if e.eqns[n].primitive in rules.PRODUCT_PRIMITIVES:
            return True
        if n not in e.reasons and e.eqns[n].primitive not in rules.CONTRACTION_PRIMITIVES:
            todo += [v for v in e.eqns[n].reads if v not in seen]
            seen.update(e.eqns[n].reads)
    return False


def _is_operand(e: Eligibility, value: int) -> bool:
    """Whether a contraction reads a value, or a view of it."""
    readers = [e.eqns[r] for r in e.program.readers[value] if r >= 0]
    views = (eqn for eqn in readers if eqn.primitive in rules.VIEWS)
    return any(eqn.primitive in rules.PRODUCT_PRIMITIVES for eqn in readers) or any(
        _is_operand(e, v) for eqn in views for v in eqn.outputs
    )


# --- equations that regions repeat


def _find_constants(e: Eligibility) -> set[int]:
    """Equations made of literals and iotas only."""
    constants: set[int] = set()
    for n, eqn in enumerate(e.eqns):
        made = map(e.program.producers.get, eqn.reads)
        if _is_foldable(eqn.primitive) and constants.issuperset(made) and e.reason(n, scalars=True) is None:
            constants.add(n)
    return constants


def _is_foldable(primitive: str) -> bool:
    return primitive in rules.LAYOUT_PRIMITIVES or primitive in rules.FOLDS or primitive == "select_n"


def _find_masks(e: Eligibility) -> set[int]:
    """Equations that make masks of integers and of other masks which together take no more bytes, and views of masks.

    In whichever region these were, all others, of all layers, would have to read them from memory.
    """
    masks = set[int]()
    integers: dict[int, frozenset[int]] = {}  # value of a mask -> the values that it is made of
    of_floats = set[int]()  # values that depend on any: these are made where the floats are
    for n, eqn in enumerate(e.eqns):
        data = [v for v in eqn.reads if e.program.producers.get(v) not in e.constants]
        if _depends_on_floats(e, eqn, data, integers, of_floats):
            of_floats.update(eqn.outputs)
        elif _may_be_mask(e, n) and (eqn.out_avals[0].dtype == bool or not integers.keys().isdisjoint(data)):
            found = frozenset[int]().union(*(integers.get(v, {e.source(v)}) for v in data))
            if sum(bytes_of(e.program.avals[v]) for v in found) <= bytes_of(eqn.out_avals[0]):
                masks.add(n)
                integers |= dict.fromkeys(eqn.outputs, found)
    return masks


def _depends_on_floats(
    e: Eligibility, eqn: FlatEqn, data: Sequence[int], integers: Mapping[int, Any], of_floats: set[int]
) -> bool:
    others = (v for v in data if v not in integers)
    return not of_floats.isdisjoint(eqn.reads) or any(_is_inexact(e.program.avals[v].dtype) for v in others)


def _may_be_mask(e: Eligibility, n: int) -> bool:
    primitive = e.eqns[n].primitive
    is_layout = primitive in rules.LAYOUT_PRIMITIVES and primitive not in rules.SLICING_PRIMITIVES
    return n not in e.constants and n not in e.reasons and (is_layout or primitive == "select_n")
