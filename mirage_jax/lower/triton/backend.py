"""The back end for Triton: kernels whose warps all do the same. Back ends that write similar texts derive from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from mirage_jax.errors import UnsupportedError
from mirage_jax.lower.backend import Interpreter
from mirage_jax.lower.kernel_source import KernelSource
from mirage_jax.lower.runtime.aot import Resources, compile_text, pointers
from mirage_jax.lower.runtime.triton_runtime import triton_call
from mirage_jax.lower.tiling import Tiling, stored_shape
from mirage_jax.lower.triton.expressions import meanings
from mirage_jax.lower.triton.frame import PLAIN, EmitOptions, Form
from mirage_jax.lower.triton.kernel import TritonKernel
from mirage_jax.lower.triton.loops import Loops
from mirage_jax.lower.triton.narrow_axes import with_narrow_axes_written_out
from mirage_jax.lower.triton.rewrites import move_factors_after_products, move_scales_into_exponentials
from mirage_jax.lower.triton.two_forms import is_clear, minimum_of, write_choice
from mirage_jax.lower.triton.writer import Writer
from mirage_jax.mugraph.graph import Axis, BlockGraph, KernelGraph, KernelSchedule, Precision
from mirage_jax.mugraph.passes.sentinels import forms_of, guarded, with_short_steps

if TYPE_CHECKING:
    import jax


class TextBackend[K: Loops]:
    """Writes a kernel in one form, or in two where it may skip for sentinels.

    A back end of this kind says how it makes the writer of a function (`kernel`), and how it joins two forms.
    """

    name = "text"

    def kernel(self, tiling: Tiling, options: EmitOptions, form: Form) -> K:
        """Return the writer of one form of a kernel."""
        raise NotImplementedError

    def rewritten(self, tiling: Tiling) -> Tiling:
        """The kernel as this back end writes it."""
        return tiling

    def two_forms(self, usual: K, complete: K, bounds: Mapping[str, Fraction]) -> KernelSource:
        """Write the form that skips, the complete one for blocks where it is wrong, and the choice."""
        raise NotImplementedError

    def emit(
        self,
        kernel: BlockGraph,
        graph: KernelGraph,
        sizes: KernelSchedule,
        parts: Mapping[Axis, int],
        options: EmitOptions,
    ) -> KernelSource:
        """Write the text of `kernel` inside `graph`, at the graph's extents and the tiles of `sizes`.

        Raises `UnsupportedError` for structures that are not written, `LoweringError` for impossible sizes.
        """

        def writer(kernel: BlockGraph, form: Form = PLAIN) -> K:
            if sizes.precise >= Precision.SPLIT_FLOAT32_RESULTS:
                kernel = move_factors_after_products(kernel, graph)
            own = with_short_steps(sizes, kernel) if form.is_complete else sizes
            tiling = self.rewritten(Tiling(move_scales_into_exponentials(kernel), graph, own, parts))
            tiling.check()
            return self.kernel(tiling, options, form)

        if not options.skips:
            return self.one_form(
                writer(kernel, PLAIN if guarded(kernel) is None else Form("_complete", is_complete=True))
            )
        forms = forms_of(kernel, graph)
        if forms is None:
            return self.one_form(writer(kernel))
        usual = writer(forms.usual, Form("_usual", forms.guards))
        complete = writer(kernel, Form("_complete", is_complete=True, fresh="fresh" if forms.guards else ""))
        return self.two_forms(usual, complete, forms.tensor_bounds)

    def one_form(self, kernel: K) -> KernelSource:
        """Write the function of a kernel."""
        kernel.name_arguments()
        name = kernel.w.name(kernel.name)
        return self.source(kernel, name, kernel.function(name))

    def source(self, kernel: K, name: str, text: str) -> KernelSource:
        """The source of a kernel whose text is written."""
        tiling, inputs, outputs = kernel.tiling, kernel.inputs, kernel.outputs
        graph, schedule = tiling.graph, tiling.schedule
        shapes = {s.tensor.name: stored_shape(s.tensor, graph, tiling.parts) for s in kernel.graph.stores}
        return KernelSource(
            name, text, (tiling.launched,), inputs, outputs,
            tuple(graph.tensors[t].dtype for t in (*inputs, *outputs)),
            tuple(shapes.values()),
            schedule.num_warps, schedule.num_stages,
            {x: next(iter(meant)) if len(meant) == 1 else None for x, meant in kernel.numbers.items()},
            rewrites=bool(kernel.form.guards), backend=self.name,
        )  # fmt: skip


class TritonBackend(TextBackend[TritonKernel]):
    """Triton's language, compiler and interpreter."""

    name = "triton"
    shares_launches = True

    def takes(self, sizes: KernelSchedule) -> bool:
        """Take kernels whose warps all do the same."""
        return not sizes.specialized

    def rewritten(self, tiling: Tiling) -> Tiling:
        """Write out axes of a few elements."""
        return replace(tiling, kernel=with_narrow_axes_written_out(tiling))

    def kernel(self, tiling: Tiling, options: EmitOptions, form: Form) -> TritonKernel:
        """Return the writer of a function."""
        if tiling.schedule.programs:
            raise UnsupportedError("only programs with specialized warps compute several blocks")
        return TritonKernel(tiling, options, form)

    def two_forms(self, usual: TritonKernel, complete: TritonKernel, bounds: Mapping[str, Fraction]) -> KernelSource:
        """Write two functions and one that calls them."""
        own, other = self.one_form(usual), self.one_form(complete)
        inputs = tuple(dict.fromkeys((*own.inputs, *other.inputs)))
        names = {name: f"in{n}" for n, name in enumerate((*inputs, *map(minimum_of, bounds)))}
        outputs = {name: f"out{n}" for n, name in enumerate(own.outputs)}
        looks = bool(usual.form.guards)
        run_usual, run_complete = (
            f"{source.name}({', '.join([*((names | outputs)[t] for t in (*source.inputs, *source.outputs)), *fresh])})"
            for source, fresh in ((own, ()), (other, ["low - 1"] if looks else ()))
        )
        name, w = own.name.removesuffix(usual.form.suffix), Writer()
        write_choice(
            w, name, (*names.values(), *outputs.values()), run_usual, run_complete, is_clear(bounds, names), looks
        )
        types = dict(zip((*own.inputs, *own.outputs, *other.inputs), (*own.dtypes, *other.dtypes), strict=False))
        return replace(
            own,
            name=name,
            text=own.text + "\n\n" + other.text[other.text.index("@triton.jit") :] + w.text(),
            inputs=tuple(names),
            dtypes=tuple(types.get(t, "f32") for t in (*names, *outputs)),
            numbers=meanings([own.numbers, other.numbers]),
        )

    def launch(
        self, source: KernelSource, arrays: Sequence[jax.Array], *, compute_capability: int | None, in_place: bool
    ) -> list[jax.Array]:
        """Launch a kernel inside a JAX trace."""
        return triton_call(source, arrays, compute_capability=compute_capability, in_place=in_place)

    def compile(self, source: KernelSource, arch: int) -> Resources:
        """Compile for sm_`arch`."""
        from triton.compiler import ASTSource

        return compile_text(source, arch, ASTSource, pointers(source))

    def interpret(self, source: KernelSource, interpreter: Interpreter) -> list[Any]:
        """Run the text in Triton's interpreter."""
        return interpreter.run_triton(source)
