"""Which GPU is described how: by its name, its compute capability, and what it reports."""

import ctypes
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from lower.kernels import PROGRAMS

from mirage_jax.compiler.specialization import specialized
from mirage_jax.cost.roofline import kernel_estimate
from mirage_jax.hardware import device_model, gpus
from mirage_jax.hardware.device_model import DEVICES, device_for, register
from mirage_jax.hardware.gpus import (
    CAPABILITIES,
    GPUS,
    Clocks,
    Facts,
    Gpu,
    capability_of,
    clocks_of,
    facts,
    named,
    shared_limit,
)
from mirage_jax.lower.runtime import aot
from mirage_jax.mugraph.graph import BlockGraph


@pytest.fixture(autouse=True)
def _nothing_is_known_yet():
    gpus._describe.cache_clear()
    yield
    gpus._describe.cache_clear()


def gpu(kind: str, capability: str | None = None, processors: int | None = None, **more: Any) -> SimpleNamespace:
    """A device as JAX shows it; what is None is not reported."""
    given = {"compute_capability": capability, "core_count": processors} | more
    return SimpleNamespace(device_kind=kind, platform="gpu", **{k: v for k, v in given.items() if v is not None})


KIB = 1024

# As JAX shows it, and bytes of shared memory, whether there is wgmma, and processors.
FAKE = {
    "H200": (gpu("NVIDIA H200", "9.0", 132, shared_memory_per_block_optin=232448), 227, True, 132),
    "GH200": (gpu("NVIDIA GH200 480GB", "9.0", 132), 227, True, 132),
    "H20": (gpu("NVIDIA H20", "9.0", 78), 227, True, 78),
    "L4": (gpu("NVIDIA L4", "8.9", 58), 99, False, 58),
    "A10": (gpu("NVIDIA A10", "8.6", 72), 99, False, 72),
    "A10G": (gpu("NVIDIA A10G", "8.6", 80), 99, False, 80),
    "RTX 4090": (gpu("NVIDIA GeForce RTX 4090", "8.9", 128), 99, False, 128),
    "RTX A6000": (gpu("NVIDIA RTX A6000", "8.6", 84), 99, False, 84),
    "RTX 5080": (gpu("NVIDIA GeForce RTX 5080", "12.0", 84), 99, False, 84),
    "GB300": (gpu("NVIDIA GB300", "10.3", 152), 227, False, 152),
    "A100": (gpu("NVIDIA A100-SXM4-80GB", "8.0", 108), 163, False, 108),
    "A800": (gpu("NVIDIA A800-SXM4-80GB", "8.0", 108), 163, False, 108),
    "MIG": (gpu("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "8.0", 14), 163, False, 14),
    "V100": (gpu("Tesla V100-SXM2-16GB", "7.0", 80), 96, False, 80),
    "a later one": (gpu("NVIDIA X1000", "13.0", 200), 99, False, 200),
    "10.7": (gpu("NVIDIA X900", "10.7", 200), 227, False, 200),
    "one that says what it has": (gpu("NVIDIA X2", "13.0", 200, shared_memory_per_block_optin=334848), 327, False, 200),
    "nothing known": (gpu("NVIDIA Graphics Device"), 48, False, gpus.DEFAULT_PROCESSORS),
}


@pytest.mark.parametrize("name", FAKE)
def test_a_gpu_has_what_its_compute_capability_has(name: str) -> None:
    device, shared, wgmma, processors = FAKE[name]
    found = device_for(device)
    assert (found.is_gpu, found.shared_bytes, found.wgmma, found.blocks) == (True, shared * KIB, wgmma, processors)
    for rate in ("bandwidth", "cache_bandwidth", "matrix_flops", "matrix_flops_f32", "vector_flops"):
        assert 0 < getattr(found, rate) < 1e16, rate


def test_what_is_known_by_name_is_what_the_cost_model_was_fitted_to() -> None:
    for name, kind, capability, processors in (
        ("A100", "NVIDIA A100-SXM4-80GB", "8.0", 108),
        ("H100", "NVIDIA H100 80GB HBM3", "9.0", 132),
        ("H200", "NVIDIA H200", "9.0", 132),
        ("B200", "NVIDIA B200", "10.0", 148),
    ):
        assert device_for(gpu(kind, capability, processors)) is DEVICES[name]
        assert device_for(gpu(kind)) is DEVICES[name]
    h200 = DEVICES["H200"]
    assert (h200.bandwidth, h200.matrix_flops, h200.shared_bytes) == (0.9 * 4.3e12, 0.9 * 780e12, 232448)


def test_names_are_whole_words() -> None:
    assert named("NVIDIA A10") is GPUS["A10"] and named("NVIDIA A100-PCIE-40GB") is GPUS["A100"]
    assert named("NVIDIA L40S") is GPUS["L40S"] and named("NVIDIA L4") is GPUS["L4"]
    assert named("NVIDIA A1000 Laptop GPU") is None and named("NVIDIA H20") is None and named("Tesla T40") is None
    assert named("NVIDIA GB200") is GPUS["B200"]


def test_a_part_of_a_gpu_has_a_part_of_its_rates() -> None:
    whole, part = device_for(FAKE["A100"][0]), device_for(FAKE["MIG"][0])
    assert part.bandwidth == pytest.approx(whole.bandwidth * 14 / 108)
    assert part.matrix_flops == pytest.approx(whole.matrix_flops * 14 / 108)
    assert part.shared_bandwidth == pytest.approx(whole.shared_bandwidth * 14 / 108)


def test_an_unknown_gpu_is_slower_than_a_known_one_of_its_kind() -> None:
    """Estimates are conservative, and of the right size."""
    for name, kind in (("L4", "NVIDIA X"), ("A10", "NVIDIA X"), ("H100", "NVIDIA X"), ("RTX 5090", "NVIDIA X")):
        row = GPUS[name]
        major, minor = divmod(row.capability, 10)
        unknown, known = device_for(gpu(kind, f"{major}.{minor}", row.processors)), DEVICES[name]
        for rate in ("bandwidth", "matrix_flops", "vector_flops"):
            most = getattr(known, rate)
            assert most / 4 < getattr(unknown, rate) <= 1.01 * most, (name, rate)


def test_what_is_no_nvidia_gpu_is_a_cpu() -> None:
    assert device_for(jax.devices("cpu")[0]) is DEVICES["CPU"]
    assert device_for(gpu("AMD Instinct MI300X", "gfx942", 304)) is DEVICES["CPU"]


@pytest.mark.parametrize("capability", [*CAPABILITIES, 60, 72, 88, 107, 130])
def test_what_fits_is_said_once(capability: int) -> None:
    """The check of what was compiled, the description, and the facts agree."""
    major, minor = divmod(capability, 10)
    device = device_for(gpu("NVIDIA X", f"{major}.{minor}", 10))
    assert device.shared_bytes == shared_limit(capability) == facts(capability).shared * KIB
    assert aot.Resources(capability, device.shared_bytes, 0, 0, "").fits
    assert not aot.Resources(capability, device.shared_bytes + 1, 0, 0, "").fits
    assert facts(capability).wgmma == (capability == 90)


def test_only_hopper_has_specialized_warps() -> None:
    """Whether kernels may have them is asked of the description alone: nothing is even written for another GPU."""
    asked: Any = SimpleNamespace()  # a graph that must not be looked at
    for name, (device, _, wgmma, _) in FAKE.items():
        if not wgmma:
            assert specialized.__wrapped__(asked, asked, device_for(device), 1) == (), name


@pytest.mark.parametrize(
    ("text", "capability"), [("9.0", 90), ("10.3", 103), ("12.1", 121), ("gfx942", None), (None, None), ("", None)]
)
def test_capabilities_are_read(text: object, capability: int | None) -> None:
    assert capability_of(text) == capability


# What the driver says.


class Driver:
    """CUDA's driver, with one device."""

    def __init__(self) -> None:
        self.attributes = {13: 2_040_000, 36: 6_251_000, 37: 192}  # kHz, kHz, bits: of an L4

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, ordinal: ctypes.c_int) -> int:
        device._obj.value = ordinal.value
        return 0 if ordinal.value == 0 else 101

    def cuDeviceGetAttribute(self, value: Any, attribute: ctypes.c_int, device: ctypes.c_int) -> int:
        value._obj.value = self.attributes.get(attribute.value, 0)
        return 0 if attribute.value in self.attributes else 1


def _no_library(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


def test_clocks_are_asked_of_the_driver() -> None:
    found = clocks_of(0, lambda name: Driver())
    assert found == Clocks(2.04e9, 6.251e9 * 2 * 192 / 8)
    for nothing in (clocks_of(1, lambda name: Driver()), clocks_of(None, lambda name: Driver())):
        assert nothing == Clocks()
    assert clocks_of(0, _no_library) == clocks_of(0, lambda name: object()) == Clocks()


def test_an_unknown_gpu_has_the_clocks_that_its_driver_says(monkeypatch) -> None:
    device = gpu("NVIDIA X", "8.9", 58, local_hardware_id=0)
    silent = device_for(device)
    gpus._describe.cache_clear()
    monkeypatch.setattr(gpus, "clocks_of", lambda ordinal: clocks_of(ordinal, lambda name: Driver()))
    told = device_for(device)
    assert told.vector_flops == pytest.approx(silent.vector_flops * 2.04e9 / gpus.DEFAULT_CLOCK_HZ)
    assert told.bandwidth == pytest.approx(DEVICES["L4"].bandwidth, rel=0.01)


def test_a_known_gpu_asks_nobody(monkeypatch) -> None:
    monkeypatch.setattr(gpus, "clocks_of", None)
    assert device_for(FAKE["H200"][0]) is DEVICES["H200"]


def test_a_device_is_added_by_one_record(monkeypatch) -> None:
    """Of a new compute capability: its limits, its peaks, the cost model, and what a kernel costs there."""
    monkeypatch.setattr(gpus, "GPUS", {**GPUS})
    monkeypatch.setattr(device_model, "DEVICES", {**DEVICES})
    monkeypatch.setitem(CAPABILITIES, 150, Facts(300, 64, 16384, 8192, 60e9, reads_together=True))
    z100 = Gpu(150, 200, 2e9, 6e12, 12e12, 3e15, 1e15, 50e12, shared_limit(150))
    register("Z100", z100)
    device = device_for(gpu("NVIDIA Z100 SXM", "15.0", 200))
    assert (device.name, device.blocks, device.shared_bytes, device.wgmma) == ("Z100", 200, 300 * KIB, False)
    assert device_for(gpu("NVIDIA Z100 MIG", "15.0", 50)).bandwidth == pytest.approx(device.bandwidth / 4)
    program = PROGRAMS["rmsnorm"]()
    (kernel,), (sizes,) = program.graph.kernels, program.schedule.kernels
    assert isinstance(kernel, BlockGraph)
    here, there = (kernel_estimate(kernel, program.graph, sizes, {}, d) for d in (device, DEVICES["T4"]))
    assert here < there
