"""Compile a kernel for a GPU that need not be there, and read off what it will occupy.

Triton and its ptxas come in one wheel, so a CPU machine can tell whether a kernel fits: for tuners and tests.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mirage_jax.errors import LoweringError
from mirage_jax.lower.launch import BACKEND_OPTIONS, load_kernel
from mirage_jax.lower.triton_source import KernelSource

SHARED_LIMIT: Mapping[int, int] = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
POINTERS: Mapping[str, str] = {
    "f16": "*fp16", "bf16": "*bf16", "f32": "*fp32", "i32": "*i32", "i8": "*i8", "u8": "*u8", "bool": "*i1",
}  # fmt: skip


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
        return self.shared <= SHARED_LIMIT.get(self.arch, 101376)


def compile_for(source: KernelSource, arch: int) -> Resources:
    """Compile for sm_`arch` (80, 90, 100, ..); raises `LoweringError` with the compiler's words if it refuses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = load_kernel(source)
    names = kernel.arg_names
    signature = {name: POINTERS[dtype] for name, dtype in zip(names, source.dtypes, strict=True)}
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(len(names))}
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages, **BACKEND_OPTIONS}
    try:
        compiled = triton.compile(
            ASTSource(kernel, signature, constexprs={}, attrs=aligned),
            target=GPUTarget("cuda", arch, 32),
            options=options,
        )
    except Exception as error:  # whatever the compiler's many stages raise
        raise LoweringError(f"kernel {source.name} does not compile for sm_{arch}: {_last_line(error)}") from error
    registers, spills = _ptxas(compiled.asm["ptx"], arch)
    return Resources(arch, compiled.metadata.shared, registers, spills, compiled.asm["ptx"])


def _ptxas(ptx: str, arch: int) -> tuple[int, int]:
    """Registers per thread and bytes spilled, from ptxas's own report."""
    from triton.backends.nvidia.compiler import get_ptxas

    program = get_ptxas(arch).path
    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [program, "-v", f"--gpu-name=sm_{arch}{suffix}", str(file), "-o", str(Path(folder) / "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LoweringError(f"ptxas refuses the kernel for sm_{arch}: {done.stderr.strip()}")
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.findall(r"(\d+) bytes spill", done.stderr)
    return int(registers.group(1)) if registers else 0, sum(map(int, spills))


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
