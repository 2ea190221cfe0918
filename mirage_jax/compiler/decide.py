"""Decides one region: the order of the gates.

    cache, else search -> types -> fingerprint -> measurement -> certificate -> exact check -> float gate -> cache

A candidate replaces XLA's code only if all of this holds:

* its muGraph is well formed, in types and with constants that the program's own justify;
* it equals the region's program over finite fields, with a certificate whose error bound is computed;
* the text of its kernels computes its muGraph, bit for bit on exact numbers;
* its floats are as accurate as XLA's against float64, on every input class;
* it is faster than XLA on this device, beyond noise.

Any other candidate is dropped and counted. If none is left, the user's own equations run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mirage_jax.cache import Cache, CacheKey
from mirage_jax.cluster import Machine
from mirage_jax.compiler.region import RegionOnDevice
from mirage_jax.compiler.stored import FIRST_INPUT_CLASSES, STORED_INPUT_CLASSES, key_of, restore, store
from mirage_jax.compiler.threads import apart, unchecked
from mirage_jax.compiler.winner import Winner
from mirage_jax.config import Options, from_environment, warn_once
from mirage_jax.errors import LoweringError, UnsupportedError, UsageError, VerificationError, in_one_line
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.mugraph.graph import KernelGraph, Precision
from mirage_jax.report import Decision, Variant
from mirage_jax.verify.gate import required
from mirage_jax.why_not import Reason, WhyNot

if TYPE_CHECKING:
    from mirage_jax.compiler import tuning
    from mirage_jax.compiler.isolation.parent import Trials
    from mirage_jax.compiler.tuning_session import TuningSession
    from mirage_jax.search.candidates import Candidate
    from mirage_jax.timing import Ratio, Timing

log = logging.getLogger("mirage_jax.gate")
search_log, cache_log = logging.getLogger("mirage_jax.search"), logging.getLogger("mirage_jax.cache")

FIRST_CANDIDATES = 4  # whose first variants are timed before others: so many compile at the same time


class Decider:
    """Decides regions, each for itself."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.cache = Cache(options.cache_dir)
        self.machines: Sequence[Machine] = ()  # others, that help while `tune` runs
        self.xla_seconds: dict[str, float | None] = {}  # that XLA's code takes on a GPU, by the region's text

    def devices(self, platform: str) -> list[Any]:
        """List the devices that regions are decided for, of one kind.

        Raises:
            RuntimeError: there is no device of this platform here.
            UsageError: the option `devices` names others.
        """
        return chosen_devices(jax.local_devices(backend=platform), self.options.devices)

    # What depends on the device's speed. A campaign that tests everything else replaces these three. They and `_search`
    # import late: a process whose decisions are all stored would spend most of its time loading what it does not need.

    def session(self, region: Region, platform: str, devices: Sequence[Any], until: float = math.inf) -> TuningSession:
        """Begin tuning a region on devices of one kind."""
        from mirage_jax.compiler.tuning_session import TuningSession

        known = self.xla_seconds.get(region.text) if platform == "cuda" else None
        return TuningSession(
            region,
            platform,
            devices[0],
            self.options,
            devices=devices,
            machines=self.machines,
            until=until,
            xla_seconds=known,
        )

    def trials(self, session: TuningSession) -> AbstractContextManager[Trials | None]:
        """Enter a context in which variants are tried in child processes; None on a CPU."""
        from mirage_jax.compiler.isolation.parent import trials

        return trials(session.devices, machines=self.machines)

    def compare(self, session: TuningSession, finalists: Sequence[Candidate], precise: Precision) -> tuning.Comparison:
        """Measure which candidates are faster than XLA."""
        from mirage_jax.compiler import tuning

        return tuning.compare(session, finalists, precise)

    def decide_region(self, region: Region, platform: str, on_miss: str, until: float) -> Decision:
        """Decide a region: from the cache, or as `on_miss` says.

        Raises:
            UsageError: nothing is stored, and `on_miss` is "error".
        """
        try:
            devices = self.devices(platform)
        except RuntimeError:
            why = f"there is no {platform} device here to measure on"
            return kept(Decision(None, "", "policy", platform), WhyNot(Reason.NO_DEVICE, detail=why))
        if self.options.backend == "triton" and platform != "cuda":
            warn_once(f"backend='triton' makes kernels for GPUs; on this {platform} only other algebra is tried")
        subject = RegionOnDevice(region, platform, devices[0], self.options)
        key = key_of(subject)
        base = Decision(None, "", "policy", platform, key=key.digest, before=subject.before)
        found = self.cache.lookup(key)
        reason = found.reason
        cache_log.info("key %s: %s", key.digest[:12], reason if found.entry is None else "found")
        if found.entry is None and (on_miss == "error" or self.options.on_miss == "fallback"):  # and not a mere lookup
            reason = self.cache.nearest(key) or reason
        if found.entry is not None:
            check = lambda winner: self._check_foreign(subject, winner, devices)  # noqa: E731
            try:
                return restore(subject, self.cache, key, found.entry, found.seal, base, check)
            except Exception as why:  # whatever is in a file, it is a miss
                cache_log.warning("cache entry %s is not used: %s", key.digest[:12], in_one_line(why))
                reason = f"the stored entry is not usable: {in_one_line(why)}"
        match on_miss:
            case "error":
                raise UsageError(
                    f"on_miss='error': no stored decision for a region of {len(region.equations)} equations ({reason})"
                )
            case "fallback":
                return kept(base, undecided(f"no stored decision ({reason}) and on_miss='fallback'"))
            case _:
                x64 = jax.config.jax_enable_x64
                session = self.session(region, platform, devices, until)
                return apart(lambda: self._search(session, key, base, on_miss == "search", x64))

    def _search(self, session: TuningSession, key: CacheKey, base: Decision, measure: bool, x64: bool) -> Decision:
        from mirage_jax import progress
        from mirage_jax.compiler import tuning

        with (
            unchecked(x64),
            progress.line() as notify,
            self.trials(session) if measure else nullcontext() as trials,
        ):
            session.try_in(trials, notify)
            operators = len(session.reference.kernels)
            search_log.info("region of %d operators: searching for at most %s", operators, self.options.budget)
            session.prepare_gate()
            try:
                with session.timed_step("search"):
                    found, report = session.candidates(self.cache, key, notify)
            except UnsupportedError as why:  # nothing is wrong: the search does not cover such a region
                why_not = session.why_not(Reason.NOT_SEARCHED, str(why))
                return self._keep(key, kept(replace(base, source="search"), why_not))
            session.end_preparing()
            base = replace(base, search=report, source="search", tried=session.tried, step_seconds=session.step_seconds)
            if measure and found:
                with session.timed_step("XLA's code"):
                    session.learn_time_of_xla()
            with session.timed_step("fingerprints"):
                promising = session.keeping_digits([c for c in found if session.promising(c)] or session.nearest(found))
                finalists = list(islice(session.verified(tuning.diverse(promising)), tuning.FINALISTS))
            if not finalists:
                why_not = _all_refused(session, base) if promising else session.not_promising(found)
                return self._keep(key, kept(base, why_not))
            tried = f"{session.tried['found']} candidates, of which {len(finalists)} are tried"
            search_log.info("region of %d operators: %s", operators, tried)
            notify(f"{tried}: proving and measuring")
            if measure:
                return self._measure(session, key, base, finalists)
            likely = _not_measured(session, finalists)
            fastest = list(islice(likely, len(finalists)))
            base = replace(base, variants=tuple(Variant.of(w.graph, w.schedule) for w in fastest))
            decision = self.accepted(session, base, _in_time(chain(fastest, likely), self.options.budget.seconds))
            if decision.winner is None:
                return decision  # not stored: other candidates are measured
            return replace(decision, why="the model's first choice, not measured (on_miss='heuristic')")

    def _measure(
        self, session: TuningSession, key: CacheKey, base: Decision, finalists: Sequence[Candidate]
    ) -> Decision:
        """Take the fastest candidate that passes the gates.

        If the float gate refuses candidates for rounding, more precise kernels are measured. A few classes of inputs
        often show that before anything is measured.
        """
        from mirage_jax.compiler import tuning

        possible = [tuning.precisions(c, session.precisions) for c in finalists]
        precisions = sorted({session.precisions[0]}.union(*possible))
        with session.timed_step("first candidates"):
            first = self._least_precise(session, finalists, possible)
        decisions: list[Decision] = []
        for precise in (p for p in precisions if p >= first):
            chosen = [c for c, has in zip(finalists, possible, strict=True) if precise == first or precise in has]
            refused = session.tried["refused by the float gate"]
            decision = self._fastest(session, base, chosen, precise)
            if decision is None:
                return kept(base, session.why_not(Reason.NOT_TIMED))
            decisions.append(decision)
            if decision.winner is not None or session.tried["refused by the float gate"] == refused:
                break
            log.info("%d candidates rounded too much (%d)", len(chosen), precise)
        last = decisions[-1]  # there is one: the last precision is never below the first
        if last.winner is None:  # why the fastest were refused says more than what was tried instead
            last = replace(decisions[0], measured=last.measured)
        return self._keep(key, last)

    def _least_precise(
        self, session: TuningSession, finalists: Sequence[Candidate], possible: Sequence[Sequence[Precision]]
    ) -> Precision:
        """Find the precision that the float gate's first classes ask for, of the candidate whose first variant is the
        fastest.

        That takes seconds; measuring all variants takes minutes.
        """
        from mirage_jax.compiler import tuning

        def first_variant(c: Candidate, precise: Precision) -> Winner:
            return session.winner(c.graph, tuning.as_precise(c.schedule, precise), c.family)

        open_ones = [(c, has) for c, has in zip(finalists, possible, strict=True) if len(has) > 1][:FIRST_CANDIDATES]
        if session.trials is None or not open_ones:
            return session.precisions[0]
        timed = session.screen([first_variant(c, has[0]) for c, has in open_ones])
        if not timed:
            return session.precisions[0]
        c, (first, *others, last) = open_ones[min(timed, key=lambda i: timed[i].seconds)]
        for precise in (first, *others):
            variant = first_variant(c, precise)
            if variant not in session.timed and not session.screen([variant]):
                break
            verdict = session.float_gate(FIRST_INPUT_CLASSES).check(variant)
            log.info("a first candidate (%d): %s", precise, verdict.why)
            if verdict.passed:
                return precise
        return last

    def _fastest(
        self,
        session: TuningSession,
        base: Decision,
        finalists: Sequence[Candidate],
        precise: Precision,
    ) -> Decision | None:
        """Decide by measurements; None if XLA cannot be measured.

        If the gates refuse all that are fastest, others may still be faster than XLA, and more accurate.
        """
        from mirage_jax.compiler import tuning

        with session.timed_step("variants"):
            found = self.compare(session, finalists, precise)
        decision = self._first_accepted(session, base, found)
        if decision is not None and decision.winner is None and found.faster and found.others:
            log.info("the fastest candidates were refused: comparing %d others", len(found.others))
            with session.timed_step("variants"):
                slower = tuning.against_xla(session, found.others)
            others = self._first_accepted(session, base, slower)
            if others is not None and others.winner is not None:
                return others
        return decision

    def _first_accepted(self, session: TuningSession, base: Decision, found: tuning.Comparison) -> Decision | None:
        """Take the fastest of the candidates that were compared with XLA and pass the gates."""
        if found.xla is None:
            return None
        times = {"xla": found.xla.seconds} | ({"best candidate": found.best[0].seconds} if found.best else {})
        base = replace(base, measured=tuple(session.measured), timings=times, variants=session.variants)
        if not found.faster:
            return kept(base, _not_faster(session, found.xla, found.best))
        decision = self.accepted(session, base, (w for w, _, _ in found.faster))
        for winner, seconds, ratio in found.faster:
            if winner is decision.winner:
                times = {"xla": found.xla.seconds, "mirage": seconds.seconds}
                decision = replace(decision, why=f"{ratio} over XLA", timings=times)
        return decision

    def accepted(self, session: TuningSession, base: Decision, winners: Iterable[Winner]) -> Decision:
        """Take the first winner that gets a certificate and passes the exact check and the float gate."""
        proof, exact, floats = session.certificate_gate(), session.exact_gate(), session.float_gate()
        rounds_too_much = set[tuple[KernelGraph, tuple[Precision, ...]]]()
        for winner in winners:
            rounding = winner.graph, tuple(k.precise for k in winner.schedule.kernels)
            if rounding in rounds_too_much:  # its other variants round in the same way
                continue
            log.info("proving a candidate equal to the program, then comparing its floats with float64")
            with session.timed_step("certificate"):
                verdict = proof.check(winner)
            if not verdict.passed:
                session.refuse(proof, verdict)
                continue
            with session.timed_step("exact check"):
                verdict = exact.check(winner)
            base = replace(base, exact=verdict.why)
            if not verdict.passed:
                session.refuse(exact, verdict)
                log.warning("a generated kernel is wrong and is not used: %s", verdict.why)
                continue
            try:
                with session.timed_step("float gate"):
                    verdict = floats.check(winner)
            except (LoweringError, UnsupportedError) as why:  # if nothing was measured, it was never compiled before
                session.tried["not compiled"] += 1
                session.last_failure = in_one_line(why)
                log.info("not lowered: %s", session.last_failure)
                continue
            base = replace(base, gate=verdict.why)
            if verdict.passed:
                log.info("float gate: %s", verdict.why)
                return replace(base, winner=winner, after=winner.footprint, certificate=proof.certificate)
            session.refuse(floats, verdict)
            rounds_too_much.add(rounding)
        return kept(base, _all_refused(session, base))

    def _keep(self, key: CacheKey, d: Decision) -> Decision:
        return store(self.cache, key, d)

    def _check_foreign(self, subject: RegionOnDevice, winner: Winner, devices: Sequence[Any]) -> str:
        """Check a winner that somebody else stored, before it runs for the user; return what the exact check found.

        The float gate takes a few telling classes.

        Raises:
            VerificationError: the winner fails.
        """
        log.info("a stored winner that was not made here is checked")
        return self.run_checks(subject.region, subject.platform, devices, winner, STORED_INPUT_CLASSES)[0]

    def run_checks(
        self, region: Region, platform: str, devices: Sequence[Any], winner: Winner, classes: Sequence[str] = ()
    ) -> tuple[str, str]:
        """Run a certified winner through the exact check and the float gate; return what each said.

        It runs in a child process first, where it can do no harm. The float gate takes the named classes, or all.

        Raises:
            VerificationError: the winner fails.
        """
        session, x64 = self.session(region, platform, devices), jax.config.jax_enable_x64

        def check() -> tuple[str, str]:
            with (
                unchecked(x64),
                np.errstate(all="ignore"),  # constants that somebody made up
                self.trials(session) if winner.has_kernels else nullcontext() as trials,
            ):
                session.try_in(trials)
                if trials is not None and not session.screen([winner]):
                    raise VerificationError("it does not compile, or does not run")
                return required(session.exact_gate(), winner), required(session.float_gate(classes), winner)

        return apart(check)


def kept(base: Decision, why_not: WhyNot) -> Decision:
    """Leave a region to XLA."""
    return replace(base, why=str(why_not), why_not=why_not)


def undecided(why: str) -> WhyNot:
    """Record that nobody has decided the region yet."""
    return WhyNot(Reason.UNDECIDED, detail=why)


def _not_faster(session: TuningSession, xla: Timing, best: tuple[Timing, Ratio] | None) -> WhyNot:
    """Explain with measured times why no candidate runs."""
    from mirage_jax.compiler.tuning import MIN_SPEEDUP

    why_not = replace(session.why_not(Reason.NOT_COMPILED, session.last_failure), xla=xla.seconds, is_measured=True)
    if best is None:
        return why_not
    taken, ratio = best
    asked = f"the best candidate is {ratio}, and the lower end must reach {MIN_SPEEDUP:g}x"
    return replace(why_not, reason=Reason.AS_FAST, best=taken.seconds, detail=asked)


def _not_measured(session: TuningSession, finalists: Sequence[Candidate]) -> Iterator[Winner]:
    """All finalists, best first, and then again with products that are more precise."""
    from mirage_jax.compiler import tuning

    def winner(c: Candidate, precise: Precision) -> Winner:
        return session.winner(c.graph, tuning.as_precise(c.schedule, precise), c.family)

    first, *others = session.precisions
    yield from (winner(c, first) for c in finalists)
    differing = [(c, tuning.precisions(c, session.precisions)) for c in finalists]  # writes kernels: if all are refused
    yield from (winner(c, precise) for precise in others for c, own in differing if precise in own)


def _in_time(winners: Iterable[Winner], seconds: float) -> Iterator[Winner]:
    """The first winner, which everything is compiled for, and the others for so long."""
    until = math.inf
    for n, winner in enumerate(winners):
        if n == 1:
            until = time.monotonic() + seconds
        elif time.monotonic() > until:
            log.info("%d candidates took all of the %g s of the budget", n, seconds)
            return
        yield winner


def _all_refused(session: TuningSession, base: Decision) -> WhyNot:
    """Explain that no candidate passed the gates, or compiled, with times of XLA and the fastest if they are known."""
    is_refused = session.refusals or not session.last_failure
    reason, detail = (Reason.REFUSED, session.refusals) if is_refused else (Reason.NOT_COMPILED, session.last_failure)
    why_not = session.why_not(reason, detail)
    if "xla" not in base.timings:
        return why_not
    return replace(why_not, xla=base.timings["xla"], best=base.timings.get("best candidate"), is_measured=True)


def chosen_devices(devices: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    """Pick the local devices that measure, by number; the first if none is named.

    Raises:
        UsageError: a number is too large, or the devices are of several kinds.
    """
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
