"""What of the optimizer works on this machine: every stage tried for real, and for what fails, the fix.

Each check is a small function that returns a `Check`; an exception in one is its finding and never ends the others.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import Literal

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from rich.console import Console
from rich.text import Text

import mirage_jax
from mirage_jax import log_topics, seals
from mirage_jax.cache import Cache, CacheKey, Entry, versions
from mirage_jax.config import VARIABLES, from_environment, is_disabled, parse_switch
from mirage_jax.errors import LoweringError, UsageError
from mirage_jax.lower.backends import compile_for
from mirage_jax.lower.runtime import launch
from mirage_jax.mugraph.graph import KernelSchedule, Schedule
from mirage_jax.mugraph.parser import parse

type Status = Literal["ok", "note", "problem"]

SWITCH = "MIRAGE_JAX"
SETTINGS = (SWITCH, *(variable for variable, _ in VARIABLES.values()), log_topics.VARIABLE)


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. A "note" limits what can be done here; a "problem" is something broken. Both come with the fix."""

    name: str
    status: Status
    found: str
    fix: str = ""


def check_versions() -> Check:
    """List the versions of Python, JAX and the optional packages."""
    known = [f"{name} {version}" for name, version in versions() if version and name != "source"]
    return Check("versions", "ok", f"Python {sys.version.split()[0]}, {', '.join(known)}")


def check_devices() -> Check:
    """List the devices that JAX finds."""
    devices = jax.devices()
    kinds = ", ".join(sorted({f"{d.platform}: {d.device_kind}" for d in devices}))
    found = f"{len(devices)} x {kinds}"
    if devices[0].platform != "cpu":
        return Check("devices", "ok", found)
    if glob.glob("/dev/nvidia[0-9]*") and os.environ.get("JAX_PLATFORMS") != "cpu":
        return Check(
            "devices", "problem", f"{found}, though there is an NVIDIA GPU", "pip install 'mirage-jax[cuda13]'"
        )
    kernels = "; GPU kernels can be generated and compiled here, not run" if not launch.missing("triton") else ""
    return Check("devices", "ok", found + kernels)


def check_processes() -> Check:
    """Note what several processes search."""
    count = jax.process_count()
    if count == 1:
        return Check("processes", "ok", "1")
    fix = "run mirage_jax.tune in one process first; all of them then find the same winners"
    found = f"{count}: the first one searches for programs that all run; for others winners are looked up"
    return Check("processes", "note", found, fix)


def check_settings() -> Check:
    """Check the environment variables that set options."""
    given = {name: os.environ[name] for name in SETTINGS if os.environ.get(name)}
    wrong = dict(from_environment()[1])
    for variable, read, unset in ((SWITCH, parse_switch, "on"), (log_topics.VARIABLE, log_topics.parse, "")):
        try:
            read(given.get(variable, unset))
        except UsageError as error:
            wrong[variable] = str(error)
    if wrong:
        found = "; ".join(f"{name}: {why}" for name, why in wrong.items())
        return Check("settings", "note", found, "correct or unset it; until then it is ignored")
    if is_disabled():
        return Check("settings", "note", "MIRAGE_JAX turns the optimizer off", "unset MIRAGE_JAX")
    return Check("settings", "ok", ", ".join(f"{k}={v}" for k, v in given.items()) or "none in the environment")


def check_cache() -> Check:
    """Write an entry to the cache directory, and read it again."""
    cache = Cache()
    key = CacheKey(graph="doctor", extents=(), backend="jax", policy="doctor", device_kind=f"process {os.getpid()}")
    stored = cache.put(key, Entry("xla", reasons=("doctor",)))
    found, why, seal = cache.lookup(key)
    if stored is None or found is None:
        return Check("cache", "problem", f"{cache.directory}: {why}", "chmod go-w it, or set MIRAGE_JAX_CACHE_DIR")
    stored.unlink()
    count = sum(1 for _ in cache.files())
    free = shutil.disk_usage(cache.directory).free
    others = "".join(f", and {directory} is read" for directory in cache.directories[1:])
    text = f"{cache.directory}: {count} entries, {free / 1e9:.1f} GB free{others}"
    if free < 50e6:
        return Check("cache", "note", text, "free some space, or set MIRAGE_JAX_CACHE_DIR")
    if not seal:
        return Check(
            "cache", "note", f"{text}; decisions are checked in every process", f"set {seals.KEY_FILE_VARIABLE}"
        )
    return Check("cache", "ok", text)


def _example(x: jax.Array, w: jax.Array) -> jax.Array:
    return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)) @ w


def _arguments(dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((16, 64)), dtype), jnp.asarray(rng.standard_normal((64, 32)) / 8, dtype)


def _optimized(backend: str, cache_dir: str) -> Callable[..., jax.Array]:
    """The example decided afresh, in a cache of its own."""
    return mirage_jax.optimize(_example, backend=backend, on_miss="heuristic", strict=True, cache_dir=cache_dir)


def check_portable() -> Check:
    """Capture, search, proof and the portable lowering, on one small function with its gradient."""
    x, w = _arguments()
    near = 1e-3 if jax.default_backend() == "cpu" else 2e-2  # tf32 on GPUs
    with TemporaryDirectory() as folder:
        optimized = _optimized("jax", folder)
        np.testing.assert_allclose(optimized(x, w), _example(x, w), near, near)
        ours, theirs = (jax.grad(lambda x, w, f=f: jnp.sum(f(x, w) ** 2), (0, 1))(x, w) for f in (optimized, _example))
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, near, near)
    return Check("capture, search, proof, portable lowering", "ok", "a function and its gradient agree with JAX")


# The softmax of every row, as one kernel: small, and with what every kernel has.
KERNEL = parse(
    """
    mugraph {
      extents i=256 k=64
      input X: f16[i,k]
      kernel softmax grid(i) {
        %x = load X[i,k]
        %m[i] = max{axes=(k)} %x
        %d[i,k] = add{cb=-1} %x %m
        %e[i,k] = exp %d
        %s[i] = sum{axes=(k)} %e
        %y[i,k] = div %e %s
        store Y: f16[i,k] = %y
      }
      output Y
    }
    """
)
SCHEDULE = Schedule((KernelSchedule((("i", 16),)),))
INSTALL = {
    **dict.fromkeys(launch.PACKAGES, launch.INSTALL),
    "jax_plugins": "pip install 'mirage-jax[cuda13]', or 'mirage-jax[aot]' where there is no GPU",
}


def _missing(name: str, *packages: str) -> Check | None:
    if package := launch.missing(*packages):
        return Check(name, "note", f"{package} is not installed: functions are lowered to JAX", INSTALL[package])
    return None


def check_triton() -> Check:
    """Triton compiles a generated kernel for GPUs, with or without having one."""
    name = "generated kernels"
    if missing := _missing(name, "triton"):
        return missing
    (source,) = launch.sources(KERNEL, SCHEDULE)
    if source is None:
        raise LoweringError("the kernel graph was taken for a library operator")
    with warnings.catch_warnings(action="ignore"):  # Triton's, about its own defaults
        resources = [compile_for(source, arch) for arch in (80, 90, 100)]
    return Check(name, "ok", f"Triton compiles for {', '.join(f'sm_{r.arch}' for r in resources)}")


def check_gpu_lowering() -> Check:
    """A generated kernel becomes a custom call in XLA's program for an NVIDIA GPU; where there is one, it runs."""
    name = "GPU lowering"
    if missing := _missing(name, "triton", "jax_triton", "jax_plugins"):
        return missing
    if jax.devices()[0].platform == "gpu":
        x, w = _arguments("float16")
        with TemporaryDirectory() as folder:
            np.testing.assert_allclose(_optimized("triton", folder)(x, w), _example(x, w), rtol=2e-2, atol=2e-2)
        return Check(name, "ok", "an optimized function runs and agrees with JAX")
    softmax = jex.core.Primitive("mirage_doctor")  # a leaf: jax-triton binds only inside of a lowering rule
    softmax.def_abstract_eval(lambda x: x)
    rule = lambda x: launch.run_cuda(KERNEL, SCHEDULE, [x], _no_library, compute_capability=90)[0]  # noqa: E731
    mlir.register_lowering(softmax, mlir.lower_fun(rule, multiple_results=False), platform="cuda")
    x = jax.ShapeDtypeStruct((256, 64), jnp.float16)
    text = jax.jit(softmax.bind).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    if not launch.kernel_calls(text):
        return Check(name, "problem", "a kernel is missing in the lowered program", INSTALL["jax_plugins"])
    return Check(name, "ok", "kernels lower to calls in XLA's program; to run and be measured they need a GPU")


def _no_library(*_: object) -> object:
    raise LoweringError("the kernel graph has no library operator")


CHECKS: dict[str, Callable[[], Check]] = {
    "versions": check_versions,
    "devices": check_devices,
    "processes": check_processes,
    "settings": check_settings,
    "cache": check_cache,
    "capture, search, proof, portable lowering": check_portable,
    "generated kernels": check_triton,
    "GPU lowering": check_gpu_lowering,
}


def examine(checks: dict[str, Callable[[], Check]] | None = None) -> list[Check]:
    """Every check's finding, in order."""
    return [_guarded(name, check) for name, check in (CHECKS if checks is None else checks).items()]


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # finding out what fails is what this is for
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        return Check(name, "problem", text, _fix_for(error))


@functools.singledispatch
def _fix_for(error: Exception) -> str:
    return "please report this, with the output of this command"


@_fix_for.register
def _(error: ImportError) -> str:
    return f"pip install --upgrade {error.name or 'mirage-jax'}"


@_fix_for.register
def _(error: RuntimeError) -> str:
    return "if it is about a device or driver, check nvidia-smi, or set JAX_PLATFORMS=cpu"


_STYLE = {"ok": "green", "note": "yellow", "problem": "red"}


def show(checks: list[Check], console: Console) -> None:
    """One line per finding, and under it what to do."""
    for check in checks:
        line = Text.assemble(
            (f"{check.status:>7}", _STYLE[check.status]), "  ", (check.name, "bold"), f": {check.found}"
        )
        console.print(line, soft_wrap=True, highlight=False)
        if check.fix:
            console.print(f"         fix: {check.fix}", soft_wrap=True, highlight=False, markup=False)


def to_json(checks: list[Check]) -> str:
    """Format the checks for programs."""
    return json.dumps([asdict(check) for check in checks], indent=1)
