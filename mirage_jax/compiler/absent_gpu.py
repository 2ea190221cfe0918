"""Decides for a GPU that need not be here: stored decisions, else the cost model's choice.

Nothing can be measured. Winners get their certificate and pass the checker of types and the exact check as ever. Their
kernels are compiled for the GPU, and the float gate runs their muGraphs as plain JAX on the processor. That says less
than it does on the GPU, so nothing is stored, and no seal is added to a decision that somebody else made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax

from mirage_jax.cache import Cache
from mirage_jax.compiler.compiler import Compiler
from mirage_jax.compiler.float_check import Accuracy
from mirage_jax.compiler.matrix_units import OnMatrixUnits
from mirage_jax.compiler.region import RegionOnDevice
from mirage_jax.compiler.tuning_session import TuningSession
from mirage_jax.compiler.winner import Winner
from mirage_jax.config import Options, unknown
from mirage_jax.errors import LoweringError, UsageError
from mirage_jax.hardware import gpus
from mirage_jax.hardware.device_model import DEVICES, DeviceModel
from mirage_jax.hardware.gpus import AbsentGpu
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.lower.backends import compile_for
from mirage_jax.lower.runtime import launch
from mirage_jax.lower.runtime.aot import refusal
from mirage_jax.lower.runtime.triton_runtime import threads_of
from mirage_jax.mugraph.graph import Library
from mirage_jax.verify.gate import Gate, Verdict

NOT_RUN = "as plain JAX on a processor: the kernels themselves were not run"


def absent_gpu(name: str, cache: Cache) -> AbsentGpu:
    """Find a GPU by its architecture or product, ``"sm_90"`` or ``"H200"``.

    If decisions are stored for such GPUs, it is the kind that has the most of them: their keys name the exact kind.
    Else it is the first product that the cost model knows with this architecture.

    Raises:
        UsageError: there is no such GPU.
    """
    products = {product: gpu.capability for product, gpu in gpus.GPUS.items()}
    architectures = {f"sm_{capability}": capability for capability in gpus.CAPABILITIES}
    capability = (architectures | products).get(name)
    if capability is None:
        raise UsageError(unknown("device", name, [*architectures, *products]))
    for kind, text in cache.device_kinds():
        if gpus.capability_of(text) == capability and gpus.named(kind) == gpus.GPUS.get(name, gpus.named(kind)):
            return AbsentGpu(kind, capability)
    likely = name if name in products else next((p for p, other in products.items() if other == capability), name)
    return AbsentGpu(f"NVIDIA {likely}", capability)


def described_gpu(name: str) -> DeviceModel:
    """Describe a GPU for the cost model by its product, ``"H200"``.

    Raises:
        UsageError: the cost model has no description of it.
    """
    described = {product: model for product, model in DEVICES.items() if model.is_gpu}
    if name not in described:
        raise UsageError(unknown("device", name, described))
    return described[name]


class AbsentGpuCompiler(Compiler):
    """The compiler of a function for a GPU that need not be here, whose programs are exported."""

    def __init__(self, options: Options, gpu: AbsentGpu) -> None:
        super().__init__(options, exports_kernels=True)
        self.gpu = gpu
        self.cache = Cache(options.cache_dir, is_read_only=True)

    @property
    def platform(self) -> str:
        """Name the platform of NVIDIA's GPUs."""
        return "cuda"

    @property
    def on_miss(self) -> str:
        """Say what to do with a region that has no stored decision: what would be measured is the model's choice."""
        chosen = self.options.on_miss or "heuristic"
        return "heuristic" if chosen == "search" else chosen

    def devices(self, platform: str) -> list[Any]:
        """Give the GPU; other platforms have the devices that are here."""
        return [self.gpu] if platform == self.platform else super().devices(platform)

    def session(self, region: Region, platform: str, devices: Sequence[Any], until: float = math.inf) -> TuningSession:
        """Begin choosing for a region."""
        return _Session(region, platform, devices[0], self.options, devices=devices, until=until)

    def trials(self, session: TuningSession) -> AbstractContextManager[None]:
        """Nothing can be tried."""
        return nullcontext()

    def _check_foreign(self, subject: RegionOnDevice, winner: Winner, devices: Sequence[Any]) -> str:
        found = super()._check_foreign(subject, winner, devices)
        return f"{found}; its floats were compared {NOT_RUN}" if winner.has_kernels else found


@dataclass
class _Session(TuningSession):
    """A region whose kernels cannot run here."""

    def float_gate(self, classes: Sequence[str] = ()) -> Gate[Winner]:
        """Make the gate for what can be known of floats here."""
        here = OnMatrixUnits(self.region, "cpu", jax.local_devices(backend="cpu")[0], self.options)
        return _PortableFloatGate(here, Accuracy(here), self.device.capability, classes)


@dataclass
class _PortableFloatGate:
    """Compiles a winner's kernels, and compares the floats of its muGraph as plain JAX."""

    here: RegionOnDevice
    accuracy: Accuracy
    capability: int
    classes: Sequence[str]
    name: str = "float gate"

    def check(self, candidate: Winner) -> Verdict:
        """Judge one candidate.

        Raises:
            LoweringError: a kernel does not compile, or could not be launched.
        """
        if candidate.has_kernels:
            _compile(candidate, self.capability)
        portable = self.here.winner(candidate.graph, candidate.schedule, candidate.family)
        passed, why = self.accuracy.gate(portable, self.classes)
        return Verdict(passed, f"{why}, {NOT_RUN}" if candidate.has_kernels else why)


def _compile(winner: Winner, capability: int) -> None:
    for source in launch.launches(winner.graph, winner.schedule, winner.options):
        if isinstance(source, Library):
            continue
        found = compile_for(source, capability)
        if problem := refusal(found, threads_of(found.ptx, 32 * source.num_warps)):
            raise LoweringError(f"kernel {source.name} {problem}")
