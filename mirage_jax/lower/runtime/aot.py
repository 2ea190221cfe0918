"""Compile a kernel for a GPU that need not be there, and read off what it will occupy.

Triton and its ptxas come in one wheel, so a CPU machine can tell whether a kernel fits: for tuners and tests.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mirage_jax.errors import LoweringError
from mirage_jax.hardware.gpus import REGISTERS, shared_limit
from mirage_jax.lower.kernel_source import KernelSource
from mirage_jax.lower.runtime import kernel_cache
from mirage_jax.lower.runtime.triton_runtime import backend_options, jax_triton_library, load_kernel, threads_of
from mirage_jax.mugraph.dtypes import DTYPES

MAX_SPILL_BYTES = 4096  # bytes per thread, above which a kernel waits for its own local memory
MAX_PTXAS_SECONDS = 15.0  # seconds that ptxas may take for a kernel that is tried; XLA will have it run once more
MAX_CACHED_KERNELS = 512  # kernels of a process that tries them: those of a region, and some


@dataclass(frozen=True, slots=True)
class Resources:
    """What one block of a compiled kernel takes."""

    arch: int
    shared: int  # bytes of shared memory per block
    registers: int  # per thread
    spills: int  # bytes stored to and loaded from local memory per thread
    ptx: str = field(repr=False)

    @property
    def fits(self) -> bool:
        """Can it be launched at all?"""
        return self.shared <= shared_limit(self.arch)


def pointers(source: KernelSource) -> dict[str, str]:
    """The signature of a kernel that takes pointers: the type of each argument, by name."""
    names = load_kernel(source).arg_names
    return {name: f"*{DTYPES[dtype].signature}" for name, dtype in zip(names, source.dtypes, strict=True)}


def compile_text(source: KernelSource, arch: int, source_type: Any, signature: Mapping[str, str]) -> Resources:
    """Compile for sm_`arch`, as Triton's `source_type` of program. Raises `LoweringError` with the compiler's words."""
    import triton
    from triton.backends.compiler import GPUTarget

    aligned = {(n,): [["tt.divisibility", 16]] for n, x in enumerate(signature.values()) if x.startswith("*")}
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages, **backend_options(arch)}
    try:
        compiled = triton.compile(
            source_type(load_kernel(source), signature, constexprs={}, attrs=aligned),
            target=GPUTarget("cuda", arch, 32),
            options=options,
        )
    except Exception as error:  # whatever the compiler's many stages raise
        raise LoweringError(f"kernel {source.name} does not compile for sm_{arch}: {_last_line(error)}") from error
    registers, spills = _ptxas(compiled.asm["ptx"], arch)
    return Resources(arch, compiled.metadata.shared, registers, spills, compiled.asm["ptx"])


def refuse_what_does_not_fit(folder: str = "") -> None:
    """From now on jax-triton raises a `LoweringError` for a kernel that could not be launched, or that spills so much
    that it is not worth it, when it has compiled it. For processes that try kernels: it costs a run of ptxas for each.
    What they try, they do not keep in Triton's cache, but remember, refusals too: graphs that differ in one kernel
    share others. Who reads `folder` (`kernel_cache.lent_folder`) need not compile their kernels again.
    """
    library = jax_triton_library()
    compile_kernel = inspect.unwrap(library.compile_ttir_inplace)
    if folder:
        compile_kernel = kernel_cache.kept(compile_kernel, library.CompilationResult, folder)
    known: dict[tuple[str, ...], Future[Any]] = {}
    lock = threading.Lock()

    def once(ttir: Any, backend: Any, options: Any, target: Any) -> Any:
        key = (str(ttir), str(options), str(target))
        mine: Future[Any] = Future()
        with lock:
            future = known.setdefault(key, mine)
            if len(known) > MAX_CACHED_KERNELS:
                del known[next(iter(known))]
        if future is mine:
            try:
                future.set_result(checked(ttir, backend, options, target))
            except BaseException as why:  # for all who wait
                future.set_exception(why)
        return future.result()

    def checked(ttir: Any, backend: Any, options: Any, target: Any) -> Any:
        result = compile_kernel(ttir, backend, options, target)
        threads = threads_of(result.binary, 32 * options.num_warps)
        found = Resources(target.arch, result.shared_mem_bytes, 0, 0, result.binary)
        problem = refusal(found, threads)
        if not problem:
            try:
                registers, spills = _ptxas(result.binary, target.arch, timeout=MAX_PTXAS_SECONDS)
                problem = refusal(replace(found, registers=registers, spills=spills), threads)
            except subprocess.TimeoutExpired:
                problem = f"takes ptxas more than {MAX_PTXAS_SECONDS:g} s"
            except (ImportError, OSError, TypeError, AttributeError):  # Triton keeps it elsewhere from time to time
                pass
        if problem:
            raise LoweringError(f"kernel {result.name} {problem}")
        return result

    library.compile_ttir_inplace = once


def refused_kernel(why: str) -> str:
    """The name of the kernel that an error says does not fit; empty if it says something else."""
    found = re.search(r"kernel (\w+) (?:takes|spills) ", why)
    return found[1] if found else ""


def refusal(found: Resources, threads: int) -> str:
    """Why a kernel of so many threads a block is not to be launched; empty if it may be."""
    if not found.fits:
        return f"takes {found.shared} bytes of shared memory, sm_{found.arch} has {shared_limit(found.arch)}"
    if found.registers * threads > REGISTERS:
        return f"takes {found.registers} registers in each of {threads} threads, there are {REGISTERS}"
    if found.spills > MAX_SPILL_BYTES:
        return f"spills {found.spills} bytes per thread, allowed are {MAX_SPILL_BYTES}"
    return ""


def _ptxas(ptx: str, arch: int, timeout: float | None = None) -> tuple[int, int]:
    """Registers per thread and bytes spilled, from ptxas's own report, if it takes no longer than `timeout` seconds."""
    from triton.backends.nvidia.compiler import get_ptxas

    program = get_ptxas(arch).path
    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [program, "-v", f"--gpu-name=sm_{arch}{suffix}", str(file), "-o", str(Path(folder) / "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    if done.returncode:
        raise LoweringError(f"ptxas refuses the kernel for sm_{arch}: {done.stderr.strip()}")
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.findall(r"(\d+) bytes spill", done.stderr)
    return int(registers.group(1)) if registers else 0, sum(map(int, spills))


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
