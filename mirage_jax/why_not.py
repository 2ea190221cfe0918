"""Explains why XLA keeps a region: a closed set of reasons, the numbers behind each, and sentences for people.

`compiler` fills in a `WhyNot` where a region stays. `explain` prints it, and the cache stores it: a decision that is
read prints the same text as one that was just made.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Self

from mirage_jax import limits
from mirage_jax.errors import CacheError

VERSION = 1  # of the stored form; a record of another version is dropped, and its entry still counts
MAX_CANDIDATES = 10**9  # that a stored record may speak of
NEAR_LIMIT = 1.25  # times the lower limit, up to which XLA's code has little to gain
MIN_GAIN_ELSEWHERE = 1.1  # possible speed-up on another device that is worth a line


class Reason(StrEnum):
    """The reasons for which a region stays with XLA."""

    NOTHING_FOUND = "nothing found"
    NO_CHEAPER_ALGEBRA = "no cheaper algebra"
    SLOWER_BY_MODEL = "slower by the model"
    NOT_COMPILED = "not compiled"
    AS_FAST = "XLA is as fast"
    REFUSED = "refused"
    NOT_SEARCHED = "not searched"
    NOT_TIMED = "XLA not timed"
    UNDECIDED = "undecided"
    NO_DEVICE = "no device"
    NO_ROOM = "no room"
    SKIPPED = "skipped"
    FAILED = "failed"


ADVICE = {
    Reason.NOTHING_FOUND: "harmless: XLA's code stays, and your program has no other form that the search knows",
    Reason.NO_CHEAPER_ALGEBRA: "harmless: your program already has the cheapest order of evaluation that was found",
    Reason.SLOWER_BY_MODEL: "harmless: nothing that was found would make this faster",
    Reason.NOT_COMPILED: "matters: run `python -m mirage_jax doctor`; the log at level INFO has each compiler error",
    Reason.AS_FAST: "harmless: XLA's code is as fast",
    Reason.REFUSED: "safe, but a loss: float32 operands leave the float gate more room than 16-bit ones",
    Reason.NOT_SEARCHED: "harmless: XLA's code runs; docs/limits.md names programs that are not searched",
    Reason.NOT_TIMED: "matters: run `python -m mirage_jax doctor`, and the region alone under jax.jit",
    Reason.UNDECIDED: "matters if this is hot: run `mirage_jax.tune` once with these shapes, or raise `budget`",
    Reason.NO_DEVICE: "expected without such a device: decide on a machine that has one",
    Reason.NO_ROOM: "matters: tune while nothing else holds the GPU's memory; `remat=True` stores less for a gradient",
    Reason.SKIPPED: "as you asked",
    Reason.FAILED: "a bug of ours: `strict=True` raises it; please report it",
}
SAVES_LITTLE = "harmless: no other order of evaluation that was found saves enough to be worth a measurement"


@dataclass(frozen=True)
class Elsewhere:
    """The cost model's seconds for the region on a device that is not here: XLA's time, and the lower limit."""

    device: str
    xla: float
    limit: float

    def __str__(self) -> str:
        ratio = self.xla / self.limit if self.limit > 0 else 1.0
        if ratio < MIN_GAIN_ELSEWHERE:
            return f"on an {self.device}, XLA's code is estimated at its limit too ({us(self.xla)})"
        return (
            f"on an {self.device}, XLA's code is estimated at {us(self.xla)}, and the limit is {us(self.limit)}:"
            f" kernels may gain up to {ratio:.1f}x"
        )


@dataclass(frozen=True)
class WhyNot:
    """Why XLA keeps a region. Times are in seconds, for one run of the region; None where they are not known.

    Args:
        reason: the code.
        device: the device, as the cost model calls it.
        candidates: how many the search found.
        tries_kernels: whether kernels were searched, or only other algebra.
        xla: XLA's time, measured if `is_measured`, else by the cost model.
        is_measured: whether `xla` and `best` are measured.
        best: the best candidate's time.
        asked: the time that the best candidate had to reach to be measured.
        limit: the model's lower limit: the program's products alone, one pass over inputs and outputs, or one kernel.
        detail: what a gate, the search or an error said.
        elsewhere: the same region on a GPU, where only algebra is tried here.
    """

    reason: Reason
    device: str = ""
    candidates: int = 0
    tries_kernels: bool = True
    xla: float | None = None
    is_measured: bool = False
    best: float | None = None
    asked: float | None = None
    limit: float | None = None
    detail: str = ""
    elsewhere: Elsewhere | None = None

    def __str__(self) -> str:
        return self._scope + _SENTENCES[self.reason](self)

    @property
    def advice(self) -> str:
        """Whether it matters, and what to write or do instead."""
        is_cheaper = self.best is not None and self.xla is not None and self.best < self.xla
        saves_little = self.reason is Reason.NO_CHEAPER_ALGEBRA and is_cheaper
        return (SAVES_LITTLE if saves_little else ADVICE[self.reason]) + self._distance

    @property
    def _scope(self) -> str:
        searched = self.reason in _SEARCHED and not self.tries_kernels
        return f"only other algebra is tried on this {self.device}; " if searched else ""

    @property
    def _distance(self) -> str:
        """How far XLA is from the limit."""
        if self.reason not in _SEARCHED or not self.limit or self.xla is None or self.xla < self.limit:
            return ""
        ratio = self.xla / self.limit
        if ratio <= NEAR_LIMIT:
            return f"; XLA's code is at {ratio:.1f}x of the limit, so there is little to gain"
        return f"; XLA's code is at {ratio:.1f}x of the limit: smaller intermediates or 16-bit types bring it closer"

    @property
    def xla_text(self) -> str:
        """XLA's time and the limit, ``XLA takes 38 us (limit 22 us)``."""
        if self.xla is None:
            return "XLA was not timed"
        verb = "takes" if self.is_measured else "is estimated at"
        return f"XLA {verb} {us(self.xla)}{self.limit_text}"

    @property
    def limit_text(self) -> str:
        """The limit in parentheses, unless times contradict it."""
        times = [t for t in (self.xla, self.best) if t is not None]
        return f" (limit {us(self.limit)})" if self.limit and all(t >= self.limit for t in times) else ""

    def to_json(self) -> dict[str, Any]:
        """As values of JSON."""
        other = self.elsewhere
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            **own,
            "version": VERSION,
            "reason": str(self.reason),
            "elsewhere": None if other is None else [other.device, other.xla, other.limit],
        }

    @classmethod
    def from_json(cls, value: object) -> Self | None:
        """Read a stored record; None if there is none, or one of another version.

        Raises:
            CacheError: the record is damaged.
        """
        if value is None:
            return None
        record = limits.mapping("why_not", value)
        if record.get("version") != VERSION:
            return None
        if missing := set(cls(Reason.FAILED).to_json()) ^ set(record):
            raise CacheError(f"why_not: {limits.brief(sorted(missing)[0])} is missing or too much")
        if record["reason"] not in list(Reason):
            raise CacheError(f"why_not: found reason {limits.brief(record['reason'])}; allowed are {', '.join(Reason)}")
        xla, best, asked, limit = (_seconds(name, record[name]) for name in _TIMES)
        return cls(
            Reason(record["reason"]),
            device=limits.text("device", record["device"]),
            candidates=limits.whole("candidates", record["candidates"], 0, MAX_CANDIDATES),
            tries_kernels=limits.flag("tries_kernels", record["tries_kernels"]),
            xla=xla,
            is_measured=limits.flag("is_measured", record["is_measured"]),
            best=best,
            asked=asked,
            limit=limit,
            detail=limits.text("detail", record["detail"]),
            elsewhere=_elsewhere(record["elsewhere"]),
        )


_TIMES = ("xla", "best", "asked", "limit")
_SEARCHED = (Reason.NOTHING_FOUND, Reason.NO_CHEAPER_ALGEBRA, Reason.SLOWER_BY_MODEL, Reason.AS_FAST)


def _seconds(name: str, value: object) -> float | None:
    return None if value is None else limits.real(name, value, limits.MAX_SECONDS)


def _elsewhere(value: object) -> Elsewhere | None:
    if value is None:
        return None
    parts = limits.items("elsewhere", value, 3)
    if len(parts) != 3:
        raise CacheError(f"elsewhere: found {len(parts)} values; allowed are a device and two times")
    xla, limit = (limits.real("elsewhere", x, limits.MAX_SECONDS) for x in parts[1:])
    return Elsewhere(limits.text("elsewhere", parts[0]), xla, limit)


def us(seconds: float) -> str:
    """A time in microseconds, with at least two digits."""
    number = seconds * 1e6
    return f"{number:,.0f} us" if number >= 10 else f"{number:.2g} us"


def _of(count: int, noun: str) -> str:
    return f"the only {noun}" if count == 1 else f"the best of {count:,} {noun}s"


def _nothing_found(w: WhyNot) -> str:
    return f"the search found no candidate, and {w.xla_text}"


def _no_cheaper_algebra(w: WhyNot) -> str:
    if w.best is None or w.xla is None or w.asked is None:
        return "no other order of evaluation is cheaper"
    if w.best >= w.xla:
        what = "the one order of evaluation" if w.candidates == 1 else f"none of {w.candidates:,} orders of evaluation"
        verb = "is no cheaper" if w.candidates == 1 else "is cheaper"
        return f"{what} that the search found {verb} than your own, estimated at {us(w.xla)}{w.limit_text}"
    saved = 1 - w.best / w.xla
    return (
        f"{_of(w.candidates, 'order')} of evaluation is estimated at {us(w.best)}, your own at {us(w.xla)}"
        f"{w.limit_text}: {saved:.1%} less, and {1 - w.asked / w.xla:.0%} less is asked"
    )


def _slower_by_model(w: WhyNot) -> str:
    if w.best is None or w.asked is None:
        return f"no candidate promises to beat XLA, and {w.xla_text}"
    return (
        f"{_of(w.candidates, 'candidate')} is estimated at {us(w.best)}, {w.xla_text};"
        f" candidates up to {us(w.asked)} are measured"
    )


def _as_fast(w: WhyNot) -> str:
    if w.best is None:
        return f"XLA is as fast: {w.xla_text}"
    return f"XLA is as fast: {_of(w.candidates, 'candidate')} takes {us(w.best)}, {w.xla_text}; {w.detail}"


def _refused(w: WhyNot) -> str:
    times = f"; the fastest takes {us(w.best)}, {w.xla_text}" if w.best and w.is_measured else ""
    return f"no candidate passed certificate, exact check and float gate ({w.detail or 'see the counts'}){times}"


def _not_compiled(w: WhyNot) -> str:
    error = f" ({w.detail})" if w.detail else ""
    return f"no candidate could be compiled and run, of {w.candidates:,} found{error}; {w.xla_text}"


_SENTENCES = {
    Reason.NOTHING_FOUND: _nothing_found,
    Reason.NO_CHEAPER_ALGEBRA: _no_cheaper_algebra,
    Reason.SLOWER_BY_MODEL: _slower_by_model,
    Reason.AS_FAST: _as_fast,
    Reason.REFUSED: _refused,
    Reason.NOT_COMPILED: _not_compiled,
    Reason.NOT_SEARCHED: lambda w: f"not searched: {w.detail}",
    Reason.NOT_TIMED: lambda w: "XLA's own code for this region cannot be timed alone",
    Reason.UNDECIDED: lambda w: w.detail,
    Reason.NO_ROOM: lambda w: f"the GPU had too little memory to check candidates: {w.detail}",
    Reason.SKIPPED: lambda w: w.detail,
    Reason.NO_DEVICE: lambda w: w.detail,
    Reason.FAILED: lambda w: w.detail,
}
