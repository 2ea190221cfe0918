"""Device descriptions of the cost model, made of the peaks in `hardware`. To support a GPU better, add a row there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mirage_jax.hardware import gpus


@dataclass(frozen=True, slots=True)
class DeviceModel:
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
    resident_warps: int = 64  # of all blocks that one processor has at a time
    wgmma: bool = False  # has Hopper's matrix instructions, which warpgroups issue and do not wait for
    reads_together: bool = True  # matrix units read operands from shared memory once for several warps
    float32_parts: int = 1  # numbers of TF32 that make an operand of a float32 product


# What kernels reach of the peaks, and the least time of one: fitted to measurements on an H200, taken for all GPUs.
BANDWIDTH, CACHE, MATRIX, VECTOR = 0.9, 0.5, 0.9, 0.44
SHORTEST, LAUNCH = 1.1e-6, 0.1e-6


def of_gpu(name: str, gpu: gpus.Gpu) -> DeviceModel:
    """Describe a GPU: how much of its peaks kernels reach."""
    return DeviceModel(
        name=name,
        blocks=gpu.processors,
        bandwidth=BANDWIDTH * gpu.bandwidth,
        cache_bandwidth=CACHE * gpu.cache_bandwidth,
        matrix_flops=MATRIX * gpu.matrix,
        matrix_flops_f32=MATRIX * gpu.matrix_f32,
        vector_flops=VECTOR * gpu.vector,
        launch=LAUNCH,
        shortest=SHORTEST,
        shared_bytes=gpu.shared_bytes,
        shared_bandwidth=gpu.shared_bandwidth,
        resident_warps=gpu.facts.warps,
        wgmma=gpu.facts.wgmma,
        reads_together=gpu.facts.reads_together,
    )


DEVICES: dict[str, DeviceModel] = {
    "CPU": DeviceModel("CPU", 2, 1.2e10, 4e10, 8e10, 8e10, 4e9, 2e-6, 2e-6, 1 << 20, math.inf, is_gpu=False),
}


def register(name: str, gpu: gpus.Gpu) -> None:
    """Add a GPU by the name that its `device_kind` contains, as ``"H200"``."""
    gpus.GPUS[name] = gpu
    DEVICES[name] = of_gpu(name, gpu)


for _name, _gpu in tuple(gpus.GPUS.items()):
    register(_name, _gpu)


def device_for(device: Any) -> DeviceModel:
    """Describe a `jax.Device` by its name and by what it reports; all but NVIDIA's GPUs are taken for a CPU."""
    gpu = gpus.describe(device)
    if gpu is None:
        return DEVICES["CPU"]
    found = (DEVICES[name] for name, other in gpus.GPUS.items() if other == gpu)
    return next(found, of_gpu(device.device_kind, gpu))
