"""From kernels with numbered dimensions to a muGraph: all dimensions are known by now, and their axes get names.

Each kernel names its axes, since kernels may divide a dimension in different ways. A load sees a tensor under the
kernel's names, which are the tensor's if nothing speaks against it. Inputs and outputs have the names that the caller
gave them, ``k -> k0 k1`` where an axis is divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from string import ascii_lowercase

from mirage_jax.errors import UnsupportedError
from mirage_jax.mirage_import.factors import Dim, Dims, FactorKey, Factors
from mirage_jax.mirage_import.rules import ImportedOperator, ImportedValue, Sketch
from mirage_jax.mugraph.builder import KernelBuilder, library
from mirage_jax.mugraph.graph import Attr, Axis, Kernel, KernelGraph, KernelSchedule, Schedule, Tensor
from mirage_jax.mugraph.operators import operator


@dataclass
class DeviceTensor:
    """A tensor in device memory; its axes have names once the kernel that makes it has."""

    name: str
    dims: Dims
    dtype: str
    axes: tuple[Axis, ...] = ()


@dataclass
class KernelSketch:
    """A sketch with its border to device memory. `grid`: the axis of each grid dimension; None: a predefined operator.

    A load is a tensor, its tile, and the dimensions of the tensor as this kernel sees them.
    """

    name: str
    sketch: Sketch
    grid: Dims | None = None
    loads: list[tuple[DeviceTensor, ImportedValue, Dims]] = field(
        default_factory=list[tuple[DeviceTensor, ImportedValue, Dims]]
    )
    stores: list[tuple[DeviceTensor, ImportedValue]] = field(default_factory=list[tuple[DeviceTensor, ImportedValue]])

    @property
    def loop(self) -> Dim:
        """The axes of the loop, if any load divides its tensor by steps."""
        return self.sketch.loop if any(value.looped for _, value, _ in self.loads) else ()


@dataclass
class ProgramSketch:
    """Kernels in order. `axes` are the interface's; `wanted` are the names of the axes of outputs."""

    factors: Factors
    axes: dict[Axis, Dim] = field(default_factory=dict[Axis, Dim])
    inputs: list[DeviceTensor] = field(default_factory=list[DeviceTensor])
    kernels: list[KernelSketch] = field(default_factory=list[KernelSketch])
    outputs: list[DeviceTensor] = field(default_factory=list[DeviceTensor])
    wanted: dict[str, tuple[Axis, ...]] = field(default_factory=dict[str, tuple[Axis, ...]])


type Parts = dict[Axis, tuple[Axis, ...]]


def assemble(program: ProgramSketch, reserved: Mapping[Axis, int]) -> tuple[KernelGraph, Schedule, Parts]:
    """Build the graph, a schedule of one tile per block and step, and the parts of the interface's axes.

    Names that are `reserved` (with their extents) are used for no axis of another extent.
    """
    return _ImportAssembler(program, reserved).run()


def letters(used: Sequence[Axis] = ()) -> Iterator[Axis]:
    """Make up names for axes."""
    names = chain("ijklmnpqrstuvwxyzabcdefgh", (f"{a}{n}" for n in count() for a in ascii_lowercase))
    return (a for a in names if a not in used)


class _ImportAssembler:
    def __init__(self, program: ProgramSketch, reserved: Mapping[Axis, int]):
        self.program, self.factors = program, program.factors
        self.extents = {a: n for a, n in reserved.items() if a not in program.axes}
        self.parts = self._parts({*program.axes, *reserved})

    def run(self) -> tuple[KernelGraph, Schedule, Parts]:
        """Name the axes, then build kernel by kernel."""
        names = _KernelAxisNames(self.factors, self.extents)
        for axis, dim in self.program.axes.items():
            for key, part in zip(self.factors.resolve(dim), self.parts[axis], strict=True):
                names.given[key] = part
                self.extents[part] = self.factors.extent(key)
        for x in self.program.inputs:
            x.axes = names(self._keys(x.dims))
        kernels: list[Kernel] = []
        for k in self.program.kernels:
            kernels += self._kernel(k)
        inputs = tuple(Tensor(x.name, x.axes, x.dtype) for x in self.program.inputs)
        outputs = tuple(x.name for x in self.program.outputs)
        graph = KernelGraph(inputs, tuple(kernels), outputs, tuple(sorted(self.extents.items())))
        sizes = tuple(KernelSchedule(tuple((a, 1) for a in k.divided)) for k in kernels)
        return graph, Schedule(sizes), self.parts

    def _keys(self, dims: Dims) -> tuple[FactorKey, ...]:
        return self.factors.resolve(tuple(chain(*dims)))

    def _parts(self, used: set[Axis]) -> Parts:
        """Names for the parts of every axis of the interface; one that is whole keeps its own."""
        parts: Parts = {}
        for axis, dim in self.program.axes.items():
            n = len(self.factors.resolve(dim))
            free = (a for i in count() if (a := f"{axis}{i}") not in used)
            parts[axis] = (axis,) if n == 1 else tuple(next(free) for _ in range(n))
            used.update(parts[axis])
        return parts

    # --- kernels

    def _kernel(self, kernel: KernelSketch) -> list[Kernel]:
        self._check_tiles(kernel)
        names = self._names(kernel)
        for device, _ in kernel.stores:
            device.axes = names(self._keys(device.dims))
        return self._library(kernel, names) if kernel.grid is None else [self._block(kernel, kernel.grid, names)]

    def _check_tiles(self, kernel: KernelSketch) -> None:
        for dims in (v.dims for v in (*(v for _, v, _ in kernel.loads), *(s.result for s in kernel.sketch.steps))):
            keys = self._keys(dims)
            if len(set(keys)) != len(keys):
                raise UnsupportedError(f"kernel {kernel.name}: two dimensions of one tile are the same axis")

    def _names(self, kernel: KernelSketch) -> _KernelAxisNames:
        names = _KernelAxisNames(self.factors, self.extents)
        for device, _ in kernel.stores:
            wanted = [part for a in self.program.wanted.get(device.name, ()) for part in self.parts[a]]
            for key, axis in zip(self._keys(device.dims), wanted, strict=False):
                names.want(key, axis)
        for device, _, dims in kernel.loads:
            for key, axis in zip(self._keys(dims), device.axes, strict=True):
                names.prefer(key, axis)
        return names

    def _block(self, kernel: KernelSketch, grid: Dims, names: _KernelAxisNames) -> Kernel:
        loop = names(self.factors.resolve(kernel.loop))
        builder = KernelBuilder(kernel.name, names(self._keys(grid)), loop[0] if loop else None)
        for device, value, dims in kernel.loads:
            builder.load(device.name, names(self._keys(dims)), value.name)
        for step in kernel.sketch.steps:
            builder.op(step.op, *step.args, name=step.result.name, **self._attrs(step, names))
        for device, value in kernel.stores:
            spread = value.name
            for axis in device.axes:  # blocks that all compute the same value
                if axis not in builder.axes(spread):
                    zero = builder.op("affine", builder.op("iota", axis=axis), scale=0)
                    spread = builder.op("add", spread, zero)
            builder.store(Tensor(device.name, device.axes, device.dtype), spread)
        return builder.build()

    def _library(self, kernel: KernelSketch, names: _KernelAxisNames) -> list[Kernel]:
        """A predefined operator is one or more of ours, over whole tensors."""
        ((result, _),) = kernel.stores
        made = {value.name: (device.name, names(self._keys(dims))) for device, value, dims in kernel.loads}
        out: list[Kernel] = []
        for step in kernel.sketch.steps:
            attrs = self._attrs(step, names)
            axes = operator(step.op).infer(tuple(made[a][1] for a in step.args), attrs)
            tensor = Tensor(f"{result.name}.{step.result.name}", axes, "f32")
            if step is kernel.sketch.steps[-1]:
                tensor = Tensor(result.name, result.axes, result.dtype)
            made[step.result.name] = tensor.name, tensor.axes
            out.append(library(step.op, [made[a] for a in step.args], tensor, **attrs))
        return out

    def _attrs(self, step: ImportedOperator, names: _KernelAxisNames) -> dict[str, Attr]:
        return {k: names(self.factors.resolve(v)) if isinstance(v, tuple) else v for k, v in step.attrs.items()}


class _KernelAxisNames:
    """Names of the axes of one kernel; another kernel may use them for other axes of the same extents."""

    def __init__(self, factors: Factors, extents: dict[Axis, int]):
        self.factors, self.extents = factors, extents
        self.given: dict[FactorKey, Axis] = {}

    def __call__(self, keys: Sequence[FactorKey]) -> tuple[Axis, ...]:
        for key in keys:
            if key not in self.given:
                self.given[key] = self._free(self.factors.extent(key))
        return tuple(self.given[k] for k in keys)

    def want(self, key: FactorKey, axis: Axis) -> None:
        """Name an axis. Raises `UnsupportedError` if it has another name already."""
        if self.given.setdefault(key, axis) != axis or list(self.given.values()).count(axis) > 1:
            raise UnsupportedError(f"two outputs of one kernel would need axis {axis} under two names")

    def prefer(self, key: FactorKey, axis: Axis) -> None:
        """Name an axis if both axis and name are free."""
        if key not in self.given and axis not in self.given.values():
            self.given[key] = axis

    def _free(self, extent: int) -> Axis:
        used = set(self.given.values())
        axis = next((a for a, n in self.extents.items() if n == extent and a not in used), None)
        if axis is None:
            axis = next(letters(tuple(self.extents)))
            self.extents[axis] = extent
        return axis
