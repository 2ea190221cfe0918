"""The interface that all back ends share. `backends` has those that there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mirage_jax.lower.kernel_source import KernelSource
from mirage_jax.lower.runtime.aot import Resources
from mirage_jax.lower.triton.frame import EmitOptions
from mirage_jax.mugraph.graph import Axis, BlockGraph, KernelGraph, KernelSchedule

if TYPE_CHECKING:
    import jax


class Interpreter(Protocol):
    """Triton's interpreter on the CPU, made for one run of one kernel."""

    @property
    def inputs(self) -> Sequence[Any]:
        """The kernel's inputs, as numpy arrays."""
        ...

    def run_triton(self, source: KernelSource) -> list[Any]:
        """Run a text in Triton's language; its outputs."""
        ...

    def run_gluon(self, source: KernelSource) -> list[Any]:
        """Run a text in Gluon; its outputs."""
        ...


class Backend(Protocol):
    """Writes kernels of some sizes, and runs what it wrote.

    name: the `backend` of its sources. shares_launches: whether several of its kernels may be one launch
    (`triton.horizontal_fusion` joins texts in Triton's language).
    """

    @property
    def name(self) -> str: ...

    @property
    def shares_launches(self) -> bool: ...

    def takes(self, sizes: KernelSchedule) -> bool:
        """Say whether kernels of these sizes are its own."""
        ...

    def emit(
        self,
        kernel: BlockGraph,
        graph: KernelGraph,
        sizes: KernelSchedule,
        parts: Mapping[Axis, int],
        options: EmitOptions,
    ) -> KernelSource:
        """Write a kernel of `graph`. `parts`: into how many each split axis is split.

        Raises:
            UnsupportedError: it does not write such a structure.
            LoweringError: the sizes are impossible.
        """
        ...

    def launch(
        self, source: KernelSource, arrays: Sequence[jax.Array], *, compute_capability: int | None, in_place: bool
    ) -> list[jax.Array]:
        """Launch a kernel inside a JAX trace. `in_place`: after its inputs, `arrays` has what it is to write into."""
        ...

    def compile(self, source: KernelSource, arch: int) -> Resources:
        """Compile for a GPU of compute capability `arch` (80, 90, 100, ..), which need not be present.

        Raises:
            LoweringError: the compiler refuses the text.
        """
        ...

    def interpret(self, source: KernelSource, interpreter: Interpreter) -> list[Any]:
        """Run a kernel on the CPU; its outputs as numpy arrays."""
        ...
