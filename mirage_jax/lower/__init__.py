"""From a block graph and a schedule to a kernel that runs.

Reading order: `tiling` (how a block lies in tiles), `triton.emitter` (the text of one kernel), `triton.context` and
`triton.ops` (values and operators), `triton.loops`; then `hopper.kernel` (warps with different tasks), `backend` (the
interface of both, and of a third) and `runtime.launch` (compile and call). Importing this package imports neither
Triton nor jax-triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mirage_jax.lower.runtime.launch import run_cuda
    from mirage_jax.lower.triton.emitter import emit

__all__ = ["emit", "run_cuda"]

MODULES = {"emit": "mirage_jax.lower.triton.emitter", "run_cuda": "mirage_jax.lower.runtime.launch"}


def __getattr__(name: str) -> Any:
    """Load an export when it is first used: `tiling` alone needs no emitter."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(MODULES[name]), name)
