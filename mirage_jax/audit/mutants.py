"""A campaign of mutants: wrong graphs close to right ones, which the verifier has to refuse.

Input: right candidates (`sources`). One or two mutation operators change each of them. Every mutant has a *fate*. The
checker refuses a *stillborn* one. An *equivalent* one computes the reference in float64. All others are wrong, and the
verifier accepts or rejects them by fingerprint and certificate.

Three kinds of mutants are right in exact arithmetic. The verifier may accept them, and the *gate* for floats must not:

* those that would compute the reference if masked elements were large numbers; they are minus infinity, and an infinite
  shift or a difference of infinities is NaN;
* those that compute (c x) / (c y) for x / y, where c is zero, but not as long as functions are uninterpreted;
* those that compute (x + c) - (y + c) for x - y, where c is so large that float64 loses the digits of x and y.

A mutant of two operators counts for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import cycle
from random import Random
from typing import ClassVar

from mirage_jax.audit.mutations import MUTATIONS, Mutation
from mirage_jax.audit.oracle import Oracle
from mirage_jax.audit.report import CampaignReport
from mirage_jax.audit.sources import Source
from mirage_jax.errors import GraphError, UsageError, VerificationError
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.verify.equivalence.certificate import Fingerprint, certify

MAX_IDLE_DRAWS = 2_000  # in a row without a new mutant: there are no more


class Fate(Enum):
    """The fate of a mutant."""

    STILLBORN = "stillborn"
    EQUIVALENT = "equivalent"
    REJECTED = "rejected"
    GATE = "gate"
    ACCEPTED = "accepted"


@dataclass(frozen=True)
class Accepted:
    """A wrong graph that got a certificate, with all that is needed to look at it."""

    source: str
    operators: tuple[str, ...]
    reference: str
    mutant: str
    certificate: str

    def __str__(self) -> str:
        return f"{self.source}, {' then '.join(self.operators)}:\n{self.reference}\n{self.mutant}\n{self.certificate}"


@dataclass
class MutantReport(CampaignReport):
    """Counts of fates: `operators` by mutation operator, `total` of all mutants."""

    title: ClassVar[str] = "Mutants"
    header: ClassVar[tuple[str, ...]] = ("operator", "change", *(f.value for f in Fate))
    words = 2

    seed: int
    sources: int
    operators: dict[str, dict[str, int]] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    by_certificate: int = 0  # rejected, but passed one draw of the fingerprint
    accepted: list[Accepted] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Mutants that are not equivalent."""
        return sum(self.total[f.value] for f in (Fate.REJECTED, Fate.GATE, Fate.ACCEPTED))

    @property
    def passed(self) -> bool:
        """Whether no wrong mutant was accepted."""
        return not self.accepted

    def count(self, fate: Fate, operators: Sequence[Mutation]) -> None:
        """Count a mutant for each of its operators and in total."""
        for counts in (self.total, *(self.operators[m.name] for m in operators)):
            counts[fate.value] += 1

    def summary(self) -> str:
        """Sum the campaign up in one sentence."""
        return (
            f"{self.total['accepted']} of {self.wrong} non-equivalent mutants accepted "
            f"({self.total['gate']} of them rejected by the float gate; besides, {self.total['stillborn']} stillborn, "
            f"{self.total['equivalent']} equivalent; {self.sources} sources, seed {self.seed}, {self.seconds:.0f} s)"
        )

    def rows(self) -> list[list[str]]:
        """Counts by operator, and of all mutants."""
        changes = {m.name: m.change for m in MUTATIONS}
        counts = [[name, changes[name], *(str(n) for n in fates.values())] for name, fates in self.operators.items()]
        return [*counts, ["", "all mutants", *(str(n) for n in self.total.values())]]

    def findings(self) -> list[str]:
        """The mutants that were accepted."""
        return list(map(str, self.accepted))


class MutationSubject:
    """One right candidate, and the judges of its mutants."""

    def __init__(self, source: Source, seed: int):
        self.source = source
        self.oracle, self.fingerprint = Oracle(source.reference, seed), Fingerprint(source.reference)
        self.seen: set[KernelGraph] = {source.candidate}
        self.by_certificate = 0  # mutants that only the certificate refused

    @property
    def sound(self) -> bool:
        """Whether the candidate itself is right, for floats and for the verifier, and the program is finite."""
        right = self.oracle.defined and self.oracle.same(self.source.candidate)
        return right and self.fingerprint(self.source.candidate)

    def fate(self, mutant: KernelGraph) -> tuple[Fate, str]:
        """Judge a mutant; returns its fate, and the certificate if it got one."""
        try:
            check_graph(mutant)
            _check_types(self.source.reference, mutant)
            if self.oracle.same(mutant):
                return Fate.EQUIVALENT, ""
        except GraphError:
            return Fate.STILLBORN, ""
        if not self.fingerprint(mutant):
            return Fate.REJECTED, ""
        try:
            certificate = certify(self.source.reference, mutant)
        except VerificationError:
            self.by_certificate += 1
            return Fate.REJECTED, ""
        oracle = self.oracle
        exactly = (
            oracle.same(mutant, finite=True) or oracle.same_where_finite(mutant) or oracle.same_in_fractions(mutant)
        )
        if exactly and not self.oracle.passes_gate(mutant):
            return Fate.GATE, ""
        return Fate.ACCEPTED, str(certificate)


def _check_types(reference: KernelGraph, mutant: KernelGraph) -> None:
    outs = [[replace(g.tensors[name], name="") for name in g.outputs] for g in (reference, mutant)]
    if outs[0] != outs[1]:
        raise GraphError("outputs of other types")


def mutate(
    sources: Sequence[Source],
    count: int,
    seed: int,
    mutations: Sequence[Mutation] = MUTATIONS,
    notify: Callable[[MutantReport], object] | None = None,
) -> MutantReport:
    """Draw mutants until `count` are wrong (or no new ones turn up), and try the verifier on these.

    Raises `UsageError` if no source is right.
    """
    rng = Random(seed)
    subjects = sound_subjects(sources, seed)
    if not subjects:
        raise UsageError(f"mutants: none of {len(sources)} sources is right and finite")
    fates = {m.name: {f.value: 0 for f in Fate} for m in mutations}
    result = MutantReport(seed, len(subjects), fates, {f.value: 0 for f in Fate})
    with result.timed() as update:
        for subject, mutant, operators in _new_mutants(subjects, mutations, rng):
            fate, certificate = subject.fate(mutant)
            result.count(fate, operators)
            if fate is Fate.ACCEPTED:
                texts = str(subject.source.reference), str(mutant), certificate
                result.accepted.append(Accepted(subject.source.name, tuple(map(str, operators)), *texts))
            if notify is not None and sum(result.total.values()) % 1000 == 0:
                update()
                notify(result)
            if result.wrong >= count:
                break
    result.by_certificate = sum(s.by_certificate for s in subjects)
    return result


def sound_subjects(sources: Sequence[Source], seed: int) -> list[MutationSubject]:
    """Take the sources that are right to begin with."""
    return [s for n, source in enumerate(sources) if (s := MutationSubject(source, seed + n)).sound]


def _new_mutants(
    subjects: Sequence[MutationSubject], mutations: Sequence[Mutation], rng: Random
) -> Iterator[tuple[MutationSubject, KernelGraph, tuple[Mutation, ...]]]:
    """Mutants that were not drawn before, by the operators in turn, until hardly any are left."""
    idle, turns = 0, cycle([(m, [s for s in subjects if m.applies(s.source.candidate)]) for m in mutations])
    while idle < MAX_IDLE_DRAWS:
        first, applicable = next(turns)
        if not applicable:
            continue
        subject, second = rng.choice(applicable), rng.choice(mutations) if rng.random() < 0.5 else None
        mutant, operators = _draw(subject, first, second, rng)
        idle += 1
        if mutant is not None and mutant not in subject.seen:
            idle = 0
            subject.seen.add(mutant)
            yield subject, mutant, operators


def _draw(
    subject: MutationSubject, first: Mutation, second: Mutation | None, rng: Random
) -> tuple[KernelGraph | None, tuple[Mutation, ...]]:
    mutant = first.draw(subject.source.candidate, rng)
    if mutant is None or second is None:
        return mutant, (first,)
    try:
        return second.draw(mutant, rng), (first, second)
    except (GraphError, KeyError):  # the first one left nothing that could be read
        return None, (first, second)
