"""Proves a muGraph that a user pinned to a region: every gate but the measurement, for its user wants this graph.

Input: a region, and a graph under any names of axes whose inputs are named as the program's. Output: a decision.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, Self

from mirage_jax.cache import Cache, CacheKey
from mirage_jax.compiler import tuning
from mirage_jax.compiler.region import RegionOnDevice
from mirage_jax.compiler.stored import STORED_INPUT_CLASSES, key_of, restore, store
from mirage_jax.compiler.winner import Family, Winner
from mirage_jax.errors import GraphError, MirageError, UsageError, VerificationError, in_one_line, without_kind
from mirage_jax.hardware.device_model import device_for
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, KernelSchedule, Schedule
from mirage_jax.mugraph.passes.aligned import aligned
from mirage_jax.mugraph.passes.merge_axes import separate_copies, sink_renames
from mirage_jax.mugraph.schedule_json import schedule_to_json
from mirage_jax.pins import Choice
from mirage_jax.report import Decision
from mirage_jax.search.candidates import Candidate, tiled
from mirage_jax.verify.equivalence.certificate import CertificateGate
from mirage_jax.verify.gate import required
from mirage_jax.verify.types import TypeGate

log = logging.getLogger("mirage_jax")


class RunChecks(Protocol):
    """Runs a certified winner through the exact check and the float gate; raises a `MirageError` if it fails."""

    def __call__(self, winner: Winner, classes: Sequence[str] = ()) -> tuple[str, str]:
        """Return what each said, on the named classes of inputs or on all."""
        ...


@dataclass
class WrittenRegion(RegionOnDevice):
    """A region whose program has the axes of a muGraph that somebody wrote."""

    graph: KernelGraph

    @classmethod
    def of(cls, subject: RegionOnDevice, graph: KernelGraph) -> Self:
        """Take the graph with its inputs in the order of the region's.

        Raises:
            GraphError: its inputs have other names.
        """
        by_name, names = {t.name: t for t in graph.inputs}, [t.name for t in subject.region.graph.inputs]
        if sorted(by_name) != sorted(names):
            raise GraphError(f"its inputs are {', '.join(by_name)}; allowed are the program's, {', '.join(names)}")
        graph = replace(graph, inputs=tuple(by_name[name] for name in names))
        return cls(subject.region, subject.platform, subject.device, subject.options, graph)

    @cached_property
    def reference(self) -> KernelGraph:
        """The program over the axes of the graph."""
        return aligned(separate_copies(sink_renames(self.region.graph)), self.graph)


def accept(subject: RegionOnDevice, choice: Choice, base: Decision, cache: Cache, run_checks: RunChecks) -> Decision:
    """Make a decision for the muGraph of a pin.

    A graph that passed here before is certified again and passes the gates that every stored winner passes.

    Args:
        subject: the region on the device where the graph is to run.
        choice: the pin.
        base: the region's decision without a winner: its key and its size.
        cache: remembers graphs that passed.
        run_checks: runs the last two gates.

    Raises:
        UsageError: a gate refuses the graph. The message says which gate, and why.
    """
    log.info("proving %s", choice)
    try:
        decision = _accepted(subject, choice, base, cache, run_checks)
    except MirageError as why:
        raise UsageError(f"{choice}: {without_kind(why)}; XLA's code runs without it") from why
    return replace(decision, why=f"{choice.why}, not measured", source="user")


def _accepted(subject: RegionOnDevice, choice: Choice, base: Decision, cache: Cache, run_checks: RunChecks) -> Decision:
    assert choice.graph is not None
    place = WrittenRegion.of(subject, choice.graph)
    key = _key_of(place, choice.schedule)
    known = _known(place, key, base, cache, run_checks)
    if known is None or choice.schedule not in (None, known.winner.schedule):
        known = store(cache, key, _proven(place, choice.schedule, base, run_checks))
    return known


def _key_of(place: WrittenRegion, schedule: Schedule | None) -> CacheKey:
    """The key under which it is remembered that the graph passed."""
    sizes = json.dumps(None if schedule is None else schedule_to_json(schedule))
    key = key_of(place)
    return replace(key, graph=f"{key.graph}\n# pinned\n{place.graph}\n# {sizes}")


def _known(place: WrittenRegion, key: CacheKey, base: Decision, cache: Cache, run_checks: RunChecks) -> Decision | None:
    """The decision if the graph passed before; None if that is not known."""
    found = cache.lookup(key)
    if found.entry is None:
        return None
    check = lambda winner: run_checks(winner, STORED_INPUT_CLASSES)[0]  # noqa: E731
    try:
        known = restore(place, cache, key, found.entry, found.seal, base, check)
    except Exception as why:  # whatever is in a file, it is a miss
        log.warning("cache entry %s is not used: %s", key.digest[:12], in_one_line(why))
        return None
    return known if known.winner is not None and known.winner.graph == place.graph else None


def _proven(place: WrittenRegion, schedule: Schedule | None, base: Decision, run_checks: RunChecks) -> Decision:
    proof = CertificateGate(place.reference)
    *others, last = _winners(place, schedule)
    for gate in (proof, TypeGate(place.reference)):
        required(gate, last)
    base = replace(base, certificate=proof.certificate)
    for winner in others:
        try:
            return _decided(base, winner, run_checks(winner))
        except VerificationError as why:  # of rounding: a more precise form may pass
            log.info("a pinned muGraph is written more precisely: %s", without_kind(why))
    return _decided(base, last, run_checks(last))


def _decided(base: Decision, winner: Winner, checks: tuple[str, str]) -> Decision:
    exact, floats = checks
    return replace(base, winner=winner, after=winner.footprint, exact=exact, gate=floats)


def _winners(place: WrittenRegion, schedule: Schedule | None) -> Iterator[Winner]:
    """The graph at the given sizes. On a GPU without sizes: at the model's, from the fastest to the most precise."""
    graph = place.graph
    if not any(isinstance(k, BlockGraph) for k in graph.kernels):
        yield place.winner(graph, schedule or Schedule((KernelSchedule(),) * len(graph.kernels)), Family.ALGEBRA)
        return
    family = Family.KERNELS if place.platform == "cuda" else Family.ALGEBRA  # elsewhere plain JAX runs its steps
    if schedule is not None:
        yield place.winner(graph, schedule, family)
        return
    found: Candidate | None = tiled(graph, family, (), device_for(place.device))
    if found is None:
        raise GraphError("no tile sizes of a kernel fit this device: pin a MuGraph with a schedule")
    for precise in tuning.precisions(found, place.precisions):
        yield place.winner(graph, tuning.as_precise(found.schedule, precise), family)
