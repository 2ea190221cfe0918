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
from importlib.util import find_spec
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.text import Text

import mirage_jax
from mirage_jax.cache import Cache, CacheKey, Entry, versions
from mirage_jax.config import Budget, is_disabled, parse_switch
from mirage_jax.errors import UsageError

type Status = Literal["ok", "note", "problem"]

SWITCHES = ("MIRAGE_JAX", "MIRAGE_JAX_STRICT")
SETTINGS = (*SWITCHES, "MIRAGE_JAX_ON_MISS", "MIRAGE_JAX_BUDGET", "MIRAGE_JAX_BACKEND", "MIRAGE_JAX_CACHE_DIR")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. A "note" limits what can be done here; a "problem" is something broken. Both come with the fix."""

    name: str
    status: Status
    found: str
    fix: str = ""


def check_versions() -> Check:
    known = [f"{name} {version}" for name, version in versions() if version and name != "source"]
    return Check("versions", "ok", f"Python {sys.version.split()[0]}, {', '.join(known)}")


def check_devices() -> Check:
    devices = jax.devices()
    kinds = ", ".join(sorted({f"{d.platform}: {d.device_kind}" for d in devices}))
    found = f"{len(devices)} x {kinds}"
    if devices[0].platform != "cpu":
        return Check("devices", "ok", found)
    if glob.glob("/dev/nvidia[0-9]*") and os.environ.get("JAX_PLATFORMS") != "cpu":
        return Check(
            "devices", "problem", f"{found}, though there is an NVIDIA GPU", "pip install 'mirage-jax[cuda13]'"
        )
    return Check("devices", "ok", f"{found}; GPU kernels can be generated and compiled here, not run")


def check_processes() -> Check:
    count = jax.process_count()
    if count == 1:
        return Check("processes", "ok", "1")
    fix = "run mirage_jax.tune in one process first; all of them then find the same winners"
    return Check("processes", "note", f"{count}: winners are looked up and never searched for", fix)


def check_settings() -> Check:
    given = {name: os.environ[name] for name in SETTINGS if os.environ.get(name)}
    wrong = []
    for name, parse in {**dict.fromkeys(SWITCHES, parse_switch), "MIRAGE_JAX_BUDGET": Budget.parse}.items():
        try:
            if name in given:
                parse(given[name])
        except UsageError as error:
            wrong.append(f"{name}: {error}")
    if wrong:
        return Check("settings", "note", "; ".join(wrong), "correct or unset it; until then it is ignored")
    if is_disabled():
        return Check("settings", "note", "MIRAGE_JAX turns the optimizer off", "unset MIRAGE_JAX")
    return Check("settings", "ok", ", ".join(f"{k}={v}" for k, v in given.items()) or "none in the environment")


def check_cache() -> Check:
    cache = Cache()
    key = CacheKey(graph="doctor", extents=(), backend="jax", policy="doctor", device_kind=f"process {os.getpid()}")
    stored = cache.put(key, Entry("xla", reasons=("doctor",)))
    found, why = cache.lookup(key)
    if stored is None or found is None:
        return Check("cache", "problem", f"{cache.directory}: {why}", "chmod go-w it, or set MIRAGE_JAX_CACHE_DIR")
    stored.unlink()
    count = sum(1 for _ in cache.files())
    free = shutil.disk_usage(cache.directory).free
    text = f"{cache.directory}: {count} entries, {free / 1e9:.1f} GB free"
    if free < 50e6:
        return Check("cache", "note", text, "free some space, or set MIRAGE_JAX_CACHE_DIR")
    return Check("cache", "ok", text)


def _example(x: jax.Array, w: jax.Array) -> jax.Array:
    return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)) @ w


def _arguments(dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((16, 64)), dtype), jnp.asarray(rng.standard_normal((64, 32)) / 8, dtype)


def _optimized(backend: str) -> Callable[..., jax.Array]:
    return mirage_jax.optimize(_example, backend=backend, on_miss="heuristic", strict=True)


def check_portable() -> Check:
    """Capture, search, proof and the portable lowering, on one small function with its gradient."""
    x, w = _arguments()
    optimized = _optimized("jax")
    np.testing.assert_allclose(optimized(x, w), _example(x, w), rtol=1e-4, atol=1e-5)
    loss = lambda f: lambda x, w: jnp.sum(f(x, w) ** 2)  # noqa: E731
    for ours, theirs in zip(
        jax.grad(loss(optimized), (0, 1))(x, w), jax.grad(loss(_example), (0, 1))(x, w), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    return Check("capture, search, proof, portable lowering", "ok", "a function and its gradient agree with JAX")


def check_triton() -> Check:
    """Triton compiles for a GPU, with or without one."""
    name = "Triton compiler"
    if find_spec("triton") is None:
        return Check(name, "note", "not installed: kernels are lowered to JAX", "pip install 'mirage-jax[triton]'")
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def double(x, y, n: tl.constexpr):  # type: ignore[valid-type]
        i = tl.arange(0, n)
        tl.store(y + i, 2 * tl.load(x + i))

    source = ASTSource(triton.jit(double), {"x": "*fp32", "y": "*fp32", "n": "constexpr"}, {"n": 128})
    sizes = {}
    for capability in (80, 90, 100):
        with warnings.catch_warnings(action="ignore"):  # of Triton's about its own defaults
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        sizes[f"sm_{capability}"] = len(compiled.asm["cubin"])
    return Check(name, "ok", f"compiles for {', '.join(sizes)}")


def check_gpu_lowering() -> Check:
    """A function goes all the way to a kernel in XLA's program for an NVIDIA GPU."""
    name = "lowering to GPU kernels"
    for package in ("triton", "jax_triton"):
        if find_spec(package) is None:
            return Check(name, "note", f"{package} is not installed", "pip install 'mirage-jax[triton]'")
    x, w = _arguments("float16")
    on_gpu = jax.devices()[0].platform == "gpu"
    optimized = _optimized("triton")
    if on_gpu:
        np.testing.assert_allclose(optimized(x, w), _example(x, w), rtol=2e-2, atol=2e-2)
        return Check(name, "ok", "a kernel ran and agrees with JAX")
    text = optimized.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()  # type: ignore[attr-defined]
    if "triton_kernel_call" not in text:
        fix = "pip install 'mirage-jax[aot]' on a machine without a GPU, 'mirage-jax[cuda13]' on one with it"
        return Check(name, "note", "lowered, without a kernel of ours", fix)
    return Check(name, "ok", "lowered to a kernel; not run, for lack of a GPU")


CHECKS: dict[str, Callable[[], Check]] = {
    "versions": check_versions,
    "devices": check_devices,
    "processes": check_processes,
    "settings": check_settings,
    "cache": check_cache,
    "capture, search, proof, portable lowering": check_portable,
    "Triton compiler": check_triton,
    "lowering to GPU kernels": check_gpu_lowering,
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
    return json.dumps([asdict(check) for check in checks], indent=1)
