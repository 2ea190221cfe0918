"""Kernels between guard zones: wrong ones are caught. Triton's interpreter stands in for the GPU."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from lower.kernels import PROGRAMS, RAGGED

from mirage_jax.audit import redzones
from mirage_jax.errors import KernelFault
from mirage_jax.lower.runtime.launch import sources
from mirage_jax.verify.exact.interpreters.triton import interpret, interpret_kernel

pytest.importorskip("triton")


def interpreted(source, inputs, outputs) -> list[np.ndarray]:
    return interpret_kernel(source, inputs, before=outputs)


def ragged(name: str):
    return PROGRAMS[name]("f16", **RAGGED[name])


@pytest.mark.parametrize("name", PROGRAMS)
def test_right_kernels(name: str) -> None:
    program = ragged(name)
    inputs = program.inputs()
    have = redzones.run_guarded(program.graph, program.schedule, inputs, launch=interpreted)
    want = interpret(program.graph, program.schedule, inputs)
    assert [x.tobytes() for x in have] == [y.tobytes() for y in want]


@pytest.fixture(params=["interpreter", pytest.param("device", marks=pytest.mark.gpu)])
def launch(request):
    return interpreted if request.param == "interpreter" else redzones.launch_on_gpu


def run_changed(launch, old: str, new: str, **sizes) -> np.ndarray:
    """The result of ntrans with another text."""
    program = PROGRAMS["ntrans"]("f16", **sizes)
    (source,) = sources(program.graph, program.schedule)
    inputs = dict(zip((t.name for t in program.graph.inputs), program.inputs(), strict=True))
    assert source.text.count(old) == 1
    changed = replace(source, text=source.text.replace(old, new))
    return redzones.run_kernel(changed, [inputs[n] for n in source.inputs], launch)[0]


def test_a_store_without_its_mask(launch) -> None:
    with pytest.raises(KernelFault, match=r"stores outside of it, into 27 of elements 37 to 63, where there are 37"):
        run_changed(launch, ".to(tl.float16), mask=k_mask)", ".to(tl.float16))", i=1, k=37)


def test_a_store_before_the_first_element(launch) -> None:
    with pytest.raises(KernelFault, match="into 1 of elements -1 to -1"):
        run_changed(launch, "tl.store(out0", "tl.store(out0 - 1", i=3, k=37)


def test_an_element_that_is_never_written(launch) -> None:
    with pytest.raises(KernelFault, match=r"21 of 111 elements of output Y are never written.*the first at .0, 30."):
        run_changed(launch, ".to(tl.float16), mask=k_mask)", ".to(tl.float16), mask=k < 30)", i=3, k=37)


def test_a_load_outside_shows_in_the_result(launch) -> None:
    """What lies around an input is NaN."""
    y = run_changed(launch, "tl.load(in0", "tl.load(in0 - 1", i=3, k=37)
    assert np.isnan(y[0]).any() and not np.isnan(y[1:]).any()


@pytest.mark.parametrize("name", PROGRAMS)
def test_lowers_and_compiles(name: str) -> None:
    """The guarded text is what is launched, into the arrays that are given."""
    pytest.importorskip("jax_triton")
    pytest.importorskip("jax_cuda13_plugin")
    from mirage_jax.lower.backends import compile_for

    program = ragged(name)
    for source in sources(program.graph, program.schedule):
        guarded = redzones.guarded_source(source)
        assert guarded.text.startswith(source.text) and "out0 + " not in source.text.partition("tl.store")[0]
        assert compile_for(guarded, 90).fits
        arrays = [
            jax.ShapeDtypeStruct(shape, np.dtype({"f16": "float16", "f32": "float32"}[d]))
            for shape, d in zip([(20000,)] * len(source.inputs) + list(guarded.shapes), source.dtypes, strict=True)
        ]
        call = jax.jit(redzones.guarded_call(guarded, 90))
        text = call.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("triton_kernel_call_ffi") == 1
        assert text.count("stablehlo.output_operand_alias") == len(source.outputs)
