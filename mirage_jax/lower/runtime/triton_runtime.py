"""Triton and jax-triton at run time: load the text of a kernel, call it inside a JAX trace, compile it.

Both packages are imported on first use, so that a machine without them can import this module.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mirage_jax.errors import LoweringError
from mirage_jax.lower.hopper.shared_memory import Descriptor
from mirage_jax.lower.kernel_source import KernelSource
from mirage_jax.lower.runtime import kernel_cache, xla_launch
from mirage_jax.lower.triton.writer import PREFIX
from mirage_jax.mugraph.dtypes import DTYPES

if TYPE_CHECKING:
    import jax

log = logging.getLogger("mirage_jax")

CUDA_13_PLUGIN, CUDA_13_PTX = "jax_cuda13_plugin", 90  # JAX's for CUDA 13, and the PTX that every assembler of it reads
NUMPY_TYPES = {name: dtype.long_name for name, dtype in DTYPES.items() if dtype.triton}


@functools.cache
def backend_options(arch: int) -> Mapping[str, Any]:
    """What Triton's compiler is told for sm_`arch`, besides warps and stages.

    XLA assembles what Triton writes, with an assembler of its own that may be older than Triton's: on this machine, or
    where an exported program runs. So the version of PTX is no later than both know.
    """
    options: dict[str, Any] = {"enable_fp_fusion": True}  # stated, because Triton's default is about to change
    if find_spec(CUDA_13_PLUGIN) is not None:
        with suppress(ImportError, OSError, RuntimeError, TypeError, AttributeError):  # it is Triton's own affair
            from triton.backends.nvidia.compiler import get_ptxas, ptx_get_version

            options["ptx_version"] = min(CUDA_13_PTX, ptx_get_version(get_ptxas(arch).version))
    return options


def shared_layout(descriptor: Descriptor) -> Any:
    """Of the blocks that the copy engine brings."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(descriptor.swizzle, 16, 2)


@functools.cache
def load_text(name: str, text: str, digest: str) -> Any:
    """The `JITFunction` called `name` in `text`. The same text gives the same object, which compiles once.

    Triton reads the source of a kernel back through `inspect`, hence the entry in `linecache`; the file name does not
    depend on the user or the machine, so that every process compiles the same bytes.
    """
    file = f"mirage_jax_{name}_{digest}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": f"mirage_jax_{name}_{digest}"}
    with triton_language():
        exec(compile(text, file, "exec"), namespace)
    return namespace[name]


_LANGUAGE = threading.RLock()


@contextmanager
def triton_language() -> Iterator[None]:
    """Read or change what Triton's words mean while no other thread does: its interpreter changes that for all."""
    with _LANGUAGE:
        _let_the_compiler_wait()
        yield


@functools.cache
def _let_the_compiler_wait() -> None:
    """From now on Triton reads a kernel within `triton_language`, whoever compiles it."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    def waiting(make_ir: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make_ir)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _LANGUAGE:
                return make_ir(*args, **kwargs)

        return run

    for source_type in (ASTSource, GluonASTSource):
        source_type.make_ir = waiting(source_type.make_ir)


def load_kernel(source: KernelSource) -> Any:
    """The Triton function of `source`."""
    return load_text(source.name, source.text, source.digest)


def in_descriptors(source: KernelSource, arrays: Sequence[jax.Array]) -> list[Any]:
    """The operands of a kernel, with descriptors for the copy engine where it takes them."""
    operands: list[Any] = list(arrays)
    for n, descriptor in enumerate(source.descriptors):
        if descriptor is not None:
            matrix = arrays[n].reshape(descriptor.shape)
            layout = shared_layout(descriptor)
            operands[n] = _jax_triton().TensorDescriptor.from_array(matrix, descriptor.block, layout)
    return operands


def triton_call(
    source: KernelSource, operands: Sequence[Any], *, compute_capability: int | None, in_place: bool
) -> list[jax.Array]:
    """Launch a text that Triton compiles. `in_place`: after its inputs, `operands` has what it is to write into."""
    import jax

    types = zip(source.shapes, source.dtypes[len(source.inputs) :], strict=True)
    aliases = {len(source.inputs) + n: n for n in range(len(source.outputs))} if in_place else None
    arch = compute_capability or jax_triton_library().triton_kernel_call_lib.get_compute_capability(0)
    return _jax_triton().triton_call(
        *operands,
        kernel=load_kernel(source),
        out_type=[jax.ShapeDtypeStruct(shape, NUMPY_TYPES[dtype]) for shape, dtype in types],
        grid=source.grid,
        name=source.name,
        num_warps=source.num_warps,
        num_stages=source.num_stages,
        num_ctas=1,
        compute_capability=compute_capability,
        backend_options=dict(backend_options(arch)),
        input_output_aliases=aliases,
    )


_CHANGING = threading.RLock()


def _jax_triton() -> Any:
    """jax-triton, changed by the first thread that asks. `functools.cache` lets several compute a first value."""
    with _CHANGING:
        return _changed()


@functools.cache
def _changed() -> Any:
    """jax-triton, with Triton 3.6 as well, and without its removal of TRITON_CACHE_DIR from the environment.

    An interrupt may end this anywhere, and then the next caller begins again.
    """
    kept = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
        import triton.backends.nvidia.compiler as compiler
        from jax.interpreters import mlir, partial_eval
    except ImportError as error:
        raise LoweringError(f"GPU kernels need jax-triton and triton: {error}") from error
    finally:
        if kept is not None:
            os.environ["TRITON_CACHE_DIR"] = kept
    library: Any = jax_triton.triton_lib  # type: ignore[attr-defined]
    if not hasattr(library.cb, "BaseBackend"):  # a stub, as Triton 3.6 lacks a constant that we do not need
        library.cb = compiler
    compile_kernel = _with_gluon(inspect.unwrap(library.compile_ttir_inplace), library.CompilationResult)
    library.compile_ttir_inplace = _without_debugging(kernel_cache.kept(compile_kernel, library.CompilationResult))
    kernels = library.triton_kernel_call_lib
    kernel_type = xla_launch.kernel_type(inspect.unwrap(kernels.TritonKernel))
    kernels.TritonKernel = _without_source(_with_all_warps(kernel_type))
    kernels.TritonKernelCall = xla_launch.launch_type(kernels.TritonKernelCall)
    rule = functools.partial(library.triton_kernel_call_lowering, library.make_cuda_target)
    mlir.register_lowering(library.triton_kernel_call_p, xla_launch.started_by_xla(rule, PREFIX), platform="cuda")
    if (rule := partial_eval.dce_rules.get(library.triton_kernel_call_p)) is not None:
        partial_eval.dce_rules[library.triton_kernel_call_p] = _with_live_inputs(rule)
    try:
        _specialize_without_torch(compiler)
    except Exception as why:  # Triton's own affair, which changes from version to version
        log.info("Triton may import torch: %s: %s", type(why).__name__, why)
    return jax_triton


def _with_gluon(compile_kernel: kernel_cache.Compile, result_type: Any) -> kernel_cache.Compile:
    """jax-triton 0.4 sends kernels in Gluon through the passes of Triton's language, which pipeline loops and move
    instructions; this is what Triton's own compiler does for them.
    """

    # No functools.wraps: who unwraps jax-triton's compiler, to keep its results elsewhere, needs these passes.
    def run(module: Any, backend: Any, options: Any, target: Any) -> Any:
        if '"ttg.num-warps"' not in str(module):  # only Gluon has layouts before any pass
            return compile_kernel(module, backend, options, target)
        metadata: dict[str, Any] = {"num_warps": options.num_warps}
        for stage in (backend.gluon_to_ttgir, backend.make_llir, backend.make_ptx):
            module = stage(module, metadata, options, target.arch)
        return result_type(
            binary=module,
            name=metadata["name"],
            shared_mem_bytes=metadata["shared"],
            ttgir="",
            llir="",
            tensordesc_meta=[{"is_im2col": False, **meta} for meta in metadata["tensordesc_meta"] or ()],
        )

    return run


def _with_all_warps(kernel_type: Callable[..., Any]) -> Callable[..., Any]:
    """jax-triton 0.4 launches as many warps as were asked for; the compiler adds those that other tasks have."""

    @functools.wraps(kernel_type, updated=())
    def kernel(name: str, num_warps: int, num_ctas: int, shared: int, binary: Any, *rest: Any) -> Any:
        return kernel_type(name, threads_of(binary, 32 * num_warps) // 32, num_ctas, shared, binary, *rest)

    return kernel


_DEBUGGING = re.compile(
    r"^\s*\.(?:loc|file)\b.*\n|^\s*\.section\s+\.debug_\w+\s*\{[^}]*\}\n?|[ \t]*//.*$", re.MULTILINE
)


def _without_debugging(compile_kernel: kernel_cache.Compile) -> kernel_cache.Compile:
    """Kernels of ours without debugging information: half of their text, which XLA looks up in each call. It names
    files of Triton's own library besides, whose folder is another on every machine; and a program that is exported, or
    whose digest finds it in JAX's cache, should not depend on that.
    """

    @functools.wraps(compile_kernel)
    def run(*args: Any) -> Any:
        result = compile_kernel(*args)
        if result.name.startswith(PREFIX) and isinstance(result.binary, str):
            result.binary = _DEBUGGING.sub("", result.binary)
        return result

    return run


def _without_source(kernel_type: Callable[..., Any]) -> Callable[..., Any]:
    """Kernels of ours without Triton's own text, which jax-triton adds, and nothing reads where they run."""

    @functools.wraps(kernel_type, updated=())
    def kernel(name: str, warps: int, ctas: int, shared: int, binary: Any, ttir: str, *rest: Any) -> Any:
        return kernel_type(name, warps, ctas, shared, binary, "" if name.startswith(PREFIX) else ttir, *rest)

    return kernel


def _with_live_inputs(rule: Callable[..., Any]) -> Callable[..., Any]:
    """jax-triton 0.4 wants (used outputs, equation) of JAX, which since 0.12 says in between which inputs live."""

    if len(inspect.signature(rule).parameters) != 2:
        return rule
    return lambda used_outputs, *rest: rule(used_outputs, rest[-1])


def threads_of(ptx: str | bytes, asked: int) -> int:
    """Threads of a block, of compiled code that was asked to have so many."""
    found = re.search(r"\.reqntid\s+(\d+)", ptx if isinstance(ptx, str) else ptx.decode(errors="replace"))
    return int(found[1]) if found else asked


def _specialize_without_torch(compiler: Any) -> None:
    """Let Triton look at an argument for the first time. Version 3.6 then imports torch, where it is installed, which
    takes a second or more, to know its tensors faster; no kernel of ours is called with any.
    """
    from triton._C import libtriton
    from triton.backends.compiler import GPUTarget

    class NoTorch:
        thread = threading.get_ident()  # for others torch is there

        @classmethod
        def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
            if name == "torch" and threading.get_ident() == cls.thread:
                raise ModuleNotFoundError(name)

    backend = compiler.CUDABackend(GPUTarget("cuda", 90, 32))
    pointer = SimpleNamespace(data_ptr=lambda: 16, dtype="fp32")
    sys.meta_path.insert(0, NoTorch)
    try:
        libtriton.native_specialize_impl(backend, pointer, False, True, True)  # as jax-triton calls it
    finally:
        sys.meta_path.remove(NoTorch)


def jax_triton_library() -> Any:
    """The module of jax-triton that compiles kernels."""
    return _jax_triton().triton_lib
