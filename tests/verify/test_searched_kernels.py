"""The search's best kernels for published programs, at their own tile sizes, pass the exact check."""

import jax
import pytest

from mirage_jax.bench.programs import program
from mirage_jax.compiler.region import as_asked
from mirage_jax.compiler.tuning_session import space_for
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.search.candidates import Candidate, kind
from mirage_jax.search.driver import search
from mirage_jax.verify.exact.exact_check import exact_check

pytest.importorskip("triton")

NAMES = ("gqa_b1", "gqa_b8", "mha_b1", "rmsnorm_b8", "gated_mlp_b8", "lora_b8", "causal_bf16_d64")


@pytest.mark.parametrize("name", NAMES)
def test_best_of_each_kind(name: str) -> None:
    """A sum that is split over the grid is followed by a kernel that adds up: what one stores, the other reads."""
    made = program(name)
    (region,) = analyse(jax.make_jaxpr(made.fn)(*made.inputs)).regions
    device = as_asked(region, DEVICES["H200"])
    found, _ = search(simplify_axes(region.graph), device, space_for(region), 20.0)
    best: dict[object, Candidate] = {}
    for c in found:
        if c.family == "kernels":
            best.setdefault(kind(c), c)
    assert best
    for c in best.values():
        assert exact_check(c.graph, c.schedule) == "", c.graph
