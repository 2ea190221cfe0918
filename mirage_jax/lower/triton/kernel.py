"""The function of a kernel whose warps all do the same, in Triton's language."""

from __future__ import annotations

from mirage_jax.lower.triton.expressions import TileVariable, reduction
from mirage_jax.lower.triton.loops import Loops
from mirage_jax.lower.triton.ops.softmax import lows


class TritonKernel(Loops):
    """One function whose warps all do the same."""

    def function(self, name: str) -> str:
        """Write the function: indices, then loops by depth, then the stores after them."""
        live, tensors = self.live(), self.tiling.graph.tensors
        for text in ("import triton", "import triton.language as tl", "", "", "@triton.jit"):
            self.w.line(text)
        fresh = [self.w.name(self.form.fresh)] if self.form.fresh else []
        with self.w.block(f"def {name}({', '.join((*self.arguments.values(), *fresh))}):"):
            self.header([tensors[t] for t in self.arguments])
            self.blocks()
            for axis in self.axes.values():
                if axis.axis != self.graph.loop:
                    self.index(axis)
            for depth in sorted({self.graph.stages[n].depth for n in self.targets(live)}):
                for group in self.loops(depth, live):
                    self.loop(group)
            for store in self.graph.stores:
                if not self.graph.stages[store.value].body:
                    self.store(store)
            if self.form.guards:
                self.w.line(f"return {self.w.let('low', self._any_low())}")
        return self.w.text()

    def _any_low(self) -> str:
        """More than 0 if a guard fails in this block. It comes after the stores, because all warps wait for it."""
        dims = {shift: self.tiling.dims(self.graph.axes_of[shift]) for shift in lows(self)}
        return " | ".join(reduction("tl.max", TileVariable(text, dims[s]), dims[s]) for s, text in lows(self).items())
