"""Tiles in shared memory, as the copy engine (TMA) of a Hopper GPU fills them and its matrix instructions read them.

Input: the plan of a kernel with specialized warps (`warpgroups`). Output: which loads lie in shared memory, as blocks
of which matrices (`Descriptor`), loaded once or in buffers, and how the text names them. Any other load is
refused (`UnsupportedError`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from mirage_jax.errors import UnsupportedError
from mirage_jax.lower.hopper.warpgroups import MAX_WGMMA_COLUMNS, WARPGROUP_ROWS, Warpgroups
from mirage_jax.lower.tiling import extent, stored_axes
from mirage_jax.lower.triton.expressions import TileVariable
from mirage_jax.mugraph.dtypes import SIXTEEN_BIT_FLOATS
from mirage_jax.mugraph.graph import Axis, Load


@dataclass(frozen=True, slots=True)
class Descriptor:
    """How an input lies in memory for the copy engine: as a matrix that is copied block by block."""

    shape: tuple[int, int]
    block: tuple[int, int]

    @property
    def layout(self) -> str:
        """The layout in Gluon."""
        return f"gl.NVMMASharedLayout({self.swizzle}, 16, 2)"

    @property
    def swizzle(self) -> int:
        """Bytes in which lines of the block are permuted: all of a line, at most 128."""
        return min(128, 2 * self.block[1])


@dataclass(frozen=True)
class Tile:
    """An operand in shared memory: of each place in its buffer, or once and for all."""

    load: Load
    descriptor: Descriptor
    axes: tuple[Axis, Axis]  # of its rows and its columns, as they lie in memory
    copies: int  # one for each warpgroup if it has the rows
    name: str

    @property
    def bytes(self) -> int:
        return 2 * prod(self.descriptor.block) * self.copies


@dataclass(frozen=True)
class StageBuffer:
    """Tiles that are loaded and given back together."""

    tiles: tuple[Tile, ...]
    full: str
    free: str

    @property
    def bytes(self) -> int:
        return sum(t.bytes for t in self.tiles)


class SharedTiles(Warpgroups):
    """Where operands of products lie."""

    @cached_property
    def tiles(self) -> Mapping[str, Tile]:
        """By load."""
        used = dict.fromkeys(a for op, _ in self.plan.products for a in op.args if a in self.loads)
        return {name: self._tile(self.loads[name], f"tile{n}") for n, name in enumerate(used)}

    def _tile(self, load: Load, name: str) -> Tile:
        """A block of the matrix whose lines are as far apart as the rows of the tile.

        Raises `UnsupportedError` for a load that is no such block, or that the copy engine cannot bring.
        """
        elements, offset, strides = self.place_of(load)
        row, column = self._tile_axes(load, strides)
        if sum(x.tensor == load.tensor for x in self.graph.loads) > 1 or len(strides) < len(load.axes):
            raise UnsupportedError(f"{load}: a tensor that is loaded twice, or a diagonal of it")
        line = strides[row]
        inside = sum((self.axes[a].full - 1) * stride for a, stride in strides.items() if stride % line)
        if line % 8 or elements % line or offset % line + inside >= line:
            raise UnsupportedError(f"{load}: not part of a matrix with lines of {line} elements")
        block = self.inner.axes[row].block, self.inner.axes[column].block
        if not _is_block_of_copy_engine(*block):
            raise UnsupportedError(f"{load}: blocks of {block}")
        copies = self.groups if self.plan.row in (row, column) else 1
        return Tile(load, Descriptor((elements // line, line), block), (row, column), copies, name)

    def _tile_axes(self, load: Load, strides: Mapping[Axis, int]) -> tuple[Axis, Axis]:
        """The axes of a tile's rows and of its columns, which are contiguous in memory."""
        axes = [a for a in strides if self.inner.axes[a].block > 1]
        is_half = self.dtype_of(load) in SIXTEEN_BIT_FLOATS
        if len(axes) != 2 or not is_half or strides[axes[1]] != 1:
            raise UnsupportedError(f"{load}: the copy engine takes tiles of two axes, the last of them contiguous")
        return axes[0], axes[1]

    def place_of(self, load: Load) -> tuple[int, int, dict[Axis, int]]:
        """The same of the tensor of a load, by its axes."""
        graph = self.tiling.graph
        tensor = graph.tensors[load.tensor]
        stored, named = stored_axes(tensor, graph), dict(zip(tensor.axes, load.axes, strict=True))
        elements, offset, strides = self.placed(tensor, [extent(a, graph, self.tiling.parts) for a in stored])
        return elements, offset, {named[a]: stride for a, stride in zip(stored, strides, strict=True)}

    @cached_property
    def resident(self) -> tuple[Tile, ...]:
        """Tiles that are loaded once."""
        return tuple(t for t in self.tiles.values() if not self.graph.stages[t.load.name].body)

    @cached_property
    def first_gemm_buffer(self) -> StageBuffer | None:
        """Tiles of each step that only the first GEMM reads."""
        return self._buffer(self._read_by_first_gemm - self._read_by_second_gemm, "")

    @cached_property
    def second_gemm_buffer(self) -> StageBuffer | None:
        """Tiles that the second GEMM reads, and perhaps the first one. The last reader gives them back."""
        return self._buffer(self._read_by_second_gemm, "_late")

    def _buffer(self, read: set[str], suffix: str) -> StageBuffer | None:
        tiles = tuple(t for name, t in self.tiles.items() if name in read and t not in self.resident)
        return StageBuffer(tiles, f"full{suffix}", f"free{suffix}") if tiles else None

    @cached_property
    def _read_by_first_gemm(self) -> set[str]:
        return {a for op, *_ in (*self.plan.values, *self.plan.sums) for a in op.args}

    @cached_property
    def _read_by_second_gemm(self) -> set[str]:
        return {a for op, *_ in self.plan.second for a in op.args}

    @cached_property
    def shares(self) -> bool:
        """Does the first GEMM read a tile that the second one reads in the next step?"""
        return self.second_gemm_buffer is not None and any(
            t.load.name in self._read_by_first_gemm for t in self.second_gemm_buffer.tiles
        )

    @cached_property
    def buffers(self) -> tuple[StageBuffer, ...]:
        """In the order in which they are filled."""
        return tuple(buffer for buffer in (self.first_gemm_buffer, self.second_gemm_buffer) if buffer is not None)

    def place(self, tile: Tile, slot: str, group: str) -> str:
        """A tile in shared memory, as it lies there."""
        if tile in self.resident:
            return f"{tile.name}.index({group if tile.copies > 1 else 0})"
        return (
            f"{tile.name}.index({slot} * {self.groups} + {group})" if tile.copies > 1 else f"{tile.name}.index({slot})"
        )

    def smem(self, name: str, slot: str, side: tuple[Axis, Axis]) -> str:
        """A loaded operand, as a matrix with the dimensions `side`."""
        tile = self.tiles[name]
        text = self.place(tile, slot, "group")
        return text if tile.axes == side else f"{text}.permute((1, 0))"

    def raw(self, load: Load, use: str, single: bool = False) -> TileVariable:
        """An operand that is read as values too comes from shared memory."""
        if load.name not in self.tiles:
            return super().raw(load, use, single)
        key = ("raw", load.name)
        if key not in self.env:
            dims = self.tiling.dims(load.axes)
            layout = self.layout(dims)
            text = f"{self.smem(load.name, self.env.get('slot', '0'), (dims[0], dims[1]))}.load({layout})"
            self.env[key] = TileVariable(self.w.let("load", text), dims)
        return self.env[key]

    @cached_property
    def values_too(self) -> list[str]:
        """Loaded operands that pointwise operators of the loop read too."""
        return [name for name in self.tiles if (name, "tile") in self.work.uses]

    def coordinates(self, tile: Tile, at: str, group: int) -> tuple[str, str]:
        """Of a block in the matrix as which a tensor lies in memory."""
        line = tile.descriptor.shape[1]
        _, offset, strides = self.place_of(tile.load)
        rows, columns = [str(offset // line)] if offset // line else [], [str(offset % line)] if offset % line else []
        for a, stride in strides.items():
            starts = self.starts(self.axes[a])
            starts += [at] if a == self.graph.loop and at else []
            starts += [str(group * WARPGROUP_ROWS)] if a == self.plan.row and group else []
            if not starts:
                continue
            terms, factor = (columns, stride) if stride % line else (rows, stride // line)
            text = " + ".join(starts)
            if factor > 1:
                text = f"{text} * {factor}" if len(starts) == 1 and "*" not in text else f"({text}) * {factor}"
            terms.append(text)
        return " + ".join(rows) or "0", " + ".join(columns) or "0"


def _is_block_of_copy_engine(rows: int, columns: int) -> bool:
    """Can the copy engine bring a block of 16-bit numbers, and a matrix instruction read it?"""
    is_swizzled = columns in (16, 32) or columns % 64 == 0
    return is_swizzled and max(rows, min(columns, 64)) <= MAX_WGMMA_COLUMNS
