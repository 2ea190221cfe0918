"""Schedules as values of JSON: how caches and processes hand them on."""

from __future__ import annotations

from typing import Any

from mirage_jax import bounds
from mirage_jax.errors import CacheError, GraphError, printable
from mirage_jax.mugraph.graph import KernelSchedule, Schedule


def schedule_to_json(s: Schedule) -> Any:
    parts = [list(p) for p in s.parts]
    return {"kernels": [kernel_to_json(k) for k in s.kernels], "parts": parts, "joint": s.joint}


def kernel_to_json(k: KernelSchedule) -> Any:
    tiles = [list(t) for t in k.tiles]
    out = {"tiles": tiles, "num_warps": k.num_warps, "num_stages": k.num_stages, "precise": k.precise}
    return out | ({"specialized": True, "programs": k.programs} if k.specialized else {})


def schedule_from_json(value: Any) -> Schedule:
    """Raises `GraphError` unless the value has the form that `schedule_to_json` gives, within `bounds`."""
    try:
        joint = bounds.flag("joint", value.get("joint", False))  # there are stored ones without
        kernels = bounds.items("kernels", value["kernels"], bounds.MAX_KERNELS)
        parts = tuple((str(a), bounds.whole("parts", n, 1, bounds.MAX_PARTS)) for a, n in value["parts"])
        return Schedule(tuple(map(kernel_from_json, kernels)), parts, joint)
    except (AttributeError, CacheError, KeyError, TypeError, ValueError) as error:
        raise GraphError(f"a stored schedule is malformed ({printable(str(error))})") from None


def kernel_from_json(value: Any) -> KernelSchedule:
    """The sizes of one kernel; raises `CacheError`, or what a value of another form leads to."""
    return KernelSchedule(
        tuple((str(a), bounds.power_of_two("tile", n, bounds.MAX_TILE)) for a, n in value["tiles"]),
        bounds.power_of_two("num_warps", value["num_warps"], bounds.MAX_WARPS),
        bounds.whole("num_stages", value["num_stages"], 1, bounds.MAX_STAGES),
        bounds.whole("precise", value.get("precise", 0), 0, 2),  # there are stored ones without
        bounds.flag("specialized", value.get("specialized", False)),
        bounds.whole("programs", value.get("programs", 0), 0, bounds.MAX_PROGRAMS),
    )
