"""What a user can choose, as frozen and validated values, and the switch that turns the optimizer off.

An option comes from the call, else from the environment, else from the default here. A wrong argument is a `UsageError`
that names the value and the allowed ones; a malformed environment variable is one logged warning and the default,
for a variable set in some shell profile must not stop a program.
"""

from __future__ import annotations

import difflib
import functools
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING

from mirage_jax.errors import UsageError
from mirage_jax.hardware.host import processors
from mirage_jax.limits import brief

log = logging.getLogger("mirage_jax")

ON_MISS = ("search", "heuristic", "fallback", "error")
BACKENDS = ("auto", "jax", "triton")
REMAT = ("auto", "regions")
CHECKS = ("first", "always")
JIT_OPTIONS = (
    "static_argnums",
    "static_argnames",
    "donate_argnums",
    "donate_argnames",
    "in_shardings",
    "out_shardings",
    "keep_unused",
    "device",
    "inline",
    "compiler_options",
)
DEFAULT_SECONDS = 30.0
MAX_DEVICES = 1 << 16  # of one process

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)\s*"
_PLAIN_NUMBER = re.compile(rf"\s*{_NUMBER}")
_DURATION = re.compile(
    r"\s*" + "".join(rf"(?:{_NUMBER}{unit}\s*)?" for unit in ("h", "m(?:in)?", "s", "ms")), re.IGNORECASE
)
_SECONDS_OF_UNITS = (3600.0, 60.0, 1.0, 1e-3)  # in the order of `_DURATION`


def _is_positive(value: object, kind: type[Real]) -> bool:
    """NaN is not; nor are True, texts and arrays."""
    return isinstance(value, kind) and not isinstance(value, bool) and value > 0  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Budget:
    """How long one search may take: seconds, and optionally states visited (the same answer on any machine).

    seconds: a number, or a text such as "30s" or "1m30s".

    workers: processes among which the parts of a wide region are divided; one for two processors, at most 8, if none
    are named. total: seconds for searching and measuring all regions of a function together, those first at which most
    time may be saved; a region that is begun is finished. With `remat`, a quarter more if regions are cut again.
    """

    seconds: float = DEFAULT_SECONDS
    states: int | None = None
    workers: int = field(default_factory=lambda: max(1, min(8, processors() // 2)))
    total: float | None = None

    if TYPE_CHECKING:  # a text is read once, so that `seconds` is a number afterwards

        def __init__(
            self,
            seconds: float | str = DEFAULT_SECONDS,
            states: int | None = None,
            workers: int = 1,
            total: float | str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.seconds, str):
            read = Budget.parse(self.seconds)
            object.__setattr__(self, "seconds", read.seconds)
            object.__setattr__(self, "total", read.total if self.total is None else self.total)
        if isinstance(self.total, str):
            object.__setattr__(self, "total", Budget.parse(self.total).seconds)
        if not _is_positive(self.seconds, Real):
            raise UsageError(f"a budget must be a positive number of seconds, found {brief(self.seconds)}")
        if self.states is not None and not _is_positive(self.states, Integral):
            raise UsageError(f"a budget of states must be a positive number or None, found {brief(self.states)}")
        if self.total is not None and not _is_positive(self.total, Real):
            raise UsageError(f"a budget's total must be positive seconds or None, found {brief(self.total)}")
        if not _is_positive(self.workers, Integral):
            raise UsageError(f"a budget has at least one worker, a whole number, found {brief(self.workers)}")

    @classmethod
    def parse(cls, value: Budget | str | float | None) -> Budget:
        """Read ``"30s"``, ``"500ms"``, ``"1m30s"``, ``"1h"`` or a number of seconds; None means the default.

        ``"20s/5m"`` is 20 seconds for one search, and five minutes in all.
        """
        match value:
            case None:
                return cls()
            case Budget():
                return value
            case bool():
                pass
            case Real() if math.isfinite(value) and value > 0:
                return cls(float(value))
            case str():
                times = list(map(_seconds, value.split("/")))
                if len(times) <= 2 and all(0 < t < math.inf for t in times):
                    return cls(times[0], total=times[1] if len(times) == 2 else None)
        raise UsageError(
            f"budget: found {brief(value)}; allowed are a positive number of seconds or a text such as "
            "'30s', '500ms', '1m30s', '1h', or '20s/5m' for one search and for all"
        )

    def __str__(self) -> str:
        states = "" if self.states is None else f", {self.states} states"
        return f"{self.seconds:g}s{states}" + ("" if self.total is None else f", {self.total:g}s in all")


def _seconds(text: str) -> float:
    """Seconds of a duration, larger units first, or of a number without a unit; NaN if the text is none."""
    if found := _PLAIN_NUMBER.fullmatch(text):
        return float(found[1])
    if (found := _DURATION.fullmatch(text)) is None:
        return math.nan
    return sum(float(n or 0) * unit for n, unit in zip(found.groups(), _SECONDS_OF_UNITS, strict=True))


@dataclass(frozen=True, slots=True)
class Options:
    """Everything `mirage_jax.optimize` can be told about optimizing, apart from jit's own arguments.

    on_miss: what to do where no winner is stored: "search" within the budget, take the "heuristic" choice unmeasured,
    "fallback" to XLA, or raise an "error". None means search in a single process, and in several for programs that
    they run together; others fall back, since all hosts of one program must lower the same code.
    strict_range: refuse every rewrite that overflows, or loses digits near zero, before the program does.
    remat: "auto" recomputes large values that are cheap to make, on GPUs, within a program; "regions" also does so on
    CPUs, and in the gradients of functions that are differentiated from outside; None stores what JAX stores. True
    means "regions", and False means None.

    devices: which local devices measure, by their place in `jax.local_devices()`; several share the variants. The
    first is what candidates are compared with XLA on.
    check: compare with plain `jax.jit` on the user's own arguments, at the "first" call with each kind or
    "always"; None compares nothing.
    skip: regions that stay with XLA, each by a source line such as "model.py:41" or by its cache key. only: all other
    regions stay with XLA; None means no such limit. Neither changes the key or the decision of another region.
    cache_dir: where winners are kept; of several directories the first is written, and all are read in their order.
    pins: the path of a file with vetoes and pinned muGraphs (`pins.read`).
    """

    on_miss: str | None = None
    budget: Budget = Budget()
    backend: str = "auto"
    cache_dir: str | tuple[str, ...] | None = None
    strict: bool = False
    strict_range: bool = False
    remat: str | None = "auto"
    devices: tuple[int, ...] = ()
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    check: str | None = None
    pins: str | None = None

    def __post_init__(self) -> None:
        if self.on_miss is not None:
            _one_of("on_miss", self.on_miss, ON_MISS)
        if isinstance(self.remat, bool):
            object.__setattr__(self, "remat", "regions" if self.remat else None)
        if self.remat is not None:
            _one_of("remat", self.remat, REMAT)
        if self.check is not None:
            _one_of("check", self.check, CHECKS)
        _one_of("backend", self.backend, BACKENDS)
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", _directories("cache_dir", self.cache_dir))
        if self.pins is not None:
            object.__setattr__(self, "pins", _path("pins", self.pins))
        for name in ("strict", "strict_range"):
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(f"{name}: found {brief(value)}; allowed are True and False")
        object.__setattr__(self, "devices", _numbers("devices", self.devices))
        object.__setattr__(self, "skip", _selectors("skip", self.skip))
        if self.only is not None:
            object.__setattr__(self, "only", _selectors("only", self.only))

    @classmethod
    def make(cls, keywords: Mapping[str, object], also: Iterable[str] = ()) -> Options:
        """Options from keyword arguments; None means not given. `also`: what else the caller takes, for the message."""
        known = [f.name for f in fields(cls)]
        for name in keywords:
            if name not in known:
                raise UsageError(unknown("option", name, [*known, *also]))
        given = {k: v for k, v in keywords.items() if v is not None}
        options, ignored = from_environment()
        for variable, why in ignored.items():
            warn_once(f"{variable} is ignored: {why}")
        return replace(options, **given)


def unknown(what: str, found: object, allowed: Iterable[str]) -> str:
    """``unknown option 'buget'; did you mean 'budget'? Allowed: ...``"""
    allowed = list(allowed)
    near = difflib.get_close_matches(found if isinstance(found, str) else brief(found), allowed, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {brief(found)}.{hint} Allowed: {', '.join(allowed)}"


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(unknown(f"value for {name}:", value, allowed))


def _path(name: str, value: object) -> str:
    try:
        path = os.path.abspath(os.path.expanduser(os.fspath(value)))  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name}: found {brief(value)}; allowed is a path") from None
    if not isinstance(path, str) or "\0" in path:
        raise UsageError(f"{name}: found {brief(value)}; allowed is a path as text")
    return path


def _directory(name: str, value: object) -> str:
    path = _path(name, value)
    if is_address(str(value)):
        raise UsageError(
            f"{name}: found {brief(value)}; allowed is a directory of this machine: mount the bucket, or copy a file "
            "from it that `python -m mirage_jax cache export` made, and add it by `cache import`"
        )
    if os.path.exists(path) and not os.path.isdir(path):
        raise UsageError(f"{name}: {path!r} exists and is not a directory")
    return path


def _directories(name: str, value: object) -> str | tuple[str, ...]:
    """``"a"``, or ``("a", "b")``."""
    if not isinstance(value, tuple | list):
        return _directory(name, value)
    if not value:
        raise UsageError(f"{name}: found {brief(value)}; allowed is a directory, or several: the first is written")
    return tuple(_directory(name, one) for one in value)


def is_address(text: str) -> bool:
    """Tell a URL such as "gs://bucket" from a path."""
    return "://" in text


def directories_in(text: str) -> str | tuple[str, ...]:
    """Read directories that are separated as in PATH; an address stays whole, for the message about it."""
    parts = (text,) if is_address(text) else tuple(filter(None, text.split(os.pathsep)))
    return parts[0] if len(parts) == 1 else parts


def _numbers(name: str, value: object) -> tuple[int, ...]:
    """``(0, 2)``, or ``"0,2"``; one number is one device."""
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    parts = value.split(",") if isinstance(value, str) else [value] if is_number else value
    try:
        found = tuple(int(str(n)) for n in parts)  # type: ignore[union-attr]
    except (TypeError, ValueError):
        found = (-1,)
    if any(not 0 <= n < MAX_DEVICES for n in found) or len(set(found)) < len(found):
        raise UsageError(
            f"{name}: found {brief(value)}; allowed are different numbers from 0 on, such as 0, (0, 2) or '0,2'"
        )
    return found


_LINE = re.compile(r".*[^\s:/\\]:[1-9]\d*")
_KEY = re.compile(r"[0-9a-fA-F]{8,64}")


def is_source_line(selector: str) -> bool:
    """Tell a source line such as "model.py:41" from a key."""
    return _LINE.fullmatch(selector) is not None


def is_cache_key(selector: str) -> bool:
    """Whether a text has the form of a cache key, or of its beginning."""
    return _KEY.fullmatch(selector) is not None


def _selectors(name: str, value: object) -> tuple[str, ...]:
    """``("model.py:41", "0f3a...")``; one text is a list of one."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list | tuple | set | frozenset):
        raise UsageError(f"{name}: found {brief(value)}; allowed is a list of {_SELECTORS}")
    for x in given:
        if not isinstance(x, str) or not (is_source_line(x) or is_cache_key(x)):
            raise UsageError(f"{name}: found {brief(x)}; allowed are {_SELECTORS}")
    return tuple(given if isinstance(given, list | tuple) else sorted(given))


_SELECTORS = "source lines such as 'model.py:41', and cache keys that explain prints (at least 8 digits of one)"


# The environment.

_TRUE, _FALSE = ("1", "on", "true", "yes"), ("0", "off", "false", "no")


def parse_switch(text: str) -> bool:
    """Read "on" or "off" and their synonyms.

    Raises:
        UsageError: the text is neither.
    """
    if (low := text.strip().lower()) in (*_TRUE, *_FALSE):
        return low in _TRUE
    raise UsageError(f"found {text!r}; allowed are {', '.join((*_TRUE, *_FALSE))}")


def _switch_or_name(text: str) -> bool | str:
    """Read "on" or "off" and their synonyms, or the name of a choice."""
    low = text.strip().lower()
    return parse_switch(low) if low in (*_TRUE, *_FALSE) else low


VARIABLES: dict[str, tuple[str, Callable[[str], object]]] = {
    "on_miss": ("MIRAGE_JAX_ON_MISS", str.lower),
    "budget": ("MIRAGE_JAX_BUDGET", Budget.parse),
    "backend": ("MIRAGE_JAX_BACKEND", str.lower),
    "cache_dir": ("MIRAGE_JAX_CACHE_DIR", directories_in),
    "strict": ("MIRAGE_JAX_STRICT", parse_switch),
    "strict_range": ("MIRAGE_JAX_STRICT_RANGE", parse_switch),
    "remat": ("MIRAGE_JAX_REMAT", _switch_or_name),
    "devices": ("MIRAGE_JAX_DEVICES", str),
    "check": ("MIRAGE_JAX_CHECK", str.lower),
}


@functools.cache
def warn_once(message: str) -> None:
    """A warning, once in a process."""
    log.warning("%s", message)


def from_environment() -> tuple[Options, Mapping[str, str]]:
    """Options of the environment, and by variable why one is ignored."""
    options, ignored = Options(), dict[str, str]()
    for name, (variable, parse) in VARIABLES.items():
        if text := os.environ.get(variable):
            try:
                options = replace(options, **{name: parse(text)})
            except UsageError as error:
                ignored[variable] = str(error)
    return options, ignored


DISABLED_SCOPE = "mirage_jax.disabled"  # name scope of equations that were traced while the optimizer was off

_disabled: ContextVar[bool] = ContextVar("mirage_jax_disabled", default=False)


@contextmanager
def disabled() -> Iterator[None]:
    """Leave the code inside of ``with mirage_jax.disabled():`` to XLA (in this thread or task).

    Optimized functions that are called inside run as plain `jax.jit`. Inside of an optimized function, the operators
    that are written there are in no region: JAX carries the name scope `DISABLED_SCOPE` through its transformations.
    """
    import jax

    token = _disabled.set(True)
    try:
        with jax.named_scope(DISABLED_SCOPE):
            yield
    finally:
        _disabled.reset(token)


def is_disabled() -> bool:
    """Whether `disabled` or ``MIRAGE_JAX=off`` is in force."""
    if _disabled.get():
        return True
    text = os.environ.get("MIRAGE_JAX")
    if not text:
        return False
    try:
        return not parse_switch(text)
    except UsageError as error:
        warn_once(f"MIRAGE_JAX is ignored: {error}")
        return False
