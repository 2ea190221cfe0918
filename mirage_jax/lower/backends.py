"""The back ends that there are. `register` adds one from another package; nothing else changes."""

from __future__ import annotations

from mirage_jax.errors import LoweringError, UsageError
from mirage_jax.lower.backend import Backend
from mirage_jax.lower.hopper.backend import HopperBackend
from mirage_jax.lower.kernel_source import KernelSource
from mirage_jax.lower.runtime.aot import Resources
from mirage_jax.lower.triton.backend import TritonBackend
from mirage_jax.mugraph.graph import KernelSchedule

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (TritonBackend(), HopperBackend())}


def register(backend: Backend) -> None:
    """Add a back end. It is asked before those that were there. Raises `UsageError` if its name is taken."""
    if backend.name in BACKENDS:
        raise UsageError(f"there is a back end called {backend.name!r}; give the new one a name of its own")
    BACKENDS[backend.name] = backend


def backend_for(sizes: KernelSchedule) -> Backend:
    """The back end for kernels of these sizes: the one that was added last, of those that take them."""
    for backend in reversed(BACKENDS.values()):
        if backend.takes(sizes):
            return backend
    raise LoweringError(f"no back end writes kernels of these sizes: {sizes}")


def backend_of(source: KernelSource) -> Backend:
    """The back end that wrote a kernel."""
    return BACKENDS[source.backend]


def compile_for(source: KernelSource, arch: int) -> Resources:
    """Compile for sm_`arch` (80, 90, 100, ..); raises `LoweringError` with the compiler's words if it refuses."""
    return backend_of(source).compile(source, arch)
