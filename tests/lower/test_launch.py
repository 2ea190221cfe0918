"""Loading kernels, and lowering them through jax-triton for a GPU that is not there."""

import functools
import inspect
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as extend
from jax.interpreters import mlir
from lower.kernels import PROGRAMS, RAGGED, attention, rmsnorm, split_attention

from mirage_jax.errors import LoweringError
from mirage_jax.lower.runtime import aot, kernel_cache, triton_runtime
from mirage_jax.lower.runtime.launch import kernel_calls, run_cuda, sources
from mirage_jax.lower.runtime.triton_runtime import load_kernel, load_text
from mirage_jax.verify.exact.interpreters.memory import InterpretedMemory
from mirage_jax.verify.exact.interpreters.triton import interpret

triton = pytest.importorskip("triton")
pytest.importorskip("jax_triton")
pytest.importorskip("jax_cuda13_plugin")


def lowered(graph, schedule, run_library=None) -> str:
    """StableHLO for sm_90 of a leaf primitive that runs the graph, lowered on this machine."""
    leaf = extend.Primitive("leaf")
    leaf.multiple_results = True
    outputs = [graph.tensors[name] for name in graph.outputs]
    names = {"f16": jnp.float16, "f32": jnp.float32}
    shapes = [(tuple(graph.extent(a) for a in t.axes), names[t.dtype]) for t in outputs]
    leaf.def_abstract_eval(lambda *_: [jax.core.ShapedArray(*s) for s in shapes])

    def rule(*xs):
        return run_cuda(graph, schedule, xs, run_library, compute_capability=90)

    mlir.register_lowering(leaf, mlir.lower_fun(rule, multiple_results=True), platform="cuda")
    inputs = [jax.ShapeDtypeStruct([graph.extent(a) for a in t.axes], names[t.dtype]) for t in graph.inputs]
    return jax.jit(lambda *xs: leaf.bind(*xs)).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_lowers_for_cuda_without_a_gpu(name: str) -> None:
    program = PROGRAMS[name]("f16", **RAGGED[name])
    text = lowered(program.graph, program.schedule)
    assert kernel_calls(text) == len(program.graph.kernels)


def test_kernels_in_a_traced_program() -> None:
    """As they are timed, and compared with float64: JAX removes dead code around them, in every version of it."""
    program = rmsnorm()
    run = functools.partial(run_cuda, program.graph, program.schedule, run_library=None, compute_capability=90)
    inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.inputs()]
    once = jax.jit(lambda *xs: run(xs))
    both = jax.jit(lambda *all_inputs: [once(*xs) for xs in all_inputs]).trace(inputs, inputs)
    assert kernel_calls(both.lower(lowering_platforms=("cuda",)).as_text()) == len(program.graph.kernels)


def test_identical_lowerings() -> None:
    program = split_attention()
    assert lowered(program.graph, program.schedule) == lowered(program.graph, program.schedule)


def test_library_operators_go_to_the_caller() -> None:
    from mirage_jax.mugraph.graph import KernelGraph, Library, Load, Op, Tensor

    program = rmsnorm()
    total = Library(
        (Load("y", "Y", ("i", "j")),), Op("t", "sum", ("y",), ("i",), (("axes", ("j",)),)), Tensor("T", ("i",), "f16")
    )
    g = program.graph
    g = KernelGraph(g.inputs, (*g.kernels, total), ("T",), g.extents)
    schedule = type(program.schedule)((*program.schedule.kernels, type(program.schedule.kernels[0])()))
    text = lowered(g, schedule, lambda kernel, env: env["Y"].sum(-1))
    assert kernel_calls(text) == 1 and "stablehlo.reduce" in text


def test_one_kernel_per_text() -> None:
    """Identical layers share one kernel."""
    first, second = (sources(p.graph, p.schedule)[0] for p in (attention(), attention()))
    assert load_kernel(first) is load_kernel(second)


def test_wrong_shapes_never_reach_a_kernel() -> None:
    program = rmsnorm()
    x, w = program.inputs()
    with pytest.raises(LoweringError, match="input X"):
        run_cuda(program.graph, program.schedule, [jnp.asarray(x[:8]), jnp.asarray(w)], None)
    with pytest.raises(LoweringError, match="input W"):
        run_cuda(program.graph, program.schedule, [jnp.asarray(x), jnp.asarray(w, jnp.float32)], None)


def test_interpretation_leaves_gluon_alone() -> None:
    """Gluon wraps what it finds in Triton's language when it is imported: never the interpreter's patches."""
    code = (
        "from lower.kernels import attention; from mirage_jax.verify.exact.interpreters.triton import interpret;"
        "p = attention(); interpret(p.graph, p.schedule, p.inputs());"
        "import inspect; from triton.experimental.gluon import language as gl;"
        "raise SystemExit('_semantic' not in inspect.signature(gl.exp2).parameters)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


def test_a_kernel_compiles_while_another_one_is_interpreted(monkeypatch) -> None:
    """The interpreter changes Triton's words for all threads: who compiles meanwhile waits, with the same result."""
    program, other = rmsnorm(), attention()
    wanted = lowered(other.graph, other.schedule)
    load_text.cache_clear()  # a text is compiled once
    load, compiling = InterpretedMemory.load, list[Future[str]]()

    def load_meanwhile(self, *args):
        if not compiling:
            compiling.append(pool.submit(lowered, other.graph, other.schedule))
            wait(compiling, 1.0)
        return load(self, *args)

    monkeypatch.setattr(InterpretedMemory, "load", load_meanwhile)
    with ThreadPoolExecutor() as pool:
        interpret(program.graph, program.schedule, program.inputs())
        assert compiling[0].result() == wanted


def test_import_leaves_triton_alone() -> None:
    """The CPU-only install has no Triton."""
    code = "import sys, mirage_jax.lower.runtime.launch, mirage_jax.lower.runtime.aot; " \
           "import mirage_jax.verify.exact.interpreters.triton; " \
           "sys.exit('triton' in sys.modules or 'jax_triton' in sys.modules)"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_runs_on_a_gpu(name: str) -> None:
    for sizes in ({}, RAGGED[name], {"i": 1}):
        program = PROGRAMS[name]("f16", **sizes)
        inputs = program.inputs()
        (got,) = jax.jit(lambda *xs, p=program: run_cuda(p.graph, p.schedule, xs, None))(*map(jnp.asarray, inputs))
        want = program.want(inputs)
        assert np.abs(np.asarray(got, np.float64) - want).max() < 2e-3 * np.abs(want).max()


def test_a_kernel_that_does_not_fit_is_refused_when_it_is_compiled(monkeypatch) -> None:
    library = aot.jax_triton_library()
    compile_kernel, compiled = inspect.unwrap(library.compile_ttir_inplace), []
    counted = lambda *args: compiled.append(1) or compile_kernel(*args)  # noqa: E731
    monkeypatch.setattr(library, "compile_ttir_inplace", counted)
    aot.refuse_what_does_not_fit()
    program = attention("f16", i=64)
    lowered(program.graph, program.schedule)  # as it is, it may be launched
    monkeypatch.setattr(aot, "shared_limit", lambda arch: 16)
    program = attention("f16", i=80)
    for _ in range(2):  # no cache remembers it as compiled
        with pytest.raises(LoweringError, match=r"mirage_attention takes \d+ bytes of shared memory, sm_90 has 16"):
            lowered(program.graph, program.schedule)
    assert len(compiled) == 2, "each kernel once, a refused one too"


def test_a_kernel_that_takes_the_assembler_too_long_is_refused(monkeypatch) -> None:
    library = aot.jax_triton_library()
    monkeypatch.setattr(library, "compile_ttir_inplace", library.compile_ttir_inplace)  # undone at the end
    monkeypatch.setattr(aot, "MAX_PTXAS_SECONDS", 1e-3)
    aot.refuse_what_does_not_fit()
    program = attention("f16", i=96)
    with pytest.raises(LoweringError, match=r"mirage_attention takes ptxas more than 0.001 s"):
        lowered(program.graph, program.schedule)


def test_what_is_refused() -> None:
    assert aot.refusal(aot.Resources(90, 1000, 255, 0, ""), 256) == ""
    assert "255 registers in each of 512 threads" in aot.refusal(aot.Resources(90, 1000, 255, 0, ""), 512)
    assert "spills 5000 bytes" in aot.refusal(aot.Resources(90, 1000, 255, 5000, ""), 128)
    assert "sm_121 has 101376" in aot.refusal(aot.Resources(121, 200000, 32, 0, ""), 128)


@pytest.fixture
def triton_cache(tmp_path, monkeypatch):
    """A directory of compiled kernels, and the list of those that were compiled."""
    compiled: list[str] = []
    library = aot.jax_triton_library()
    compile_kernel = inspect.unwrap(library.compile_ttir_inplace)

    def counting(ttir, *rest):
        compiled.append(str(ttir))
        return compile_kernel(ttir, *rest)

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(library, "compile_ttir_inplace", kernel_cache.kept(counting, library.CompilationResult))
    return tmp_path, compiled


def as_by_another_process(program) -> str:
    """StableHLO of a program whose kernels this process has forgotten."""
    for source in filter(None, sources(program.graph, program.schedule)):
        load_kernel(source)._jT_kernel_cache = {}
    return lowered(program.graph, program.schedule)


def test_kernels_carry_no_debugging_information(triton_cache, monkeypatch) -> None:
    """It is half of a program's text, and names the folder of Triton's library."""
    library, made = aot.jax_triton_library(), []
    kernels = library.triton_kernel_call_lib
    compile_kernel = triton_runtime._without_debugging(library.compile_ttir_inplace)
    monkeypatch.setattr(library, "compile_ttir_inplace", compile_kernel)
    real = inspect.unwrap(kernels.TritonKernel)
    monkeypatch.setattr(kernels, "TritonKernel", triton_runtime._without_source(lambda *x: made.append(x) or real(*x)))
    program = attention("f16", i=144)
    lowered(program.graph, program.schedule)
    ((name, *_, ptx, ttir, _),) = made
    assert name == "mirage_attention" and ttir == ""
    assert not re.search(r"\.loc|\.file|\.section|//|\.py", ptx)
    assert aot._ptxas(ptx, 90)[0] > 32


def test_a_compiled_kernel_is_kept(triton_cache) -> None:
    """As another process would find it: this one has forgotten."""
    directory, compiled = triton_cache
    again = functools.partial(as_by_another_process, attention("f16", i=48))
    first = again()
    assert again() == first and len(compiled) == 1
    (file,) = directory.glob("*/mirage_jax.json")
    file.write_text(file.read_text().replace("ld.global", "ld.shared"))  # rot
    assert again() == first and len(compiled) == 2
    assert as_by_another_process(attention("f16", i=112)) != first and len(compiled) == 3


def test_what_another_process_tried_is_not_compiled_again(triton_cache) -> None:
    """It keeps its kernels in a folder that this process lends, and this one keeps what it used of them."""
    directory, compiled = triton_cache
    library = aot.jax_triton_library()
    ours = library.compile_ttir_inplace
    again = functools.partial(as_by_another_process, attention("f16", i=52))
    with kernel_cache.lent_folder() as (folder,):
        aot.refuse_what_does_not_fit(folder)  # as the other process does
        first = again()
        library.compile_ttir_inplace = ours
        assert len(os.listdir(folder)) == 1 == len(compiled) and not list(directory.glob("*/mirage_jax.json"))
        assert again() == first and len(compiled) == 1
    assert not os.path.exists(folder)
    assert again() == first and len(compiled) == 1 and list(directory.glob("*/mirage_jax.json"))


def test_without_room_for_a_folder_kernels_are_compiled_again(monkeypatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with kernel_cache.lent_folder() as folders:
        assert folders == ()


def test_nothing_can_be_kept(triton_cache, monkeypatch) -> None:
    directory, compiled = triton_cache
    monkeypatch.setattr(triton.knobs.cache, "dir", str(directory / "file"))
    (directory / "file").write_text("in the way")
    program = attention("f16", i=176)
    assert kernel_calls(lowered(program.graph, program.schedule)) == len(compiled) == 1
