"""Facts about GPUs: each stands here once, with its unit and its source.

`facts` looks a compute capability up, `GPUS` has the peaks of single products, and `describe` describes a `jax.Device`:
by its name, else by its compute capability, its number of processors and the clocks that its driver reports. Anything
unknown is taken for small, so that a kernel that is tried can run.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

KIB, MIB = 1 << 10, 1 << 20

# Of all GPUs since Volta (CUDA Programming Guide, Compute Capabilities, "Memory Information per Compute Capability").
REGISTERS = 65536  # 32-bit registers of one processor
MAX_THREAD_REGISTERS = 255  # most that one thread can have
SHARED_BYTES_PER_CYCLE = 128  # bytes that the shared memory of one processor delivers in a cycle

WGMMA_ROWS = 64  # rows of a warpgroup's matrix instruction
BARRIER_BYTES = 1 * KIB  # bytes of shared memory that are left for barriers where warps are specialized
SURE_L2_BYTES = 40 * MIB  # that blocks of any order find in the last-level cache of A100 and later large GPUs
COLD_BYTES = 240 * MIB  # of input sets after which none is in any last-level cache: the largest has 126 MiB

# A large GPU, to which programs are cut on every device: FLOP/s of 16-bit products, bytes/s.
LARGE_FLOPS, LARGE_BANDWIDTH = 7e14, 3.3e12


@dataclass(frozen=True, slots=True)
class Facts:
    """Limits and rates of one compute capability. Rates belong to its slowest known product."""

    shared: int  # KiB of shared memory that one block may have, if it asks for it
    warps: int  # that are on one processor at a time
    matrix: int  # FLOP per processor and cycle, 16-bit operands and sums of f32
    matrix_f32: int  # the same of f32 operands, rounded to TF32 where there is that
    bandwidth: float  # bytes/s from device memory per processor
    wgmma: bool = False  # has Hopper's matrix instructions, which warpgroups issue and do not wait for
    reads_together: bool = False  # matrix units read operands from shared memory once for several warps


# Shared memory and warps: CUDA Programming Guide 13, Compute Capabilities, "Device and Streaming Multiprocessor
# Information" and "Memory Information per Compute Capability", for Volta version 12. Rates: vendor's data of
# V100, T4, A100, A10, Jetson Orin, L4, H100 PCIe, B200, B300, Jetson Thor, RTX PRO 6000 and GB10; products for games
# have half the rate of matrix products, which is what stands here.
CAPABILITIES: dict[int, Facts] = {
    70: Facts(96, 64, 1024, 128, 11e9),
    75: Facts(64, 32, 512, 128, 8e9),
    80: Facts(163, 64, 2048, 1024, 14e9),
    86: Facts(99, 48, 512, 256, 8e9),
    87: Facts(163, 48, 512, 256, 12e9),
    89: Facts(99, 48, 512, 256, 5e9),
    90: Facts(227, 64, 4096, 2048, 17e9, wgmma=True, reads_together=True),
    100: Facts(227, 64, 8192, 4096, 54e9, reads_together=True),
    103: Facts(227, 64, 8192, 4096, 50e9, reads_together=True),
    110: Facts(227, 48, 4096, 2048, 13e9, reads_together=True),
    120: Facts(99, 48, 512, 256, 9e9),
    121: Facts(99, 48, 512, 256, 5e9),
}
OLDEST = Facts(48, 32, 128, 128, 5e9)  # what every GPU has, whatever it is
LATER = replace(CAPABILITIES[86], bandwidth=5e9)  # what every GPU has had since Ampere
DEFAULT_PROCESSORS = 20  # of a GPU that does not say how many it has
DEFAULT_CLOCK_HZ = 1.4e9  # cycles per second of a GPU that does not say

# What code reaches where nobody has measured it, of vendors' peaks, or per processor and cycle; as on those measured.
REACHED_BANDWIDTH, REACHED_MATRIX = 0.88, 0.8
VECTOR_FLOPS_PER_CYCLE = 100  # FLOP of f32 arithmetic that is no product, per processor and cycle
L2_BYTES_PER_CYCLE = 32  # bytes from the last-level cache, per processor and cycle


@dataclass(frozen=True, slots=True)
class Gpu:
    """One product as it is: peaks that large kernels reach, in bytes/s and FLOP/s."""

    capability: int
    processors: int
    clock: float  # cycles per second
    bandwidth: float  # from device memory
    cache_bandwidth: float  # from the last-level cache
    matrix: float  # 16-bit operands
    matrix_f32: float
    vector: float  # pointwise f32 arithmetic
    shared_bytes: int  # of one block

    @property
    def facts(self) -> Facts:
        """Limits and rates of its compute capability."""
        return facts(self.capability)

    @property
    def shared_bandwidth(self) -> float:
        """Bytes/s from the shared memory of all processors."""
        return SHARED_BYTES_PER_CYCLE * self.processors * self.clock

    def with_processors(self, count: int) -> Gpu:
        """Describe a part of this GPU, or another cut of its chip."""
        if count == self.processors:
            return self
        part = count / self.processors
        rates = ("bandwidth", "cache_bandwidth", "matrix", "matrix_f32", "vector")
        return replace(self, processors=count, **{name: part * getattr(self, name) for name in rates})


def facts(capability: int) -> Facts:
    """Look up a compute capability, 90 for 9.0. An unknown one has the limits of the next smaller of its generation."""
    if capability in CAPABILITIES:
        return CAPABILITIES[capability]
    if smaller := [known for known in CAPABILITIES if known // 10 == capability // 10 and known < capability]:
        return replace(CAPABILITIES[max(smaller)], wgmma=False)
    return LATER if capability > max(CAPABILITIES) else OLDEST


def shared_limit(capability: int) -> int:
    """Bytes of shared memory that one block may have."""
    return facts(capability).shared * KIB


def by_vendor(capability: int, processors: int, clock: float, bandwidth: float, matrix: int | None = None) -> Gpu:
    """A GPU by its vendor's data: clock under load, bytes/s, FLOP of matrix products per processor and cycle."""
    known, cycles = facts(capability), processors * clock
    return Gpu(
        capability=capability,
        processors=processors,
        clock=clock,
        bandwidth=REACHED_BANDWIDTH * bandwidth,
        cache_bandwidth=L2_BYTES_PER_CYCLE * cycles,
        matrix=REACHED_MATRIX * (matrix or known.matrix) * cycles,
        matrix_f32=REACHED_MATRIX * known.matrix_f32 * cycles,
        vector=VECTOR_FLOPS_PER_CYCLE * cycles,
        shared_bytes=shared_limit(capability),
    )


# The H200 is measured (bandwidth counts bytes read plus written), A100, H100 and B200 are near to it in kind; of all
# others there is only the vendors' data.
GPUS: dict[str, Gpu] = {
    "A100": Gpu(80, 108, 1.4e9, 1.4e12, 5e12, 280e12, 70e12, 15e12, shared_limit(80)),
    "H100": Gpu(90, 132, 1.7e9, 2.9e12, 8e12, 700e12, 350e12, 25e12, shared_limit(90)),
    "H200": Gpu(90, 132, 1.7e9, 4.3e12, 9e12, 780e12, 390e12, 25e12, shared_limit(90)),
    "B200": Gpu(100, 148, 1.9e9, 7.0e12, 14e12, 2000e12, 900e12, 35e12, shared_limit(100)),
    "B300": by_vendor(103, 148, 1.9e9, 8.0e12),
    "V100": by_vendor(70, 80, 1.53e9, 0.9e12),
    "T4": by_vendor(75, 40, 1.59e9, 0.32e12, 1024),
    "A10": by_vendor(86, 72, 1.695e9, 0.6e12, 1024),
    "L4": by_vendor(89, 58, 2.04e9, 0.3e12, 1024),
    "L40S": by_vendor(89, 142, 2.52e9, 0.864e12, 1024),
    "RTX 3090": by_vendor(86, 82, 1.695e9, 0.936e12),
    "RTX 4090": by_vendor(89, 128, 2.52e9, 1.008e12),
    "RTX 5090": by_vendor(120, 170, 2.41e9, 1.792e12),
}
WITH_A_CPU = {"GH200": "H200", "GB200": "B200", "GB300": "B300"}


@dataclass(frozen=True, slots=True)
class AbsentGpu:
    """A GPU that need not be here, with those attributes of a `jax.Device` that describe one.

    capability: 90 for 9.0.
    """

    device_kind: str
    capability: int

    platform = "gpu"

    @property
    def compute_capability(self) -> str:
        """The compute capability as JAX writes it."""
        return f"{self.capability // 10}.{self.capability % 10}"


def named(kind: str) -> Gpu | None:
    """Find the product that a `device_kind` names, as whole words: an A1000 is no A100."""
    words = re.sub(r"[^A-Z0-9]+", " ", kind.upper()).split()
    text = f" {' '.join(WITH_A_CPU.get(word, word) for word in words)} "
    return next((gpu for name, gpu in GPUS.items() if f" {name} " in text), None)


def capability_of(text: object) -> int | None:
    """Read ``"9.0"`` as 90 and ``"12.1"`` as 121; None for a text that is no compute capability of CUDA."""
    match = re.fullmatch(r"(\d+)\.(\d)", str(text))
    return int(match[1]) * 10 + int(match[2]) if match else None


def describe(device: Any) -> Gpu | None:
    """Describe a `jax.Device`; None if it is no NVIDIA GPU."""
    kind, capability = str(device.device_kind), capability_of(getattr(device, "compute_capability", None))
    if capability is None and named(kind) is None and not re.search("nvidia|gpu", kind, re.IGNORECASE):
        return None
    number = lambda name: _positive(getattr(device, name, None))  # noqa: E731
    shared = number("shared_memory_per_block_optin")
    return _describe(kind, capability, number("core_count"), shared, getattr(device, "local_hardware_id", None))


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


@functools.cache
def _describe(
    kind: str, capability: int | None, processors: int | None, shared: int | None, ordinal: int | None
) -> Gpu:
    known = named(kind)
    if known is not None and capability in (None, known.capability):
        found = known if processors is None else known.with_processors(processors)
    else:
        clocks = clocks_of(ordinal)
        capability, processors = capability or 0, processors or DEFAULT_PROCESSORS
        bandwidth = clocks.bandwidth or facts(capability).bandwidth * processors
        found = by_vendor(capability, processors, clocks.processor or DEFAULT_CLOCK_HZ, bandwidth)
    return found if shared is None else replace(found, shared_bytes=shared)


# ---------------------------------------------------------------------- clocks


@dataclass(frozen=True, slots=True)
class Clocks:
    """Rates that a driver reports of a GPU; 0 where it reports none."""

    processor: float = 0.0  # cycles per second
    bandwidth: float = 0.0  # bytes/s: two transfers a cycle over the width of the bus


CLOCK_RATE, MEMORY_CLOCK_RATE, BUS_WIDTH = 13, 36, 37  # CUdevice_attribute: kHz, kHz, bits


def clocks_of(ordinal: int | None, load: Callable[[str], Any] = ctypes.CDLL) -> Clocks:
    """Ask CUDA's driver for the clocks of its device number `ordinal`. It is in this process already, with JAX."""
    try:
        driver = load("libcuda.so.1")
        device = ctypes.c_int()
        if ordinal is None or driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(ordinal)):
            return Clocks()

        def _ask(attribute: int) -> float:
            value = ctypes.c_int()
            failed = driver.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(attribute), device)
            return 0.0 if failed else float(value.value)

        memory = 1e3 * _ask(MEMORY_CLOCK_RATE) * 2 * _ask(BUS_WIDTH) / 8
        return Clocks(1e3 * _ask(CLOCK_RATE), memory)
    except (OSError, AttributeError):  # no driver, or not this one
        return Clocks()
