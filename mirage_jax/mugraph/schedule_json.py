"""Schedules as values of JSON: how caches and processes hand them on."""

from __future__ import annotations

from typing import Any

from mirage_jax.errors import GraphError
from mirage_jax.mugraph.graph import Axis, KernelSchedule, Schedule

LARGEST = 1 << 20  # tile, and number of parts, that is taken for one


def schedule_to_json(s: Schedule) -> Any:
    parts = [list(p) for p in s.parts]
    return {"kernels": [kernel_to_json(k) for k in s.kernels], "parts": parts, "joint": s.joint}


def kernel_to_json(k: KernelSchedule) -> Any:
    tiles = [list(t) for t in k.tiles]
    out = {"tiles": tiles, "num_warps": k.num_warps, "num_stages": k.num_stages, "precise": k.precise}
    return out | ({"specialized": True, "programs": k.programs} if k.specialized else {})


def schedule_from_json(value: Any) -> Schedule:
    """Raises `GraphError` unless the value has the form that `schedule_to_json` gives."""
    try:
        if not isinstance(joint := value.get("joint", False), bool):  # there are stored ones without
            raise TypeError(f"joint: {joint!r}")
        return Schedule(tuple(map(kernel_from_json, value["kernels"])), _pairs(value["parts"]), joint)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise GraphError(f"a stored schedule is malformed ({error})") from None


def kernel_from_json(value: Any) -> KernelSchedule:
    if (precise := value.get("precise", 0)) not in (0, 1, 2):  # there are stored ones without
        raise TypeError(f"precise: {precise!r}")
    if not isinstance(specialized := value.get("specialized", False), bool):
        raise TypeError(f"specialized: {specialized!r}")
    warps, stages, programs = int(value["num_warps"]), int(value["num_stages"]), int(value.get("programs", 0))
    if not 0 <= programs <= LARGEST:
        raise ValueError(f"programs: {programs}")
    return KernelSchedule(_pairs(value["tiles"]), warps, stages, int(precise), specialized, programs)


def _pairs(x: Any) -> tuple[tuple[Axis, int], ...]:
    out = tuple((str(a), int(n)) for a, n in x)
    if any(not 0 < n <= LARGEST for _, n in out):
        raise ValueError(out)
    return out
