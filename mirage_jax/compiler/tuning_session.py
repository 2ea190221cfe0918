"""Works on one region without a stored decision: searches candidates, times them, and makes their gates."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import jax
import numpy as np

from mirage_jax import progress, timing
from mirage_jax.cache import Cache, CacheKey, Entry
from mirage_jax.cluster import Machine
from mirage_jax.compiler.float_check import Accuracy, FloatGate
from mirage_jax.compiler.isolation.parent import SLOW, Outcome, TrialFailure, Trials
from mirage_jax.compiler.matrix_units import OnMatrixUnits, products_left_to_xla
from mirage_jax.compiler.refused_kernels import RefusedKernels
from mirage_jax.compiler.region import RegionOnDevice, as_asked
from mirage_jax.compiler.specialization import specialized
from mirage_jax.compiler.threads import as_here
from mirage_jax.compiler.winner import Winner
from mirage_jax.config import warn_once
from mirage_jax.cost.residuals import Residuals, kind
from mirage_jax.cost.roofline import bound_by_products, estimate, fused_estimate, lower_limit
from mirage_jax.errors import MirageError, TrialError, in_one_line
from mirage_jax.gpu_lock import gpu_lock, process_turn
from mirage_jax.hardware.device_model import DEVICES, DeviceModel, device_for
from mirage_jax.interruptible import POLL_SECONDS, background, spread
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.lower.runtime import launch
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.dtypes import BYTES
from mirage_jax.mugraph.footprint import Footprint, footprint
from mirage_jax.mugraph.graph import KernelGraph, Tensor
from mirage_jax.report import Variant
from mirage_jax.search import candidates
from mirage_jax.search.candidates import Candidate
from mirage_jax.search.driver import search
from mirage_jax.search.enumerate.kernels import Space
from mirage_jax.search.enumerate.window_search import FAMILIES
from mirage_jax.search.forward_error import ForwardError
from mirage_jax.search.report import SearchReport, StopReason
from mirage_jax.verify.equivalence import certificate as certificates
from mirage_jax.verify.exact import exact_check
from mirage_jax.verify.gate import Gate, Verdict
from mirage_jax.verify.types import TypeGate
from mirage_jax.why_not import Elsewhere, Reason, WhyNot

log = logging.getLogger("mirage_jax.timing")
gate_log = logging.getLogger("mirage_jax.gate")

type Unsure = Callable[[Mapping[str, timing.Timing]], Sequence[str]]

SPACE = Space(max_ops=14)
MAX_VARIANTS_LISTED = 9  # different muGraphs, in a report
MIN_SEARCH_SECONDS = 2.0  # seconds for a search, however late it is
MAX_SEARCH_FRACTION = 0.35  # of the seconds that are left to a region: what is found must be measured, too
MIN_REMEMBERED_SEARCH_SECONDS = 10.0  # seconds of a search that is worth remembering for other sizes
MAX_STORED_STRUCTURES = 48  # structures kept for other sizes, where others may be the best
MAX_ALGEBRA_COST_RATIO = 0.97  # other algebra is measured if the model puts it below this fraction of the program's own
MAX_COST_OVER_XLA = 1.75  # kernels are measured up to this multiple of XLA's estimated time, which is rough
MAX_COST_OVER_LIBRARY = 1.0  # the same where products of libraries take the time, which the model knows well
MAX_NEAREST_COST, NEAREST = 3.0, 3  # up to this multiple of that limit, so many kernels are measured if no others are
MIN_NEAREST_GAIN = 1.3  # of XLA's time over the lower limit, from which on that is worth the time
MAX_COST_BEFORE_SPECIALIZING = 4.0  # up to this multiple of that limit, a kernel's specialized form is priced
MAX_SPECIALIZED_CANDIDATES = 40  # candidates whose specialized form is priced
XLA_COMPILE_THREADS = 8
MAX_PREPARING_SECONDS = 60.0  # after the gate is wanted
MANY_OPERATORS = 20  # of a region, above which kernels may have twice as many
MORE_ROUNDS = 60  # of times that are too few to decide
MAX_SECONDS_OF_MORE = 2.0  # of the programs in these rounds
MAX_LATE_SECONDS = 10.0  # after a region's share of the budget, within which its first variants are begun
MIN_OPERATORS_PREPARED = 4  # of a region, from which on the search takes about as long as preparing the float gate
TF32_CLASSES = ("normal", "uniform", "zero rows", "one hot", "constant rows", "cancelling")  # of inputs
ELSEWHERE = "H200"  # the device that reports speak of where kernels cannot run
MAX_TRIAL_MEMORY_FRACTION = 0.5  # of the free memory of a device, for all children


def space_for(region: Region) -> Space:
    """Choose the limits of the search. A region that reads slices has each pointwise operator once per slice.

    One kernel may make most of a large region: a gradient of distances has 30 operators.
    """
    in_windows = any(len(b.tensors) > 1 for b in region.inputs)
    is_large = len(region.graph.kernels) > MANY_OPERATORS
    return replace(SPACE, max_ops=2 * SPACE.max_ops) if in_windows or is_large else SPACE


@dataclass
class TuningSession(RegionOnDevice):
    """A region that is being searched, measured and checked, with the counts for its report."""

    tried: Counter[str] = field(default_factory=Counter)  # candidates by what happened to them
    step_seconds: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    measured: list[tuple[float, float]] = field(default_factory=list)  # seconds of each variant: by the model, and real
    timed: dict[Winner, timing.Timing] = field(default_factory=dict)  # variants that were screened
    fastest: dict[KernelGraph, Variant] = field(default_factory=dict)  # variant of each muGraph that was timed
    xla_seconds: float | None = None  # that XLA's code takes, where it was timed
    specialized_asked: int = 0  # candidates whose specialized form was priced
    refused_kernels: RefusedKernels = field(default_factory=RefusedKernels)
    devices: Sequence[Any] = ()  # of one kind: variants may be tried on all of them
    machines: Sequence[Machine] = ()  # others, that help
    until: float = math.inf  # in seconds of `time.monotonic`: from then on, tuning skips optional steps
    trials: Trials | None = None  # children that try variants first; None: this process does
    notify: progress.Say = progress.silent
    last_failure: str = ""  # of a candidate to compile or to run
    _preparing: threading.Thread | None = None
    _is_searched: threading.Event = field(default_factory=threading.Event)

    def try_in(self, trials: Trials | None, notify: progress.Say = progress.silent) -> None:
        """Try variants in these children from now on, as many as the device has room for, and report progress."""
        self.trials = None if trials is None else self.with_room(trials)
        self.notify = notify

    @contextmanager
    def timed_step(self, name: str) -> Iterator[None]:
        """Count the seconds of a step of tuning."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.step_seconds[name] += time.monotonic() - started

    @cached_property
    def space(self) -> Space:
        """The limits of the search for this region."""
        return space_for(self.region)

    @property
    def description(self) -> DeviceModel:
        """The device, as the cost model describes it."""
        return as_asked(self.region, device_for(self.device))

    def headroom(self, xla: float | None = None) -> float:
        """Estimate the seconds that tuning may save: XLA's time less a lower bound.

        `xla` is XLA's measured time; without it the cost model estimates it.
        """
        taken = fused_estimate(self.reference, self.description) if xla is None else xla
        return taken - lower_limit(self.reference, self.description)

    def _bytes(self, t: Tensor) -> int:
        return math.prod(map(self.reference.extent, t.axes)) * BYTES[t.dtype]

    @property
    def sets(self) -> int:
        """Sets of inputs on which the region is timed."""
        return timing.sets_for(self._input_bytes) if self._on_gpu else 1

    @property
    def _on_gpu(self) -> bool:
        return self.platform == "cuda"

    @property
    def _input_bytes(self) -> int:
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.specs)

    def with_room(self, trials: Trials) -> Trials:
        """Keep the children for which the device has room: each needs the inputs and results of all sets."""
        stats = self.device.memory_stats() or {}
        if "bytes_limit" not in stats:
            return trials
        results = sum(self._bytes(self.reference.tensors[name]) for name in self.reference.outputs)
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        return trials.with_room(self.sets * (self._input_bytes + results), MAX_TRIAL_MEMORY_FRACTION * free)

    # ------------------------------------------------------------------ search

    def candidates(self, cache: Cache, key: CacheKey, notify: progress.Say) -> tuple[list[Candidate], str]:
        """Search for candidates: return them, best estimate first, and the search's report.

        Kernels that a long search found for the same structure at other sizes are tiled for these; only algebra is
        searched then, because what order of evaluation is cheap depends on sizes.
        """
        device = self.description
        share = MAX_SEARCH_FRACTION * (self.until - time.monotonic())
        seconds = min(self.options.budget.seconds, max(share, MIN_SEARCH_SECONDS))
        key = replace(key, graph=candidates.structure(self.reference), extents=(), policy=f"structures, {self.space}")
        known = cache.get(key) if device.is_gpu and len(self.families) > 1 else None
        kernels = [] if known is None else candidates.restore(known.schedule, self.reference, device)
        families = ("algebra",) if kernels else self.families
        found, report = self.searched(families, seconds, notify)
        text = str(report)
        if kernels:
            text = f"kernels: {len(kernels)} structures known from other sizes, only tiles were chosen\nalgebra: {text}"
        elif (
            report.seconds >= MIN_REMEMBERED_SEARCH_SECONDS
        ):  # else the next time too: nothing beats candidates made for the sizes
            kept = islice(candidates.diverse(c for c in found if c.family == "kernels"), MAX_STORED_STRUCTURES)
            if new := candidates.to_json(list(kept)):
                cache.put(key, Entry("structures", schedule=new))
        return self.ranked((*kernels, *found)), text

    def searched(
        self, families: Sequence[str], seconds: float, notify: progress.Say
    ) -> tuple[list[Candidate], SearchReport]:
        """Search for candidates of these families, in so many seconds."""
        states, workers = self.options.budget.states or 2_000_000, self.options.budget.workers
        of_search = progress.searching(notify, seconds)
        found, report = search(
            self.reference, self.description, self.space, seconds, states, families, of_search, workers, self.machines
        )
        if report.stop is StopReason.INTERRUPTED:  # candidates found so far are no answer to store
            raise KeyboardInterrupt
        return found, report

    def ranked(self, found: Iterable[Candidate]) -> list[Candidate]:
        """Put candidates into the form in which they are launched, best estimate first."""
        ordered = (candidates.in_order(c, self.reference) for c in found)
        ranked = sorted((candidates.as_launched(c, self.description) for c in ordered), key=lambda c: c.seconds)
        self.tried["found"] = len(ranked)
        return ranked

    @property
    def families(self) -> Sequence[str]:
        """The families of candidates to search. If no kernel can run here, warn once."""
        if self._on_gpu and (package := launch.missing(*launch.PACKAGES)):
            warn_once(f"no kernels are tried on this GPU: {package} is not installed ({launch.INSTALL})")
            return ("algebra",)
        return ("algebra",) if self.options.backend == "jax" else FAMILIES

    @cached_property
    def slowest(self) -> float:
        """Seconds, by the model, up to which kernels are measured."""
        most = MAX_COST_OVER_LIBRARY if bound_by_products(self.reference, self.description) else MAX_COST_OVER_XLA
        return most * self._xla_seconds_at_most

    @property
    def _xla_seconds_at_most(self) -> float:
        """XLA's time as measured or as estimated, the larger one."""
        return max(fused_estimate(self.reference, self.description), self.xla_seconds or 0.0)

    def learn_time_of_xla(self) -> None:
        """Time XLA's code if that is not known: a model that is far off would drop faster kernels."""
        while self.xla_seconds is None and self._is_preparing:  # that begins with XLA's time
            time.sleep(POLL_SECONDS)
        self._time_xla_once()

    def _time_xla_once(self) -> None:
        if self.xla_seconds is None and self._on_gpu and self.trials is not None and not self.is_late:
            (self.xla_seconds,) = times_of_xla([self])
            log.info("XLA's code takes %s s", self.xla_seconds)

    def promising(self, c: Candidate) -> bool:
        """Whether a candidate is worth measuring.

        Library operators must do clearly less work than the program; kernels must not be far slower than XLA's.
        """
        if c.family == "kernels":
            promising = c.seconds <= self.slowest or self._promising_specialized(c)
            self.tried["far slower than XLA by the model"] += not promising
            return promising

        promising = self._work(footprint(c.graph)) < MAX_ALGEBRA_COST_RATIO * self._work(self.before)
        self.tried["not cheaper than the program"] += not promising
        return promising

    def keeping_digits(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Leave out candidates that lose digits, unless they are much faster than all that lose none."""
        error = ForwardError(self.reference)
        keep = candidates.keeping_digits([replace(c, loses_digits=error.is_larger(c.graph)) for c in found])
        self.tried["losing digits"] += len(found) - len(keep)
        return keep

    def nearest(self, found: Sequence[Candidate]) -> list[Candidate]:
        """The kernels that come closest, where the model promises nothing of any: it may be wrong about all."""
        gain = self._xla_seconds_at_most / max(lower_limit(self.reference, self.description), self.description.shortest)
        if self.trials is None or gain < MIN_NEAREST_GAIN or self.is_late:
            return []
        near = (c for c in found if c.family == "kernels" and c.seconds <= MAX_NEAREST_COST * self.slowest)
        return list(islice(candidates.diverse(near), NEAREST))

    def _work(self, f: Footprint) -> float:
        """Seconds on a roofline."""
        return max(f.flops / self.description.matrix_flops_f32, f.bytes / self.description.bandwidth)

    def _promising_specialized(self, c: Candidate) -> bool:
        """The same for kernels with specialized warps. Only the first few are asked: pricing them is slow."""
        if (
            c.seconds > MAX_COST_BEFORE_SPECIALIZING * self.slowest
            or self.specialized_asked >= MAX_SPECIALIZED_CANDIDATES
            or not self.description.wgmma
        ):
            return False
        self.specialized_asked += 1
        best = specialized(c.graph, c.schedule, self.description, most=1)
        return any(estimate(c.graph, s, self.description) <= self.slowest for s in best)

    def not_promising(self, found: Sequence[Candidate]) -> WhyNot:
        """Explain why none of these candidates is worth measuring, by the one that comes closest."""
        if not found:
            return self.why_not(Reason.NOTHING_FOUND)
        if kernels := [c for c in found if c.family == "kernels"]:
            best = min(c.seconds for c in kernels)
            return replace(self.why_not(Reason.SLOWER_BY_MODEL), best=best, asked=self.slowest)
        own, best = self._work(self.before), min(self._work(footprint(c.graph)) for c in found)
        asked = MAX_ALGEBRA_COST_RATIO * own
        return replace(self.why_not(Reason.NO_CHEAPER_ALGEBRA), xla=own, best=best, asked=asked)

    def why_not(self, reason: Reason, detail: str = "") -> WhyNot:
        """Record why XLA keeps the region, with the cost model's estimates."""
        reference, device = self.reference, self.description
        return WhyNot(
            reason,
            device.name,
            self.tried["found"],
            tries_kernels=device.is_gpu and self.options.backend != "jax",
            xla=fused_estimate(reference, device),
            limit=max(lower_limit(reference, device), device.shortest),
            detail=detail,
            elsewhere=None if device.is_gpu else elsewhere(reference),
        )

    def verified(self, found: Iterable[Candidate]) -> Iterator[Candidate]:
        """Yield candidates that are well formed, have justified types and pass one draw of the fingerprint."""
        fingerprint, types = certificates.Fingerprint(self.reference), TypeGate(self.reference)
        for c in found:
            try:
                check_graph(c.graph)
                same = fingerprint(c.graph)
            except MirageError as why:
                self.refuse(types, Verdict(False, str(why)))
                continue
            if not same:
                self.tried["refused by the fingerprint"] += 1
            elif (verdict := types.check(c)).passed:
                yield c
            else:
                self.refuse(types, verdict)

    # ------------------------------------------------------------------ measurement

    def timings(
        self, functions: Mapping[str, Callable[..., Any]], rounds: int, unsure: Unsure = lambda found: ()
    ) -> dict[str, timing.Timing]:
        """Interleaved times of functions of the region's values; a function that fails is left out and counted.

        unsure: of the times found, the names of those that are too few. These functions are timed again, longer.
        """
        self.wait_for_gate()  # or what it runs would be in the profile
        with process_turn(self.device):
            calls = self._calls(functions)
            found = self._times(calls, rounds)
            if again := {name: calls[name] for name in unsure(found)}:
                seconds = self.sets * sum(found[name].seconds for name in again)
                if (more := min(MORE_ROUNDS, int(MAX_SECONDS_OF_MORE / max(seconds, 1e-9)))) > rounds:
                    log.info("timed again in %d rounds: %s", more, ", ".join(again))
                    found |= self._times(again, more)
            return found

    def _calls(self, functions: Mapping[str, Callable[..., Any]]) -> dict[str, timing.Call]:
        """Compile functions, and run each once."""
        args = [self.inputs(i) for i in range(self.sets)]

        def prepare(item: tuple[str, Callable[..., Any]]) -> tuple[str, timing.Call] | None:
            """Compile a function, and run it once."""
            label, f = item
            try:
                call = timing.in_turn(self.compiled(f), args)
                call()
            except Exception as why:  # a kernel that cannot be compiled or launched is one candidate less
                self.tried["not compiled"] += 1
                self.last_failure = in_one_line(why)
                log.info("%s not compiled: %s", label, self.last_failure)
                return None
            return label, call

        first, *others = functions.items()
        with gpu_lock(self.device):  # XLA's code is the first: it times products to choose one, as nothing else runs
            prepared = [prepare(first)]
        prepared += spread(as_here(prepare), others, XLA_COMPILE_THREADS if self._on_gpu else 1)
        return dict(x for x in prepared if x is not None)

    def _times(self, calls: Mapping[str, timing.Call], rounds: int) -> dict[str, timing.Timing]:
        with jax.default_device(self.device):
            return timing.time_steps(calls, self.sets, rounds) if self._on_gpu else timing.time_wall(calls, rounds)

    @cached_property
    def compiled_xla(self) -> Callable[..., Any]:
        """XLA's code for the region, without autotuning of products, which takes seconds."""
        return self.compiled(self.xla, timing.ONCE)

    def time_xla(self) -> float:
        """Time `compiled_xla` once, in seconds: good enough to choose among regions, not to decide about one."""
        with process_turn(self.device):
            args = [self.inputs(i) for i in range(self.sets)]
            return self._times({"xla": timing.in_turn(self.compiled_xla, args)}, rounds=1)["xla"].seconds

    def screen(self, winners: Sequence[Winner], residuals: Residuals | None = None) -> dict[int, timing.Timing]:
        """Time variants once each, by position; leave out and count those that fail, and those that will not be the
        fastest, as `residuals` learn from the times of others.

        Children run them, if there are any, so that none that faults or hangs ever runs in this process.
        """
        found = self._screened(winners, Residuals() if residuals is None else residuals)
        self.timed |= {winners[i]: t for i, t in found.items()}
        return found

    def _screened(self, winners: Sequence[Winner], residuals: Residuals) -> dict[int, timing.Timing]:
        if self.trials is not None:
            try:
                return self._screen_in(self.trials, winners, residuals)
            except TrialError as why:
                log.warning("variants are tried in this process: %s", why)
                self.trials = None
        found = self.timings({str(i): self.ours(w) for i, w in enumerate(winners)}, rounds=1)
        return {int(i): t for i, t in found.items()}

    @property
    def is_late(self) -> bool:
        """Whether the region's share of the budget is spent."""
        return time.monotonic() > self.until

    def _screen_in(self, trials: Trials, winners: Sequence[Winner], residuals: Residuals) -> dict[int, timing.Timing]:
        tell = progress.measuring(self.notify, len(winners))
        kinds = [kind_of(w) for w in winners]
        price = [self.estimate(w) for w in winners]

        def notify(i: int, outcome: Outcome) -> None:
            """Report one more variant, and learn from its failure."""
            if isinstance(outcome, TrialFailure):
                self.refused_kernels.learn(winners[i], outcome.why)
                tell(None)
            else:
                residuals.learn(kinds[i], winners[i], price[i], outcome.seconds)
                tell(outcome.seconds)

        def doomed(i: int) -> TrialFailure | None:
            """What is known against a variant."""
            if why := self.refused_kernels.why(winners[i]):
                return TrialFailure("not compiled", why)
            return SLOW if residuals.is_slow(kinds[i], price[i]) else None

        until = self.until if self.timed else self.until + MAX_LATE_SECONDS
        outcomes = trials.times([w.to_json() for w in winners], notify, until, doomed)
        self._count_failures(outcomes)
        return {i: t for i, t in enumerate(outcomes) if isinstance(t, timing.Timing)}

    def _count_failures(self, outcomes: Sequence[Outcome]) -> None:
        """Count the variants that have no time, by kind.

        Raises:
            TrialError: all have failed, some for lack of memory.
        """
        failures = Counter(o for o in outcomes if isinstance(o, TrialFailure))
        all_failed = failures.total() == len(outcomes)
        if all_failed and any(f.wants_memory for f in failures):
            raise TrialError("this process leaves no memory of the device (XLA_PYTHON_CLIENT_PREALLOCATE=false does)")
        for failure, count in failures.items():
            self.tried[failure.kind] += count
            if failure is not SLOW:
                self.last_failure = failure.why
            log.info("%d of %d %s: %s", count, len(outcomes), failure.kind, failure.why)

    def estimate(self, winner: Winner) -> float:
        """Seconds of a variant, by the model."""
        return estimate(winner.graph, winner.schedule, self.description)

    def record(self, timed: Iterable[tuple[Winner, timing.Timing]]) -> None:
        """Keep the model's estimate and the measured time of each variant."""
        for winner, t in timed:
            self.measured.append((self.estimate(winner), t.seconds))
            known = self.fastest.get(winner.graph)
            if known is None or known.seconds is None or t.seconds <= known.seconds:
                self.fastest[winner.graph] = Variant.of(winner.graph, winner.schedule, t.seconds)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The fastest variants of different muGraphs."""
        return tuple(sorted(self.fastest.values(), key=lambda v: v.seconds or 0.0)[:MAX_VARIANTS_LISTED])

    # ------------------------------------------------------------------ checks

    def certificate_gate(self) -> certificates.CertificateGate:
        """Make the gate for equivalence with the region's program."""
        return certificates.CertificateGate(self.reference)

    def exact_gate(self) -> Gate[Winner]:
        """Make the gate for the text of kernels."""
        return exact_check.ExactGate()

    def float_gate(self, classes: Sequence[str] = ()) -> Gate[Winner]:
        """Make the gate for floats, on the named classes of inputs or on all."""
        return FloatGate(self.gate, classes)

    def refuse(self, gate: Gate[Any], verdict: Verdict) -> None:
        """Count a candidate that a gate refused."""
        self.tried[f"refused by the {gate.name}"] += 1
        gate_log.info("refused by the %s: %s", gate.name, verdict.why)

    @property
    def refusals(self) -> str:
        """How many candidates each gate refused."""
        return ", ".join(
            f"{outcome} {count}" for outcome, count in self.tried.items() if count and "refused" in outcome
        )

    @cached_property
    def _accuracy(self) -> Accuracy:
        return Accuracy(self)

    def prepare_gate(self) -> None:
        """Time XLA's code and compile what the float gate runs, on another thread, while candidates are searched and
        first variants compiled. It ends soon after the search; the gate makes what is missing then.
        """
        is_searched_for_long = len(self.reference.kernels) >= MIN_OPERATORS_PREPARED
        if self._on_gpu and self.trials is not None and is_searched_for_long:
            self._preparing = background(as_here(self._prepare_gate))

    def _prepare_gate(self) -> None:
        try:
            start = time.monotonic()
            self._time_xla_once()
            self._accuracy.prepare(self._is_searched.is_set)
            log.info("XLA's code was timed and the float gate prepared in %.1f s", time.monotonic() - start)
        except Exception as why:  # for lack of memory, say: the gate will meet it, and say so
            log.info("the float gate is not prepared: %s", in_one_line(why))

    @property
    def _is_preparing(self) -> bool:
        return self._preparing is not None and self._preparing.is_alive()

    def end_preparing(self) -> None:
        """Let the preparation of the gate end with what it is at: what few candidates need can wait."""
        self._is_searched.set()

    def wait_for_gate(self) -> None:
        """Wait until the gate's preparation ends, or not for long."""
        self.end_preparing()
        until = time.monotonic() + MAX_PREPARING_SECONDS
        while self._is_preparing and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def gate(self, winner: Winner, only: Sequence[str] = ()) -> tuple[bool, str]:
        """Compare the winner's floats with XLA's on every input class, or on those in `only`: passed, and why."""
        self.wait_for_gate()
        passed, why = self._accuracy.gate(winner, only)
        if passed and not only and (wrong := self._wrong_in_tf32(winner)):
            return False, wrong
        return passed, why

    def _wrong_in_tf32(self, winner: Winner) -> str:
        """Say why the winner is wrong where all products are of TF32; empty if it is not, or nobody can say.

        XLA chooses an algorithm for each small product that it compiles: one that keeps float32's digits in the gate
        may lose some in the user's program.
        """
        here = self._in_tf32
        if here is None or not self._accuracy.is_small or not products_left_to_xla(winner.graph):
            return ""
        portable = here.subject.winner(winner.graph, winner.schedule, winner.family)
        passed, why = here.gate(portable, TF32_CLASSES)
        return "" if passed else f"with products in TF32, {why}"

    @cached_property
    def _in_tf32(self) -> Accuracy | None:
        """The same on a processor, with products of TF32; None where the device has none, or JAX no processor."""
        if not self.multiplies_in_tf32:
            return None
        try:
            processor = jax.local_devices(backend="cpu")[0]
        except RuntimeError:
            return None
        return Accuracy(OnMatrixUnits(self.region, "cpu", processor, self.options))


def kind_of(winner: Winner) -> tuple[KernelGraph, int]:
    """The kind of a variant."""
    return kind(winner.graph, winner.schedule)


def elsewhere(reference: KernelGraph) -> Elsewhere:
    """Price a program on a GPU that need not be here."""
    device = DEVICES[ELSEWHERE]
    return Elsewhere(ELSEWHERE, fused_estimate(reference, device), max(lower_limit(reference, device), device.shortest))


def times_of_xla(sessions: Sequence[TuningSession]) -> list[float | None]:
    """Time XLA's code for several regions, in seconds, compiled at the same time; None where that fails.

    The model does not know everything: whether XLA copies the operands of a product, for example.
    """

    def tried[T](action: Callable[[TuningSession], T], session: TuningSession) -> T | None:
        try:
            return action(session)
        except Exception as why:
            log.info("XLA's code is not timed: %s", in_one_line(why))
            return None

    compiled = spread(as_here(lambda session: tried(lambda a: a.compiled_xla, session)), sessions, XLA_COMPILE_THREADS)
    return [c and tried(TuningSession.time_xla, session) for c, session in zip(compiled, sessions, strict=True)]
