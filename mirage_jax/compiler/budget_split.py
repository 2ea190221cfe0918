"""Splits the time for tuning all regions of a function: each region's share follows the seconds that it may save.

While a region is searched, the GPU is idle; while its kernels are timed, the CPU is. So a GPU's regions are tuned in
*lanes*, side by side. Within a lane they are tuned one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

MIN_SAVING_SECONDS = 1e-9  # a lower limit for every region, so that no share is 0 / 0
MAX_REGIONS_TIMED_FIRST = 8  # kinds of regions whose XLA code is timed before the split; the model ranks them
MIN_SHARE_TIMED = 0.02  # of all possible savings by the model, from which on that is worth the time
MIN_FRACTION_AGAIN = 0.25  # of the time for all regions, that is left where a program is cut again
MAX_LANES, MIN_LANE_PROCESSORS = 2, 4  # lanes at most, and processors of the host that one needs


class HasHeadroom(Protocol):
    """A tuning session, as far as the split asks it."""

    def headroom(self, xla: float | None = None) -> float:
        """Seconds that tuning may save at most, given the seconds that XLA takes if they were measured."""
        ...


def shares(saved: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield regions, largest possible saving first, each with its share (0 to 1) of the time left at that point."""
    order = sorted(saved, key=saved.__getitem__, reverse=True)
    for n, text in enumerate(order):
        yield text, saved[text] / sum(saved[other] for other in order[n:])


def lanes(saved: Mapping[str, float], processors: int) -> list[dict[str, float]]:
    """Divide regions among lanes, largest possible saving first, each to the lane that may save least so far.

    Args:
        saved: the seconds that each region may save.
        processors: of the host.
    """
    count = max(1, min(MAX_LANES, processors // MIN_LANE_PROCESSORS, len(saved)))
    found: list[dict[str, float]] = [{} for _ in range(count)]
    for text in sorted(saved, key=saved.__getitem__, reverse=True):
        min(found, key=lambda lane: sum(lane.values()))[text] = saved[text]
    return found


def savings[S: HasHeadroom](
    sessions: Mapping[str, Callable[[], S]],
    count: Mapping[str, int],
    time_xla: Callable[[Sequence[S]], Sequence[float | None]] | None,
    notify: Callable[[str, Exception], None],
) -> dict[str, float]:
    """Estimate the seconds that tuning may save in all regions of each kind.

    Args:
        sessions: begins a session for a kind of region, by the region's text.
        count: how often each kind occurs.
        time_xla: times XLA's code for several sessions, in seconds; None if that is not worth it.
        notify: hears of a kind for which the estimate fails. It gets the lower limit.
    """
    found = dict.fromkeys(sessions, MIN_SAVING_SECONDS)
    begun: dict[str, S] = {}

    def estimate(text: str, xla: float | None = None) -> None:
        """Estimate one kind of region."""
        found[text] = max(count[text] * begun[text].headroom(xla), MIN_SAVING_SECONDS)

    for text, begin in sessions.items():
        try:
            begun[text] = begin()
            estimate(text)
        except Exception as why:
            notify(text, why)
    if time_xla is not None and len(begun) > 1:
        least = MIN_SHARE_TIMED * sum(found.values())
        first = sorted((t for t in begun if found[t] >= least), key=found.__getitem__, reverse=True)
        first = first[:MAX_REGIONS_TIMED_FIRST]
        for text, xla in zip(first, time_xla([begun[text] for text in first]), strict=True):
            estimate(text, xla)
    return found
