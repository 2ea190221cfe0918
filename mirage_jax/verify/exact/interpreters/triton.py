"""Run generated kernels on the CPU through Triton's interpreter, on numpy arrays, without torch and without a GPU.

The text that is compiled for a GPU runs here, block by block: slow (use small shapes), but with the real masks, loops
and orders of evaluation. Floats are floats, or exact numbers (`interpreter_exact`), on which the result can be compared
bit for bit with what the graph says. Triton's interpreter needs help in six places, all of it undone afterwards, so
that the same process can go on compiling kernels. Meanwhile other threads wait that would compile one:

* it expects torch tensors: `_Pointer` has the few methods that it calls;
* it reads and writes whatever an address points to: `interpreter_memory` checks each access;
* ``tl.sum`` and friends are compiled-flavour functions that refuse to be called: `JITFunction.__call__` is replaced;
* it computes bf16 on the integers that hold the bits, and casts by cutting bits off: arithmetic is routed through f32
  and rounded once, to nearest. It rounds the product of an fma, which hardware does not;
* its exp is that of numpy, but a GPU has exp2 only, of a product that is rounded;
* a truth value spread over a tile becomes integers, which no load takes as a mask.

It does not model races, shared memory, or the rounding of tf32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from mirage_jax.errors import MirageError, UnsupportedError
from mirage_jax.lower.backends import backend_of
from mirage_jax.lower.runtime.launch import check_shapes, launches, missing
from mirage_jax.lower.runtime.triton_runtime import load_kernel, load_text, triton_language
from mirage_jax.lower.triton.emitter import DEFAULT_OPTIONS, EmitOptions, KernelSource
from mirage_jax.lower.triton.expressions import LOG2E, Number
from mirage_jax.lower.triton.two_forms import arguments
from mirage_jax.mugraph.domains import exact as numbers
from mirage_jax.mugraph.dtypes import BYTES, numpy_dtype
from mirage_jax.mugraph.graph import KernelGraph, Library, Schedule
from mirage_jax.verify.exact.interpreters.exact_arithmetic import exact_patches
from mirage_jax.verify.exact.interpreters.gluon import Words
from mirage_jax.verify.exact.interpreters.memory import Buffer, InterpretedMemory, memory_patches


def interpret(
    graph: KernelGraph,
    schedule: Schedule,
    arrays: Sequence[np.ndarray],
    run_library: Callable[[Library, Mapping[str, np.ndarray]], np.ndarray] | None = None,
    options: EmitOptions = DEFAULT_OPTIONS,
) -> list[np.ndarray]:
    """Outputs of the graph for numpy inputs; `run_library` is needed if it has library operators."""
    env = {t.name: np.asarray(a, order="C") for t, a in zip(graph.inputs, arrays, strict=True)}
    check_shapes(graph, env, options)
    for launch in launches(graph, schedule, options):
        if not isinstance(launch, Library):
            env |= zip(launch.outputs, interpret_kernel(launch, arguments(launch.inputs, env)), strict=True)
        elif run_library is not None:
            env[launch.name] = np.asarray(run_library(launch, env), order="C")
        else:
            raise ValueError(f"the graph has the library operator {launch}, but nothing to run it with was passed")
    return [env[name] for name in graph.outputs]


def interpret_kernel(
    source: KernelSource, arrays: Sequence[np.ndarray], exact: bool = False, before: Sequence[np.ndarray] | None = None
) -> list[np.ndarray]:
    """Run one kernel and return its outputs.

    Args:
        source: the kernel's text.
        arrays: its inputs, of the types of its tensors.
        exact: compute on numbers without rounding instead of floats.
        before: contents of the outputs at the start; with it, the kernel may leave elements as they are.

    Raises:
        KernelFault: it reads or writes outside of its tensors, or does not write each element of its results once.
        UnsupportedError: Triton is not installed.
    """
    return backend_of(source).interpret(source, TritonInterpreter(arrays, exact, before))


@dataclass(frozen=True)
class TritonInterpreter:
    """One run of a kernel in Triton's interpreter. `exact`, `before`: see `interpret_kernel`."""

    inputs: Sequence[np.ndarray]
    exact: bool = False
    before: Sequence[np.ndarray] | None = None

    def run_triton(self, source: KernelSource) -> list[np.ndarray]:
        """Run a text in Triton's language."""
        return self._run(source, lambda memory: load_kernel(source))

    def run_gluon(self, source: KernelSource) -> list[np.ndarray]:
        """Run a text in Gluon, with the meaning of its words from `interpreters.gluon`."""
        return self._run(source, lambda memory: _with_meaning(source, memory))

    def _run(self, source: KernelSource, load: Callable[[InterpretedMemory], Any]) -> list[np.ndarray]:
        if missing("triton"):
            raise UnsupportedError("Triton is not installed")
        memory, outputs = _memory_of(source, self.inputs, self.exact, self.before)
        with triton_language():
            kernel, constants = load(memory), source.numbers if self.exact else None
            with _interpreting(memory, constants) as interpreted, np.errstate(all="ignore"):
                try:
                    interpreted(kernel)[source.grid](*map(_Pointer, memory.buffers))
                except Exception as error:
                    if isinstance(error.__cause__, MirageError):  # Triton's interpreter wraps exceptions from below
                        raise error.__cause__ from None
                    raise
        if self.before is None:
            for buffer in memory.buffers:
                buffer.check_written()
        return outputs


def _memory_of(
    source: KernelSource, arrays: Sequence[np.ndarray], exact: bool, before: Sequence[np.ndarray] | None
) -> tuple[InterpretedMemory, list[np.ndarray]]:
    """Lay out the inputs and outputs of a kernel; also return the outputs' arrays."""
    types = [_numpy_type(d, exact) for d in source.dtypes]
    outputs = [np.zeros(shape, t) for shape, t in zip(source.shapes, types[len(source.inputs) :], strict=True)]
    for x, y in zip(before or (), outputs, strict=bool(before)):
        y[...] = x
    names = [*(f"input {name}" for name in source.inputs), *(f"output {name}" for name in source.outputs)]
    dtypes = [(name, _numpy_type(d).name, BYTES[d]) for name, d in zip(names, source.dtypes, strict=True)]
    inputs = [np.asarray(x, t, order="C") for x, t in zip(arrays, types[: len(arrays)], strict=True)]
    return InterpretedMemory([*inputs, *outputs], dtypes, len(inputs), source.rewrites), outputs


def _numpy_type(dtype: str, exact: bool = False) -> np.dtype:
    if exact and dtype in ("f16", "bf16", "f32"):
        return numbers.EXACT
    return numpy_dtype(dtype)


class _Name(str):
    """Name of a type, with its size: what Triton asks of a tensor's dtype."""

    itemsize: int


class _Pointer:
    """A buffer dressed as the torch tensor that the interpreter expects; "host" and "device" are the same memory."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    @property
    def dtype(self) -> _Name:
        """The type's name, with its size."""
        name = _Name(self.buffer.dtype)
        name.itemsize = self.buffer.itemsize
        return name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.buffer.array.shape

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self.buffer.address

    def untyped_storage(self) -> _Pointer:
        """The memory, which is the buffer itself."""
        return self

    cpu = untyped_storage

    def copy_(self, other: _Pointer) -> None:
        """Nothing to copy."""

    def storage_offset(self) -> int:
        """The place of the first element in the memory."""
        return 0

    def size(self) -> tuple[int, ...]:
        """The shape, as torch names it."""
        return self.shape

    def stride(self) -> tuple[int, ...]:
        """Strides in elements."""
        return tuple(s // self.buffer.array.itemsize for s in self.buffer.array.strides)

    def new_empty(self, size: int, device: str | None = None) -> _Pointer:
        """Allocate nothing: the copy on the "device" is the same buffer."""
        return _Pointer(self.buffer)

    def set_(self, storage: _Pointer, offset: int, size: Any, stride: Any) -> _Pointer:
        """Point to the memory of another tensor."""
        self.buffer = storage.buffer
        return self


_functions: dict[Callable[..., Any], Any] = {}  # Python function -> its interpreted form


def _with_meaning(source: KernelSource, memory: InterpretedMemory) -> Any:
    """A kernel in Gluon, whose words have the meaning that they have in the interpreter."""
    import triton.language

    known = zip(memory.buffers, source.descriptors, strict=False)
    matrices = {buffer.address: (d.shape, d.block) for buffer, d in known if d is not None}
    kernel = _own_copy(source.name, source.text, source.digest)
    kernel.fn.__globals__.update(Words(triton.language, matrices, _interpreted).namespace())
    return kernel


@functools.cache
def _own_copy(name: str, text: str, digest: str) -> Any:
    """A kernel whose globals are changed: the one that is compiled is another."""
    return load_text.__wrapped__(name, text, digest)


def _interpreted(kernel: Any) -> Any:
    from triton.runtime.interpreter import InterpretedFunction

    if isinstance(kernel, InterpretedFunction):
        return kernel
    if kernel.fn not in _functions:  # not keyed by the kernel: hashing that walks its globals
        _functions[kernel.fn] = InterpretedFunction(kernel.fn)
    return _functions[kernel.fn]


@contextlib.contextmanager
def _interpreting(
    memory: InterpretedMemory, constants: Mapping[float, Number | None] | None
) -> Iterator[Callable[[Any], Any]]:
    """Patch Triton for interpretation; yields the function that makes a kernel interpretable.

    `constants`: what literals stand for if floats are to be exact numbers, else None.
    """
    import triton.experimental.gluon.language  # on import it wraps what it finds in Triton's language: not our patches
    import triton.language
    from triton import knobs
    from triton.runtime import interpreter, jit

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = _interpreted(self).rewrite()
        interpreter._patch_lang(self.fn)
        return function(*args, **kwargs)

    plain_patch = interpreter._patch_lang
    patched: list[Any] = []  # modules of the language, until the end: each takes a millisecond

    def patch_language(fn: Any) -> Any:
        """Triton 3.6 makes a number of an array with one element in a way that NumPy has given up."""
        both, visible = (triton.language, triton.language.core), fn.__globals__.values()
        new = [module for module in both if module not in patched and any(x is module for x in visible)]
        if new:
            scope = plain_patch(fn)
            stack.callback(scope.restore)
            scope.set_attr(triton.language.tensor, "__index__", lambda tensor: int(tensor.handle.data.squeeze()))
            patched.extend(new)
        return interpreter._LangPatchScope()

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(interpreter, "_patch_lang", patch_language))
        stack.enter_context(_replaced(jit.JITFunction, "__call__", call))
        stack.enter_context(_replaced(knobs.runtime, "interpret", True))
        # Whether indices overflow takes long to check, and their addresses tell.
        unchecked = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        stack.enter_context(_replaced(interpreter.interpreter_builder, "options", unchecked))
        lang = triton.language
        floats = _float_patches(interpreter, lang) if constants is None else exact_patches(interpreter, lang, constants)
        for owner, name, patch in (*memory_patches(interpreter, memory), *floats):
            stack.enter_context(_replaced(owner, name, patch))
        splat = interpreter.InterpreterBuilder.create_splat
        stack.enter_context(_replaced(interpreter.InterpreterBuilder, "create_splat", _bool_splat(splat)))
        yield _interpreted


def _bool_splat(plain: Callable[..., Any]) -> Callable[..., Any]:
    def splat(self: Any, shape: Any, x: Any) -> Any:
        out = plain(self, shape, x)
        if x.data.dtype == np.bool_:
            out.data = out.data.astype(np.bool_)
        return out

    return splat


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    saved = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, saved)


def _exp_of_gpus(x: np.ndarray) -> np.ndarray:
    """exp as Triton compiles it: exp2 of a product that is rounded."""
    return np.exp2(x * x.dtype.type(LOG2E))


def _float_patches(interpreter: Any, tl: Any) -> list[tuple[Any, str, Any]]:
    """Replacements that round once: for arithmetic on bf16, done in f32, and for the sum of an fma."""
    handle, builder, reduce = interpreter.TensorHandle, interpreter.InterpreterBuilder, interpreter.ReduceOps
    plain_dot, plain_binary, plain_unary = builder.create_dot, builder.binary_op, builder.unary_op
    plain_cast = builder.cast_impl

    def is_bf16(x: Any) -> bool:
        """Whether a tensor holds bfloat16, which numpy stores as uint16."""
        return x.dtype.scalar == tl.bfloat16

    def wide(x: Any) -> Any:
        """Widen bfloat16 to float32."""
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32) if is_bf16(x) else x

    def narrow(data: np.ndarray) -> np.ndarray:
        """Round float32 to bfloat16."""
        return np.asarray(data, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)

    def cast(self: Any, x: Any, dtype: Any) -> Any:
        if is_bf16(x) and dtype.scalar == tl.float32:
            return wide(x)
        if x.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            return handle(narrow(x.data), tl.bfloat16)
        return plain_cast(self, x, dtype)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain_dot(self, wide(a), wide(b), *rest)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        """Multiply and add in float64, in which a product of float32 is exact."""
        total = x.data.astype(np.float64) * y.data + z.data
        return handle(total.astype(z.data.dtype), z.dtype.scalar)

    def binary(self: Any, left: Any, right: Any, op: Callable[..., Any]) -> Any:
        if not (is_bf16(left) and is_bf16(right)):
            return plain_binary(self, left, right, op)
        result = op(wide(left).data, wide(right).data)
        return handle(result, tl.int1) if result.dtype == np.bool_ else handle(narrow(result), tl.bfloat16)

    def unary(self: Any, x: Any, op: Callable[..., Any]) -> Any:
        op = _exp_of_gpus if op is np.exp else op
        return handle(narrow(op(wide(x).data)), tl.bfloat16) if is_bf16(x) else plain_unary(self, x, op)

    def reduction(plain: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(x, tl.core.tensor) or x.dtype.scalar != tl.bfloat16:
                return plain(self, x, *args, **kwargs)
            shape = [int(n) for n in x.type.shape]
            out = plain(self, tl.core.tensor(wide(x.handle), tl.core.block_type(tl.float32, shape)), *args, **kwargs)
            data = narrow(out.handle.data)
            return self.to_tensor(data if out.type.is_block() else data.reshape(-1)[0], tl.bfloat16)

        return run

    return [
        (builder, "cast_impl", cast),
        (builder, "create_dot", dot),
        (builder, "create_fma", fma),
        (builder, "binary_op", binary),
        (builder, "unary_op", unary),
        (reduce, "sum", reduction(reduce.sum)),
        (reduce, "min_max", reduction(reduce.min_max)),
    ]
