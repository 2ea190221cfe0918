"""Times a program and its variants on random numbers, interleaved, within little time and the memory that is free."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from mirage_jax import timing
from mirage_jax.compiler.gross_errors import gross_error, moved
from mirage_jax.compiler.inputs import one_set
from mirage_jax.compiler.whole_function import WholeTimes
from mirage_jax.errors import UnsupportedError, in_one_line
from mirage_jax.gpu_lock import gpu_lock
from mirage_jax.jaxpr_frontend.capture.lowering import PLAIN, WholeProgram

log = logging.getLogger("mirage_jax.timing")

MAX_HOST_BOUND_SECONDS = 1e-3  # of a call on a device, up to which the host may be slower
HOST_CALLS, HOST_ROUNDS = 16, 10  # calls in a row to see that, and how often
MAX_CALLS = 4  # on other inputs, one after the other
ROUNDS_RANGE = range(2, 11)  # how many there may be, as the time allows
PROFILE_SECONDS = 0.15  # that one takes to begin and to end
MAX_MEMORY_FRACTION = 0.9  # of the memory that is free

type Function = Callable[..., list[Any]]


def measure(whole: WholeProgram, device: Any, limit: float) -> WholeTimes:
    """Measure times and temporary memory of the program as it was written, and of each variant that is not wrong.

    Args:
        whole: the program.
        device: the device that runs it.
        limit: seconds that the runs may take; there are two rounds at least.

    Raises:
        UnsupportedError: the program does not fit into the free memory, or cannot be run.
    """
    here = SingleDeviceSharding(device)
    avals: list[Any] = [v.aval for v in whole.jaxpr.invars]
    types = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for a in avals)
    functions: dict[str, Function] = {PLAIN: whole.run}
    functions |= {label: variant().run for label, variant in whole.variants.items()}
    on_gpu = device.platform == "gpu"
    given = sum(map(_bytes, types))
    sets = _sets(given) if on_gpu else 1
    with jax.default_device(device):
        lowered = {label: _lowered(label, f, types) for label, f in functions.items()}
        with gpu_lock(device):  # XLA times products to choose one, while nothing else runs
            compiled = {label: _compiled(label, x) for label, x in lowered.items()}
        plans = {label: c.memory_analysis() for label, c in compiled.items()}
        _check_room(plans.values(), given, sets, device)
        args = [one_set(types, n) for n in range(sets)]
        wrong: dict[str, str] = {}
        if _wanted(plans.values(), given, sets + 1, results=3) <= _room(device):
            compiled, wrong = _without_wrong(compiled, args[0])
        calls = {label: timing.in_turn(c, args) for label, c in compiled.items()}
        times = _times(calls, sets, limit, on_gpu)
        is_short = on_gpu and times[PLAIN].seconds < MAX_HOST_BOUND_SECONDS
        host = _host_times(compiled, args[0], device) if is_short else {}
    seconds = {label: t.seconds for label, t in times.items()}
    return WholeTimes(seconds, _memory(plans), _over_plain(times), _over_plain(host), wrong)


def _sets(given: int) -> int:
    """How many sets of so many bytes of inputs a function runs on."""
    return min(timing.sets_for(max(given, 1)), MAX_CALLS) if given < timing.COLD_BYTES else 1


def _over_plain(times: Mapping[str, timing.Timing]) -> dict[str, tuple[float, float, float]]:
    """The ratio of each variant over plain jit: median, low, high."""
    ratios = {label: timing.ratio(times[PLAIN], t) for label, t in times.items() if label != PLAIN}
    return {label: (r.value, r.low, r.high) for label, r in ratios.items()}


def _host_times(compiled: Mapping[str, Any], args: Sequence[jax.Array], device: Any) -> dict[str, timing.Timing]:
    """The time from one call to the next, where many follow each other and the host waits for the last."""

    def run(function: Callable[..., Any]) -> None:
        last = None
        for _ in range(HOST_CALLS):
            last = function(*args)
        jax.block_until_ready(last)

    try:
        with gpu_lock(device):
            return timing.time_wall({label: partial(run, c) for label, c in compiled.items()}, HOST_ROUNDS)
    except Exception as why:  # for lack of memory, say: results of several calls may be there at a time
        log.info("how fast the host makes calls is not known: %s", in_one_line(why))
        return {}


def _memory(plans: Mapping[str, Any]) -> dict[str, int]:
    """Temporary bytes, as XLA plans them."""
    return {label: int(plan.temp_size_in_bytes) for label, plan in plans.items() if plan is not None}


def _without_wrong(compiled: Mapping[str, Any], args: Sequence[jax.Array]) -> tuple[dict[str, Any], dict[str, str]]:
    """The program and its variants whose results are not grossly wrong; and of the others how they are.

    Raises `UnsupportedError` if they cannot be run.
    """
    with _unsupported("it cannot be run on random numbers"):
        plain = compiled[PLAIN](*args)
        nearby = compiled[PLAIN](*moved(args))
        found = {label: gross_error(c(*args), plain, nearby) for label, c in compiled.items() if label != PLAIN}
    right = {label: c for label, c in compiled.items() if not found.get(label)}
    return right, {label: why for label, why in found.items() if why}


def _lowered(label: str, function: Function, types: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    with _unsupported(f"{label} cannot be compiled"):
        return jax.jit(lambda *args: function(*args)).lower(*types)


def _compiled(label: str, lowered: Any) -> Any:
    with _unsupported(f"{label} cannot be compiled"):
        return lowered.compile()


@contextmanager
def _unsupported(what: str) -> Iterator[None]:
    """Raise an `UnsupportedError` for whatever fails: the function's own call will meet it."""
    try:
        yield
    except Exception as why:
        raise UnsupportedError(f"{what}: {in_one_line(why)}") from why


def _times(calls: Mapping[str, timing.Call], sets: int, limit: float, on_gpu: bool) -> dict[str, timing.Timing]:
    """Interleaved, in as many rounds as the time allows."""
    with _unsupported("it cannot be run on random numbers"):  # for lack of memory, say
        for call in calls.values():
            call()
        each = [timing.wall(call) for call in calls.values()]
    least = 0.0 if on_gpu else timing.SAMPLE_SECONDS
    one_round = 2 * sum(max(seconds, least) for seconds in each) + (PROFILE_SECONDS if on_gpu else 0.0)
    rounds = min(max(int(limit / one_round), ROUNDS_RANGE[0]), ROUNDS_RANGE[-1])
    log.info("timing a function as a whole: %d rounds of %.3g s", rounds, one_round)
    return timing.time_steps(calls, sets, rounds) if on_gpu else timing.time_wall(calls, rounds)


def _check_room(plans: Iterable[Any], given: int, sets: int, device: Any) -> None:
    """Raises `UnsupportedError` if inputs, results and temporary values do not fit."""
    wanted, room = _wanted(plans, given, sets, results=sets), _room(device)
    if wanted > room:
        raise UnsupportedError(f"it needs {wanted / 1e9:.2f} GB of memory, of which {room / 1e9:.2f} are free")


def _wanted(plans: Iterable[Any], given: int, sets: int, results: int) -> int:
    """Bytes of so many sets of inputs, and of so many results, with temporary values."""
    largest = max((p.temp_size_in_bytes + results * p.output_size_in_bytes for p in plans if p is not None), default=0)
    return largest + sets * given


def _room(device: Any) -> float:
    """Bytes of memory that may be used."""
    return MAX_MEMORY_FRACTION * _free(device)


def _free(device: Any) -> float:
    """Bytes of memory that are free on a device; infinity where that cannot be told."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return _free_on_host() if device.platform == "cpu" else math.inf


def _free_on_host() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    except (AttributeError, OSError, ValueError):  # not on every system
        return math.inf


def _bytes(t: jax.ShapeDtypeStruct) -> int:
    return math.prod(t.shape) * t.dtype.itemsize
