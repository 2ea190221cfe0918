"""Cuts a flat program into regions that a muGraph can express, and says of every other equation why it is left out.

1. Each equation gets a reason to stay with XLA, or none (eligibility.py).
2. The others are cut into pieces (cutting.py).
3. Each piece is translated. An equation that turns out not to be expressible is left out, and the program is cut again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.capture.rematerialize import is_cheap, repeated
from mirage_jax.jaxpr_frontend.capture.sharding import one_device
from mirage_jax.jaxpr_frontend.jax_compat import Jaxpr
from mirage_jax.jaxpr_frontend.partition.clusters import Dependencies, in_order
from mirage_jax.jaxpr_frontend.partition.compared import compared
from mirage_jax.jaxpr_frontend.partition.cutting import CutContext, Piece, pieces
from mirage_jax.jaxpr_frontend.partition.eligibility import Eligibility
from mirage_jax.jaxpr_frontend.partition.program import FlatEqn, FlatProgram, flatten
from mirage_jax.jaxpr_frontend.partition.reasons import Code, LeftOut
from mirage_jax.jaxpr_frontend.partition.remade import Remade, number
from mirage_jax.jaxpr_frontend.translate.translate import Region, TranslationRefused, renamed, translate

type Pieces = Mapping[Region, Piece]  # the equations that each region takes over, without those that it repeats

MAX_REGION_OPERATORS = 24
MAX_CUTS = 16  # cuts after which all that is refused is left out at once: the next cut could have kept some of it
POINTWISE = (Code.NO_HEAVY_OP, "only pointwise or layout operations")
LONE_REDUCTION = (Code.NO_HEAVY_OP, "a reduction by itself")
LEFT_TO_LIBRARIES = (Code.LIBRARY, "a large matrix product with little around it: XLA's libraries are best at these")


@dataclass(frozen=True)
class Partition:
    """A program as steps in execution order: a region, or the position of an equation that XLA keeps. `remade`: regions
    that make values of others again, and the numbers that `Remade` gives their pieces.
    """

    program: FlatProgram
    steps: tuple[Region | int, ...]
    list_left_out: Callable[[], tuple[LeftOut, ...]]
    remade: Mapping[Region, int] = field(default_factory=dict[Region, int])

    @cached_property
    def left_out(self) -> tuple[LeftOut, ...]:
        """List the equations that XLA keeps. Slow: it names a line of the user's source for each, for reports."""
        return self.list_left_out()

    @property
    def regions(self) -> tuple[Region, ...]:
        """List the regions in execution order."""
        return tuple(s for s in self.steps if isinstance(s, Region))


@dataclass(frozen=True)
class Analysis:
    """All regions of a jaxpr and of the bodies of its control flow, and the equations left out."""

    regions: tuple[Region, ...]
    left_out: tuple[LeftOut, ...]

    def __add__(self, other: Analysis) -> Analysis:
        return Analysis(self.regions + other.regions, self.left_out + other.left_out)


def analyse(jaxpr: Jaxpr, max_ops: int = MAX_REGION_OPERATORS, sharded: bool = False, remat: bool = False) -> Analysis:
    """Find the regions of `jaxpr` and of its bodies; runs nothing.

    sharded: XLA divides the program over several devices, except for the bodies of shard_map. Regions are those that
    one device sees.
    remat: recompute large values that are cheap to make, as `rematerialize.repeated` does.
    """
    program = flatten(jaxpr)
    found = partition(repeated(program) if remat else program, max_ops, sharded, remat)
    regions = found.regions
    if sharded:
        regions = tuple(local.region for r in regions if (local := one_device(r)) is not None)
    inner = (
        analyse(body, max_ops, sharded and eqn.primitive != "shard_map", remat)
        for eqn in found.program.eqns
        if not eqn.is_disabled
        for body in jax_compat.bodies(eqn.eqn)
    )
    return sum(inner, Analysis(regions, found.left_out))


def partition(
    program: FlatProgram,
    max_ops: int = MAX_REGION_OPERATORS,
    sharded: bool = False,
    remat: bool = False,
    left: Collection[int] = (),
) -> Partition:
    """Divide a program into regions and left-out equations. sharded: over several devices, by XLA. remat: regions make
    large values again that are cheap to make, except those in `left`, by their numbers in `Partition.remade`.
    """
    eligibility, dependencies = Eligibility(program, sharded), Dependencies.of(program)
    translator = _Translator(eligibility, remat, left)
    known_pieces = {}
    for cut in itertools.count():
        if cut == MAX_CUTS:
            translator.lose_patience()
        found, unprofitable = pieces(CutContext(eligibility, dependencies, max_ops, known_pieces))
        if (piece_of := translator.regions(found)) is not None:
            steps = _schedule(dependencies, piece_of, set().union(*translator.unneeded))
            left_out = partial(_left_out, eligibility, tuple(piece_of), unprofitable)
            return Partition(program, steps, left_out, translator.remade(piece_of))
    raise AssertionError("unreachable")


class _Translator:
    """Translates pieces, once for those of one form, and tells `eligibility` which equations are refused."""

    def __init__(self, eligibility: Eligibility, remat: bool, left: Collection[int]) -> None:
        self.eligibility, self.program, self.remat, self.left = eligibility, eligibility.program, remat, left
        self.again: Mapping[Piece, set[int]] = {}  # equations of others that the last cut's pieces repeat
        self.unneeded: Collection[Piece] = ()  # of the last cut: others make their values for themselves
        self.patient = True  # leaves out only what no other cut could keep, while there is any
        self.known: dict[object, Region | TranslationRefused | None] = {}  # by form

    def lose_patience(self) -> None:
        """Leave out all that is refused from now on."""
        self.patient = False
        self.known = {form: x for form, x in self.known.items() if not isinstance(x, TranslationRefused)}

    def regions(self, found: Sequence[Piece]) -> Pieces | None:
        """Make the regions of all pieces. None if some equation was refused: then the program is to be cut again."""
        found = found if self.remat else [*filter(self.eligibility.has_contraction, found)]
        wholes = dict(zip(found, self._wholes(found), strict=True))
        results = self._results(found, wholes)
        if light := set(itertools.filterfalse(self.eligibility.has_contraction, results)):
            return self.regions(_less(found, light))
        while len(results) < len(wholes):  # others make the values of some for themselves, and these read nothing then
            wholes = {piece: wholes[piece] for piece in results}
            results = self._results(found, wholes)
        regions = self._translated(wholes, results)
        if regions is None:
            return None
        if empty := set(wholes).difference(regions.values()):
            return self.regions(_less(found, empty))
        self.unneeded = set(found).difference(wholes)
        return regions

    def _results(self, found: Sequence[Piece], wholes: Mapping[Piece, Piece]) -> dict[Piece, list[int]]:
        """The values of each piece that others read, if there are any. `wholes`: needed pieces and what they repeat."""
        demanded = _demanded(self.program, found, wholes.values())
        made = {piece: [v for v in self.program.made_by(piece) if v in demanded] for piece in wholes}
        return {piece: values for piece, values in made.items() if values}

    def _translated(self, wholes: Mapping[Piece, Piece], results: Mapping[Piece, Sequence[int]]) -> Pieces | None:
        """The regions of pieces, where there is something to compute. None if some equation was refused."""
        regions: dict[Region, Piece] = {}
        refused = is_final = False  # is_final: some equation cannot be in any region
        for piece, whole in wholes.items():
            if is_final and not self.eligibility.reasons.keys().isdisjoint(whole):
                continue
            try:
                region = self._region(whole, results[piece])
            except TranslationRefused as why:
                refused = True
                is_final |= why.by_itself
                self._refuse(whole, why, is_final)
                continue
            if region is not None:
                regions[region] = piece
        return None if refused else regions

    def _wholes(self, found: Sequence[Piece]) -> list[Piece]:
        """Pieces with the equations that they repeat."""
        remade = Remade(self.eligibility, found, self._may_be_repeated, self.left)
        self.again = {piece: remade.of(piece) for piece in found} if self.remat else {}
        wholes = [{*piece, *self.again.get(piece, ())} for piece in found]
        return [tuple(sorted(own | self.eligibility.repeated(own))) for own in wholes]

    def _may_be_repeated(self, eqn: FlatEqn) -> bool:
        return is_cheap(eqn) and self.compared.isdisjoint(eqn.outputs)

    @cached_property
    def compared(self) -> frozenset[int]:
        """Collect the values that no second region may make."""
        return compared(self.program)

    def remade(self, regions: Pieces) -> Mapping[Region, int]:
        """Those of the last cut's regions that make values of others again, and the numbers of their pieces."""
        return {region: number(self.program, piece) for region, piece in regions.items() if self.again.get(piece)}

    def _region(self, whole: Piece, results: Sequence[int]) -> Region | None:
        eqns = [self.program.eqns[n] for n in whole]
        form = self.eligibility.forms.piece(whole, results)
        if form not in self.known:
            try:
                self.known[form] = translate(self.program, eqns, results, self.patient)
            except TranslationRefused as refused:
                self.known[form] = refused
        match self.known[form]:
            case Region() as region:
                return renamed(region, self.program, eqns)
            case TranslationRefused() as refused:
                raise refused
            case None:
                return None

    def _refuse(self, whole: Piece, why: TranslationRefused, is_final: bool) -> None:
        # A reason that an equation has because of its surroundings may go away with these.
        if why.by_itself or not (is_final and self.patient):
            for position, reason in why.reasons.items():
                self.eligibility.refuse(whole[position], reason, self.patient)


def _less(found: Sequence[Piece], as_written: Collection[Piece]) -> list[Piece]:
    """Pieces without those that run as they are: they read what regions make, not what they would have repeated."""
    return [piece for piece in found if piece not in as_written]


def _demanded(program: FlatProgram, found: Iterable[Piece], wholes: Iterable[Piece]) -> set[int]:
    """Values that are read outside of the region that makes them. `wholes`: needed pieces with what they repeat."""
    outside = set(range(len(program.eqns))).difference(*found)
    demanded = program.results | program.read_by(outside)
    for whole in wholes:
        demanded |= program.read_by(whole).difference(program.made_by(whole))
    return demanded


def _schedule(dependencies: Dependencies, piece_of: Pieces, unneeded: Collection[int]) -> tuple[Region | int, ...]:
    """Steps in an order that respects every dependency, without equations that nobody needs."""
    region_at = {piece[0]: region for region, piece in piece_of.items()}
    order = in_order(dependencies, piece_of.values())
    return tuple(region_at.get(step[0], step[0]) for step in order if step[0] not in unneeded)


def _too_little(primitive: str) -> tuple[Code, str]:
    return LONE_REDUCTION if primitive.startswith("reduce_") else POINTWISE


def _left_out(e: Eligibility, regions: Sequence[Region], unprofitable: set[int]) -> tuple[LeftOut, ...]:
    inside = {id(eqn) for region in regions for eqn in region.equations}
    outside = [n for n, eqn in enumerate(e.eqns) if id(eqn) not in inside and n not in e.constants]
    default = {n: LEFT_TO_LIBRARIES if n in unprofitable else _too_little(e.eqns[n].primitive) for n in outside}
    reasons = {n: e.reasons.get(n, default[n]) for n in outside}
    return tuple(LeftOut(e.eqns[n].primitive, code, why, e.eqns[n].where) for n, (code, why) in reasons.items())
