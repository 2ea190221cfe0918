"""Decides for each region who computes it: cache, else search -> check -> fingerprint -> measure -> certify -> exact
check -> gate -> cache.

A candidate replaces XLA only if all of this holds: its muGraph is well formed; it equals the region's program over
finite fields, with a certificate whose error bound is computed; the text of its kernels computes what its muGraph
says, bit for bit on exact numbers; its floats are as accurate as XLA's against float64
on every input class; and it was measured faster than XLA on this device, beyond noise. Whatever fails is dropped and
counted, and where nothing is left the user's own equations run.

Nothing here may break the user's program: `decide` turns every exception into a decision for XLA, unless `strict`.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mirage_jax import limits
from mirage_jax.cache import Cache, CacheKey, Entry
from mirage_jax.compiler.region import RegionOnDevice
from mirage_jax.compiler.threads import apart, unchecked
from mirage_jax.compiler.whole_function import (
    MAX_TUNING_FRACTION,
    Question,
    WholeTimes,
    not_measured,
    of_one_region,
    question_of,
)
from mirage_jax.compiler.winner import Winner, readable
from mirage_jax.config import Options, from_environment, warn_once
from mirage_jax.errors import CacheError, LoweringError, MirageError, UnsupportedError, UsageError, in_one_line
from mirage_jax.gc_pause import no_collection
from mirage_jax.jaxpr_frontend.capture.lowering import WholeProgram
from mirage_jax.jaxpr_frontend.partition.regions import MAX_REGION_OPERATORS
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.mugraph.check import check_graph, check_schedule
from mirage_jax.mugraph.dtypes import numpy_dtype
from mirage_jax.mugraph.footprint import footprint
from mirage_jax.mugraph.graph import KernelGraph, Precision, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.schedule_json import schedule_from_json, schedule_to_json
from mirage_jax.report import Decision, WholeFunction, places
from mirage_jax.seals import Seal
from mirage_jax.verify.equivalence import certificate as certificates
from mirage_jax.verify.types import check_types

if TYPE_CHECKING:
    from mirage_jax.compiler import tuning
    from mirage_jax.compiler.isolation.parent import Trials
    from mirage_jax.compiler.tuning_session import TuningSession
    from mirage_jax.search.candidates import Candidate

log = logging.getLogger("mirage_jax")

STORED_INPUT_CLASSES = ("normal", "near overflow", "heavy tail", "large logits")  # what shows rounding
MIN_SAVING_SECONDS = 1e-9  # seconds that any region may save, so that shares are numbers
MAX_TIMED_FIRST = (
    8  # kinds of regions whose XLA code is timed first, to choose among them: those that save most by the model
)
POLICY = "certificate 1e-12, float gate 3.0, lower bound of the ratio at least 1.03"
STRICT_RANGE = ", strict range"
MAX_WORK_RATIO, ALLOWED_WORK = 32.0, 1e8  # a stored winner's work over the program's, and what is always allowed
CHECKED_HERE = (
    f"passed on {len(STORED_INPUT_CLASSES)} input classes ({', '.join(STORED_INPUT_CLASSES)}) when first read here; "
    "made elsewhere"
)

# What the graph of a stored winner is held to beside its certificate: functions of the reference and the graph, which
# raise a `MirageError`.
RULES_FOR_STORED: tuple[Callable[[KernelGraph, KernelGraph], object], ...] = (check_types,)


class Compiler:
    """Decides for the regions of one optimized function; hashable by identity, so that it can be a parameter of a
    primitive.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.cache = Cache(options.cache_dir)
        self.decisions: dict[tuple[str, str], Decision] = {}
        self.spent = 0.0  # seconds of tuning that count against the total
        self.tuned = 0.0  # seconds of tuning since a whole function was measured
        self.is_part = False  # of some program that was lowered
        self.wholes: dict[str, WholeFunction] = {}  # by digest of key
        self._asked: str | None = None  # what to do on a miss, where `tune` says it
        self._begun = set[tuple[str, str]]()  # what it has asked for already
        self._kept: Callable[[Sequence[Any]], Trials | None] | None = None  # processes that try variants of all regions
        self._lock = threading.RLock()

    max_ops = MAX_REGION_OPERATORS

    @property
    def strict(self) -> bool:
        return self.options.strict

    @property
    def remat(self) -> bool:
        return self.options.remat == "regions"

    @property
    def on_miss(self) -> str:
        """What to do where nothing is stored."""
        return self._asked or self.options.on_miss or _default_on_miss()

    @contextmanager
    def asking(self, on_miss: str | None) -> Iterator[None]:
        """What is undecided so far is decided again as this says, if it says anything, with all of the time anew."""
        if on_miss is None:
            yield
            return
        before, self._asked = self._asked, on_miss
        self.spent = 0.0
        self._begun.clear()
        try:
            yield
        finally:
            self._asked = before

    def prepare(self, regions: Sequence[Region], platforms: tuple[str, ...]) -> None:
        """Decide for all regions of a function where that may take long: the same processes try the variants of all."""
        if len(platforms) != 1 or self.on_miss != "search":
            return
        platform = _cuda(platforms[0])
        kinds = {id(r.graph): r for r in regions}  # those of equal layers have one graph, and its text takes its time
        graphs = Counter(id(r.graph) for r in regions)
        with self._lock:  # another thread may prepare the same function
            unknown: dict[str, Region] = {}
            count = Counter[str]()
            for graph, region in kinds.items():
                memo = (region.text, platform)
                known = self.decisions.get(memo)
                again = self._asked is not None and memo not in self._begun
                if known is None or (again and known.source == "policy"):
                    unknown[region.text] = region
                    count[region.text] += graphs[graph]
            self._begun.update((text, platform) for text in unknown)
            with self._keeping_trials(), self._counting():
                if self.options.budget.total is not None:
                    try:
                        self._decide_within(self.options.budget.total, unknown, count, platform)
                    except BaseException:  # an interrupt, say: what was only looked up is not decided
                        for key in [(text, platform) for text in unknown]:
                            if key in self.decisions and self.decisions[key].source == "policy":
                                del self.decisions[key]
                        raise
                else:
                    for region in unknown.values():
                        self.decide(region, platform, "search")

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the time as one of tuning."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.tuned += time.monotonic() - started

    def _decide_within(
        self, total: float, unknown: Mapping[str, Region], count: Mapping[str, int], platform: str
    ) -> None:
        """Where the time for all regions of a function is limited, tune those first at which most time may be saved.
        Each gets a share of the time that is left, like its share of what is left to save. What is not tuned when it is
        used up stays with XLA, undecided: another process, or another `tune`, goes on there.
        """
        missing = {
            text: region
            for text, region in unknown.items()
            if self.decide(region, platform, "fallback").source != "cache"
        }
        limit = (1 - MAX_TUNING_FRACTION) * total  # the rest is for measuring the function as a whole
        if self.spent >= limit:  # of other programs of the same function
            return self._out_of_time(missing, platform, total)
        started = time.monotonic()
        saved = self._savings(missing, count, platform)
        self.spent += time.monotonic() - started
        order = sorted(missing, key=saved.__getitem__, reverse=True)
        for n, text in enumerate(order):
            if n > 0 and self.spent >= limit:
                return self._out_of_time(order[n:], platform, total)
            share = saved[text] / sum(saved[other] for other in order[n:])
            started = time.monotonic()
            self.decide(missing[text], platform, "search", started + share * (limit - self.spent))
            self.spent += time.monotonic() - started

    def _out_of_time(self, missing: Iterable[str], platform: str, total: float) -> None:
        for key in [(text, platform) for text in missing]:
            why = f"no time left of {total:g} s for tuning all regions"
            self.decisions[key] = replace(self.decisions[key], why=why)

    @contextmanager
    def _keeping_trials(self) -> Iterator[None]:
        """The processes that try variants for a region, if one is searched, go on to the next one."""
        with ExitStack() as stack:

            @functools.cache
            def kept() -> Callable[[Sequence[Any]], Trials | None]:
                from mirage_jax.compiler.isolation import parent

                return stack.enter_context(parent.kept())

            self._kept = lambda devices: kept()(devices)
            try:
                yield
            finally:
                self._kept = None

    def _savings(self, regions: Mapping[str, Region], count: Mapping[str, int], platform: str) -> dict[str, float]:
        """Seconds that may be saved in all regions of each kind, which are given by their texts."""
        found = dict.fromkeys(regions, MIN_SAVING_SECONDS)
        attempts: dict[str, TuningSession] = {}
        try:
            device = _chosen(jax.local_devices(backend=platform), self.options.devices)[0]
        except RuntimeError:
            return found  # there is none here: nothing will be tuned
        for text, region in regions.items():
            try:
                attempts[text] = self.attempt(region, platform, device)
                found[text] = max(count[text] * attempts[text].headroom(), MIN_SAVING_SECONDS)
            except Exception as why:
                place = ", ".join(places(region.where)[:1])
                log.warning("the region at %s is tuned last: %s", place, in_one_line(why))
        if platform == "cuda" and len(attempts) > 1:
            first = sorted(attempts, key=found.__getitem__, reverse=True)[:MAX_TIMED_FIRST]
            x64 = jax.config.jax_enable_x64
            times = apart(lambda: self._times_of_xla([attempts[text] for text in first], x64))
            for text, xla in zip(first, times, strict=True):
                found[text] = max(count[text] * attempts[text].headroom(xla), MIN_SAVING_SECONDS)
        return found

    def _times_of_xla(self, attempts: Sequence[TuningSession], x64: bool) -> list[float | None]:
        """What XLA takes for each of several regions; None where that cannot be told."""
        from mirage_jax.compiler.tuning_session import times_of_xla

        log.info("timing XLA's code for %d kinds of regions", len(attempts))
        with unchecked(x64):
            return times_of_xla(attempts)

    def compile_region(self, region: Region, platforms: tuple[str, ...]) -> Winner | None:
        """What runs instead of the region's equations, or None: XLA. A program exported for several platforms stays
        with XLA.
        """
        if len(platforms) != 1:
            log.info(
                "a program lowered for %s stays with XLA: regions are decided for one platform", ", ".join(platforms)
            )
            return None
        return self.decide(region, platforms[0]).winner

    def known_region(self, region: Region, platforms: tuple[str, ...]) -> Winner | None:
        """The same, but only what is decided already, or stored."""
        memo = (region.text, _cuda(platforms[0]))
        with self._lock:
            is_decided = memo in self.decisions
            decision = self.decisions[memo] if is_decided else self.decide(region, platforms[0], "fallback")
            if not is_decided and decision.source != "cache":
                del self.decisions[memo]
            return decision.winner

    def choose(self, whole: WholeProgram) -> WholeFunction:
        """Which of a program's variants is the fastest as a whole: stored, or measured where regions are."""
        with self._lock:
            self.is_part |= whole.target.is_nested
            try:
                return self._choose(whole)
            except UsageError:
                raise
            except Exception as why:
                if self.strict:
                    raise
                log.warning("a function is not measured as a whole: %s", in_one_line(why))
                return not_measured(whole, in_one_line(why))

    def _choose(self, whole: WholeProgram) -> WholeFunction:
        if len(whole.target.platforms) != 1:
            return not_measured(whole, "it is lowered for several platforms")
        platform = _cuda(whole.target.platforms[0])
        if (found := self._of_one_region(whole, platform)) is not None:
            return found
        device = _chosen(jax.local_devices(backend=platform), self.options.devices)[0]
        question = Question(whole, CacheKey.here(**question_of(whole, self.options.backend), device=device))
        digest = question.key.digest
        known = self.wholes.get(digest)
        if known is None or (self._asked is not None and known.ratio is None):
            found = question.stored(self.cache)
            if self._asked is not None and found is not None and found.ratio is None:
                found = None  # there may be room for it now
            if found is None and self.on_miss != "search":
                return not_measured(whole, f"nothing is stored, and on_miss={self.on_miss!r}")
            self.wholes[digest] = found or self._measured(question, device)
        return self.wholes[digest]

    def _of_one_region(self, whole: WholeProgram, platform: str) -> WholeFunction | None:
        """What is known of a program that is one region and nothing else."""
        if len(whole.variants) > 1 or (region := whole.ours.only_region) is None:
            return None
        d = self.decisions.get((region.text, platform))
        if d is None or d.speedup is None:
            return None
        return of_one_region(whole, d)

    def _measured(self, question: Question, device: Any) -> WholeFunction:
        from mirage_jax.compiler import function_timing

        if why := question.why_not():
            return not_measured(question.whole, why)
        limit, self.tuned = MAX_TUNING_FRACTION * self.tuned, 0.0
        x64 = jax.config.jax_enable_x64
        for variant in question.whole.variants.values():
            variant()  # here: another thread would wait for this one's lock

        def measure() -> WholeTimes:
            with unchecked(x64):
                return function_timing.measure(question.whole, device, limit)

        started = time.monotonic()
        try:
            found = question.decided(apart(measure))
        except UnsupportedError as why:
            found = not_measured(question.whole, str(why))
        finally:
            self.spent += time.monotonic() - started
        log.info("whole function: %s", found)
        question.store(self.cache, found)
        return found

    def decide(self, region: Region, platform: str, on_miss: str | None = None, until: float = math.inf) -> Decision:
        """The decision for a region, made once per process and program text; `until`, of `time.monotonic`, is when the
        time for all regions is used up.
        """
        platform = _cuda(platform)
        memo = (region.text, platform)
        with self._lock:
            if memo in self.decisions and on_miss is None:
                return self.decisions[memo]
            try:
                decision = self._decide(region, platform, on_miss or self.on_miss, until)
            except UsageError:
                raise
            except Exception as why:
                if self.strict:
                    raise
                text = in_one_line(why)
                log.warning("the region at %s stays with XLA: %s", ", ".join(places(region.where)[:1]), text)
                decision = Decision(None, text, "policy", platform)
            self.decisions[memo] = decision
            return decision

    # What is known of the device's speed. A campaign that tests everything else replaces these three. What they and
    # `_search` import is not loaded where every decision is stored: that would take longer than all the rest.

    def attempt(self, region: Region, platform: str, device: Any) -> TuningSession:
        """A new attempt at a region."""
        from mirage_jax.compiler.tuning_session import TuningSession

        return TuningSession(region, platform, device, self.options)

    def trials(self, attempt: TuningSession) -> AbstractContextManager[Trials | None]:
        """Where variants are tried."""
        from mirage_jax.compiler.isolation.parent import trials

        return trials(attempt.devices) if self._kept is None else nullcontext(self._kept(attempt.devices))

    def compare(
        self, attempt: TuningSession, finalists: Sequence[Candidate], precise: Precision = Precision.FAST
    ) -> tuning.Comparison:
        """Which candidates are faster than XLA."""
        from mirage_jax.compiler import tuning

        return tuning.compare(attempt, finalists, precise)

    def _decide(self, region: Region, platform: str, on_miss: str, until: float) -> Decision:
        try:
            devices = _chosen(jax.local_devices(backend=platform), self.options.devices)
        except RuntimeError:
            return Decision(None, f"there is no {platform} device here to measure on", "policy", platform)
        device = devices[0]
        subject = RegionOnDevice(region, platform, device, self.options)
        key = CacheKey.here(
            graph=subject.text,
            extents=subject.reference.sizes,
            backend=self.options.backend,
            policy=f"{POLICY}{STRICT_RANGE if self.options.strict_range else ''}",
            device=device,
        )
        base = Decision(None, "", "policy", platform, key=key.digest, before=subject.before)
        found = self.cache.lookup(key)
        reason = found.reason
        if found.entry is not None:
            try:
                return self._from_cache(subject, key, found.entry, found.seal, base, devices)
            except Exception as why:  # whatever is in a file, it is a miss
                log.warning("cache entry %s is not used: %s", key.digest[:12], in_one_line(why))
                reason = f"the stored entry is not usable: {in_one_line(why)}"
        match on_miss:
            case "error":
                raise UsageError(
                    f"on_miss='error': no stored decision for a region of {len(region.equations)} equations ({reason})"
                )
            case "fallback":
                return replace(base, why=f"no stored decision ({reason}) and on_miss='fallback'")
            case _:
                x64 = jax.config.jax_enable_x64
                attempt = self.attempt(region, platform, device)
                attempt.devices, attempt.until = devices, until
                return apart(lambda: self._search(attempt, key, base, on_miss == "search", x64))

    def _search(self, attempt: TuningSession, key: CacheKey, base: Decision, measure: bool, x64: bool) -> Decision:
        from mirage_jax import progress
        from mirage_jax.compiler import tuning

        with (
            unchecked(x64),
            progress.line() as say,
            self.trials(attempt) if measure else nullcontext() as attempt.trials,
        ):
            attempt.say = say
            if attempt.trials is not None:
                attempt.trials = attempt.with_room(attempt.trials)
            budget = self.options.budget
            operators = len(attempt.reference.kernels)
            log.info("region of %d operators: searching for at most %s", operators, budget)
            try:
                found, report = attempt.candidates(self.cache, key, say)
            except UnsupportedError as why:  # nothing is wrong: the search has nothing to say about such a region
                return self._keep(key, replace(base, source="search", why=f"not searched: {why}"))
            base = replace(base, search=report, source="search", tried=attempt.tried)
            promising = [c for c in found if attempt.promising(c)]
            finalists = list(islice(attempt.verified(tuning.diverse(promising)), tuning.FINALISTS))
            if not finalists:
                return self._keep(key, replace(base, why="no candidate promises to beat XLA"))
            tried = f"{attempt.tried['found']} candidates, of which {len(finalists)} are tried"
            log.info("region of %d operators: %s", operators, tried)
            say(f"{tried}: proving and measuring")
            if measure:
                return self._measure(attempt, key, base, finalists)
            decision = self._accepted(attempt, base, (attempt.winner(c.graph, c.schedule, c.family) for c in finalists))
            if decision.winner is None:
                return decision  # not for good: measured ones are also tried more precisely
            return replace(decision, why="the model's first choice, not measured (on_miss='heuristic')")

    def _measure(
        self, attempt: TuningSession, key: CacheKey, base: Decision, finalists: Sequence[Candidate]
    ) -> Decision:
        """Take the fastest that is right. Where the float gate refuses those that round, they are written to round
        less: before they are measured if a few classes of inputs show it, else they are measured again.
        """
        from mirage_jax.compiler import tuning

        possible = [tuning.precisions(c) for c in finalists]
        precisions = sorted({Precision.FAST}.union(*possible))
        first = self._least_precise(attempt, finalists, possible)
        decisions: list[Decision] = []
        for precise in (p for p in precisions if p >= first):
            chosen = [c for c, own in zip(finalists, possible, strict=True) if precise == first or precise in own]
            refused = attempt.tried["refused by the float gate"]
            decision = self._fastest(attempt, base, chosen, precise)
            if decision is None:
                return replace(base, why="XLA's own code for this region cannot be timed alone")
            decisions.append(decision)
            if decision.winner is not None or attempt.tried["refused by the float gate"] == refused:
                break
            log.info("%d candidates rounded too much (%d)", len(chosen), precise)
        last = decisions[-1]  # there is one: the last precision is never below the first
        if last.winner is None:  # why the fastest were refused tells more than what was tried instead
            last = replace(decisions[0], measured=last.measured)
        return self._keep(key, last)

    def _least_precise(
        self, attempt: TuningSession, finalists: Sequence[Candidate], possible: Sequence[Sequence[Precision]]
    ) -> Precision:
        """How precise kernels have to be for the float gate's first classes. Asked of the first candidate that runs, in
        seconds, where to measure all of them takes minutes.
        """
        from mirage_jax.compiler import tuning

        if attempt.trials is None:
            return Precision.FAST
        for c, precisions in zip(finalists, possible, strict=True):
            for precise in precisions[:-1]:
                winner = attempt.winner(c.graph, tuning.as_precise(c.schedule, precise), c.family)
                if not attempt.screen([winner]):
                    break
                passed, why = attempt.gate(winner, STORED_INPUT_CLASSES)
                log.info("a first candidate (%d): %s", precise, why)
                if passed:
                    return precise
            else:
                if len(precisions) > 1:
                    return precisions[-1]
        return Precision.FAST

    def _fastest(
        self,
        attempt: TuningSession,
        base: Decision,
        finalists: Sequence[Candidate],
        precise: Precision = Precision.FAST,
    ) -> Decision | None:
        """The decision that measurements lead to; None if XLA cannot be measured."""
        found = self.compare(attempt, finalists, precise)
        if found.xla is None:
            return None
        times = {"xla": found.xla.seconds} | ({"best candidate": found.best[0].seconds} if found.best else {})
        base = replace(base, measured=tuple(attempt.measured), timings=times)
        if not found.faster:
            top = f"the best candidate is {found.best[1]}" if found.best else "no candidate could be compiled"
            return replace(base, why=f"XLA is as fast: {top}")
        decision = self._accepted(attempt, base, (w for w, _, _ in found.faster))
        for winner, seconds, ratio in found.faster:
            if winner is decision.winner:
                times = {"xla": found.xla.seconds, "mirage": seconds.seconds}
                decision = replace(decision, why=f"{ratio} over XLA", timings=times)
        return decision

    def _accepted(self, attempt: TuningSession, base: Decision, winners: Iterable[Winner]) -> Decision:
        """The first of the winners that gets a certificate and passes the exact check and the float gate."""
        refused = set[KernelGraph]()
        for winner in winners:
            if winner.graph in refused:  # its other variants round alike
                continue
            log.info("proving a candidate equal to the program, then comparing its floats with float64")
            try:
                certificate = certificates.certify(attempt.reference, winner.graph)
            except MirageError as why:
                attempt.tried["refused by the certificate"] += 1
                log.info("no certificate: %s", why)
                continue
            agrees, exact = attempt.exact(winner)
            base = replace(base, exact=exact)
            if not agrees:
                attempt.tried["refused by the exact check"] += 1
                log.warning("a generated kernel is wrong and is not used: %s", exact)
                continue
            try:
                passed, gate = attempt.gate(winner)
            except (LoweringError, UnsupportedError) as why:  # not seen before where nothing was measured
                attempt.tried["not compiled"] += 1
                log.info("not lowered: %s", why)
                continue
            base = replace(base, gate=gate)
            if passed:
                return replace(base, winner=winner, after=winner.footprint, certificate=certificate)
            attempt.tried["refused by the float gate"] += 1
            refused.add(winner.graph)
            log.info("float gate: %s", gate)
        return replace(base, why="no candidate passed certificate, exact check and float gate")

    # ------------------------------------------------------------------ the cache

    def _keep(self, key: CacheKey, d: Decision) -> Decision:
        w = d.winner
        entry = Entry(
            decision="xla" if w is None else "win",
            graph=None if w is None else str(w.graph),
            schedule=None if w is None else schedule_to_json(w.schedule),
            certificate=None if d.certificate is None else json.loads(d.certificate.to_json()),
            timings=dict(d.timings),
            measured=d.measured,
            reasons=(d.why, d.gate, "" if w is None else w.family, d.exact),
        )
        kernels = None if w is None else readable(w)
        path = self.cache.put(key, entry, kernels)
        return replace(d, kernels=str(path.with_suffix(".py")) if path is not None and kernels else "")

    def _from_cache(
        self, subject: RegionOnDevice, key: CacheKey, entry: Entry, seal: Seal, base: Decision, devices: Sequence[Any]
    ) -> Decision:
        """A stored decision. What this user has not sealed is checked further before it is used, and says so."""
        if len(entry.reasons) != 4:
            raise CacheError(f"found {len(entry.reasons)} texts where why, gate, family and exact check must be")
        why, gate, family, exact = entry.reasons
        base = replace(base, source="cache", timings=dict(entry.timings), measured=tuple(entry.measured))
        if entry.decision == "xla":
            return replace(base, why=why if seal is Seal.MADE else f"{why} (decided elsewhere)", gate=gate, exact=exact)
        winner, certificate = _restored(subject, entry, family)
        text = self.cache.kernel_path(key)
        base = replace(base, winner=winner, after=winner.footprint, certificate=certificate)
        base = replace(base, kernels=str(text) if text.is_file() else "")
        if seal is Seal.MADE:
            return replace(base, why=why, gate=gate, exact=exact)
        exact = "passed when it was first read here" if winner.cuda is not None else ""
        if seal is Seal.FOREIGN:
            exact = self._check_foreign(subject, winner, devices)
            self.cache.vouch(key, entry)
        return replace(base, why=_measured_elsewhere(entry), gate=CHECKED_HERE, exact=exact)

    def _check_foreign(self, subject: RegionOnDevice, winner: Winner, devices: Sequence[Any]) -> str:
        """What somebody else's winner has to pass before it runs for the user: a first run where it can do no harm, the
        exact check of its kernels, and the float gate on a few telling classes. Says what the exact check found; raises
        `CacheError` for what does not pass.
        """
        log.info("a stored winner that was not made here is checked")
        attempt = self.attempt(subject.region, subject.platform, subject.device)
        attempt.devices, x64 = devices, jax.config.jax_enable_x64

        def check() -> str:
            with (
                unchecked(x64),
                np.errstate(all="ignore"),  # constants that somebody made up
                self.trials(attempt) if winner.cuda is not None else nullcontext() as attempt.trials,
            ):
                if attempt.trials is not None and not attempt.screen([winner]):
                    raise CacheError("it does not run")
                agrees, exact = attempt.exact(winner)
                if not agrees:
                    raise CacheError(f"refused by the exact check: {exact}")
                passed, gate = attempt.gate(winner, STORED_INPUT_CLASSES)
                if not passed:
                    raise CacheError(f"refused by the float gate: {gate}")
                return exact

        return apart(check)


@no_collection()
def _restored(subject: RegionOnDevice, entry: Entry, family: str) -> tuple[Winner, certificates.Certificate]:
    """A stored winner, proven again; raises a `MirageError` for anything else."""
    graph, schedule = parse(entry.graph or ""), schedule_from_json(entry.schedule)
    check_graph(graph)
    check_schedule(graph, schedule)
    if family not in ("kernels", "algebra"):
        raise CacheError(f"family {family!r} is neither kernels nor algebra")
    _check_size(graph, schedule, subject)
    for rule in RULES_FOR_STORED:
        rule(subject.reference, graph)
    certificate = _proved(subject.reference, graph)
    return subject.winner(graph, schedule, family), certificate


def _check_size(graph: KernelGraph, schedule: Schedule, subject: RegionOnDevice) -> None:
    """Refuse what computes anything in vain, in types that JAX may not have, or more than any search would choose."""
    limits.whole("kernels", len(graph.kernels), 1, limits.MAX_KERNELS)
    read = {load.tensor for kernel in graph for load in kernel.loads} | set(graph.outputs)
    own = {t.dtype for t in subject.reference.tensors.values()}
    if wide := [t for t in graph.tensors.values() if numpy_dtype(t.dtype).itemsize > 4 and t.dtype not in own]:
        raise CacheError(f"{wide[0]} is wider than anything in the program")
    if unused := [k.name for k in graph if not any(store.tensor.name in read for store in k.stores)]:
        raise CacheError(f"nothing reads what kernel {unused[0]} computes")
    ours, before = footprint(graph, schedule.part_counts), subject.before
    for what, n, most in (("bytes", ours.bytes, before.bytes), ("operations", ours.flops, before.flops)):
        if n > MAX_WORK_RATIO * most + ALLOWED_WORK:
            raise CacheError(f"it takes {float(n):.1e} {what}, the program {float(most):.1e}")


def _measured_elsewhere(entry: Entry) -> str:
    """Why somebody else's winner was chosen, from numbers: its text is not ours to repeat."""
    times = [entry.timings.get(name, 0.0) for name in ("xla", "mirage")]
    ratio = f"{times[0] / times[1]:.2f}x over XLA" if min(times) > 0 else "faster than XLA"
    return f"{ratio}, as measured elsewhere"


def _cuda(platform: str) -> str:
    return "cuda" if platform == "gpu" else platform


def _chosen(devices: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    """Those of the local devices that are to measure, all of one kind; the first if none are named."""
    if wrong := [n for n in numbers if n >= len(devices)]:
        why = f"devices: found {wrong[0]}; there are {len(devices)} of this platform here, counted from 0"
        if tuple(numbers) != from_environment()[0].devices:
            raise UsageError(why)
        warn_once(f"MIRAGE_JAX_DEVICES is ignored: {why}")  # a variable does not stop a program
        numbers = ()
    chosen = [devices[n] for n in numbers or (0,)]
    if len(kinds := sorted({d.device_kind for d in chosen})) > 1:
        raise UsageError(f"devices: found {', '.join(kinds)}; allowed are devices of one kind")
    return chosen


@functools.lru_cache(maxsize=256)
def _proved(reference: KernelGraph, graph: KernelGraph) -> certificates.Certificate:
    """Proof-carrying: what is read is proved again, once in a process."""
    return certificates.certify(reference, graph)


def _default_on_miss() -> str:
    """All processes of one program must lower the same code, so only a single process searches by itself."""
    return "search" if jax.process_count() == 1 else "fallback"
