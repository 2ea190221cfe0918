"""Layers whose forward pass is one kernel on a GPU: found, proven, and their text compared with the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxpr_frontend.replacing import analysis
from layers.layers import LAYERS

from mirage_jax.bench.programs import program
from mirage_jax.compiler.tuning_session import space_for
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.lower.backends import compile_for
from mirage_jax.lower.runtime.launch import sources
from mirage_jax.mugraph.dtypes import is_float
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import BlockGraph
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.search.driver import search
from mirage_jax.verify.equivalence.certificate import certify
from mirage_jax.verify.exact.interpreters.triton import interpret

ONE_KERNEL = (
    "attention",
    "bias of grouped queries",
    "mask",
    "causal",
    "padding",
    "segment ids",
    "soft cap",
    "attention dropout",
    "rms norm",
    "layer norm alone",
    "elu mlp",
    "cross entropy",
    "cross entropy of optax",
    "int8 weights",
    "int8 weights, scaled late",
    "packed int4 weights",
    "dropout",
)
# what other tests do not have
COMPILED = ("elu mlp", "cross entropy", "int8 weights", "int8 weights, scaled late", "packed int4 weights")


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name: str) -> None:
    layer = LAYERS[name]
    (region,) = analysis(layer.fn, *layer.args).regions
    reference = simplify_axes(region.graph)
    found, _ = search(reference, DEVICES["H200"], space_for(region), seconds=120.0, states=20_000)
    best = next(c for c in found if c.family == "kernels")
    (kernel,) = best.graph.kernels
    assert isinstance(kernel, BlockGraph)
    certify(reference, best.graph)
    (source,) = sources(best.graph, best.schedule)
    assert source is not None
    if name not in COMPILED:
        return
    assert compile_for(source, 90).fits
    values = _operands(region)
    shapes = [tuple(map(reference.extent, t.axes)) for t in reference.inputs]  # of fewer axes than the region's own
    tensors = [np.asarray(x).reshape(n) for x, n in zip(region.prepare(values), shapes, strict=True)]
    made = interpret(best.graph, best.schedule, tensors)
    have = [jnp.asarray(x).reshape(shape) for x, (shape, _) in zip(made, region.tensor_types(), strict=True)]
    for x, y in zip(region.finish(have), region.reference(*values), strict=True):
        x, y = x.astype("float32"), y.astype("float32")
        np.testing.assert_allclose(x, y, rtol=2e-2, atol=2e-2 * float(jnp.abs(y).max()))


@pytest.mark.parametrize("name", ["w8a16", "w4a16"])
def test_scales_of_groups(name: str) -> None:
    """One kernel goes through the groups: a product for each, then its scale. Nothing is unpacked in memory."""
    p = program(name)
    (region,) = analysis(p.fn, *p.inputs).regions
    reference = simplify_axes(region.graph)
    found, _ = search(reference, DEVICES["H200"], space_for(region), seconds=120.0, states=60_000)
    best = next(c for c in found if c.family == "kernels" and not c.schedule.parts)
    (kernel,) = best.graph.kernels
    assert isinstance(kernel, BlockGraph)
    certify(reference, best.graph)
    assert kernel.loop is not None and reference.extent(kernel.loop) == 32
    assert best.schedule.kernels[0].tile(kernel.loop) == 1
    (source,) = sources(best.graph, best.schedule)
    assert source is not None and compile_for(source, 90).fits
    small = {a: min(n, 4 if a == kernel.loop else 32) for a, n in reference.extents}
    rng = np.random.default_rng(0)
    shapes = [[small[a] for a in t.axes] for t in reference.inputs]
    tensors = [
        rng.integers(0, 256, n, np.uint8) if t.dtype == "u8" else rng.standard_normal(n).astype(np.float16)
        for t, n in zip(reference.inputs, shapes, strict=True)
    ]
    (result,) = interpret(best.graph.with_extents(small), best.schedule, tensors)
    (wanted,) = run(reference.with_extents(small), tensors)
    np.testing.assert_allclose(result, wanted, rtol=0, atol=5e-3 * np.abs(wanted).max())


def _operands(region) -> list[jax.Array]:
    """Values of the region's inputs: of weights in 8 bits any, of labels those that exist."""
    rng, out = np.random.default_rng(0), []
    for b in region.inputs:
        aval = region.avals[b.value]
        if is_float(aval.dtype):
            out.append(jnp.asarray(0.3 * rng.normal(size=aval.shape), aval.dtype))
        else:
            low = -128 if aval.dtype == jnp.int8 else 0
            out.append(jnp.asarray(rng.integers(low, 48, aval.shape), aval.dtype))
    return out
