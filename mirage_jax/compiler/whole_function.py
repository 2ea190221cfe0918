"""A function as a whole: whether it runs as ours or under plain `jax.jit`, decided once and stored.

Each region beats XLA's code for that region alone. That says little about a function: what XLA fuses across a border,
and what it need not make again, is in no region's time. So the function is measured, too: as it was written, ours, ours
as it was cut first, and ours without values that are made again. The rule: the fastest of ours runs if its median ratio
over plain jit is at least 1 and the lower end of its interval at least 0.98; among variants within 1% of the fastest,
the least temporary memory wins. Else, if ours has two or three regions, each is left to XLA in turn, and the same is
asked of these. Else plain jit runs. So it does where a GPU waits for the host, which starts XLA's kernels faster than
ours, unless a larger program calls the function.

A decision is stored under the program's fingerprint and the decisions of its regions, so it is asked again when one of
these changes. It is about speed: every variant is made of proven regions. Only where XLA compiles one wrongly as a
whole, and its results are grossly off, it does not run either.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mirage_jax.cache import Cache, CacheKey, Entry
from mirage_jax.jaxpr_frontend import jax_compat
from mirage_jax.jaxpr_frontend.capture.lowering import OURS, PLAIN, LoweringPlan, WholeProgram
from mirage_jax.jaxpr_frontend.partition.fingerprint import fingerprint
from mirage_jax.jaxpr_frontend.partition.program import FlatEqn
from mirage_jax.mugraph.schedule_json import schedule_to_json
from mirage_jax.report import Decision, WholeFunction, ratio_as_text
from mirage_jax.seals import Seal

MAX_TUNING_FRACTION = 0.05  # of the time of tuning, that a function may be measured as a whole
MIN_MEDIAN_RATIO = 1.0  # median of plain jit's time over ours, from which on ours runs
MIN_LOW_RATIO = 0.98  # lower end of that ratio's interval, from which on ours runs
TIE_RATIO = 0.99  # of the best ratio, from which on memory decides
POLICY = (
    f"whole function: median ratio {MIN_MEDIAN_RATIO}, lower bound {MIN_LOW_RATIO}, memory within {TIE_RATIO}; "
    "by itself no slower for the host"
)
MAX_RATIO = 1e6  # a larger stored ratio is no ratio of times

type Ratios = Mapping[str, tuple[float, float, float]]


@dataclass(frozen=True)
class WholeTimes:
    """Seconds and temporary bytes by label, and each variant's ratio over plain jit: median, low, high. On a GPU these
    are device times; `for_the_host` has the ratios of how fast the host makes calls, where they are short. Variants in
    `wrong` differ grossly from plain jit, in words; they have no ratios.
    """

    seconds: Mapping[str, float]
    memory: Mapping[str, int]
    ratios: Ratios
    for_the_host: Ratios = field(default_factory=dict[str, tuple[float, float, float]])
    wrong: Mapping[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        return ", ".join(f"{label} {ratio_as_text(ratio)}" for label, ratio in self.ratios.items())


def not_measured(whole: WholeProgram, why: str, is_safe: bool = False) -> WholeFunction:
    """The decision for the first variant, where the function cannot be measured. is_safe: for plain jit, where the
    variant recomputes values.
    """
    label = PLAIN if is_safe and whole.ours.makes_again else next(iter(whole.variants))
    return WholeFunction(label, f"not measured: {why}", "policy")


def as_written() -> WholeFunction:
    """The decision about a program in which nothing is replaced."""
    return WholeFunction(PLAIN, "plain jit: no region is replaced", "policy")


def of_one_region(whole: WholeProgram, d: Decision) -> WholeFunction:
    """The decision about a program that is one region: its measurement is the function's."""
    label = next(iter(whole.variants))
    seconds = {PLAIN: d.timings["xla"], label: d.timings["mirage"]}
    value = seconds[PLAIN] / seconds[label]
    why = d.why.removesuffix(" over XLA") + " over plain jit, as one region"
    return WholeFunction(label, why, d.source, (value, value, value), seconds)


def question_of(whole: WholeProgram, backend: str) -> dict[str, Any]:
    """Fields of the key under which a decision is stored."""
    graph = f"{fingerprint(whole.as_written)} {','.join(whole.variants)} {decisions(whole.ours)}"
    return {"graph": graph, "extents": {}, "backend": backend, "policy": POLICY}


def decisions(plan: LoweringPlan) -> str:
    """A digest of what replaces regions in a plan."""
    texts = {f"{w.family} {w.graph} {json.dumps(schedule_to_json(w.schedule))}" for w in _winners(plan)}
    return _digest(texts)


def kernels(whole: WholeProgram) -> str:
    """A digest of the text of all kernels of a program's variants."""
    return _digest({w.kernel_digest for plan in whole.variants.values() for w in _winners(plan())})


def _winners(plan: LoweringPlan) -> list[Any]:
    return [placed.compiled for placed in plan.replaced]


def _digest(texts: Collection[str]) -> str:
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()


@dataclass(frozen=True)
class Question:
    """A program to decide about, and the key of the answer."""

    whole: WholeProgram
    key: CacheKey

    def why_not(self) -> str:
        """Why the program cannot be run on random numbers, on one device; empty if it can."""
        return next(self._obstacles(), "")

    def _obstacles(self) -> Iterator[str]:
        target, jaxpr = self.whole.target, self.whole.jaxpr
        if target.is_partitioned or target.is_manual:
            yield "several devices compute it"
        if target.is_exported:
            yield "it is exported"
        if jaxpr.effects:
            yield "it has effects"
        if any(not _can_be_drawn(v.aval) for v in jaxpr.invars):
            yield "its arguments cannot be drawn: their sizes are not known, say"
        yield from filter(None, map(_obstacle, self.whole.equations()))

    def decided(self, found: WholeTimes) -> WholeFunction:
        """Choose the variant that runs."""
        if not found.ratios:
            why = next(iter(found.wrong.values()))
            return WholeFunction(PLAIN, f"plain jit: ours differs from it on random numbers: {why}", "search")
        label, (value, low, high) = fastest(found)
        ratio, text = (value, low, high), ratio_as_text((value, low, high))
        host, inside = found.for_the_host.get(label), ""
        if value < MIN_MEDIAN_RATIO or low < MIN_LOW_RATIO:
            label, why = PLAIN, f"plain jit: ours is {text} as fast"
        elif host is not None and host[2] < 1:
            label, inside = PLAIN, label
            why = f"plain jit: ours is {text} as fast, but the host starts it {ratio_as_text(host)} as fast"
            why += "; inside of a larger program ours runs"
        else:
            why = f"{text} over plain jit{label.removeprefix(OURS)}"
        return WholeFunction(label, why, "search", ratio, found.seconds, found.memory, inside)

    def store(self, cache: Cache, found: WholeFunction) -> None:
        """Keep the decision for other processes."""
        others = {label: decisions(plan()) for label, plan in list(self.whole.variants.items())[1:]}
        ratio = list(found.ratio or ())
        details = {"ratio": ratio, "memory": dict(found.memory), "others": others, "inside": found.inside}
        reasons = (found.chosen, found.why)
        text = kernels(self.whole)
        entry = Entry("whole", schedule=details, timings=dict(found.seconds), reasons=reasons, kernels=text)
        cache.put(self.key, entry)

    def stored(self, cache: Cache) -> WholeFunction | None:
        """Read the stored decision; None if there is none that can be used."""
        entry, _, seal = cache.lookup(self.key)
        if entry is None or entry.decision != "whole" or len(entry.reasons) != 2:
            return None
        if seal is Seal.FOREIGN and entry.kernels and entry.kernels != kernels(self.whole):
            return None
        details: Any = entry.schedule
        chosen, why = entry.reasons
        if not _are_details(details):
            return None
        inside = details["inside"]
        if not all(self._is_possible(label, details["others"]) for label in (chosen, inside or PLAIN)):
            return None
        ratio = details["ratio"]
        known = (ratio[0], ratio[1], ratio[2]) if ratio else None  # empty if the program could not be measured
        return WholeFunction(chosen, why, "cache", known, dict(entry.timings), details["memory"], inside)

    def _is_possible(self, chosen: str, others: Mapping[str, str]) -> bool:
        """Whether the program has the variant, with the regions' decisions of the time when it was chosen."""
        if chosen not in (PLAIN, *self.whole.variants):
            return False
        return chosen not in others or decisions(self.whole.variants[chosen]()) == others[chosen]


def fastest(found: WholeTimes) -> tuple[str, tuple[float, float, float]]:
    """Choose the fastest optimized variant, or a nearly as fast one that needs less temporary memory."""
    best = max(ratio[0] for ratio in found.ratios.values())
    tied = {label: ratio for label, ratio in found.ratios.items() if ratio[0] >= TIE_RATIO * best}
    label = min(tied, key=lambda label: (found.memory.get(label, math.inf), -tied[label][0]))
    return label, tied[label]


def _can_be_drawn(aval: Any) -> bool:
    shape = getattr(aval, "shape", None)
    known = shape is not None and all(isinstance(n, int) for n in shape)
    drawn = not jax_compat.is_key(aval) or jax_compat.key_implementation(aval) is not None
    return known and drawn and jax_compat.is_on_device(aval)


def _obstacle(eqn: FlatEqn) -> str:
    """Why an equation keeps a program from being run on random numbers."""
    if eqn.primitive == "while":
        return "how often a loop runs depends on data"
    if eqn.primitive == "shard_map":
        return "several devices compute it"
    return "it calls code outside of JAX" if jax_compat.calls_outside(eqn.eqn) else ""


def _are_details(value: Any) -> bool:
    """Whether a stored value has the fields that `Question.store` writes."""
    if not isinstance(value, dict) or not {"ratio", "memory", "others", "inside"} <= value.keys():
        return False
    is_ratio = value["ratio"] == [] or _is_ratio(value["ratio"])
    are_labels = isinstance(value["others"], dict) and isinstance(value["inside"], str)
    return is_ratio and _are_counts(value["memory"]) and are_labels


def _is_ratio(value: Any) -> bool:
    is_number = lambda x: isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < MAX_RATIO  # noqa: E731
    return isinstance(value, list) and len(value) == 3 and all(map(is_number, value))


def _are_counts(value: Any) -> bool:
    is_count = lambda x: isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 1 << 60  # noqa: E731
    return isinstance(value, dict) and all(map(is_count, value.values()))
