"""Device descriptions: what the cost model knows about hardware. Data only; add a row to support a device.

Peak figures are vendor data or, for the H200, measured (bandwidth counts bytes read plus written).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """Seconds and bytes of one device as the cost model sees it."""

    name: str
    blocks: int  # thread blocks (GPU) or cores (CPU) that run at the same time
    bandwidth: float  # bytes/s from device memory
    cache_bandwidth: float  # bytes/s from the last-level cache
    matrix_flops: float  # FLOP/s of the matrix units, 16-bit operands
    matrix_flops_f32: float
    vector_flops: float  # FLOP/s of pointwise f32 arithmetic
    launch: float  # seconds per kernel
    shortest: float  # seconds that even an empty kernel takes
    shared_bytes: int  # shared memory per block
    shared_bandwidth: float  # bytes/s from the shared memory of all blocks
    is_gpu: bool = True
    wgmma: bool = False  # has Hopper's matrix instructions, which warpgroups issue and do not wait for


# What kernels reach of the peaks, and the least time of one: fitted to measurements on an H200, taken for all GPUs.
BANDWIDTH, CACHE, MATRIX, VECTOR = 0.9, 0.5, 0.9, 0.44
SHORTEST, LAUNCH = 1.1e-6, 0.1e-6


SHARED_ROW = 128  # bytes that shared memory delivers in a cycle


def _gpu(
    name: str,
    blocks: int,
    bandwidth: float,
    cache: float,
    matrix: float,
    wide: float,
    vector: float,
    shared: int,
    clock: float,
) -> Device:
    reached = (BANDWIDTH * bandwidth, CACHE * cache, MATRIX * matrix, MATRIX * wide, VECTOR * vector)
    wgmma = name in ("H100", "H200")
    return Device(name, blocks, *reached, LAUNCH, SHORTEST, shared, SHARED_ROW * blocks * clock, wgmma=wgmma)


DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        _gpu("A100", 108, 1.4e12, 5e12, 280e12, 70e12, 15e12, 163 << 10, 1.4e9),
        _gpu("H100", 132, 2.9e12, 8e12, 700e12, 350e12, 25e12, 227 << 10, 1.7e9),
        _gpu("H200", 132, 4.3e12, 9e12, 780e12, 390e12, 25e12, 227 << 10, 1.7e9),
        _gpu("B200", 148, 7.0e12, 14e12, 2000e12, 900e12, 35e12, 227 << 10, 1.9e9),
        Device("CPU", 2, 1.2e10, 4e10, 8e10, 8e10, 4e9, 2e-6, 2e-6, 1 << 20, math.inf, is_gpu=False),
    )
}


def device_for(kind: str) -> Device:
    """The description for a `jax.Device.device_kind`; an unknown GPU is taken for an H100, all else for a CPU."""
    for name, device in DEVICES.items():
        if name.lower() in kind.lower():
            return device
    return DEVICES["H100" if "nvidia" in kind.lower() or "gpu" in kind.lower() else "CPU"]
