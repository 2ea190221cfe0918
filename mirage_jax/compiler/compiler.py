"""The compiler of one optimized function: remembers decisions, and splits the budget among regions and programs.

`decide.Decider` decides one region. This module calls it for the regions of every program of the function, measures
each program as a whole, and turns every exception into a decision for XLA, unless `strict`: nothing here may break the
user's program.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

import jax

from mirage_jax import pins
from mirage_jax.cache import CacheKey, Entry
from mirage_jax.cluster import Machine
from mirage_jax.compiler.budget_split import MIN_FRACTION_AGAIN, MIN_SAVING_SECONDS, lanes, savings, shares
from mirage_jax.compiler.decide import Decider, kept, undecided
from mirage_jax.compiler.processes import ProcessGroup
from mirage_jax.compiler.region import RegionOnDevice
from mirage_jax.compiler.selection import is_line_of, is_named, why_skipped
from mirage_jax.compiler.stored import entry_of, key_of, restore
from mirage_jax.compiler.threads import apart, as_here, unchecked
from mirage_jax.compiler.whole_function import (
    MAX_TUNING_FRACTION,
    Question,
    WholeTimes,
    as_written,
    not_measured,
    of_one_region,
    question_of,
)
from mirage_jax.compiler.winner import Winner
from mirage_jax.config import Options, warn_once
from mirage_jax.errors import UnsupportedError, UsageError, in_one_line, is_out_of_memory
from mirage_jax.hardware.host import processors
from mirage_jax.interruptible import spread
from mirage_jax.jaxpr_frontend.capture.lowering import WholeProgram
from mirage_jax.jaxpr_frontend.jax_compat import LoweringTarget, default_platform
from mirage_jax.jaxpr_frontend.partition.regions import MAX_REGION_OPERATORS
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.pins import Choice
from mirage_jax.report import Decision, WholeFunction, places
from mirage_jax.seals import Seal
from mirage_jax.why_not import Reason, WhyNot

if TYPE_CHECKING:
    from mirage_jax.compiler.isolation.parent import Lend, Trials
    from mirage_jax.compiler.tuning_session import TuningSession

log = logging.getLogger("mirage_jax")


class Compiler(Decider):
    """Decides for the regions of one optimized function; hashable by identity, so a primitive may have it as a
    parameter.
    """

    def __init__(self, options: Options, exports_kernels: bool = False) -> None:
        """exports_kernels: programs that `jax.export` stores have kernels, too."""
        super().__init__(options)
        self.exports_kernels = exports_kernels
        self.decisions: dict[tuple[str, str], Decision] = {}  # by the region's text, and the platform
        self.spent = 0.0  # seconds of tuning that count against the total, however many regions at a time
        self.tuned = 0.0  # seconds of tuning since a whole function was measured
        self._spent_on: list[str] = []  # places and outcomes of regions that were tuned within the total
        self.is_part = False  # of some program that was lowered
        self.wholes: dict[str, WholeFunction] = {}  # by digest of key
        self.choices: dict[str, Choice] = pins.read(options.pins) if options.pins else {}  # the user's, by cache key
        self._proven: dict[tuple[str, str, Choice], Decision] = {}  # for pinned muGraphs
        self._undecided_yet: dict[tuple[str, str], Decision] = {}  # key and size alone, where options need the key
        self._asked_on_miss: str | None = None  # `tune` overrides the option
        self._agreed = set[tuple[str, str]]()  # regions that all processes of a program have decided alike
        self._begun = set[tuple[str, str]]()  # regions that `tune` has asked for already
        self._shared_trials: Callable[[Sequence[Any]], AbstractContextManager[Trials | None]] | None = None
        self._lanes = 1  # of regions that are being tuned at the same time
        self._has_more_time = False  # than the total: a program was cut again
        self._lock = threading.RLock()

    max_ops = MAX_REGION_OPERATORS

    @property
    def strict(self) -> bool:
        """Whether exceptions reach the user."""
        return self.options.strict

    @property
    def platform(self) -> str:
        """Name the platform that a function runs on, if nothing else names one."""
        return default_platform()

    def recomputes(self, target: LoweringTarget) -> bool:
        """Whether regions of a program for this target may recompute large intermediates."""
        if self.options.remat != "auto":
            return self.checkpoints
        is_measured = not (target.is_partitioned or target.is_manual)  # as a whole
        return is_measured and self.options.backend != "jax" and {*map(_cuda, target.platforms)} == {"cuda"}

    @property
    def checkpoints(self) -> bool:
        """Whether functions that are differentiated from outside may recompute large intermediates in the backward
        pass.
        """
        return self.options.remat == "regions"

    @property
    def on_miss(self) -> str:
        """Say what to do with a region that has no stored decision: "search", "heuristic", "fallback" or "error"."""
        return self._asked_on_miss or self.options.on_miss or _default_on_miss()

    @contextmanager
    def asking(self, on_miss: str | None, machines: Sequence[Machine] = ()) -> Iterator[None]:
        """Decide open regions again with another `on_miss`, with all of the budget, and with the help of other
        machines; None changes nothing.
        """
        if on_miss is None:
            yield
            return
        before, self._asked_on_miss = self._asked_on_miss, on_miss
        helped, self.machines = self.machines, machines
        self.spent, self._has_more_time = 0.0, False
        self._spent_on.clear()
        self._begun.clear()
        try:
            yield
        finally:
            self._asked_on_miss, self.machines = before, helped

    # ------------------------------------------------------------------ all regions of a program

    def prepare(self, regions: Sequence[Region], target: LoweringTarget, again: bool = False) -> None:
        """Decide for all regions of a program before it is lowered, so that they share the budget and the children. If
        several processes run the program, the first one decides.

        again: the program was cut in another way before, and regions of that may have taken all of the time.
        """
        if len(target.platforms) != 1:
            return
        platform = _cuda(target.platforms[0])
        with self._lock:  # another thread may prepare the same function
            if self.choices:
                self._warn_of_lost_choices(regions, platform)
            regions = [r for r in regions if self.settled(r, platform) is None]
            if (group := ProcessGroup.of(target.processes)) is not None:
                self._agree(regions, platform, group, again)
            elif self.on_miss == "search":
                self._search_all(regions, platform, again)

    def _search_all(self, regions: Sequence[Region], platform: str, again: bool) -> None:
        """Decide regions by searching, as far as the budget goes."""
        undecided, count = self._undecided(regions, platform)
        self._begun.update((text, platform) for text in undecided)
        with self._sharing_trials(), self._counting():
            if self.options.budget.total is None:
                for region in undecided.values():
                    self.decide(region, platform, "search")
                return
            try:
                self._decide_within(self.options.budget.total, undecided, count, platform, again)
            except BaseException:  # an interrupt, say: regions that were only looked up stay open
                self._forget_lookups(undecided, platform)
                raise

    def _agree(self, regions: Sequence[Region], platform: str, group: ProcessGroup, again: bool) -> None:
        """Decide regions as the first process of a group does; all of its processes come here, with equal regions."""
        kinds = {_digest(r.text): r for r in regions if (r.text, platform) not in self._agreed}
        if not kinds:
            return
        offer = functools.partial(self._offered, kinds, regions, platform, again)
        take = functools.partial(self._take, kinds, platform)
        used: frozenset[str] = frozenset()
        try:
            used = group.agree(_digest(" ".join(sorted(kinds))), offer, take)
        finally:  # where the first one fails, too: the others have nothing from it
            why = undecided("the processes that run the program could not agree on a decision")
            for region in (region for key, region in kinds.items() if key not in used):
                self.decisions[region.text, platform] = kept(self._without_decision(region, platform), why)
            self._agreed.update((region.text, platform) for region in kinds.values())

    def _offered(
        self, kinds: Mapping[str, Region], regions: Sequence[Region], platform: str, again: bool
    ) -> Mapping[str, object]:
        """Decide, in the first process, what all others will take."""
        mode = self._asked_on_miss or self.options.on_miss or "search"
        if mode == "search":
            self._search_all(regions, platform, again)
        found = {key: self.decide(region, platform) for key, region in kinds.items()}
        return {key: entry_of(decision).to_json() for key, decision in found.items()}

    def _take(self, kinds: Mapping[str, Region], platform: str, offered: Mapping[str, object]) -> list[str]:
        """Take decisions, in another process; return the keys of those that are of no use here."""
        taken = {key: self._taken(kinds[key], platform, entry) for key, entry in offered.items()}
        self.decisions |= {(kinds[key].text, platform): d for key, d in taken.items() if d is not None}
        return [key for key, d in taken.items() if d is None]

    def _taken(self, region: Region, platform: str, value: object) -> Decision | None:
        """A decision of another process of the same program; None if it is of no use here."""
        try:
            subject = RegionOnDevice(region, platform, self.devices(platform)[0], self.options)
            key, base = key_of(subject), self._without_decision(region, platform)
            return restore(subject, self.cache, key, Entry.from_json(value), Seal.MADE, base, lambda _: "")
        except Exception as why:
            log.warning("a decision of another process is not used: %s", in_one_line(why))
            return None

    def _undecided(self, regions: Sequence[Region], platform: str) -> tuple[dict[str, Region], Counter[str]]:
        """List the regions to decide, one of each kind, by text; and how many there are of each kind."""
        kinds = {id(r.graph): r for r in regions}  # equal layers share one graph, and making its text takes time
        graphs = Counter(id(r.graph) for r in regions)
        undecided: dict[str, Region] = {}
        count = Counter[str]()
        for graph, region in kinds.items():
            if self._is_open((region.text, platform)):
                undecided[region.text] = region
                count[region.text] += graphs[graph]
        return undecided, count

    def _is_open(self, memo: tuple[str, str]) -> bool:
        decision = self.decisions.get(memo)
        if decision is None:
            return True
        return self._asked_on_miss is not None and memo not in self._begun and decision.source == "policy"

    def _forget_lookups(self, undecided: Iterable[str], platform: str) -> None:
        for memo in [(text, platform) for text in undecided]:
            if memo in self.decisions and self.decisions[memo].source == "policy":
                del self.decisions[memo]

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the time as tuning."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.tuned += time.monotonic() - started

    @contextmanager
    def _spending(self) -> Iterator[None]:
        """Count the time against the total of the budget."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.spent += time.monotonic() - started

    def _decide_within(
        self, total: float, undecided: Mapping[str, Region], count: Mapping[str, int], platform: str, again: bool
    ) -> None:
        """Tune regions within `total` seconds, those first that may save most.

        A region gets a share of the seconds that are left to its lane, in proportion to its possible saving. The rest
        stays with XLA, undecided: another process, or another `tune`, goes on there. Where a program is cut again, what
        won before may be part of another region now, so that once there is more time.
        """
        missing = {
            text: region
            for text, region in undecided.items()
            if self.decide(region, platform, "fallback").source != "cache"
        }
        limit = (1 - MAX_TUNING_FRACTION) * total  # the rest is for measuring the function as a whole
        if again and missing and not self._has_more_time:
            self._has_more_time, limit = True, max(limit, self.spent + MIN_FRACTION_AGAIN * total)
        if self.spent >= limit:  # by other programs of the same function, or by this one with values made again
            return self._out_of_time(missing, platform, total, "; ".join(self._spent_on))
        with self._spending():
            saved = self._savings(missing, count, platform)
        until = time.monotonic() + limit - self.spent

        def tune(lane: Mapping[str, float]) -> None:
            """Tune the regions of one lane."""
            left = self._tune_lane(shares(lane), missing, platform, until)
            self._out_of_time(left, platform, total)

        side_by_side = lanes(saved, _processors(platform))
        self._lanes = len(side_by_side)
        with self._spending():
            if self._lanes == 1:
                tune(saved)
            else:
                spread(as_here(tune), side_by_side, self._lanes)

    def _tune_lane(
        self, lane: Iterable[tuple[str, float]], regions: Mapping[str, Region], platform: str, until: float
    ) -> list[str]:
        """Tune regions one after the other; return those for which no time is left. Runs on threads of its own, while
        another one has the lock.
        """
        left: list[str] = []
        for n, (text, share) in enumerate(lane):
            now = time.monotonic()
            if n > 0 and now >= until:
                left.append(text)
                continue
            found = self._decided(regions[text], platform, "search", now + share * (until - now))
            self.decisions[text, platform] = found
            self._spent_on.append(f"{_place(regions[text])}: {found.why}")
        return left

    def _out_of_time(self, missing: Iterable[str], platform: str, total: float, spent_on: str = "") -> None:
        why = f"no time left of {total:g} s for tuning all regions" + (f"; it went into {spent_on}" if spent_on else "")
        for memo in [(text, platform) for text in missing]:
            self.decisions[memo] = kept(self.decisions[memo], undecided(why))

    def _savings(self, regions: Mapping[str, Region], count: Mapping[str, int], platform: str) -> dict[str, float]:
        """Estimate the seconds that may be saved in all regions of each kind, by text."""
        try:
            devices = self.devices(platform)
        except RuntimeError:  # there is no such device here, so nothing will be tuned
            return dict.fromkeys(regions, MIN_SAVING_SECONDS)
        sessions = {text: functools.partial(self.session, r, platform, devices) for text, r in regions.items()}
        time_xla = functools.partial(self._times_of_xla, jax.config.jax_enable_x64) if platform == "cuda" else None

        def notify(text: str, why: Exception) -> None:
            """Log a region that cannot be estimated."""
            log.warning("the region at %s is tuned last: %s", _place(regions[text]), in_one_line(why))

        return savings(sessions, count, time_xla, notify)

    def _times_of_xla(self, x64: bool, sessions: Sequence[TuningSession]) -> list[float | None]:
        """Time XLA's code for several regions, in seconds; None where that fails."""
        from mirage_jax.compiler.tuning_session import times_of_xla

        log.getChild("timing").info("timing XLA's code for %d kinds of regions", len(sessions))

        def work() -> list[float | None]:
            with unchecked(x64):
                return times_of_xla(sessions)

        found = apart(work)
        self.xla_seconds |= {s.region.text: xla for s, xla in zip(sessions, found, strict=True)}
        return found

    @contextmanager
    def _sharing_trials(self) -> Iterator[None]:
        """Let the regions use the same child processes, one region after the other."""
        with ExitStack() as stack:
            lock = threading.Lock()

            def lend(devices: Sequence[Any]) -> AbstractContextManager[Trials | None]:
                with lock:
                    return shared(tuple(devices))()

            @functools.cache
            def shared(devices: Sequence[Any]) -> Lend:  # only if a region is searched
                from mirage_jax.compiler.isolation import parent

                return stack.enter_context(parent.shared(devices, self._lanes, self.machines))

            self._shared_trials = lend
            try:
                yield
            finally:
                self._shared_trials, self._lanes = None, 1

    def trials(self, session: TuningSession) -> AbstractContextManager[Trials | None]:
        """Enter a context in which variants are tried in child processes, shared with other regions if possible."""
        if self._shared_trials is None:
            return super().trials(session)
        return self._shared_trials(session.devices)

    # ------------------------------------------------------------------ one region

    def compile_region(self, region: Region, platforms: tuple[str, ...]) -> Winner | None:
        """Decide a region, and return the winner, or None for XLA.

        A program exported for several platforms stays with XLA.
        """
        if len(platforms) != 1:
            log.info(
                "a program lowered for %s stays with XLA: regions are decided for one platform", ", ".join(platforms)
            )
            return None
        return self.decide(region, platforms[0]).winner

    def known_region(self, region: Region, platforms: tuple[str, ...]) -> Winner | None:
        """Return the winner of a region that is decided already, here or in the cache; never search."""
        memo = (region.text, _cuda(platforms[0]))
        with self._lock:
            if (settled := self.settled(region, memo[1])) is not None:
                return settled.winner
            is_decided = memo in self.decisions
            decision = self.decisions[memo] if is_decided else self.decide(region, platforms[0], "fallback")
            if not is_decided and decision.source != "cache":
                del self.decisions[memo]
            return decision.winner

    def decide(self, region: Region, platform: str, on_miss: str | None = None, until: float = math.inf) -> Decision:
        """Decide a region, once per process, program text and platform.

        Args:
            region: the region.
            platform: JAX's name; "gpu" means "cuda".
            on_miss: decide again, with this instead of the option.
            until: when the region's share of the budget ends, in seconds of `time.monotonic`.
        """
        platform = _cuda(platform)
        memo = (region.text, platform)
        with self._lock:
            if (settled := self.settled(region, platform)) is not None:
                return settled
            if memo in self.decisions and on_miss is None:
                return self.decisions[memo]
            self.decisions[memo] = self._decided(region, platform, on_miss or self.on_miss, until)
            return self.decisions[memo]

    def _decided(self, region: Region, platform: str, on_miss: str, until: float) -> Decision:
        """Decide a region anew; XLA keeps it if that fails, unless `strict`."""
        try:
            return self.decide_region(region, platform, on_miss, until)
        except UsageError:
            raise
        except Exception as why:
            if self.strict:
                raise
            text = in_one_line(why)
            log.warning("the region at %s stays with XLA: %s", _place(region), text)
            reason = Reason.NO_ROOM if is_out_of_memory(text) else Reason.FAILED
            return kept(Decision(None, "", "policy", platform), WhyNot(reason, detail=text))

    # ------------------------------------------------------------------ regions that the user decides

    def settled(self, region: Region, platform: str) -> Decision | None:
        """Decide as the user said: by `skip` and `only`, by a veto or by a pin; None if nothing was said.

        Raises:
            UsageError: a gate refuses a pinned muGraph.
        """
        skipped = self.skipped(region, platform)
        return self._chosen(region, platform) if skipped is None else skipped

    def choose_for(self, region: Region, platform: str, choice: Choice) -> Decision:
        """Decide a region by a veto or a pin from now on, here and where the same region occurs again.

        Raises:
            UsageError: a gate refuses the pinned muGraph, or there is no such device here. Nothing changes then.
        """
        platform = _cuda(platform)
        with self._lock:
            base = self._without_decision(region, platform)
            if not base.key:
                raise UsageError(f"the region at {_place(region)} has no key: there is no {platform} device here")
            decision = self._as_chosen(region, platform, choice, base)
            self.choices = {k: c for k, c in self.choices.items() if not base.key.startswith(k)} | {base.key: choice}
            return decision

    def choice_for(self, region: Region, platform: str) -> Choice | None:
        """Find the user's veto or pin of a region."""
        if not self.choices:
            return None
        key = self._without_decision(region, _cuda(platform)).key
        return next((choice for k, choice in self.choices.items() if key.startswith(k)), None)

    def _chosen(self, region: Region, platform: str) -> Decision | None:
        choice = self.choice_for(region, platform)
        if choice is None:
            return None
        return self._as_chosen(region, platform, choice, self._without_decision(region, platform))

    def _as_chosen(self, region: Region, platform: str, choice: Choice, base: Decision) -> Decision:
        if choice.graph is None:
            return kept(replace(base, source="user"), WhyNot(Reason.SKIPPED, detail=choice.why))
        memo = (region.text, platform, choice)
        if memo not in self._proven:
            from mirage_jax.compiler import pinned

            devices = self.devices(platform)
            run_checks = functools.partial(self.run_checks, region, platform, devices)
            subject = RegionOnDevice(region, platform, devices[0], self.options)
            self._proven[memo] = pinned.accept(subject, choice, base, self.cache, run_checks)
        return self._proven[memo]

    def _warn_of_lost_choices(self, regions: Sequence[Region], platform: str) -> None:
        """Warn, once in a process, of vetoes and pins for lines of regions that have other keys now."""
        keys = {r: self._without_decision(r, platform).key for r in regions}
        others = [r for r in regions if self.choice_for(r, platform) is None]
        for chosen, choice in pins.unused(self.choices, keys.values()).items():
            there = next((r for r in others if is_named(choice.source, r.where, key="")), None)
            if there is not None:
                changed = f"the region there now has the key {keys[there][:12]}, not {chosen[:12]}"
                warn_once(f"{choice} is not used: {changed}: its code, shapes, device or versions have changed")

    def take_decisions(self, other: Compiler) -> None:
        """Take what another compiler of the same function has decided, stored or not."""
        self.decisions, self.choices, self._proven = dict(other.decisions), dict(other.choices), dict(other._proven)

    @property
    def selects(self) -> bool:
        """Whether the options `skip` and `only` leave regions to XLA."""
        return bool(self.options.skip) or self.options.only is not None

    def names_line_of(self, region: Region) -> tuple[str, ...]:
        """List the source lines of `skip` and `only` that a region has."""
        if not self.selects:
            return ()
        selectors = (*self.options.skip, *(self.options.only or ()))
        return tuple(s for s in selectors if is_line_of(s, region.where))

    def skipped(self, region: Region, platform: str) -> Decision | None:
        """Decide for XLA if the options say so; None if they do not."""
        if not self.selects:
            return None
        base = self._without_decision(region, platform)
        why = why_skipped(self.options, region.where, base.key)
        return kept(base, WhyNot(Reason.SKIPPED, detail=why)) if why else None

    def _without_decision(self, region: Region, platform: str) -> Decision:
        """The key of a region and its size, once for each kind; without a device there is no key."""
        memo = (region.text, platform)
        if memo not in self._undecided_yet:
            base = Decision(None, "", "policy", platform)
            try:
                device = self.devices(platform)[0]
                subject = RegionOnDevice(region, platform, device, self.options)
                base = replace(base, key=key_of(subject).digest, before=subject.before)
            except UsageError:
                raise
            except Exception as why:  # no device, say: the region has no key, and its lines may still name it
                log.info("the region at %s has no key here: %s", _place(region), in_one_line(why))
            self._undecided_yet[memo] = base
        return self._undecided_yet[memo]

    # ------------------------------------------------------------------ a program as a whole

    def choose(self, whole: WholeProgram) -> WholeFunction:
        """Choose the fastest variant of a program: stored, or measured where regions are."""
        with self._lock:
            self.is_part |= whole.target.is_nested
            try:
                found = self._choose(whole)
                return found.as_part() if whole.target.is_nested else found
            except UsageError:
                raise
            except Exception as why:
                if self.strict:
                    raise
                log.warning("a function is not measured as a whole: %s", in_one_line(why))
                return self._not_measured(whole, in_one_line(why))

    def _choose(self, whole: WholeProgram) -> WholeFunction:
        if len(whole.target.platforms) != 1:
            return self._not_measured(whole, "it is lowered for several platforms")
        platform = _cuda(whole.target.platforms[0])
        if any(self.choice_for(placed.region, platform) for placed in whole.ours.replaced):
            return not_measured(whole, "a muGraph is pinned")
        if (found := self._of_one_region(whole, platform)) is not None:
            return found
        device = self.devices(platform)[0]
        question = Question(whole, CacheKey.here(**question_of(whole, self.options.backend), device=device))
        digest = question.key.digest
        if not self._is_answered(self.wholes.get(digest)):
            found = question.stored(self.cache)
            if not self._is_answered(found):
                if self.on_miss != "search":
                    return self._not_measured(whole, f"nothing is stored, and on_miss={self.on_miss!r}")
                found = self._measured(question, device)
            self.wholes[digest] = found
        return self.wholes[digest]

    def _not_measured(self, whole: WholeProgram, why: str) -> WholeFunction:
        """Decide without times. Nobody asked for values to be recomputed, so they are not where that may be slower."""
        return not_measured(whole, why, is_safe=not self.checkpoints)

    def _is_answered(self, found: WholeFunction | None) -> TypeGuard[WholeFunction]:
        """`tune` asks again about programs that could not be measured: the device may have room for them now."""
        return found is not None and (self._asked_on_miss is None or found.ratio is not None)

    def _of_one_region(self, whole: WholeProgram, platform: str) -> WholeFunction | None:
        """Take the decision about the region, if the program is one region and nothing else.

        Not on a GPU: there the host's time counts, too, and XLA's code is compiled again, while nothing else runs.
        """
        if platform == "cuda" or len(whole.variants) > 1 or (region := whole.ours.only_region) is None:
            return None
        d = self.decisions.get((region.text, platform))
        if d is None or d.speedup is None:
            return None
        return of_one_region(whole, d)

    def _measured(self, question: Question, device: Any) -> WholeFunction:
        from mirage_jax.compiler import function_timing

        if why := question.why_not():
            return self._not_measured(question.whole, why)
        limit, self.tuned = MAX_TUNING_FRACTION * self.tuned, 0.0
        x64 = jax.config.jax_enable_x64
        timed = question.whole.with_kernels  # here: another thread would wait for the lock that this one holds
        if not timed.variants:
            return as_written()

        def measure() -> WholeTimes:
            with unchecked(x64):
                return function_timing.measure(timed, device, limit)

        timings = log.getChild("timing")
        with self._spending():
            try:
                times = apart(measure)
                found = question.decided(times)
                _warn_of(times.wrong)
                timings.info("whole function over plain jit: %s", times)
            except UnsupportedError as why:
                found = self._not_measured(question.whole, str(why))
        timings.info("whole function: %s", found)
        question.store(self.cache, found)
        return found


def _warn_of(wrong: Mapping[str, str]) -> None:
    for label, why in wrong.items():
        log.warning("a function does not run as %s: on random numbers %s; see mirage_jax.bisect", label, why)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _cuda(platform: str) -> str:
    return "cuda" if platform == "gpu" else platform


def _processors(platform: str) -> int:
    """The host's processors that tune. On a CPU two regions would disturb each other, so they count as one."""
    return processors() if platform == "cuda" else 1


def _place(region: Region) -> str:
    """The user's first line, for a message."""
    return ", ".join(places(region.where)[:1])


def _default_on_miss() -> str:
    """All processes of one program must lower the same code, so only a single process searches by itself."""
    return "search" if jax.process_count() == 1 else "fallback"
