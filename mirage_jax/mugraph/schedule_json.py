"""Schedules as values of JSON: how caches, processes and people hand them on, alone or with their muGraph."""

from __future__ import annotations

from typing import Any

from mirage_jax import limits
from mirage_jax.errors import CacheError, GraphError, printable
from mirage_jax.mugraph.check import check_graph, check_schedule
from mirage_jax.mugraph.graph import KernelGraph, KernelSchedule, Precision, Schedule
from mirage_jax.mugraph.parser import parse


def schedule_to_json(s: Schedule) -> Any:
    """Encode a schedule; `schedule_from_json` decodes it."""
    parts = [list(p) for p in s.parts]
    return {"kernels": [kernel_to_json(k) for k in s.kernels], "parts": parts, "joint": s.joint}


def kernel_to_json(k: KernelSchedule) -> Any:
    """Encode the schedule of one kernel."""
    tiles = [list(t) for t in k.tiles]
    out = {"tiles": tiles, "num_warps": k.num_warps, "num_stages": k.num_stages, "precise": int(k.precise)}
    return out | ({"specialized": True, "programs": k.programs} if k.specialized else {})


def schedule_from_json(value: Any) -> Schedule:
    """Raises `GraphError` unless the value has the form that `schedule_to_json` gives, within `bounds`."""
    try:
        joint = limits.flag("joint", value.get("joint", False))  # there are stored ones without
        kernels = limits.items("kernels", value["kernels"], limits.MAX_KERNELS)
        parts = tuple((str(a), limits.whole("parts", n, 1, limits.MAX_PARTS)) for a, n in value["parts"])
        return Schedule(tuple(map(kernel_from_json, kernels)), parts, joint)
    except (AttributeError, CacheError, KeyError, TypeError, ValueError) as error:
        raise GraphError(f"a stored schedule is malformed ({printable(str(error))})") from None


def kernel_from_json(value: Any) -> KernelSchedule:
    """The sizes of one kernel; raises `CacheError`, or what a value of another form leads to."""
    return KernelSchedule(
        tuple((str(a), limits.power_of_two("tile", n, limits.MAX_TILE)) for a, n in value["tiles"]),
        limits.power_of_two("num_warps", value["num_warps"], limits.MAX_WARPS),
        limits.whole("num_stages", value["num_stages"], 1, limits.MAX_STAGES),
        Precision(limits.whole("precise", value.get("precise", 0), 0, max(Precision))),  # there are stored ones without
        limits.flag("specialized", value.get("specialized", False)),
        limits.whole("programs", value.get("programs", 0), 0, limits.MAX_PROGRAMS),
    )


def read_graph(text: str, schedule: Any = None) -> tuple[KernelGraph, Schedule | None]:
    """Read a muGraph that somebody wrote, and its schedule where there is one; check that both are well formed.

    Raises:
        ParseError, GraphError: they are not.
    """
    graph = parse(text)
    check_graph(graph)
    sizes = None if schedule is None else schedule_from_json(schedule)
    if sizes is not None:
        check_schedule(graph, sizes)
    return graph, sizes
