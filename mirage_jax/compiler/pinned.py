"""Proves a muGraph that a user pinned to a region: every gate but the measurement, for its user wants this graph.

Input: a region, and a graph under any names of axes whose inputs are named as the program's. Output: a decision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mirage_jax.compiler import tuning
from mirage_jax.compiler.region import RegionOnDevice
from mirage_jax.compiler.winner import Family, Winner
from mirage_jax.config import Options
from mirage_jax.errors import GraphError, MirageError, UsageError, VerificationError, without_kind
from mirage_jax.hardware.device_model import device_for
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, KernelSchedule, Schedule
from mirage_jax.mugraph.passes.aligned import aligned
from mirage_jax.mugraph.passes.merge_axes import separate_copies, sink_renames
from mirage_jax.pins import Choice
from mirage_jax.report import Decision
from mirage_jax.search.candidates import Candidate, tiled
from mirage_jax.verify.equivalence.certificate import CertificateGate
from mirage_jax.verify.gate import required
from mirage_jax.verify.types import TypeGate

log = logging.getLogger("mirage_jax")

type RunChecks = Callable[[Winner], tuple[str, str]]  # exact check and float gate: what each said


@dataclass
class WrittenRegion(RegionOnDevice):
    """A region whose program has the axes of a muGraph that somebody wrote."""

    graph: KernelGraph

    @cached_property
    def reference(self) -> KernelGraph:
        """The program over the axes of the graph."""
        return aligned(separate_copies(sink_renames(self.region.graph)), self.graph)


def accept(
    region: Region, platform: str, device: Any, options: Options, choice: Choice, base: Decision, run_checks: RunChecks
) -> Decision:
    """Make a decision for the muGraph of a pin.

    Args:
        region, platform, device, options: the place where the graph is to run.
        choice: the pin.
        base: the region's decision without a winner: its key and its size.
        run_checks: runs a winner through the exact check and the float gate. Raises a `MirageError` if it fails.

    Raises:
        UsageError: a gate refuses the graph. The message says which gate, and why.
    """
    log.info("proving %s", choice)
    try:
        return _accepted(region, platform, device, options, choice, base, run_checks)
    except MirageError as why:
        raise UsageError(f"{choice}: {without_kind(why)}; XLA's code runs without it") from why


def _accepted(
    region: Region, platform: str, device: Any, options: Options, choice: Choice, base: Decision, run_checks: RunChecks
) -> Decision:
    assert choice.graph is not None
    graph = _in_order(choice.graph, [t.name for t in region.graph.inputs])
    place = WrittenRegion(region, platform, device, options, graph)
    proof = CertificateGate(place.reference)
    *others, last = _winners(place, choice.schedule)
    for gate in (proof, TypeGate(place.reference)):
        required(gate, last)
    for winner in others:
        try:
            return _decided(base, choice, winner, proof, run_checks(winner))
        except VerificationError as why:  # of rounding: a more precise form may pass
            log.info("a pinned muGraph is written more precisely: %s", without_kind(why))
    return _decided(base, choice, last, proof, run_checks(last))


def _decided(
    base: Decision, choice: Choice, winner: Winner, proof: CertificateGate, checks: tuple[str, str]
) -> Decision:
    exact, floats = checks
    why = f"{choice.why}, not measured"
    made = replace(base, winner=winner, why=why, source="user", after=winner.footprint)
    return replace(made, certificate=proof.certificate, exact=exact, gate=floats)


def _in_order(graph: KernelGraph, names: Sequence[str]) -> KernelGraph:
    """The graph with its inputs in the program's order."""
    by_name = {t.name: t for t in graph.inputs}
    if sorted(by_name) != sorted(names):
        raise GraphError(f"its inputs are {', '.join(by_name)}; allowed are the program's, {', '.join(names)}")
    return replace(graph, inputs=tuple(by_name[name] for name in names))


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
    for precise in tuning.precisions(found):
        yield place.winner(graph, tuning.as_precise(found.schedule, precise), family)
