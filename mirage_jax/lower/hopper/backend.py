"""The back end for Hopper: kernels in Gluon, whose warps have different tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from mirage_jax.errors import UnsupportedError
from mirage_jax.lower.backend import Interpreter
from mirage_jax.lower.hopper.kernel import GluonKernel
from mirage_jax.lower.hopper.warpgroups import WARPGROUP_WARPS
from mirage_jax.lower.kernel_source import KernelSource
from mirage_jax.lower.runtime.aot import Resources, compile_text, pointers
from mirage_jax.lower.runtime.triton_runtime import in_descriptors, shared_layout, triton_call
from mirage_jax.lower.tiling import Tiling
from mirage_jax.lower.triton.backend import TextBackend
from mirage_jax.lower.triton.expressions import meanings
from mirage_jax.lower.triton.frame import EmitOptions, Form
from mirage_jax.lower.triton.two_forms import is_clear, minimum_of
from mirage_jax.mugraph.graph import KernelSchedule

if TYPE_CHECKING:
    import jax


class HopperBackend(TextBackend[GluonKernel]):
    """Gluon, its compiler, and its meaning in Triton's interpreter."""

    name = "hopper"
    shares_launches = False

    def takes(self, sizes: KernelSchedule) -> bool:
        """Take kernels with specialized warps."""
        return sizes.specialized

    def kernel(self, tiling: Tiling, options: EmitOptions, form: Form) -> GluonKernel:
        """Return the writer of a kernel and its tasks."""
        return GluonKernel(tiling, options, form)

    def source(self, kernel: GluonKernel, name: str, text: str) -> KernelSource:
        """The source of a kernel whose text is written; Gluon starts one warpgroup, and the text starts the others."""
        source = super().source(kernel, name, text)
        return replace(source, num_warps=WARPGROUP_WARPS, descriptors=kernel.descriptors)

    def two_forms(self, usual: GluonKernel, complete: GluonKernel, bounds: Mapping[str, Fraction]) -> KernelSource:
        """Write one kernel whose tasks run both forms."""
        usual.name_arguments()
        complete.name_arguments()
        if complete.arguments != usual.arguments:
            raise UnsupportedError("specialized warps: the forms of a kernel take other tensors")
        name = usual.name.removesuffix(usual.form.suffix)
        minima = {minimum_of(tensor): f"low{n}" for n, tensor in enumerate(bounds)}
        text = usual.both_forms(name, complete, list(minima.values()), is_clear(bounds, minima))
        source, ins = self.source(usual, name, text), len(usual.inputs)
        return replace(
            source,
            inputs=(*source.inputs, *minima),
            dtypes=(*source.dtypes[:ins], *("f32" for _ in minima), *source.dtypes[ins:]),
            numbers=meanings([source.numbers, self.source(complete, name, text).numbers]),
            descriptors=(*source.descriptors, *(None for _ in minima)),
        )

    def launch(
        self, source: KernelSource, arrays: Sequence[jax.Array], *, compute_capability: int | None, in_place: bool
    ) -> list[jax.Array]:
        """Launch a kernel inside a JAX trace, with descriptors in place of what the copy engine reads."""
        operands = in_descriptors(source, arrays)
        return triton_call(source, operands, compute_capability=compute_capability, in_place=in_place)

    def compile(self, source: KernelSource, arch: int) -> Resources:
        """Compile for sm_`arch`."""
        from triton.experimental.gluon._runtime import GluonASTSource

        signature = pointers(source)
        for name, descriptor in zip(signature, source.descriptors, strict=False):
            if descriptor is not None:
                element, (rows, columns) = signature[name][1:], descriptor.block
                signature[name] = f"tensordesc<{element}[{rows}, {columns}],{shared_layout(descriptor)!r}>"
        return compile_text(source, arch, GluonASTSource, signature)

    def interpret(self, source: KernelSource, interpreter: Interpreter) -> list[Any]:
        """Run the text in Triton's interpreter, with the meaning that Gluon's words have there."""
        return interpreter.run_gluon(source)
