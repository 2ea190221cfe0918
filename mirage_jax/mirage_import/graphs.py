"""Reads saved muGraphs of CMU's Mirage into ours, exactly as they are, right or wrong.

Input: the JSON of a file (`mirage_import.file`). Output: for each graph a `KernelGraph` with the `Schedule` that the
file gives it, or the reason why it cannot be written here.

The peer's tensors have numbered dimensions, and a block graph says which dimension is divided by which grid dimension
(imap, omap) and by the loop (fmap). Here each such division makes axes: a dimension of 256 that 64 blocks share is the
axes (g: 64)(r: 4), where g is the kernel's own axis over its blocks, the same one in each tensor that these blocks
divide:

    grid (64); loop 4;  X[128,256], imap -> 1, fmap -> 0   ->   load X[l,k,g,r]     grid(g) loop(l), tiles of 1

So two dimensions of unlike meaning that one grid dimension divides are tied to each other, as they are on the GPU (the
peer's wrong graphs depend on it), which one tile per named axis could not say. Tiles of 1 make `Schedule` the file's
own; any other tiles of g and l compute the same, since no operator in a block sees past its block and step. That is why
the verifier may choose its own at reduced extents.

Where a tensor is divided in one way by one kernel and in another by the next, axes are divided until both can be
written (`mirage_import.factors`); a loop over such an axis runs over its first part, and the others lie in the tile.
Given a reference graph, the two are brought to common axes, so that they can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from mirage_jax.errors import DifferentError, GraphError, ParseError, UnsupportedError
from mirage_jax.mirage_import.assemble import DeviceTensor, KernelSketch, ProgramSketch, assemble, letters
from mirage_jax.mirage_import.factors import Dim, Dims, Factors
from mirage_jax.mirage_import.file import SavedBlock, SavedGraph, SavedOp, SavedTensor, Source, read_mirage_json
from mirage_jax.mirage_import.rules import ImportedValue, Sketch, apply, require_shape
from mirage_jax.mugraph.check import check_graph, check_schedule
from mirage_jax.mugraph.dtypes import FLOATS
from mirage_jax.mugraph.graph import Axis, KernelGraph, Schedule, Tensor
from mirage_jax.mugraph.passes.merge_axes import divide_axes


@dataclass(frozen=True)
class Imported:
    """A graph of the file, and the reference over the same axes (without one: the graph itself)."""

    number: int
    graph: KernelGraph
    schedule: Schedule
    reference: KernelGraph


@dataclass(frozen=True)
class RefusedGraph:
    """A graph of the file that cannot be written as a muGraph, and why."""

    number: int
    reason: str


def from_mirage_json(source: Source, data_types: str | None = None) -> list[Imported | RefusedGraph]:
    """Read the graphs of a file, or of a checkpoint of a search.

    Args:
        source: the text, or parsed JSON.
        data_types: whose numbers of types the file has: "early", "evaluation" (of Mirage's branch of this name) or
            "mpk". None means that the file tells by those that it has.

    Raises:
        ParseError: it is malformed, or does not tell its types.
        UsageError: there are no such `data_types`.
    """
    out: list[Imported | RefusedGraph] = []
    for saved in read_mirage_json(source, data_types):
        try:
            out.append(import_graph(saved))
        except UnsupportedError as error:
            out.append(RefusedGraph(saved.number, str(error)))
    return out


def import_graph(saved: SavedGraph, reference: KernelGraph | None = None) -> Imported:
    """Read one graph. Raises `UnsupportedError` if it cannot be written here, `ParseError` if it is malformed.

    A reference (of library operators, with the file's shapes) lends its names of axes and is divided along;
    `DifferentError` if its inputs or outputs have other shapes.
    """
    names = _interface(saved) if reference is None else _interface_of(reference, saved)
    translation = _Translation(saved, names, reference)
    for op in with_concats_multiplied(saved.ops):
        translation.run(op)
    if reference is not None:
        translation.tie_outputs(reference)
    try:
        graph, schedule, parts = assemble(translation.program, {} if reference is None else reference.sizes)
        check_graph(graph)
        check_schedule(graph, schedule)
    except (GraphError, UnsupportedError) as error:
        raise UnsupportedError(f"graph {saved.number}: {error}") from None
    same = graph if reference is None else divide_axes(reference, parts, graph.sizes)
    return Imported(saved.number, graph, schedule, same)


def with_concats_multiplied(ops: Sequence[SavedOp]) -> list[SavedOp]:
    """Operators of one level, in which a product of two concatenations along the axis that it sums is one operator."""
    made_by = {t: op for op in ops for t in op.outputs}
    out = [_of_parts(op, made_by) if op.kind == "matmul" and len(op.inputs) == 2 else op for op in ops]
    read = {t for op in out for t in op.inputs}
    return [op for op in out if not re.fullmatch(r"concat_\d", op.kind) or not read.isdisjoint(op.outputs)]


def _of_parts(matmul: SavedOp, made_by: Mapping[SavedTensor, SavedOp]) -> SavedOp:
    """The sum of the products of the parts, if both operands are concatenations whose parts fit."""
    x, y = matmul.inputs
    left, right = (made_by.get(t, matmul) for t in (x, y))
    if (left.kind, right.kind) != (f"concat_{len(x.shape) - 1}", f"concat_{len(y.shape) - 2}"):
        return matmul
    fit = [t.shape[-1] for t in left.inputs] == [t.shape[-2] for t in right.inputs]
    return replace(matmul, kind="concat_then_matmul", inputs=(*left.inputs, *right.inputs)) if fit else matmul


type Names = tuple[tuple[tuple[tuple[Axis, int], ...], ...], ...]  # by input and dimension: axes with their extents


def _interface(saved: SavedGraph) -> Names:
    """Each dimension of each input has an axis of its own."""
    names = letters()
    return tuple(tuple(((next(names), n),) if n > 1 else () for n in t.shape) for t in saved.inputs)


def _interface_of(reference: KernelGraph, saved: SavedGraph) -> Names:
    """The axes of a reference."""
    have = [t.shape for t in saved.inputs]
    if len(have) != len(reference.inputs):
        raise DifferentError(f"{len(have)} inputs, where the program has {len(reference.inputs)}")
    return tuple(_grouped(reference, t, shape) for t, shape in zip(reference.inputs, have, strict=True))


def _grouped(graph: KernelGraph, tensor: Tensor, shape: tuple[int, ...]) -> tuple[tuple[tuple[Axis, int], ...], ...]:
    """The axes of each dimension of a tensor that is a row-major array of `shape`."""
    axes = [(a, graph.extent(a)) for a in tensor.axes]
    out: list[tuple[tuple[Axis, int], ...]] = []
    for size in shape:
        group: list[tuple[Axis, int]] = []
        while size > 1 and axes and size % axes[0][1] == 0:
            group.append(axes.pop(0))
            size //= group[-1][1]
        if size > 1:
            break
        out.append(tuple(group))
    if len(out) != len(shape) or axes:
        extents = [graph.extent(a) for a in tensor.axes]
        raise DifferentError(f"a tensor of shape {list(shape)}, where the program has axes of {extents}")
    return tuple(out)


class _Translation:
    """One graph of the file; `names` are the names of its inputs' axes."""

    def __init__(self, saved: SavedGraph, names: Names, reference: KernelGraph | None):
        self.saved, self.reference = saved, reference
        self.factors = Factors()
        self.program = ProgramSketch(self.factors)
        self.axes = self.program.axes
        for axis, n in chain(*chain(*names)):
            self.axes.setdefault(axis, self.factors.dim(n))
        self.names = iter(names)
        self.devices: dict[int, DeviceTensor] = {}

    def run(self, op: SavedOp) -> None:
        """Translate an operator of the kernel graph."""
        if op.kind == "input":
            dims = tuple(tuple(chain(*(self.axes[a] for a, _ in group))) for group in next(self.names))
            n = len(self.program.inputs)
            name = f"x{n}" if self.reference is None else self.reference.inputs[n].name
            self.program.inputs.append(self._device(op, op.outputs[0], name, dims))
        elif op.kind == "output":
            self.program.outputs.append(self.devices[op.inputs[0].guid])
        elif op.block is not None:
            self._customized(op, op.block)
        else:
            self._predefined(op)

    def _device(self, op: SavedOp, tensor: SavedTensor, name: str, dims: Dims) -> DeviceTensor:
        if tensor.dtype not in FLOATS:
            raise UnsupportedError(f"{op.where}: type {tensor.dtype}; muGraphs here have {', '.join(FLOATS)}")
        device = self.devices[tensor.guid] = DeviceTensor(name, dims, tensor.dtype)
        return device

    def _predefined(self, op: SavedOp) -> None:
        kernel = KernelSketch(f"k{len(self.program.kernels)}", Sketch(self.factors))
        args = [self._load(kernel, op, self.devices[t.guid], t.shape) for t in op.inputs]
        value = apply(kernel.sketch, op, tuple(args))
        if value in args:  # e.g. a sum over a dimension of 1
            value = kernel.sketch.pointwise("affine", value)
        self._store(kernel, op, op.outputs[0], value, value.dims)
        self.program.kernels.append(kernel)

    def _customized(self, op: SavedOp, block: SavedBlock) -> None:
        loop = self.factors.dim(block.forloop_range)
        sketch = Sketch(self.factors, loop, block.forloop_range)
        kernel = KernelSketch(f"k{len(self.program.kernels)}", sketch, tuple(map(self.factors.dim, block.grid)))
        values: dict[int, ImportedValue] = {}
        for inner in with_concats_multiplied(block.ops):
            if inner.kind == "input" and inner.device is not None:
                value = self._load(kernel, inner, self.devices[inner.device.guid], inner.outputs[0].shape)
            elif inner.kind == "output" and inner.device is not None:
                value = values[inner.inputs[0].guid]
                self._store(kernel, inner, inner.device, value, self._whole(kernel, inner, value.dims))
                continue
            else:
                value = apply(sketch, inner, tuple(values[t.guid] for t in inner.inputs))
            values[inner.outputs[0].guid] = value
        self.program.kernels.append(kernel)

    def _load(self, kernel: KernelSketch, op: SavedOp, device: DeviceTensor, shape: tuple[int, ...]) -> ImportedValue:
        """A tile of a tensor: each of its dimensions is (blocks)(steps)(tile)."""
        grid = self._divided(kernel, op, len(device.dims))
        tile = tuple(map(self.factors.dim, shape))
        looped = op.forloop_dim >= 0 and bool(kernel.sketch.loop)
        seen = tuple(
            (*g, *(kernel.sketch.loop if op.forloop_dim == d else ()), *t)
            for d, (g, t) in enumerate(zip(grid, tile, strict=False))
        )
        require_shape(op, self.factors.shape(device.dims), self.factors.shape(seen))
        for whole, own in zip(device.dims, seen, strict=True):
            self.factors.unify(self.factors.copy(whole), own)
        value = ImportedValue(kernel.sketch.fresh(), tile, looped)
        kernel.loads.append((device, value, seen))
        return value

    def _whole(self, kernel: KernelSketch, op: SavedOp, tile: Dims) -> Dims:
        """Dimensions of a tensor whose tiles the blocks write."""
        grid = self._divided(kernel, op, len(tile))
        for letter, dim, to in zip("xyz", kernel.grid or (), op.divided, strict=True):
            if dim and to < 0:
                raise UnsupportedError(f"{op.where}: blocks along grid {letter} write over each other")
        return tuple((*g, *t) for g, t in zip(grid, tile, strict=True))

    def _divided(self, kernel: KernelSketch, op: SavedOp, rank: int) -> Dims:
        """By dimension of a tensor: the axis of the grid that divides it."""
        out: list[Dim] = [()] * rank
        for dim, to in zip(kernel.grid or (), op.divided, strict=False):
            if dim and to >= rank:
                raise ParseError(f"{op.where}: divides dimension {to} of a tensor with {rank}")
            if dim and to >= 0:
                if out[to]:
                    raise UnsupportedError(f"{op.where}: two grid dimensions divide dimension {to}")
                out[to] = dim
        return tuple(out)

    def _store(self, kernel: KernelSketch, op: SavedOp, tensor: SavedTensor, value: ImportedValue, dims: Dims) -> None:
        require_shape(op, tensor.shape, self.factors.shape(dims))
        number = sum(len(k.stores) for k in (*self.program.kernels, kernel))
        kernel.stores.append((self._device(op, tensor, f"t{number}", dims), value))

    def tie_outputs(self, reference: KernelGraph) -> None:
        """Give outputs the axes of the reference's. Raises `DifferentError` if shapes or their number differ."""
        if len(self.program.outputs) != len(reference.outputs):
            raise DifferentError(f"{len(self.program.outputs)} outputs, where the program has {len(reference.outputs)}")
        for saved, device, name in zip(self.saved.outputs, self.program.outputs, reference.outputs, strict=True):
            tensor = reference.tensors[name]
            self.program.wanted[device.name] = tensor.axes
            for group, dim in zip(_grouped(reference, tensor, saved.shape), device.dims, strict=True):
                for a, n in group:
                    self.axes.setdefault(a, self.factors.dim(n))
                own = tuple(chain(*(self.axes[a] for a, _ in group)))
                self.factors.unify(self.factors.copy(own), self.factors.copy(dim))
