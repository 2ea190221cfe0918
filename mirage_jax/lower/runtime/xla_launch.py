"""Kernels that XLA starts itself.

jax-triton's custom call is a function of the host, which starts the kernel. XLA puts no such call in a CUDA graph: the
kernels before and after it are then started one by one, and so are all kernels of a loop that holds one. XLA has a call
for PTX, too, ``__gpu$xla.gpu.ptx``, and treats that as its own kernels. So the calls that jax-triton lowers are turned
into these, where all arguments of the kernel are addresses. Kernels of other packages stay as they are, and so do
kernels that take descriptors of the copy engine or write in place.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

TARGET = "__gpu$xla.gpu.ptx"  # of XLA's thunk emitter, which reads the fields below
_ENTRY = re.compile(r"(?P<start>\.visible \.entry \w+\()(?P<parameters>[^)]*)\)")
_ADDRESS = re.compile(r"\.param \.[ub]64 [^\[\]]*?(?P<name>\w+)")
SCRATCH_PARAMETERS = 2  # of Triton's kernels, after all others: the compiler's own memory, and that of a profiler

type Lower = Callable[..., Sequence[Any]]  # a lowering rule: context, operands, parameters -> results


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A compiled kernel: its name, the threads of a block, their shared memory in bytes, and PTX."""

    name: str
    threads: int
    shared: int
    ptx: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Compiled code and its grid."""

    code: CompiledKernel
    grid: tuple[int, int, int]


class _Lowered(threading.local):
    """The launch that jax-triton's rule has described last, in a thread."""

    launch: Launch | None = None


_lowered = _Lowered()


def kernel_type(base: type[Any]) -> type[Any]:
    """jax-triton's `TritonKernel`, which keeps its code where `launch_type` finds it."""

    class KernelWithCode(base):
        def __init__(self, name: str, warps: int, ctas: int, shared: int, ptx: Any, *rest: Any) -> None:
            super().__init__(name, warps, ctas, shared, ptx, *rest)
            self.code = CompiledKernel(name, 32 * warps, shared, ptx) if isinstance(ptx, str) and ctas == 1 else None

    return KernelWithCode


def launch_type(base: type[Any]) -> type[Any]:
    """jax-triton's `TritonKernelCall`, which `started_by_xla` finds when it has been described."""

    class DescribedCall(base):
        def __init__(self, kernel: Any, x: int, y: int, z: int, parameters: Any) -> None:
            super().__init__(kernel, x, y, z, parameters)
            code = getattr(kernel, "code", None)
            self.launch = None if code is None else Launch(code, (x, y, z))

        def to_proto(self, *args: Any) -> Any:
            """Describe the call, as jax-triton does for each kernel that it lowers."""
            _lowered.launch = self.launch
            return super().to_proto(*args)

    return DescribedCall


def started_by_xla(rule: Lower, prefix: str) -> Lower:
    """jax-triton's lowering rule, with XLA's call for kernels whose names begin so."""

    @functools.wraps(rule)
    def lower(context: Any, *operands: Any, **parameters: Any) -> Sequence[Any]:
        _lowered.launch = None
        results = rule(context, *operands, **parameters)
        launch, _lowered.launch = _lowered.launch, None
        if launch is not None and launch.code.name.startswith(prefix) and not parameters["input_output_aliases"]:
            call = results[0].owner
            ptx = without_scratch(launch.code.ptx, len(call.operands) + len(call.results))
            if ptx:
                _start_by_xla(call, launch, ptx)
        return results

    return lower


def without_scratch(ptx: str, count: int) -> str:
    """PTX of a kernel that takes `count` addresses and no scratch memory; "" if it takes anything else."""
    entry = _ENTRY.search(ptx)
    if entry is None:
        return ""
    parameters = entry["parameters"].split(",")
    found = [_ADDRESS.fullmatch(parameter.strip()) for parameter in parameters]
    if None in found or len(found) != count + SCRATCH_PARAMETERS:
        return ""
    names, body = [parameter["name"] for parameter in found if parameter], ptx[entry.end() :]
    if any(re.search(rf"\b{name}\b", body) for name in names[count:]):
        return ""
    return f"{ptx[: entry.start()]}{entry['start']}{','.join(parameters[:count])}\n){body}"


def _start_by_xla(call: Any, launch: Launch, ptx: str) -> None:
    """Change jax-triton's custom call into XLA's own."""
    from jax.extend.mlir import ir

    def number(value: int) -> Any:
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(32), value)

    code, ins, outs = launch.code, len(call.operands), len(call.results)
    fields: dict[str, Any] = {"name": ir.StringAttr.get(code.name), "kernel_type": ir.StringAttr.get("ptx")}
    fields |= {"kernel_data": ir.StringAttr.get(ptx), "shared_mem_bytes": number(code.shared)}
    fields |= {f"grid_{axis}": number(size) for axis, size in zip("xyz", launch.grid, strict=True)}
    fields |= {f"block_{axis}": number(size) for axis, size in zip("xyz", (code.threads, 1, 1), strict=True)}
    fields["output_indices"] = ir.ArrayAttr.get([number(ins + n) for n in range(outs)])
    call.attributes["call_target_name"] = ir.StringAttr.get(TARGET)
    call.attributes["mhlo.backend_config"] = ir.DictAttr.get(fields)  # where JAX has what is not text
