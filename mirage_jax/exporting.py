"""Exports a function with its kernels, for machines that have JAX and not this package.

Input: a function, its arguments or their shapes, and a GPU, which need not be here. Output: what `jax.export` makes, in
which each kernel is a custom call that carries PTX, which JAX's CUDA plugin runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax import export as jax_export

from mirage_jax.api import Method, Optimized, optimize
from mirage_jax.compiler import Compiler
from mirage_jax.compiler.absent_gpu import NOT_RUN, AbsentGpuCompiler, absent_gpu
from mirage_jax.errors import UsageError
from mirage_jax.jaxpr_frontend import flax_modules
from mirage_jax.lower.runtime import launch
from mirage_jax.report import Report

__all__ = ["NOT_RUN", "Exported", "export", "exported", "for_gpu"]

PLUGINS = "jax_plugins"  # the package of JAX's plugins for accelerators
CHECKS = [jax_export.DisabledSafetyCheck.custom_call(name) for name in launch.CUSTOM_CALLS]  # of `jax.export`


@dataclass(frozen=True)
class Exported:
    """A function for a GPU: the program, what was decided, and the name of the GPU."""

    program: jax_export.Exported
    report: Report
    gpu: str

    @property
    def kernels(self) -> int:
        """Calls of kernels in the program."""
        return launch.kernel_calls(self.program.mlir_module())


def export(fn: Callable[..., Any], /, *args: Any, device: str | None = None, **kwargs: Any) -> jax_export.Exported:
    """Export a function with its kernels as PTX, so that processes with JAX and without this package run it.

    Save ``serialize()`` of the result, and run ``jax.export.deserialize(data).call(*args)`` elsewhere.

    Args:
        fn: a function, or an optimized function, whose options count.
        *args: its arguments: arrays or `jax.ShapeDtypeStruct`s, but no nnx modules.
        **kwargs: the same by name.
        device: an architecture such as "sm_90", or a GPU such as "H200", that need not be here. Its stored decisions
            count. Other regions get the cost model's choice, which passes the certificate and the exact check; the
            float gate sees it as plain JAX only. If that is refused, others are tried for as long as the budget says.
            None means the GPU that is here, where decisions are made as ever.

    Raises:
        UsageError: there is no such GPU, or a package that compiles kernels is missing here.
    """
    return exported(fn, args, kwargs, device).program


def exported(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: str | None = None
) -> Exported:
    """Do what `export` does, and report what was decided. Raises `UsageError` as it does."""
    if isinstance(fn, Method):
        fn, args = fn.__func__, (fn.__self__, *args)
    if flax_modules.has_modules(args, kwargs):
        raise UsageError("export: found an nnx module; allowed are arrays: export a function of nnx.split(module)")
    if package := launch.missing(*launch.PACKAGES, PLUGINS):
        raise UsageError(f"export: {package} is not installed: pip install 'mirage-jax[aot]'")
    f = for_gpu(fn if isinstance(fn, Optimized) else optimize(fn), device)
    report = f.explain(*args, **kwargs)
    make = jax_export.export(f, platforms=["cuda"], disabled_checks=CHECKS)  # type: ignore[arg-type]  # as jit's
    gpu = f.compiler.devices("cuda")[0]
    with _without_folders():
        return Exported(
            make(*args, **kwargs), report, f"{gpu.device_kind}, compute capability {gpu.compute_capability}"
        )


def for_gpu(f: Optimized[..., Any], device: str | None) -> Optimized[..., Any]:
    """Make the same function for the GPU that is named, or that is here, with kernels in what `jax.export` makes of it.

    Raises:
        UsageError: there is no such GPU.
    """
    if device is not None:
        return f.with_compiler(AbsentGpuCompiler(f.options, absent_gpu(device, f.compiler.cache)))
    if jax.default_backend() != "gpu":
        raise UsageError("export: there is no GPU here; name one, such as device='sm_90' or device='H200'")
    compiler = Compiler(f.options, exports_kernels=True)
    compiler.take_decisions(f.compiler)
    return f.with_compiler(compiler)


@contextmanager
def _without_folders() -> Iterator[None]:
    """Leave the folders of source files out of programs that are lowered: they are this machine's affair."""
    name = "jax_hlo_source_file_canonicalization_regex"
    before = getattr(jax.config, name)
    jax.config.update(name, r"^.*[/\\]")
    try:
        yield
    finally:
        jax.config.update(name, before)
