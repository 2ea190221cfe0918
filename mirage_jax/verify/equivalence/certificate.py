"""Proof by random testing that a muGraph computes what the program computes, with a computed bound of its error.

Both graphs are evaluated at reduced extents on random inputs over Z_p x Z_q (`mugraph.domains.finite_field`): the
reference as straight-line code, the candidate as that (which finds most errors at once, and is what the portable
lowering runs) and then block by block and step by step, with at least two tiles on every divided axis, ragged tails,
and two ragged parts of split axes. A kernel that skips for sentinels (`mugraph.passes.sentinels`) is tested in both of
its forms. `Fingerprint` is one draw for any number of candidates, for the search; `certify` makes as many as the bound
(`verify.equivalence.error_bound`) asks for.

What it says: the two graphs are the same function in exact arithmetic, at the reduced extents (each sum is weighed to
have the mass of the real extent); see `mugraph.domains.finite_field` for functions outside the Lax fragment. Rounding,
and the code generated from the graph, are the float gate's business.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import combinations
from typing import Any

import numpy

from mirage_jax.errors import DifferentError, GraphError, MirageError, VerificationError
from mirage_jax.mugraph.canonical import structure_hash
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.domains.finite_field import (
    ALGEBRAIC,
    MAXIMUM,
    ROOT,
    SEMILATTICES,
    Draw,
    FieldDomain,
    Pair,
    ZeroDivisor,
)
from mirage_jax.mugraph.domains.floats import arrange
from mirage_jax.mugraph.domains.index_facts import FactAt, FactDomain, Scale
from mirage_jax.mugraph.evaluate import evaluate, part_length
from mirage_jax.mugraph.graph import (
    Axis,
    BlockGraph,
    Kernel,
    KernelGraph,
    KernelSchedule,
    Library,
    LoopBounds,
    Op,
    Schedule,
    is_part,
    origin,
    part_axis,
)
from mirage_jax.mugraph.passes.sentinels import complete, guarded, usual
from mirage_jax.verify.equivalence.error_bound import Bound, BoundDomain, Difference, error_bound
from mirage_jax.verify.gate import HasGraph, Verdict

VERSION = 2
MAX_ERROR_PROBABILITY = 1e-12
MIN_DRAWS, MAX_DRAWS = 2, 8
PRIME_BITS = (
    (127, 61),
    (191, 93),
    (255, 125),
    (383, 189),
    (511, 253),
    (1023, 509),
)  # bits of p and q; larger ones for larger graphs
MAXIMA = SEMILATTICES | {"max"}
COUNTING = frozenset({"iota", "affine"})  # make indices of indices
MAX_REDUCED_EXTENT = 48  # elements that several compared axes may need at reduced extents
FULL, QUICK = (3, 5, 7), (2, 3, 6)  # elements of an axis that is whole or in the grid, in a loop, split
MAX_REDRAWS = 5  # draws that meet a zero divisor before the graph itself is blamed

type Entropy = Callable[[int], bytes]


@dataclass(frozen=True)
class Certificate:
    """What was tested, how, and how likely it is to be wrong. Plain data; see `to_json`."""

    reference: str  # structure hashes, extents included
    candidate: str
    extents: tuple[tuple[Axis, int], ...]  # reduced, as tested
    schedule: str
    p_bits: int
    q_bits: int
    seeds: tuple[str, ...]  # one per draw, in hex: each fixes primes, root of unity, hash key and inputs
    primes: tuple[tuple[int, int], ...]
    log2_terms: float  # number of exponentials k in the cleared difference
    degree: float  # of its polynomials
    log2_height: float  # of their coefficients
    hashed: int  # evaluations of uninterpreted functions
    algebraic: tuple[str, ...]  # functions that have their algebra; all others are uninterpreted
    log2_per_draw: float
    bound: float  # probability that a wrong candidate gets this certificate
    version: int = VERSION

    def __str__(self) -> str:
        return (
            f"certified: {len(self.seeds)} draws, p ~ 2^{self.p_bits}, q ~ 2^{self.q_bits}, "
            f"k <= 2^{self.log2_terms:.1f}, d <= {self.degree:.0f}, ln H <= {self.log2_height * math.log(2):.0f}, "
            f"{self.hashed} uninterpreted values; wrong with probability <= {self.bound:.1e}"
        )

    def to_json(self) -> str:
        """Write the certificate as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """Read a certificate.

        Raises:
            VerificationError: the text is none, or of another version.
        """
        try:
            d = json.loads(text)
            if d["version"] != VERSION:
                raise VerificationError(f"certificate of version {d['version']}; this is version {VERSION}")
            d["extents"] = tuple((str(a), int(n)) for a, n in d["extents"])
            d["primes"] = tuple((int(p), int(q)) for p, q in d["primes"])
            d["seeds"] = tuple(str(s) for s in d["seeds"])
            d["algebraic"] = tuple(str(f) for f in d["algebraic"])
            return cls(**d)
        except (KeyError, TypeError, ValueError) as e:
            raise VerificationError(f"not a certificate: {e!r}") from None


class Fingerprint:
    """One draw for any number of candidates of one reference: are the graphs equal at random inputs?

    The draw, the inputs and the reference's values are made once for all candidates with the same reduced extents.
    Each candidate is a graph that was there before the draw was looked at, so each passes wrongly with the probability
    of one draw. False also for a candidate that is not well formed or differs in type. A filter, to be followed by a
    certificate, so it does a fraction of the work: blocks along a grid axis do not know each other (no block may reduce
    one), so there is only one along each; axes are as short as two tiles allow; and it runs in tiles only, not
    as straight-line code before.
    """

    def __init__(self, reference: KernelGraph, entropy: Entropy = secrets.token_bytes):
        check_graph(reference)
        self.reference, self._draw = reference, Draw(entropy(32), *PRIME_BITS[0])
        self._known: dict[object, _Values] = {}

    def __call__(self, candidate: KernelGraph) -> bool:
        try:
            comparison = _Comparison(self.reference, candidate, quick=True)
            key = comparison.key
            if key not in self._known:
                self._known[key] = comparison.values(self._draw)
            comparison.test(self._known[key])
        except (VerificationError, ZeroDivisor, GraphError):
            return False
        return True


def fingerprint(reference: KernelGraph, candidate: KernelGraph, entropy: Entropy = secrets.token_bytes) -> bool:
    """One draw for one candidate."""
    return Fingerprint(reference, entropy)(candidate)


def certify(
    reference: KernelGraph,
    candidate: KernelGraph,
    target: float = MAX_ERROR_PROBABILITY,
    entropy: Entropy = secrets.token_bytes,
) -> Certificate:
    """A certificate with bound <= target; `VerificationError` if the graphs differ or the bound cannot be met.

    Maxima, the logistic function and square roots are uninterpreted first. If the graphs are equal only by
    max(c x) == c max(x), by 1 / (1 + exp(-x)) or by sqrt(x)**2 == x, these have their algebra. Roots are then taken in
    the field, where their signs are arbitrary: were a radicand a square, a wrong graph (x for sqrt(x*x)) would pass one
    draw in two. So a draw then counts for one half only (assuming that no wrong graph depends on several such signs).
    """
    comparison, first = _first_draw(reference, candidate, entropy)
    p_bits, q_bits, per_draw, draws = comparison.plan(target, first.hashed)
    done = [first] if (first.p_bits, first.q_bits) == (p_bits, q_bits) else []
    while len(done) < draws:
        done.append(comparison.retry(entropy, p_bits, q_bits))
    return comparison.certificate(done, per_draw)


def _first_draw(reference: KernelGraph, candidate: KernelGraph, entropy: Entropy) -> tuple[_Comparison, Draw]:
    """The comparison that assumes least of all that the graphs pass. Its draw counts the hashed values."""
    comparison = _Comparison(reference, candidate)
    functions = comparison.algebraic_functions
    for some in (some for n in range(1, len(functions) + 1) for some in combinations(functions, n)):
        try:
            return comparison, comparison.retry(entropy, *PRIME_BITS[0])  # finds most errors at once
        except VerificationError:
            comparison = _Comparison(reference, candidate, frozenset(some))
    return comparison, comparison.retry(entropy, *PRIME_BITS[0])


@dataclass
class CertificateGate:
    """The gate for equivalence: `certify` against one program."""

    reference: KernelGraph
    certificate: Certificate | None = None  # of the last candidate that passed
    name = "certificate"

    def check(self, candidate: HasGraph) -> Verdict:
        """Certify the candidate, and keep the certificate."""
        try:
            self.certificate = certify(self.reference, candidate.graph)
        except MirageError as why:
            return Verdict(False, str(why))
        return Verdict(True, str(self.certificate))


def recheck(
    certificate: Certificate, reference: KernelGraph, candidate: KernelGraph, entropy: Entropy = secrets.token_bytes
) -> Certificate:
    """A fresh certificate, if the given one is about these graphs and claims no more than its draws can show.

    The draws themselves are not trusted: whoever chose their seeds may have chosen them well.
    """
    for what, graph in (("reference", reference), ("candidate", candidate)):
        if getattr(certificate, what) != structure_hash(graph):
            raise VerificationError(f"the certificate is about another {what}")
    fresh = certify(reference, candidate, entropy=entropy)
    shown = len(certificate.seeds) * fresh.log2_per_draw if certificate.q_bits <= fresh.q_bits else -math.inf
    if math.log2(max(certificate.bound, 1e-300)) < shown - 1:
        raise VerificationError(
            f"the certificate claims a bound of {certificate.bound:.1e}, more than {len(certificate.seeds)} draws show"
        )
    return fresh


def replay(certificate: Certificate, reference: KernelGraph, candidate: KernelGraph) -> None:
    """Repeat the very draws of a certificate, for bug reports; raises `VerificationError` if any differs."""
    comparison = _Comparison(reference, candidate)
    for seed, primes in zip(certificate.seeds, certificate.primes, strict=True):
        draw = Draw(bytes.fromhex(seed), certificate.p_bits, certificate.q_bits, frozenset(certificate.algebraic))
        if (draw.p, draw.q) != primes:
            raise VerificationError(f"seed {seed} gives other primes than the certificate says")
        comparison.draw(draw)


def scale_of(reference: KernelGraph, candidate: KernelGraph) -> Scale | None:
    """Where the cuts of masks and loop bounds lie at reduced extents; None if the candidate has no loop bounds.

    Windows may be longer than a reduced axis, so all cuts in both graphs move closer together, in order.

    Raises:
        VerificationError: differences of three axes in a circle would add up to each other, so nothing is proven; or
            there are too many cuts to test.
    """
    all_bounds = list(_loop_bounds(candidate))
    if not all_bounds:
        return None
    pairs = {frozenset((loop, loop_bounds.axis)) for loop, loop_bounds in all_bounds}
    domain = FactDomain({b for _, loop_bounds in all_bounds for b in loop_bounds.bounds}, pairs)
    for graph in (reference, candidate):
        evaluate(graph, [FactAt(axes=t.axes) for t in graph.inputs], domain)
    scale = replace(Scale.of(sorted(domain.seen)), pairs=frozenset(domain.pairs))
    classes = _Classes({a: a for pair in domain.pairs for a in pair})
    for a, b in _same_indices(reference, candidate, classes, scale):
        classes.join(a, b)
    for a, b in map(sorted, domain.pairs):
        if classes.of[a] == classes.of[b]:
            raise VerificationError(
                f"masks and loop bounds compare axes in a circle: {sorted(map(sorted, domain.pairs))}"
            )
        classes.join(a, b)
    if scale.far > MAX_REDUCED_EXTENT:
        raise VerificationError(
            f"masks and loop bounds compare axes with {scale.largest} different bounds: too many to test"
        )
    return scale


@dataclass
class _Classes:
    """Classes of axes, each named by one of its members."""

    of: dict[Axis, Axis]

    def join(self, a: Axis, b: Axis) -> None:
        """Make one class of two."""
        old, new = self.of.setdefault(a, a), self.of.setdefault(b, b)
        self.of.update({k: new for k, name in self.of.items() if name == old})


def _same_indices(
    reference: KernelGraph, candidate: KernelGraph, classes: _Classes, scale: Scale
) -> Iterator[tuple[Axis, Axis]]:
    """Pairs of axes whose indices are the same number."""
    ones = [a for a in classes.of if reference.sizes.get(origin(a), candidate.sizes.get(origin(a))) == 1]
    yield from ((a, ones[0]) for a in ones[1:])  # the only index of each is 0
    if any(a != b for a, b in scale.to.items()):  # else bounds add up as they do at real extents
        for graph in (reference, candidate):
            yield from _renamed_masks(graph)


def _renamed_masks(graph: KernelGraph) -> Iterator[tuple[Axis, Axis]]:
    """Names under which axes of tensors that may depend on comparisons of indices are read elsewhere.

    A tensor of mere indices is none: read along another axis, it counts that axis.
    """
    of_indices, indices = set[str](), set[str]()
    for kernel in graph:
        read = {x.tensor for x in kernel.loads}
        for load in (x for x in kernel.loads if x.tensor in of_indices):
            pairs = zip(graph.tensors[load.tensor].axes, load.axes, strict=True)
            yield from ((a, b) for a, b in pairs if a != b)
        names = [store.tensor.name for store in kernel.stores]
        if isinstance(kernel, Library) and kernel.op.op in COUNTING and indices.issuperset(read):
            indices.update(names)
        elif not (of_indices | indices).isdisjoint(read) or any(op.op == "iota" for op in kernel.ops):
            of_indices.update(names)


def _loop_bounds(graph: KernelGraph) -> Iterator[tuple[Axis, LoopBounds]]:
    """Loop axis and loop bounds of every kernel that has one."""
    for kernel in graph:
        if kernel.loop is not None and kernel.loop_bounds is not None:
            yield kernel.loop, kernel.loop_bounds


def reduced(
    reference: KernelGraph, candidate: KernelGraph, scale: Scale | None = None, quick: bool = False
) -> tuple[dict[Axis, int], Schedule]:
    """Extents at which to test, and a schedule of the candidate for them.

    Axes of equal real extent keep equal extents. An axis that is split has 7 elements in 2 parts (4 and 3), a loop axis
    5, others 3, in tiles of 2; so does an axis that has fewer really, unless it has just one element. So each divided
    axis has two tiles or more and a ragged last one, and no tile is a single element, for which sum(f(x)) is f(sum(x)).
    Where a loop has bounds, both its axes reach beyond every cut (see `scale_of`), the loop's also from the last row,
    and their tiles are of 1 and 2 elements, so that a bound too tight by one leaves out some step that counts; if the
    loop's axis is also split, both of 1: some window of three then has two steps in one part and one in the other.
    `quick`: shorter axes, and one block along each grid axis, parts and loop bounds excepted.
    """
    scale = scale or Scale()
    real = dict(reference.extents) | dict(candidate.extents)
    wanted = _wanted_extents(real, candidate, scale, quick)
    by_size: dict[int, int] = {}
    for axis, n in real.items():
        by_size[n] = max(by_size.get(n, 1), wanted[axis] if n > 1 else 1)
    extents = {a: by_size[n] for a, n in real.items()}
    parts = {a: 2 if extents[origin(a)] > 1 else 1 for a in candidate.split_axes}
    kernels = tuple(KernelSchedule(tuple(_reduced_tiles(k, extents, parts, quick).items())) for k in candidate)
    return extents, Schedule(kernels, tuple(sorted(parts.items())))


def _wanted_extents(real: Iterable[Axis], candidate: KernelGraph, scale: Scale, quick: bool) -> dict[Axis, int]:
    """The extent that each axis needs by itself."""
    plain, looped, split = QUICK if quick else FULL
    wanted = dict.fromkeys(real, plain)
    wanted |= {origin(kernel.loop): looped for kernel in candidate if kernel.loop is not None}
    wanted |= {origin(axis): split for axis in candidate.split_axes}
    for loop, loop_bounds in _loop_bounds(candidate):
        rows, columns, scaled = origin(loop_bounds.axis), origin(loop), scale.loop_bounds(loop_bounds)
        odd = 0 if quick else 1
        beyond = scale.largest + (2 if quick and loop_bounds.low is None else 3)
        wanted[rows] = max(wanted[rows], beyond | odd, looped)
        wanted[columns] = max(wanted[columns], wanted[rows] + max(scaled.high or 0, 0) | odd)
    for axis in {origin(a) for pair in scale.pairs for a in pair}:
        wanted[axis] = max(wanted[axis], scale.far)
    return wanted


def _reduced_tiles(
    kernel: Kernel, extents: Mapping[Axis, int], parts: Mapping[Axis, int], quick: bool
) -> dict[Axis, int]:
    """Tiles of the axes that a kernel divides, at reduced extents."""
    tiles: dict[Axis, int] = {}
    for a in (a for a in kernel.divided if not is_part(a)):
        length = extents[origin(a)]
        if part_axis(a) in kernel.grid:
            length -= (parts[a] - 1) * part_length(length, parts[a])  # of the last, shortest part
        tiles[a] = length if quick and a != kernel.loop else _ragged(length)
    if kernel.loop is not None and kernel.loop_bounds is not None:
        most = 1 if part_axis(kernel.loop) in kernel.grid else 2
        tiles |= {kernel.loop_bounds.axis: 1, kernel.loop: min(tiles[kernel.loop], most)}
    return tiles


def _scaled(graph: KernelGraph, scale: Scale | None) -> KernelGraph:
    """The graph with its loop bounds at reduced extents."""
    if scale is None:
        return graph
    return replace(graph, kernels=tuple(_narrowed(k, scale) for k in graph))


def _narrowed(kernel: Kernel, scale: Scale) -> Kernel:
    if not isinstance(kernel, BlockGraph) or kernel.loop_bounds is None:
        return kernel
    return replace(kernel, loop_bounds=scale.loop_bounds(kernel.loop_bounds))


def _ragged(n: int) -> int:
    """Choose a tile that divides n elements into two or more, with a short last one: 3 -> 2, 4 -> 3, 5 -> 2."""
    return 1 if n <= 2 else 2 if n % 2 else n // 2 + 1


@dataclass(frozen=True)
class _Values:
    """What one draw gives a reference at reduced extents."""

    draw: Draw
    inputs: Sequence[Pair]
    want: Sequence[Pair]
    rooted: frozenset[tuple[int, int]]


class _Comparison:
    """A reference and a candidate at reduced extents."""

    def __init__(
        self,
        reference: KernelGraph,
        candidate: KernelGraph,
        algebraic: frozenset[str] = frozenset(),
        quick: bool = False,
    ):
        _check_interface(reference, candidate, known=quick)
        self.algebraic, self.quick = algebraic, quick
        self.given = reference, candidate
        self.scale = scale_of(reference, candidate)
        self.extents, self.schedule = reduced(reference, candidate, self.scale, quick)
        self.weights = {a: Fraction(n, self.extents[a]) for g in self.given for a, n in g.extents}
        self.reference, self.candidate = (
            _scaled(g, self.scale).with_extents({a: self.extents[a] for a in g.sizes}) for g in self.given
        )

    @property
    def divides(self) -> bool:
        """Does the candidate cut any axis into tiles or parts?"""
        return any(kernel.divided for kernel in self.candidate)

    @property
    def key(self) -> object:
        """All that the reference's values depend on besides the draw."""
        scale = self.scale and frozenset(self.scale.to.items())
        return self.reference.extents, scale

    def draw(self, draw: Draw) -> Draw:
        """One test; raises `VerificationError` if an output differs."""
        self.test(self.values(draw))
        return draw

    def values(self, draw: Draw) -> _Values:
        """Evaluate the reference on the inputs of a draw."""
        domain = self._domain(draw)
        inputs = [domain.random(t.axes, tuple(self.extents[origin(a)] for a in t.axes)) for t in self.reference.inputs]
        draw.rooted.clear()
        want = evaluate(self.reference, inputs, domain)
        return _Values(draw, inputs, want, frozenset(draw.rooted))

    def test(self, known: _Values) -> None:
        """Raises `VerificationError` if an output of the candidate differs, or if it takes roots of what the reference
        takes none of: were these negative, it would compute nothing, though sqrt(x) sqrt(x) is x where it does.
        """
        draw = known.draw
        draw.rooted.clear()
        evaluated = partial(evaluate, inputs=known.inputs, domain=self._domain(draw))
        if not (self.quick and self.divides):
            self._compare(draw, known.want, evaluated(self.candidate))
        if self.divides:
            self._compare(draw, known.want, evaluated(complete(self.candidate), schedule=self.schedule))
        if self.is_guarded:
            masked = usual(self.candidate)
            self._compare(draw, evaluated(masked), evaluated(masked, schedule=self.schedule))
        if not draw.rooted <= known.rooted:
            raise VerificationError("the candidate takes roots of what the program takes none of")

    def _compare(self, draw: Draw, want: Sequence[Pair], have: Sequence[Pair]) -> None:
        for n, (name, x, y) in enumerate(zip(self.reference.outputs, want, have, strict=True)):
            if wrong := _differences(x, y):
                raise DifferentError(
                    f"output {n} ({name}) differs in {wrong} of {x.p.re.size} elements (p = {draw.p}, q = {draw.q})"
                )

    @property
    def is_guarded(self) -> bool:
        """Does a kernel of the candidate have two forms? Then three things are tested: that the candidate is the
        program, that its complete form is in tiles, and that its usual form leaves out nothing that counts there.
        """
        return any(guarded(kernel) for kernel in self.candidate)

    def _domain(self, draw: Draw) -> FieldDomain:
        return FieldDomain(draw, self.weights, scale=self.scale)

    def retry(self, entropy: Entropy, p_bits: int, q_bits: int) -> Draw:
        """One test with a draw that meets no zero divisor."""
        for _ in range(MAX_REDRAWS):
            try:
                return self.draw(Draw(entropy(32), p_bits, q_bits, self.algebraic))
            except ZeroDivisor:
                continue
        raise VerificationError("a graph divides by zero whatever the inputs")

    @property
    def algebraic_functions(self) -> list[str]:
        """Functions of the graphs that can have their algebra, those first that make a proof the least weaker."""
        ops = [op for graph in (self.reference, self.candidate) for kernel in graph for op in kernel.ops]
        found = {_algebra_of(op) for op in ops}
        return [f for f in ALGEBRAIC if f in found]

    # --- the bound

    def plan(self, target: float, hashed: Mapping[str, int]) -> tuple[int, int, float, int]:
        """Sizes of p and q, log2 of the error of one draw, and the number of draws."""
        self._measure()
        for p_bits, q_bits in PRIME_BITS:
            per_draw = self._per_draw(p_bits, q_bits, hashed)
            if per_draw > math.log2(target) / MAX_DRAWS:
                continue
            if ROOT in self.algebraic:
                per_draw = -1.0  # signs of roots; larger than the computed bound
            return p_bits, q_bits, per_draw, max(MIN_DRAWS, math.ceil(math.log2(target) / per_draw))
        worst = max(self.differences, key=lambda d: d.top.terms + d.root_bits)
        raise VerificationError(
            f"the error bound misses {target:g} even with {MAX_DRAWS} draws at q ~ 2^{PRIME_BITS[-1][1]}: "
            f"up to 2^{worst.top.terms:.0f} exponentials, 2^{worst.root_bits:.0f} roots"
        )

    def _measure(self) -> None:
        domain = BoundDomain(self.extents, self.weights, algebraic=self.algebraic)
        inputs = [domain.input(t.axes) for t in self.reference.inputs]
        want: list[Bound] = evaluate(self.reference, inputs, domain)
        have: list[Bound] = evaluate(self.candidate, inputs, domain, self.schedule)
        pairs = list(zip(want, have, strict=True))
        if self.is_guarded:
            masked = usual(self.candidate)
            pairs += zip(evaluate(masked, inputs, domain), evaluate(masked, inputs, domain, self.schedule), strict=True)
        self.differences = [Difference.between(domain, x, y) for x, y in pairs]
        self.arguments = {name: Difference.of_arguments(x) for name, x in domain.notes.arguments.items()}

    def _per_draw(self, p_bits: int, q_bits: int, hashed: Mapping[str, int]) -> float:
        """If the graphs differ, one output does: the worst counts, not their sum. Collisions of hashes come on top."""
        logs = [max(error_bound(d, p_bits, q_bits) for d in self.differences)]
        for name, n in hashed.items():
            if name in self.arguments:  # else nothing reads what it makes: no output depends on it
                logs.append(2 * math.log2(n) + error_bound(self.arguments[name], p_bits, q_bits))
        if max(logs) >= 0:  # says nothing, and may be beyond floats
            return 0.0
        return min(math.log2(sum(2.0**x for x in logs)), 0.0)

    def certificate(self, draws: Sequence[Draw], per_draw: float) -> Certificate:
        """State what the draws have shown."""
        tops = [d.top for d in self.differences]
        return Certificate(
            reference=structure_hash(self.given[0]),
            candidate=structure_hash(self.given[1]),
            extents=tuple(sorted(self.extents.items())),
            schedule=_text(self.schedule, self.scale),
            p_bits=draws[0].p_bits,
            q_bits=draws[0].q_bits,
            seeds=tuple(d.seed.hex() for d in draws),
            primes=tuple((d.p, d.q) for d in draws),
            log2_terms=max(t.terms for t in tops),
            degree=max(t.degree for t in tops),
            log2_height=max(t.height for t in tops),
            hashed=max(d.hashed.total() for d in draws),
            algebraic=tuple(sorted(self.algebraic)),
            log2_per_draw=per_draw,
            bound=2.0 ** max(per_draw * len(draws), -1000.0),
        )


def _algebra_of(op: Op) -> str:
    """The name in `ALGEBRAIC` of an operator; powers with half an integer as exponent are square roots."""
    if op.op == "pow" and op.number("exponent").denominator == 2:
        return ROOT
    return MAXIMUM if op.op in MAXIMA else op.op


def _check_interface(reference: KernelGraph, candidate: KernelGraph, known: bool = False) -> None:
    """Both well formed (the reference is `known` to be); the same inputs and outputs, in order, with equal axes,
    extents and types.
    """
    try:
        for graph in (candidate,) if known else (reference, candidate):
            check_graph(graph)
    except GraphError as e:
        raise VerificationError(f"not well formed: {e}") from None
    for axis in set(reference.sizes) & set(candidate.sizes):
        if reference.sizes[axis] != candidate.sizes[axis]:
            raise VerificationError(
                f"axis {axis} has extent {reference.sizes[axis]}, in the candidate {candidate.sizes[axis]}"
            )
    if reference.inputs != candidate.inputs:
        raise VerificationError(f"inputs differ: {_list(reference.inputs)} and {_list(candidate.inputs)}")
    outs = [[replace(g.tensors[name], name="") for name in g.outputs] for g in (reference, candidate)]
    if outs[0] != outs[1]:
        raise VerificationError(f"outputs differ: {_list(outs[0])} and {_list(outs[1])}")


def _list(xs: Sequence[Any]) -> str:
    return ", ".join(str(x) for x in xs)


def _text(schedule: Schedule, scale: Scale | None) -> str:
    """Describe the schedule, and the bounds of masks that were moved."""
    tiles = "; ".join(" ".join(f"{a}={n}" for a, n in k.tiles) for k in schedule.kernels)
    parts = [f"; {n} parts of {a}" for a, n in schedule.parts]
    moved = [f"; {b} for {a} in masks" for a, b in scale.to.items() if a != b] if scale else []
    return "".join([f"tiles {tiles}", *parts, *moved])


def _differences(x: Pair, y: Pair) -> int:
    """Number of elements that differ. Where both have a q part it must agree as well."""
    y = y.map(x.axes, lambda a: arrange(a, y.axes, x.axes))
    wrong = numpy.zeros(x.p.re.shape, bool)
    for a, b in [(x.p, y.p)] + ([(x.q, y.q)] if x.q is not None and y.q is not None else []):
        wrong |= numpy.asarray(a.re != b.re, bool)
        wrong |= numpy.asarray((0 if a.im is None else a.im) != (0 if b.im is None else b.im), bool)
    return int(wrong.sum())
