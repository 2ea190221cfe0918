"""Cuts a flat program into regions that a muGraph can express, and says of every other equation why it is left out.

1. Each equation gets a reason to stay with XLA, or none (`_reason`).
2. Constants, iotas and masks made of them are *free*: every region that reads one computes its own. So it is with masks
   made of integers that are no larger (lengths, segments).
3. Expressible equations are clustered (clusters.py); a large cluster, or one of matrix products that are better kept
   apart (borders.py), is divided where the fewest bytes cross, never between a cast or a broadcast and the one
   operator that reads it.
4. Each piece is translated. An equation that turns out not to be expressible is left out, and the cut is made again.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import jax.numpy as jnp

from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.capture.rematerialize import repeated
from mirage_jax.jaxpr_frontend.capture.sharding import is_local, one_device
from mirage_jax.jaxpr_frontend.jax_compat import Jaxpr
from mirage_jax.jaxpr_frontend.partition.clusters import Dependencies, convex_clusters, divide, in_order
from mirage_jax.jaxpr_frontend.partition.fingerprint import Forms
from mirage_jax.jaxpr_frontend.partition.product_boundaries import Borders
from mirage_jax.jaxpr_frontend.partition.program import FlatEqn, FlatProgram, bytes_of, flatten
from mirage_jax.jaxpr_frontend.partition.reasons import BY_ITSELF, Code, LeftOut, NotExpressible
from mirage_jax.jaxpr_frontend.translate import rules
from mirage_jax.jaxpr_frontend.translate.translate import Region, TranslationRefused, renamed, translate
from mirage_jax.mugraph.dtypes import is_float

type Kinds = tuple[Sequence[Hashable], Mapping[Hashable, Sequence[int]]]  # by position, and the positions of each

MAX_REGION_OPERATORS = 24
MAX_CUTS = 16  # cuts after which all that is refused is left out at once: the next cut could have kept some of it
CONTEXT_EQUATIONS = 5  # how far around an equation is looked to say that another is like it
MASKS = rules.LAYOUT_PRIMITIVES - rules.SLICING_PRIMITIVES | {"select_n"}  # primitives that masks are made by
INDEXED = frozenset({"gather", "scatter-add"})
NO_CONTRACTION = (Code.NO_HEAVY_OP, "XLA fuses what is only pointwise or layout")
LEFT_TO_LIBRARIES = (Code.LIBRARY, "a large matrix product with little around it: XLA's libraries are best at these")


@dataclass(frozen=True)
class Partition:
    """A program as steps in execution order: a region, or the position of an equation that XLA keeps."""

    program: FlatProgram
    steps: tuple[Region | int, ...]
    list_left_out: Callable[[], tuple[LeftOut, ...]]

    @cached_property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Only reports ask for it: it names a line of the user's source for each equation."""
        return self.list_left_out()

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(s for s in self.steps if isinstance(s, Region))


@dataclass(frozen=True)
class Analysis:
    """All regions of a jaxpr and of the bodies of its control flow, and what was left out."""

    regions: tuple[Region, ...]
    left_out: tuple[LeftOut, ...]


def analyse(jaxpr: Jaxpr, max_ops: int = MAX_REGION_OPERATORS, sharded: bool = False, remat: bool = False) -> Analysis:
    """What would be optimized in `jaxpr`; runs nothing.

    sharded: XLA divides the program over several devices, except for the bodies of shard_map. Regions are those that
    one device sees.
    remat: large values that are cheap to make again are, as in `remat.repeated`.
    """
    program = flatten(jaxpr)
    found = partition(repeated(program) if remat else program, max_ops, sharded)
    inner = [
        analyse(body, max_ops, sharded and eqn.primitive != "shard_map", remat)
        for eqn in found.program.eqns
        for body in jax_compat.bodies(eqn.eqn)
    ]
    regions, left_out = found.regions, found.left_out
    if sharded:
        regions = tuple(local.region for r in regions if (local := one_device(r)) is not None)
    return Analysis(
        regions + tuple(r for a in inner for r in a.regions),
        left_out + tuple(x for a in inner for x in a.left_out),
    )


def partition(program: FlatProgram, max_ops: int = MAX_REGION_OPERATORS, sharded: bool = False) -> Partition:
    """Divide a program into regions and left-out equations. sharded: over several devices, by XLA."""
    return _Partitioner(program, max_ops, sharded).run()


class _Partitioner:
    def __init__(self, program: FlatProgram, max_ops: int, sharded: bool):
        self.program, self.max_ops, self.sharded = program, max_ops, sharded
        self.eqns = program.eqns
        self.dependencies = Dependencies.of(program)
        self.made = {v: n for n, eqn in enumerate(self.eqns) for v in eqn.outputs}
        self.forms = Forms(self.eqns)
        self.known_reasons: dict[tuple[int, bool], tuple[Code, str] | None] = {}
        self.free = self._free()
        self.reasons: dict[int, tuple[Code, str]] = {}
        for n in range(len(self.eqns)):
            if n not in self.free and (reason := self._reason(n)) is not None:
                self.reasons[n] = reason
        for n in list(self._without_literal()):
            self.free.discard(n)
            self.reasons[n] = Code.PARAMETERS, rules.NEEDS_LITERAL[self.eqns[n].primitive][1]
        for n, eqn in enumerate(self.eqns):
            if eqn.primitive != "gather" and any(call.primitive.name == "gather" for call in eqn.calls):
                self.reasons[n] = Code.NON_FINITE, "NaN where an index is out of range"
        for n in self._indices():
            self.reasons[n] = Code.NO_HEAVY_OP, "an index: XLA computes it"
        for n in self._between_products():
            self.reasons[n] = Code.LAYOUT, "a product is taken apart into operands of other products: a border"
        self.masks = self._masks()
        self.translated: dict[
            object, Region | TranslationRefused | None
        ] = {}  # by form: equal layers are translated once
        self.cuts: dict[Hashable, list[tuple[int, ...]]] = {}  # pieces of clusters by their form, as places in them
        self.patient = True
        self.idle: set[int] = set()  # equations of pieces that no kernel could do faster than libraries
        self.own: dict[Region, tuple[int, ...]] = {}  # the equations that a region takes over, without repeated ones

    def run(self) -> Partition:
        for cut in itertools.count():
            if cut == MAX_CUTS:
                self.patient = False
                self.translated = {
                    form: x for form, x in self.translated.items() if not isinstance(x, TranslationRefused)
                }
            try:
                regions = self._regions(self._pieces())
            except _LeftOutLate:
                del self.weights  # of constants that are none any more
                continue
            break
        return Partition(self.program, self._schedule(regions), partial(self._left_out, regions))

    # --- kinds of equations

    def _reason(self, n: int, scalars: bool = False) -> tuple[Code, str] | None:
        """Once for equations of one form."""
        key = self.forms.of[n], scalars
        if key not in self.known_reasons:
            self.known_reasons[key] = _reason(self.eqns[n], self.sharded, scalars)
        return self.known_reasons[key]

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Positions of the equations that read each value; -1 for the program's results."""
        out: dict[int, list[int]] = {}
        for n, eqn in enumerate(self.eqns):
            for v in dict.fromkeys(eqn.reads):
                out.setdefault(v, []).append(n)
        for v in self.program.outputs:
            if isinstance(v, int):
                out.setdefault(v, []).append(-1)
        return out

    def _free(self) -> set[int]:
        """Equations made of literals and iotas only, which every region may repeat."""
        free: set[int] = set()
        for n, eqn in enumerate(self.eqns):
            known = (
                eqn.primitive in rules.LAYOUT_PRIMITIVES or eqn.primitive in rules.FOLDS or eqn.primitive == "select_n"
            )
            if known and free.issuperset(map(self.made.get, eqn.reads)) and self._reason(n, scalars=True) is None:
                free.add(n)
        return free

    def _masks(self) -> set[int]:
        """Equations that make masks of integers and of other masks which together take no more bytes, and what is shown
        of masks. In whichever region these were, all others, of all layers, would have to read them from memory.
        """
        masks = set[int]()
        sources: dict[int, frozenset[int]] = {}  # values that a mask is made of
        of_floats = set[int]()  # values that depend on any: these are made where the floats are
        for n, eqn in enumerate(self.eqns):
            own = (v for v in eqn.reads if v not in sources and self.made.get(v) not in self.free)
            if not of_floats.isdisjoint(eqn.reads) or any(_is_inexact(self.program.avals[v].dtype) for v in own):
                of_floats.update(eqn.outputs)
                continue
            if n in self.free or n in self.reasons or eqn.primitive not in MASKS:
                continue
            reads = [v for v in eqn.reads if self.made.get(v) not in self.free]
            if eqn.out_avals[0].dtype != bool and sources.keys().isdisjoint(reads):
                continue
            found = frozenset[int]().union(*(sources.get(v, {self._source(v)}) for v in reads))
            if sum(bytes_of(self.program.avals[v]) for v in found) <= bytes_of(eqn.out_avals[0]):
                masks.add(n)
                sources |= dict.fromkeys(eqn.outputs, found)
        return masks

    def _without_literal(self) -> Iterator[int]:
        """Equations with an operand that would have to be a literal."""
        for n, eqn in enumerate(self.eqns):
            if eqn.primitive in rules.NEEDS_LITERAL and n not in self.reasons:
                operand = eqn.inputs[rules.NEEDS_LITERAL[eqn.primitive][0]]
                if isinstance(operand, int) and not self._traces_to_literal(operand):
                    yield n

    def _indices(self) -> set[int]:
        """Equations on integers that only make indices: a region reads these, and has fewer operators."""
        found: set[int] = set()
        todo = [e.inputs[1] for n, e in enumerate(self.eqns) if e.primitive in INDEXED and n not in self.reasons]
        while todo:
            atom = todo.pop()
            n = self.made.get(atom) if isinstance(atom, int) else None
            if n is None or n in found or n in self.free or is_float(self.eqns[n].out_avals[0].dtype):
                continue
            found.add(n)
            todo += self.eqns[n].reads
        return found

    def _between_products(self) -> set[int]:
        """Slices that take all of a product apart, where a product reads one of them: fused projections of attention.

        One kernel for both sides would compute the projections again and again, and what parts them well, products
        by XLA and one kernel that reads three results, is no plan of the search.
        """
        by_source: dict[int, list[int]] = {}
        for n, eqn in enumerate(self.eqns):
            if eqn.primitive == "slice" and eqn.reads and n not in self.reasons:
                by_source.setdefault(eqn.reads[0], []).append(n)
        return {
            n
            for source, slices in by_source.items()
            if self._is_product(source)
            and sum(bytes_of(self.eqns[s].out_avals[0]) for s in slices) >= bytes_of(self.program.avals[source])
            and any(self._is_operand(v) for s in slices for v in self.eqns[s].outputs)
            for n in slices
        }

    @cached_property
    def turned(self) -> dict[int, int]:
        """Transposes of products that nothing else reads, and views between, by the product: it is as well written in
        their order, and what reads it elsewhere has fewer axes then.
        """
        found: dict[int, int] = {}
        for n, eqn in enumerate(self.eqns):
            if eqn.primitive != "transpose" or n in self.reasons:
                continue
            chain, (value,) = [n], eqn.reads
            while (above := self.made.get(value)) is not None and above not in self.reasons:
                if len(self.readers[value]) > 1:
                    break
                if self.eqns[above].primitive == "dot_general":
                    found |= dict.fromkeys(chain, above)
                    break
                if not self._is_view(above):
                    break
                chain.append(above)
                (value,) = self.eqns[above].reads
        return found

    def _is_product(self, value: int) -> bool:
        """Whether a value is a contraction, seen through views and pointwise operators."""
        todo, known = [value], {value}
        while todo:
            n = self.made.get(todo.pop())
            if n is None or self.eqns[n].primitive in rules.SLICING_PRIMITIVES:
                continue
            if self.eqns[n].primitive == "dot_general":
                return True
            if n not in self.reasons and self.eqns[n].primitive not in rules.CONTRACTION_PRIMITIVES:
                todo += [v for v in self.eqns[n].reads if v not in known]
                known.update(self.eqns[n].reads)
        return False

    def _is_operand(self, value: int) -> bool:
        """Whether a contraction reads a value, or a view of it."""
        readers = [self.eqns[r] for r in self.readers.get(value, ()) if r >= 0]
        return any(
            e.primitive == "dot_general" or (e.primitive in rules.VIEWS and any(map(self._is_operand, e.outputs)))
            for e in readers
        )

    def _is_scalar_constant(self, eqn: FlatEqn) -> bool:
        """Whether some operand is a literal, or a literal's copy in another shape."""
        return any(not isinstance(a, int) or self._traces_to_literal(a) for a in eqn.inputs)

    def _traces_to_literal(self, value: int) -> bool:
        n = self.made.get(value)
        if n is None or n not in self.free:
            return False
        eqn = self.eqns[n]
        return eqn.primitive != "iota" and all(self._traces_to_literal(v) for v in eqn.reads)

    @cached_property
    def weights(self) -> list[int]:
        """What each equation adds to the size of a region: nothing for layouts, casts, masks and literal operands."""
        return list(map(self._weighed, range(len(self.eqns))))

    def _weighed(self, n: int) -> int:
        eqn = self.eqns[n]
        if n in self.free or eqn.primitive in rules.LAYOUT_PRIMITIVES:
            return 0
        if eqn.primitive in ("add", "sub", "mul", "div") and self._is_scalar_constant(eqn):
            return 0
        if eqn.primitive == "max" and any(not isinstance(a, int) and float(a.val) == -math.inf for a in eqn.inputs):
            return 0
        return 1

    # --- pieces

    def _pieces(self) -> list[tuple[int, ...]]:
        members = [n for n in range(len(self.eqns)) if not (n in self.free or n in self.masks or n in self.reasons)]
        borders = Borders(self.program, members, self.readers)
        at_operands = {(maker, then) for _, maker, then in borders.pairs if borders.at_operand(then)}
        apart = {(first, then) for first, _, then in borders.pairs}
        for n in {n for _, maker, _ in borders.pairs for n in self._put_together(maker)}:
            self.reasons[n] = Code.LAYOUT, "what a product reads is put together: a border"
        members = [n for n in members if n not in self.reasons]
        clusters = convex_clusters(self.dependencies, members, [eqn.scope for eqn in self.eqns], at_operands)
        cluster_of = {n: cluster[0] for cluster in clusters for n in cluster}
        together: dict[int, list[tuple[int, int]]] = {}  # pairs to be apart that are in one cluster, by the cluster
        for first, then in apart:
            if first in cluster_of and cluster_of[first] == cluster_of.get(then):
                together.setdefault(cluster_of[first], []).append((first, then))
        pieces: list[tuple[int, ...]] = []
        for cluster in clusters:
            if not any(self.eqns[n].primitive in rules.CONTRACTION_PRIMITIVES for n in cluster):
                continue
            pieces += self._cut(cluster, together.get(cluster[0], []), borders.crossing(cluster))
        pieces = [p for p in pieces if any(self.eqns[n].primitive in rules.CONTRACTION_PRIMITIVES for n in p)]
        self.idle = {n for p in pieces if not borders.pays(p) for n in p}
        return [p for p in pieces if p[0] not in self.idle]

    def _cut(
        self, cluster: tuple[int, ...], apart: Sequence[tuple[int, int]], results: Sequence[int]
    ) -> Iterator[tuple[int, ...]]:
        """The pieces of a cluster, of which `results` are read elsewhere. Those of equal layers are cut once: where
        their equations are of one form, count alike, and have the same transposed products, waits and pairs apart.
        """
        at = {n: i for i, n in enumerate(cluster)}
        key = (
            self.forms.piece(cluster, results),
            tuple(map(self.weights.__getitem__, cluster)),
            tuple((i, at.get(self.turned[n])) for n, i in at.items() if n in self.turned),
            tuple(
                (i, *sorted(at.get(p, -1) for p in self.dependencies.before[n]))
                for n, i in at.items()
                if self.eqns[n].after
            ),
            tuple(sorted((at[a], at[b]) for a, b in apart)),
        )
        if key not in self.cuts:
            self.cuts[key] = [tuple(map(at.__getitem__, piece)) for piece in self._pieces_of(cluster, apart)]
        return (tuple(map(cluster.__getitem__, piece)) for piece in self.cuts[key])

    def _pieces_of(self, cluster: tuple[int, ...], apart: Sequence[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
        small = sum(map(self.weights.__getitem__, cluster)) <= self.max_ops and not apart
        for segment in [cluster] if small else self._divide(cluster, apart):
            kept = self._without_last_parts(segment)
            yield from [segment] if small and kept == segment else self._connected(kept)

    def _put_together(self, n: int) -> Iterator[int]:
        """The concatenation that an equation is, or shows."""
        while self._is_view(n) and (above := self.made.get(self.eqns[n].reads[0])) is not None:
            n = above
        if self.eqns[n].primitive in rules.SLICING_PRIMITIVES and self.eqns[n].primitive != "slice":
            yield n

    def _without_last_parts(self, segment: tuple[int, ...]) -> tuple[int, ...]:
        """A segment without what only takes its results apart or puts them together, which XLA does as well.

        Slices stay if what they leave out need not be computed then.
        """
        inside, last, gone = set(segment), set[int](), set[int]()
        for n in reversed(segment):
            after = [m for m in self.dependencies.after[n] if m in inside]
            if self.eqns[n].primitive in rules.LAYOUT_PRIMITIVES and last.issuperset(after):
                last.add(n)
        for n in sorted(last):
            is_part = self.eqns[n].primitive in rules.SLICING_PRIMITIVES and not self._is_less(n, last)
            if is_part or not gone.isdisjoint(self.dependencies.before[n]):
                gone.add(n)
        return tuple(n for n in segment if n not in gone)

    def _is_less(self, n: int, last: Collection[int]) -> bool:
        """Whether a slice, with others at the end of a region, shows less than all of what it is a slice of."""
        if self.eqns[n].primitive != "slice":
            return False
        (value,) = self.eqns[n].reads
        readers = self.readers[value]
        is_all = sum(bytes_of(self.eqns[r].out_avals[0]) for r in readers if r >= 0) >= bytes_of(
            self.program.avals[value]
        )
        return not is_all and all(r in last and self.eqns[r].primitive == "slice" for r in readers)

    def _divide(self, cluster: Sequence[int], apart: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
        order = self._groups(cluster)
        group_of = {n: g for g, group in enumerate(order) for n in group}
        weights = [sum(map(self.weights.__getitem__, group)) for group in order]
        reach = list(itertools.accumulate(weights, initial=0))
        last: dict[int, int] = {}  # value -> last group that reads it, or a view of it
        for n in cluster:
            for v in map(self._source, self.eqns[n].reads):
                last[v] = max(last.get(v, 0), group_of[n])
        change = [0] * (len(order) + 2)  # of the bytes that cross, from one cut to the next
        for n in cluster:
            for v in self.eqns[n].outputs:
                if (end := last.get(v, -1)) <= (start := group_of[n]):
                    continue
                size = bytes_of(self.program.avals[v])
                # No segment reaches further: what lives longer is stored and loaded wherever the cuts are. So a cut in
                # one layer costs what it costs in an equal one, however much the first keeps for a backward pass.
                change[min(end, max(start + 1, bisect_left(reach, reach[end] - self.max_ops)))] += size
                change[end + 1] -= size
                if all(map(group_of.__contains__, self.readers.get(v, ()))):  # else it is stored anyway
                    change[start + 1] += size
                    change[max(start + 2, min(end + 1, bisect_right(reach, reach[start] + self.max_ops)))] -= size
        crossing = list(itertools.accumulate(change))
        pairs = [(group_of[a], group_of[b]) for a, b in apart]
        return divide(order, weights, crossing, self.max_ops, pairs)

    def _groups(self, cluster: Sequence[int]) -> list[list[int]]:
        """A topological order in which layouts and casts stand beside the operator that they serve, as one group."""
        inside = set(cluster)
        place: dict[int, tuple[int, int, int]] = {}
        anchored: dict[int, int] = {}  # light equation -> first weighty equation that depends on it
        for n in reversed(cluster):
            if self.turned.get(n) in inside:
                continue
            if self.weights[n]:
                anchored[n] = n
                continue
            below = [anchored[m] for m in self.dependencies.after[n] if m in anchored]
            if below:
                anchored[n] = min(below)
        for n in cluster:
            if n in anchored:
                place[n] = (anchored[n], 1 if anchored[n] == n else 0, n)
            elif self.turned.get(n) in inside:
                place[n] = (self.turned[n], 2, n)
            else:
                above = [place[p][:1] for p in self.dependencies.before[n] if p in inside]
                place[n] = (max(above)[0] if above else n, 2, n)
        groups: dict[int, list[int]] = {}
        for n in sorted(cluster, key=place.__getitem__):
            groups.setdefault(place[n][0], []).append(n)
        return [groups[k] for k in sorted(groups)]

    def _connected(self, segment: Sequence[int]) -> list[tuple[int, ...]]:
        """Parts of a segment that share no value inside of it."""
        part_of: dict[int, list[int]] = {}
        for n in sorted(segment):
            part_of[n] = part = [n]
            for p in self.dependencies.before[n]:
                other = part_of.get(p, part)
                if other is not part:
                    part, less = (part, other) if len(part) > len(other) else (other, part)
                    part += less
                    part_of.update(dict.fromkeys(less, part))
        return [tuple(sorted(part)) for part in {id(part): part for part in part_of.values()}.values()]

    # --- regions

    def _regions(self, pieces: Sequence[tuple[int, ...]]) -> list[Region]:
        """The regions of all pieces; raises `_LeftOutLate` if some equation turns out not to be expressible."""
        wholes = [tuple(sorted({*piece, *self._repeated(piece)})) for piece in pieces]
        demanded = self._demanded(pieces, wholes)
        regions: list[Region] = []
        refused = will_be_cut_anew = False
        for piece, whole in zip(pieces, wholes, strict=True):
            if will_be_cut_anew and not self.reasons.keys().isdisjoint(whole):
                continue
            results = tuple(v for n in piece for v in self.eqns[n].outputs if v in demanded)
            try:
                region = self._region(whole, results)
            except TranslationRefused as why:
                refused = True
                will_be_cut_anew |= why.by_itself
                # What an equation has because of its surroundings may go away with these.
                if why.by_itself or not (will_be_cut_anew and self.patient):
                    self._leave_out_all(whole, why)
                continue
            if region is not None:
                regions.append(region)
                self.own[region] = piece
        if refused:
            raise _LeftOutLate
        return regions

    def _demanded(self, pieces: Sequence[tuple[int, ...]], wholes: Sequence[tuple[int, ...]]) -> set[int]:
        """Values that are read outside of the region that makes them. `wholes`: pieces with what they repeat."""
        inside = {n for piece in pieces for n in piece}
        demanded = {v for v in self.program.outputs if isinstance(v, int)}
        demanded.update(v for n, eqn in enumerate(self.eqns) if n not in inside for v in eqn.reads)
        for whole in wholes:
            own = {v for n in whole for v in self.eqns[n].outputs}
            demanded.update(v for n in whole for v in self.eqns[n].reads if v not in own)
        return demanded

    def _leave_out_all(self, whole: Sequence[int], why: TranslationRefused) -> None:
        for position, reason in why.reasons.items():
            self._leave_out(whole[position], reason)

    def _region(self, whole: tuple[int, ...], results: tuple[int, ...]) -> Region | None:
        eqns = [self.eqns[n] for n in whole]
        form = self.forms.piece(whole, results)
        if form not in self.translated:
            try:
                self.translated[form] = translate(self.program, eqns, results, self.patient)
            except TranslationRefused as refused:
                self.translated[form] = refused
        match self.translated[form]:
            case Region() as region:
                return renamed(region, self.program, eqns)
            case TranslationRefused() as refused:
                raise refused
        return None

    def _leave_out(self, position: int, reason: NotExpressible) -> None:
        """Give an equation its reason, and all others that are like it: the same equations of equal layers."""
        kinds, alike = self._kinds if reason.code in BY_ITSELF else self._surroundings
        beside = () if self.patient else self._beside(position)
        for n in (*alike[kinds[position]], *beside):
            self.free.discard(n)
            self.masks.discard(n)
            self.reasons[n] = (reason.code, reason.why)

    def _beside(self, position: int) -> Iterator[int]:
        """The equations of the same primitive that read the same values: hundreds of slices of one product, say."""
        for v in self.eqns[position].reads:
            yield from (
                r for r in self.readers[v] if r >= 0 and self.eqns[r].primitive == self.eqns[position].primitive
            )

    @cached_property
    def _kinds(self) -> Kinds:
        """Of each equation: what decides whether it is expressible by itself."""
        return _with_alike(
            [(form, *map(self._traces_to_literal, e.reads)) for form, e in zip(self.forms.of, self.eqns, strict=True)]
        )

    @cached_property
    def _surroundings(self) -> Kinds:
        """Of each equation: a hash of what is around it, as far as `CONTEXT_EQUATIONS` equations away."""
        kinds = list(map(hash, self._kinds[0]))
        after = [[r for v in eqn.outputs for r in self.readers.get(v, ())] for eqn in self.eqns]
        before = [[self.made.get(v, -1) for v in eqn.reads] for eqn in self.eqns]
        for _ in range(CONTEXT_EQUATIONS):
            known = [*kinds, 0]  # -1: an input or a result of the program
            kinds = [
                hash((known[n], tuple(known[p] for p in before[n]), tuple(sorted(known[r] for r in after[n]))))
                for n in range(len(kinds))
            ]
        return _with_alike(kinds)

    def _repeated(self, piece: Iterable[int]) -> set[int]:
        """Equations outside of a piece that it repeats: constants, masks, and views of what it reads."""
        found: set[int] = set()
        todo = list(piece)
        while todo:
            for v in self.eqns[todo.pop()].reads:
                n = self.made.get(v)
                if n is None or n in found:
                    continue
                if n in self.free or n in self.masks or (self._is_view(n) and n not in self.turned):
                    found.add(n)
                    todo.append(n)
        return found

    def _is_view(self, n: int) -> bool:
        """Whether an equation only shows its operand differently, and reading the operand costs no more."""
        return n in self.views and n not in self.reasons

    @cached_property
    def views(self) -> frozenset[int]:
        """Equations that are views, unless there is a reason against them."""
        return frozenset(
            n
            for n, eqn in enumerate(self.eqns)
            if eqn.primitive in rules.VIEWS
            and len(eqn.reads) == 1
            and bytes_of(eqn.in_avals[0]) <= bytes_of(eqn.out_avals[0])
        )

    def _source(self, value: int) -> int:
        """The value that a region reads if it repeats the views of it."""
        while (n := self.made.get(value)) is not None and n not in self.free and self._is_view(n):
            if n in self.turned:
                break
            (value,) = self.eqns[n].reads
        return value

    def _schedule(self, regions: Sequence[Region]) -> tuple[Region | int, ...]:
        """Steps in an order that respects every dependency."""
        region_at = {self.own[region][0]: region for region in regions}
        order = in_order(self.dependencies, [self.own[region] for region in regions])
        return tuple(region_at.get(step[0], step[0]) for step in order)

    def _left_out(self, regions: Sequence[Region]) -> tuple[LeftOut, ...]:
        inside = {id(eqn) for region in regions for eqn in region.equations}
        out: list[LeftOut] = []
        for n, eqn in enumerate(self.eqns):
            if id(eqn) in inside or n in self.free:
                continue
            code, why = self.reasons.get(n, LEFT_TO_LIBRARIES if n in self.idle else NO_CONTRACTION)
            out.append(LeftOut(eqn.primitive, code, why, eqn.where))
        return tuple(out)


@cache
def _is_inexact(dtype: Any) -> bool:
    """Whether numbers of a type are rounded. Keys of random numbers have a type, too."""
    return jnp.issubdtype(dtype, jnp.inexact)


def _with_alike(kinds: Sequence[Hashable]) -> Kinds:
    """Kinds of equations by position, with the positions of each kind."""
    alike: dict[Hashable, list[int]] = {}
    for n, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(n)
    return kinds, alike


class _LeftOutLate(Exception):
    """An equation was left out while regions were being made: cut again."""


def _reason(eqn: FlatEqn, sharded: bool, scalars: bool = False) -> tuple[Code, str] | None:
    """Why an equation cannot be in a muGraph, as far as can be said before translating it."""
    if eqn.effects:
        return Code.EFFECT, "its effects must happen in order"
    if jax_compat.bodies(eqn.eqn):
        return Code.CONTROL_FLOW, "its body is optimized on its own"
    if eqn.primitive not in rules.RULES:
        return Code.UNSUPPORTED_PRIMITIVE, rules.why_not(eqn.primitive)
    if jax_compat.has_context(eqn.eqn):
        return Code.CONTEXT, "it carries XLA metadata, or the place where it is to be computed"
    for aval in (*eqn.in_avals, *eqn.out_avals):
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
    if sharded and not is_local(eqn):
        return Code.SHARDED, "XLA divides this program over several devices and cannot divide a kernel"
    if not scalars and all(aval.shape == () for aval in eqn.out_avals):
        return Code.RANK0, "a scalar is no work for a kernel"
    return None
