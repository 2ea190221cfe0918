"""A campaign of mutants: wrong graphs near to right ones, of which the verifier has to refuse every one.

Input: right candidates (`sources`). One or two mutation operators are applied to each. A mutant that the checker
refuses is *stillborn*; one that computes the reference in float64 is *equivalent*; what is left is wrong, and passes
the verifier's fingerprint and certificate or does not. Two kinds of wrong mutants are none in exact arithmetic, and
have a right to their certificates. Were what is masked a large number, one would compute the reference, but it is minus
infinity, and an infinite shift or a difference of infinities is NaN. Another computes (c x) / (c y) for x / y, where c
is no zero as long as functions are uninterpreted, but is one in fact: NaN again. The float gate has to refuse these
(*gate*). A mutant made by two operators counts for both.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
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

IDLE = 2_000  # draws in a row that give no new mutant: there are no more


class Fate(Enum):
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
    """What a campaign found. `operators`: fates per mutation operator; `total`: per mutant."""

    title: ClassVar[str] = "Mutants"
    header: ClassVar[tuple[str, ...]] = ("operator", "change", *(f.value for f in Fate))
    words: ClassVar[int] = 2

    seed: int
    sources: int
    operators: dict[str, dict[str, int]] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    by_certificate: int = 0  # of those rejected: passed one draw of the fingerprint
    accepted: list[Accepted] = field(default_factory=list)
    seconds: float = 0.0
    date: str = ""

    @property
    def wrong(self) -> int:
        """Mutants that are not equivalent."""
        return sum(self.total[f.value] for f in (Fate.REJECTED, Fate.GATE, Fate.ACCEPTED))

    def summary(self) -> str:
        return (
            f"{self.total['accepted']} of {self.wrong} non-equivalent mutants accepted "
            f"({self.total['gate']} of them rejected by the float gate; besides, {self.total['stillborn']} stillborn, "
            f"{self.total['equivalent']} equivalent; {self.sources} sources, seed {self.seed}, {self.seconds:.0f} s)"
        )

    def rows(self) -> list[list[str]]:
        changes = {m.name: m.change for m in MUTATIONS}
        counts = [[name, changes[name], *(str(n) for n in fates.values())] for name, fates in self.operators.items()]
        return [*counts, ["", "all mutants", *(str(n) for n in self.total.values())]]

    def details(self) -> list[str]:
        return list(map(str, self.accepted))


class MutationSubject:
    """One right candidate, and what its mutants are judged by."""

    def __init__(self, source: Source, seed: int):
        self.source = source
        self.oracle, self.fingerprint = Oracle(source.reference, seed), Fingerprint(source.reference)
        self.seen: set[KernelGraph] = {source.candidate}
        self.late = 0  # refused by the certificate only

    @property
    def sound(self) -> bool:
        """Is the candidate itself right, for floats and for the verifier, and the program finite?"""
        right = self.oracle.defined and self.oracle.same(self.source.candidate)
        return right and self.fingerprint(self.source.candidate)

    def fate(self, mutant: KernelGraph) -> tuple[Fate, str]:
        """What becomes of a mutant, and the certificate that it got."""
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
            self.late += 1
            return Fate.REJECTED, ""
        exactly = self.oracle.same(mutant, finite=True) or self.oracle.same_where_finite(mutant)
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
    """Draw mutants until `count` of them are wrong (or no new ones turn up), and try the verifier on these."""
    began, rng = time.monotonic(), Random(seed)
    subjects = [s for n, source in enumerate(sources) if (s := MutationSubject(source, seed + n)).sound]
    if not subjects:
        raise UsageError(f"mutants: none of {len(sources)} sources is right and finite")
    fates = {m.name: {f.value: 0 for f in Fate} for m in mutations}
    result = MutantReport(
        seed, len(subjects), fates, {f.value: 0 for f in Fate}, date=datetime.date.today().isoformat()
    )
    idle, turns = 0, cycle([(m, [s for s in subjects if m.applies(s.source.candidate)]) for m in mutations])
    while result.wrong < count and idle < IDLE:
        first, applicable = next(turns)
        if not applicable:
            continue
        subject, second = rng.choice(applicable), rng.choice(mutations) if rng.random() < 0.5 else None
        mutant, operators = _draw(subject, first, second, rng)
        idle += 1
        if mutant is None or mutant in subject.seen:
            continue
        idle = 0
        subject.seen.add(mutant)
        fate, certificate = subject.fate(mutant)
        result.total[fate.value] += 1
        for m in operators:
            result.operators[m.name][fate.value] += 1
        if fate is Fate.ACCEPTED:
            names = tuple(map(str, operators))
            texts = str(subject.source.reference), str(mutant), certificate
            result.accepted.append(Accepted(subject.source.name, names, *texts))
        if notify is not None and sum(result.total.values()) % 1000 == 0:
            result.seconds = time.monotonic() - began
            notify(result)
    result.seconds, result.by_certificate = time.monotonic() - began, sum(s.late for s in subjects)
    return result


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
