"""What would be tried on a GPU that need not be here: the search's best kernels for a function, proven, not measured.

Input: a function, types of its arguments, the name of a device. Output: text, region by region: the program, the first
candidate that is a kernel, its certificate and the Triton source at the tile sizes that the cost model likes best.
Nothing is stored, and nothing of the function is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from mirage_jax.compiler.absent_gpu import described_gpu
from mirage_jax.compiler.region import as_asked, precisions
from mirage_jax.compiler.tuning import as_precise
from mirage_jax.compiler.tuning_session import space_for
from mirage_jax.compiler.winner import KERNEL_EMIT_OPTIONS
from mirage_jax.config import Budget
from mirage_jax.cost.roofline import fused_estimate, lower_limit
from mirage_jax.errors import MirageError
from mirage_jax.hardware.device_model import DeviceModel
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.lower.runtime import launch
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.footprint import footprint
from mirage_jax.mugraph.graph import KernelGraph, Schedule
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.search.candidates import Candidate
from mirage_jax.search.driver import search
from mirage_jax.verify.equivalence import certificate as certificates
from mirage_jax.why_not import us


def preview(fn: Callable[..., Any], arguments: Sequence[Any], device: str, budget: Budget) -> str:
    """The text; `UsageError` for a device that is no GPU with a description."""
    model = described_gpu(device)
    regions = analyse(jax.make_jaxpr(fn)(*arguments), remat=True).regions  # as a GPU would, by default
    lines = [f"{len(regions)} region{'s' * (len(regions) != 1)}, for {device}; proven, not measured"]
    for i, region in enumerate(regions):
        lines += [f"region {i}:", *_region(region, as_asked(region, model), budget)]
    return "\n".join(lines)


def _region(region: Region, device: DeviceModel, budget: Budget) -> Iterator[str]:
    program, precise = simplify_axes(region.graph), precisions(region)[0]
    yield str(program)
    found, report = search(program, device, space_for(region), budget.seconds, budget.states or 2_000_000)
    xla, limit = fused_estimate(program, device), max(lower_limit(program, device), device.shortest)
    yield f"XLA's code is estimated at {us(xla)}, {xla / limit:.1f}x of the limit {us(limit)}; {footprint(program)}"
    yield f"search: {report}"
    for candidate in found:
        if candidate.family == "kernels":
            try:
                yield from _kernels(program, candidate, as_precise(candidate.schedule, precise), xla)
                return
            except MirageError as why:
                yield f"a candidate is refused: {why}"
    yield "no candidate is a kernel"


def _kernels(program: KernelGraph, candidate: Candidate, schedule: Schedule, xla: float) -> list[str]:
    check_graph(candidate.graph)
    certificate = certificates.certify(program, candidate.graph)
    sources = launch.sources(candidate.graph, schedule, KERNEL_EMIT_OPTIONS)
    size = footprint(candidate.graph, candidate.schedule.part_counts)
    estimate = f"estimated at {us(candidate.seconds)}, {xla / candidate.seconds:.1f}x over XLA by the model; {size}"
    return [str(candidate.graph), str(certificate), estimate, *(source.text for source in sources if source)]
