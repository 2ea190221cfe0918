"""Stored decisions: their keys, how they are written, and what a stored winner must pass before it runs again.

Whoever can write to the cache directory could write anything there. So a stored winner is parsed, checked and certified
again in every process. One that this user did not seal also runs in a child process first, then passes the exact check
and the float gate.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace

from mirage_jax import limits
from mirage_jax.cache import Cache, CacheKey, Entry
from mirage_jax.compiler.region import RegionOnDevice
from mirage_jax.compiler.winner import Family, Winner
from mirage_jax.errors import CacheError, VerificationError
from mirage_jax.gc_pause import no_collection
from mirage_jax.mugraph.check import check_graph, check_schedule
from mirage_jax.mugraph.domains.floats import numpy_dtype
from mirage_jax.mugraph.footprint import footprint
from mirage_jax.mugraph.graph import KernelGraph, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.schedule_json import schedule_from_json, schedule_to_json
from mirage_jax.report import Decision, Variant
from mirage_jax.seals import Seal
from mirage_jax.verify.equivalence import certificate as certificates
from mirage_jax.verify.gate import Gate
from mirage_jax.verify.types import TypeGate

POLICY = "certificate 1e-12, float gate 3.0, lower bound of the ratio at least 1.03"
STRICT_RANGE = ", strict range"
# These show most rounding errors; the last two are those of programs whose inputs mask.
STORED_INPUT_CLASSES = ("normal", "near overflow", "heavy tail", "large logits", "on or off", "masked rows")
FIRST_INPUT_CLASSES = (*STORED_INPUT_CLASSES, "large logits, transposed")  # of a candidate that is not tuned yet
MAX_WORK_RATIO = 32.0  # bytes or operations of a stored winner over the program's
ALLOWED_WORK = 1e8  # bytes or operations that are always allowed on top
MAX_STORED_ITEMSIZE = 4  # bytes of a dtype that JAX always has; wider ones have to occur in the program
CHECKED_HERE = (
    f"passed on a few telling input classes ({', '.join(STORED_INPUT_CLASSES)}) when first read here; made elsewhere"
)

# Gates that every stored graph passes again, besides its certificate: each is made for the program's own graph.
GATES_FOR_STORED: tuple[Callable[[KernelGraph], Gate[Winner]], ...] = (TypeGate,)


def key_of(subject: RegionOnDevice) -> CacheKey:
    """Compute the key under which the region's decision is stored."""
    return CacheKey.here(
        graph=subject.text,
        extents=subject.reference.sizes,
        backend=subject.options.backend,
        policy=f"{POLICY}{STRICT_RANGE if subject.options.strict_range else ''}",
        device=subject.device,
    )


def entry_of(d: Decision) -> Entry:
    """A decision as it is stored."""
    w: Winner | None = d.winner
    return Entry(
        decision="xla" if w is None else "win",
        graph=None if w is None else str(w.graph),
        schedule=None if w is None else schedule_to_json(w.schedule),
        certificate=None if d.certificate is None else json.loads(d.certificate.to_json()),
        timings=dict(d.timings),
        measured=d.measured,
        why_not=d.why_not,
        reasons=(d.why, d.gate, "" if w is None else w.family, d.exact),
        variants=tuple((v.text, v.sizes, v.seconds) for v in d.variants),
        kernels="" if w is None else w.kernel_digest,
    )


def store(cache: Cache, key: CacheKey, d: Decision) -> Decision:
    """Write a decision to the cache, and return it with the path of its readable kernels."""
    kernels = None if d.winner is None else d.winner.readable
    path = cache.put(key, entry_of(d), kernels)
    return replace(d, kernels=str(path.with_suffix(".py")) if path is not None and kernels else "")


def restore(
    subject: RegionOnDevice,
    cache: Cache,
    key: CacheKey,
    entry: Entry,
    seal: Seal,
    base: Decision,
    check_foreign: Callable[[Winner], str],
) -> Decision:
    """Make a decision of a cache entry; `check_foreign` checks a winner that this user did not seal.

    Raises:
        MirageError: the entry cannot be used.
    """
    if len(entry.reasons) != 4:
        raise CacheError(f"found {len(entry.reasons)} texts where why, gate, family and exact check must be")
    why, gate, family, exact = entry.reasons
    base = replace(base, source="cache", timings=dict(entry.timings), measured=tuple(entry.measured))
    base = replace(base, why_not=entry.why_not, variants=tuple(Variant(*v) for v in entry.variants))
    if entry.decision == "xla":
        return replace(base, why=why if seal is Seal.MADE else f"{why} (decided elsewhere)", gate=gate, exact=exact)
    winner, certificate = proven_winner(subject, entry, family)
    text = cache.kernel_path(key)
    base = replace(base, winner=winner, after=winner.footprint, certificate=certificate)
    base = replace(base, kernels=str(text) if text.is_file() else "")
    if seal is Seal.MADE:
        return replace(base, why=why, gate=gate, exact=exact)
    exact = "passed when it was first read here" if winner.has_kernels else ""
    if seal is Seal.FOREIGN:
        if entry.kernels and entry.kernels != winner.kernel_digest:
            raise CacheError("this build writes other kernels for it than those that were measured")
        exact = check_foreign(winner)
        cache.vouch(key, entry)
    return replace(base, why=_measured_elsewhere(entry), gate=CHECKED_HERE, exact=exact)


@no_collection()
def proven_winner(subject: RegionOnDevice, entry: Entry, family: str) -> tuple[Winner, certificates.Certificate]:
    """Parse a stored winner and prove it again. Raises a `MirageError` if it cannot be proven."""
    graph, schedule = parse(entry.graph or ""), schedule_from_json(entry.schedule)
    check_graph(graph)
    check_schedule(graph, schedule)
    if family not in Family:
        raise CacheError(f"family {family!r} is neither kernels nor algebra")
    _check_size(graph, schedule, subject)
    winner = subject.winner(graph, schedule, family)
    for gate in GATES_FOR_STORED:
        verdict = gate(subject.reference).check(winner)
        if not verdict.passed:
            raise VerificationError(verdict.why)
    return winner, _proved(subject.reference, graph)


def _check_size(graph: KernelGraph, schedule: Schedule, subject: RegionOnDevice) -> None:
    """Refuse idle kernels, types that JAX may not have, and more work than any search would choose."""
    limits.whole("kernels", len(graph.kernels), 1, limits.MAX_KERNELS)
    _check_dtypes(graph, subject.reference)
    read = {load.tensor for kernel in graph for load in kernel.loads} | set(graph.outputs)
    if unused := [k.name for k in graph if read.isdisjoint(store.tensor.name for store in k.stores)]:
        raise CacheError(f"nothing reads what kernel {unused[0]} computes")
    ours, program = footprint(graph, schedule.part_counts), subject.before
    _check_work("bytes", ours.bytes, program.bytes)
    _check_work("operations", ours.flops, program.flops)


def _check_dtypes(graph: KernelGraph, reference: KernelGraph) -> None:
    in_program = {t.dtype for t in reference.tensors.values()}
    for t in graph.tensors.values():
        if numpy_dtype(t.dtype).itemsize > MAX_STORED_ITEMSIZE and t.dtype not in in_program:
            raise CacheError(f"{t} is wider than anything in the program")


def _check_work(unit: str, ours: float, program: float) -> None:
    if ours > MAX_WORK_RATIO * program + ALLOWED_WORK:
        raise CacheError(f"it takes {float(ours):.1e} {unit}, the program {float(program):.1e}")


def _measured_elsewhere(entry: Entry) -> str:
    """Say why somebody else's winner was chosen, from its numbers: we do not repeat its text."""
    times = [entry.timings.get(name, 0.0) for name in ("xla", "mirage")]
    ratio = f"{times[0] / times[1]:.2f}x over XLA" if min(times) > 0 else "faster than XLA"
    return f"{ratio}, as measured elsewhere"


@functools.lru_cache(maxsize=256)
def _proved(reference: KernelGraph, graph: KernelGraph) -> certificates.Certificate:
    """Certify a stored graph again, once in a process: we do not trust the stored certificate."""
    return certificates.certify(reference, graph)
