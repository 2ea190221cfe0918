"""Device memory of an interpreted kernel, in which no wrong access goes unnoticed.

Input: the arrays that a kernel is launched with. Buffers lie at made-up addresses, far from each other. Every load and
store is looked up: an address that no mask excludes has to be an element of the buffer whose pointer it came from,
nothing is stored into an input, and each element of an output is stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mirage_jax.errors import KernelFault

SPACING = 1 << 40  # bytes between the starts of two buffers


@dataclass(frozen=True)
class Buffer:
    """An array in device memory; `stores` counts the stores to each element of an output, None for an input."""

    name: str
    array: np.ndarray
    dtype: str  # as Triton names it
    itemsize: int  # of an element on the device
    address: int
    stores: np.ndarray | None

    def check_written(self) -> None:
        """Raise `KernelFault` if an element was never written."""
        if self.stores is not None and not self.stores.all():
            missing = np.flatnonzero(self.stores.reshape(-1) == 0)
            raise KernelFault(
                f"{len(missing)} of {self.stores.size} elements of {self.name} are never written, the first at "
                f"{_place(missing[0], self.array)}"
            )


def _place(index: Any, array: np.ndarray) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(int(index), array.shape)))


class InterpretedMemory:
    """Buffers, and the loads and stores of Triton's interpreter on them."""

    def __init__(
        self, arrays: Sequence[np.ndarray], names: Sequence[tuple[str, str, int]], inputs: int, rewrites: bool = False
    ) -> None:
        """`names`: name, dtype and bytes per element of each array, the first `inputs` of these are never written.
        `rewrites`: others may be written twice.
        """
        self.rewrites = rewrites
        self.buffers = [
            Buffer(*name[:1], x, *name[1:], (n + 1) * SPACING, None if n < inputs else np.zeros(x.shape, np.int32))
            for n, (x, name) in enumerate(zip(arrays, names, strict=True))
        ]

    def load(self, pointers: np.ndarray, mask: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Read elements, with a check of every address."""
        out = np.array(np.broadcast_to(other, pointers.shape))
        if found := self._find(pointers, mask, "loads"):
            buffer, index = found
            flat = buffer.array.reshape(-1)
            out[mask] = flat.view(out.dtype)[index]
        return out

    def store(self, pointers: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
        """Write elements, with a check of every address."""
        if found := self._find(pointers, mask, "stores"):
            buffer, index = found
            if buffer.stores is None:
                raise KernelFault(f"the kernel stores into {buffer.name}")
            stores, flat = buffer.stores.reshape(-1), buffer.array.reshape(-1)
            np.add.at(stores, index, 1)
            if (twice := stores[index] > 1 + self.rewrites).any():
                raise KernelFault(f"element {_place(index[twice][0], buffer.array)} of {buffer.name} is written twice")
            flat.view(values.dtype)[index] = np.broadcast_to(values, pointers.shape)[mask]

    def _find(self, pointers: np.ndarray, mask: np.ndarray, verb: str) -> tuple[Buffer, np.ndarray] | None:
        """The buffer that the lanes under a mask point into, and their elements."""
        addresses = pointers[mask].astype(np.int64)
        if not addresses.size:
            return None
        number = int((addresses[0] + SPACING // 2) // SPACING) - 1
        if not 0 <= number < len(self.buffers):
            raise KernelFault(f"the kernel {verb} what no buffer is near, at address {addresses[0]:#x}")
        buffer = self.buffers[number]
        index, rest = np.divmod(addresses - buffer.address, buffer.itemsize)
        wrong = (index < 0) | (index >= buffer.array.size) | (rest != 0)
        if wrong.any():
            raise KernelFault(
                f"the kernel {verb} element {index[wrong][0]} of {buffer.name}, which has {buffer.array.size}"
            )
        return buffer, index


def memory_patches(interpreter: Any, memory: InterpretedMemory) -> list[tuple[Any, str, Any]]:
    """Replacements of the interpreter's own loads and stores, which go to any address that they are given."""
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder

    def load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        element = pointers.get_element_ty()
        padding = np.zeros(1, interpreter._get_np_dtype(element)) if other is None else other.data
        return handle(memory.load(pointers.data, mask.data, padding), element)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> None:
        memory.store(pointers.data, value.data, mask.data)

    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise KernelFault("the kernel goes to memory by other ways than loads and stores, which none of ours does")

    others = [n for n in dir(builder) if n.startswith(("create_atomic", "create_descriptor_", "create_tensor_pointer"))]
    ours = [(builder, "create_masked_load", load), (builder, "create_masked_store", store)]
    return ours + [(builder, name, refused) for name in others]
