"""Kernels with specialized warps: right on exact numbers under any order of their tasks, and no wait too many."""

import functools
import re
from dataclasses import replace
from fractions import Fraction as Q
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from lower.kernels import (
    NUMPY,
    PROGRAMS,
    Block,
    Program,
    attention,
    gated_mlp,
    graph,
    rmsnorm,
    schedule,
    split_attention,
    tensor,
)
from lower.test_launch import as_by_another_process, lowered
from lower.test_loop_bounds import sized
from mugraph.graphs import CAUSAL_BOUNDS, WINDOW

from mirage_jax.compiler import specialization
from mirage_jax.compiler.specialization import specialized
from mirage_jax.errors import GraphError, KernelFault, UnsupportedError
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.lower.backends import compile_for
from mirage_jax.lower.runtime import aot
from mirage_jax.lower.runtime.launch import launches, run_cuda, sources
from mirage_jax.lower.triton.emitter import EmitOptions, KernelSource
from mirage_jax.mugraph import evaluate
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, KernelSchedule, Precision, Schedule
from mirage_jax.mugraph.schedule_json import schedule_from_json, schedule_to_json
from mirage_jax.mugraph.views import View, ViewStep
from mirage_jax.verify.exact.exact_check import disagreement, exact_check
from mirage_jax.verify.exact.interpreters.gluon import Barrier, Tasks
from mirage_jax.verify.exact.interpreters.triton import interpret, interpret_kernel

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

type Sized = tuple[KernelGraph, Schedule]


def as_specialized(p: Program, tiles: dict[str, int], stages: int = 2, row: str = "i") -> Sized:
    """A program whose first kernel has specialized warps, one warpgroup for 64 elements of an axis."""
    first, *others = p.schedule.kernels
    own = KernelSchedule(
        tuple((a, tiles.get(a, n)) for a, n in first.tiles), tiles[row] // 16, stages, specialized=True
    )
    return p.graph, replace(p.schedule, kernels=(own, *others))


def several(graph: KernelGraph, schedule: Schedule, programs: int = 3) -> Sized:
    """Each program computes several blocks."""
    first, *others = schedule.kernels
    return graph, replace(schedule, kernels=(replace(first, programs=programs), *others))


def precise(graph: KernelGraph, schedule: Schedule) -> Sized:
    first, *others = schedule.kernels
    return graph, replace(schedule, kernels=(replace(first, precise=Precision.SPLIT_ALL), *others))


def masked(program: object, rows: int, columns: int, stages: int = 2) -> Sized:
    graph = sized(program, "online", 512, "f16").with_extents({"n": 512, "n'": 512, "d": 64, "e": 64})  # type: ignore[arg-type]
    return graph, Schedule((KernelSchedule((("n'", rows), ("n", columns)), rows // 16, stages, specialized=True),))


def backward() -> Program:
    """As for the gradients of keys and values: late products read what early ones read, and one number twice."""
    b = Block("backward", "h j", "i")
    k, v, q, gradient = b.load("K", "h j d"), b.load("V", "h j d"), b.load("Q", "h i d"), b.load("G", "h i d")
    p = b.exps(b.dot(k, q, axes="d"), b.load("M", "h i"), scale=Q(1, 16))
    d = b.mul(p, b.add(b.dot(v, gradient, axes="d"), b.load("D", "h i"), cb=-1))
    of_keys, of_values = b.acc(b.dot(d, q, axes="i")), b.acc(b.dot(p, gradient, axes="i"))
    b.store(tensor("Y", "h j d", "f16"), b.add(b.add(of_keys, of_values), b.acc(b.dot(p, q, axes="i"))))
    shapes = {"K": "h j d", "V": "h j d", "Q": "h i d", "G": "h i d", "M": "h i", "D": "h i"}
    inputs = [tensor(name, axes, "f32" if name in "MD" else "f16") for name, axes in shapes.items()]
    g = graph(inputs, [b], "Y", {"h": 2, "i": 512, "j": 256, "d": 64})
    return Program(g, schedule({"h": 1, "j": 128, "i": 64}), lambda *arrays: arrays[0])


def statistics() -> Program:
    """As that pass begins: row sums of weights and of their gradients. No product is summed, and operands are given
    with the loop's axis first.
    """
    b = Block("statistics", "h i", "j")
    k, v, q, gradient = b.load("K", "h j d"), b.load("V", "h j d"), b.load("Q", "h i d"), b.load("G", "h i d")
    s = b.dot(k, q, axes="d")
    m = b.shift(s, axes="j", scale=Q(1, 16))
    p = b.exps(s, m, scale=Q(1, 16))
    of_gradients = b.accs(b.dot(b.dot(v, gradient, axes="d"), p, axes="j"), m)
    b.store(tensor("Y", "h i", "f32"), b.div(of_gradients, b.accs(b.sum(p, axes="j"), m)))
    inputs = [tensor(x, "h j d" if x in "KV" else "h i d", "f16") for x in "KVQG"]
    g = graph(inputs, [b], "Y", {"h": 2, "i": 256, "j": 512, "d": 64})
    return Program(g, schedule({"h": 1, "i": 128, "j": 64}), lambda *arrays: arrays[0])


FLASH = attention("f16", h=2, i=512, n=512, d=64, tiles={"h": 1, "i": 128, "n": 64})
GATED = gated_mlp("f16", i=512, k=512, j=256, tiles={"i": 128, "j": 64, "k": 64})
NORM = rmsnorm("f16", i=512, k=512, j=256, tiles={"i": 128, "j": 128, "k": 64})
CASES: dict[str, Sized] = {
    "attention": as_specialized(FLASH, {"i": 128, "n": 64}),
    "attention, three stages": as_specialized(FLASH, {"i": 128, "n": 64}, 3),
    "attention, one warpgroup": as_specialized(FLASH, {"i": 64, "n": 128}),
    "attention, bf16": as_specialized(
        attention("bf16", h=2, i=256, n=256, d=128, tiles={"h": 1, "i": 128, "n": 64}), {"i": 128}
    ),
    "split attention": as_specialized(
        split_attention("f16", i=256, n=512, d=64, tiles={"h": 1, "i": 128, "n": 64, "n.g": 1}), {"i": 128}
    ),
    "causal attention": masked(CAUSAL_BOUNDS, 128, 64),
    "causal attention, wide steps": masked(CAUSAL_BOUNDS, 64, 128, 3),
    "a window of attention": masked(WINDOW, 128, 64),
    "gated MLP": as_specialized(GATED, {"i": 128}, 4),
    "gated MLP, one warpgroup": as_specialized(GATED, {"i": 64, "j": 128}, 2),
}
CASES["norm of what is multiplied"] = as_specialized(NORM, {"i": 128, "j": 128, "k": 64}, 3)
CASES["attention, more precise"] = precise(*CASES["attention"])
CASES["gradients"] = as_specialized(backward(), {"i": 32, "j": 128}, 3, row="j")
CASES["row sums of gradients"] = as_specialized(statistics(), {"i": 128, "j": 64}, 2)
CASES |= {
    f"{name}, several blocks": several(*CASES[name])
    for name in (
        "attention, three stages",
        "causal attention",
        "attention, more precise",
        "gated MLP",
        "norm of what is multiplied",
        "gradients",
        "row sums of gradients",
    )
}
every_case = pytest.mark.parametrize("case", CASES)


def source_of(case: str) -> KernelSource:
    source = sources(*CASES[case])[0]
    assert source is not None
    return source


@every_case
def test_exact(case: str) -> None:
    assert exact_check(*CASES[case]) == ""


@pytest.mark.parametrize("program, case", [(FLASH, "attention"), (GATED, "gated MLP")], ids=["attention", "gated"])
def test_floats(program: Program, case: str) -> None:
    inputs = program.inputs()
    (have,), want = interpret(*CASES[case], inputs), program.want(inputs)
    assert np.abs(have - want).max() < 3e-3 * np.abs(want).max()


def test_operands_that_lie_in_others() -> None:
    """Queries, keys and values are parts of one projection: blocks are copied from where they lie."""
    graph, schedule = CASES["attention"]
    whole = (2, 512, 192)
    parts = {"Q": 0, "V": 128}
    views = {
        name: View(whole, (ViewStep(whole, (0, 0, n), (2, 512, n + 64)),), (2, 512, 64)) for name, n in parts.items()
    }
    options = EmitOptions(views=tuple(views.items()))
    source = sources(graph, schedule, options)[0]
    assert source is not None and [d and d.shape for d in source.descriptors] == [(1024, 192), (128, 512), (1024, 192)]
    assert exact_check(graph, schedule, options) == ""
    rng = np.random.default_rng(0)
    q, k, v = FLASH.inputs()
    projected = rng.standard_normal(whole).astype(np.float16)
    projected[:, :, :64], projected[:, :, 128:] = q, v
    (have,) = interpret(graph, schedule, [projected, k, projected], options=options)
    assert np.abs(have - FLASH.want([q, k, v])).max() < 3e-3
    bad = View((2, 512, 66), (ViewStep((2, 512, 66), (0, 0, 2), (2, 512, 66)),), (2, 512, 64))
    with pytest.raises(UnsupportedError, match="lines of 66"):
        sources(graph, schedule, EmitOptions(views=(("Q", bad),)))


@every_case
def test_compiles(case: str) -> None:
    """For Hopper: with all warps, and registers that are handed from the warp that loads to those that compute."""
    groups = CASES[case][1].kernels[0].num_warps // 4
    found = compile_for(source_of(case), 90)
    assert found.fits and not found.spills
    assert f".reqntid {32 * 4 * (groups + 1)}" in found.ptx
    assert ("setmaxnreg" in found.ptx) and "wgmma.mma_async" in found.ptx and "cp.async.bulk.tensor" in found.ptx


def test_processes_that_try_kernels_run_the_passes_of_gluon(monkeypatch) -> None:
    """They keep what they compile elsewhere, and so unwrap jax-triton's compiler."""
    from triton.backends.nvidia.compiler import CUDABackend

    library, passes, ran = aot.jax_triton_library(), CUDABackend.gluon_to_ttgir, []
    monkeypatch.setattr(CUDABackend, "gluon_to_ttgir", lambda *args: ran.append(1) or passes(*args))
    monkeypatch.setattr(library, "compile_ttir_inplace", library.compile_ttir_inplace)  # what follows is undone
    aot.refuse_what_does_not_fit()
    graph, schedule = CASES["attention"]
    as_by_another_process(SimpleNamespace(graph=graph, schedule=schedule))
    assert ran


@pytest.mark.parametrize("case", ["attention", "gated MLP, several blocks"])
def test_is_lowered_for_a_gpu_that_is_not_there(case: str) -> None:
    """The copy engine's descriptors are among the operands of the call."""
    assert "@triton_kernel_call_ffi(" in lowered(*CASES[case])


@pytest.mark.gpu
@every_case
def test_on_a_gpu(case: str) -> None:
    """Near float64, and the same bits a hundred times."""
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs a Hopper GPU")
    graph, schedule = CASES[case]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([graph.extent(a) for a in t.axes]).astype(NUMPY[t.dtype]) for t in graph.inputs]
    run = jax.jit(lambda *xs: run_cuda(graph, schedule, xs, None)[0])
    have = [np.asarray(run(*arrays)) for _ in range(100)]
    assert len({x.tobytes() for x in have}) == 1
    (want,) = evaluate.run(graph, arrays)
    assert np.abs(have[0].astype(np.float64) - want).max() < 2e-2 * np.abs(want).max()


def wrong(case: str, text: str) -> str:
    """What the exact check says of a kernel with another text."""
    graph, schedule = CASES[case]
    kernel, source = graph.kernels[0], replace(source_of(case), text=text)
    assert isinstance(kernel, BlockGraph)
    return disagreement(kernel, graph, schedule.kernels[0], schedule.part_counts, source)


ORDERING = re.compile(r"^( +)(?:.*= warpgroup_mma_wait\(|mbarrier\.(?:wait|arrive|expect|init)\(|copy_tile\()")


def test_precise_products() -> None:
    """Probabilities are two numbers of 16 bits: nearly all results are what their own rounding makes of float64's."""
    inputs = FLASH.inputs()
    rounded = FLASH.want(inputs).astype(np.float16)
    names = ("attention, more precise", "attention")
    more, less = ((interpret(*CASES[name], inputs)[0] != rounded).mean() for name in names)
    assert more < 0.02 and less > 10 * more


@pytest.mark.parametrize(
    "case",
    [
        "attention",
        "gated MLP",
        "norm of what is multiplied",
        "gradients",
        "attention, more precise",
        "attention, three stages, several blocks",
        "gated MLP, several blocks",
        "gradients, several blocks",
    ],
)
def test_every_line_that_orders_counts(case: str) -> None:
    """Without it, some order of tasks reads what is not there, overwrites what is read, or waits forever."""
    lines = source_of(case).text.splitlines()
    complete = next((n for n, line in enumerate(lines) if "_complete_load(" in line), len(lines))
    found = [n for n, line in enumerate(lines[:complete]) if ORDERING.match(line)]
    assert len(found) >= 15
    for n in found:
        indent = lines[n][: len(lines[n]) - len(lines[n].lstrip())]
        mutant = "\n".join([*lines[:n], f"{indent}pass", *lines[n + 1 :]]) + "\n"
        assert wrong(case, mutant), f"not needed: {lines[n].strip()}"


MUTANTS: dict[str, tuple[str, str, str]] = {
    "a tile is given back before its product is done": (
        "gated MLP",
        r"free\.index\(\(step \+ 3\) % 4\), count=1, pred=step > 0",
        "free.index(step % 4), count=1",
    ),
    "an early product is not waited for": ("attention", r"warpgroup_mma_wait\(1,", "warpgroup_mma_wait(2,"),
    "the warp that loads waits for the wrong phase": ("attention", r" \^ 1\)", ")"),
    "a late product reads the tile of another step": (
        "attention",
        r"tile2\.index\(\(step - 1\) % 2\)",
        "tile2.index(step % 2)",
    ),
    "sums are not rescaled": ("attention", r"acc\d+ \* decay\d+\[:, None\]", "acc4"),
    "both warpgroups have the same rows": ("attention", r"index\(group\)", "index(0)"),
    "a copy from the neighbour": ("attention", r"\+ 64, 0\]", "+ 63, 0]"),
    "fewer bytes than are copied": ("attention", r"(mbarrier\.expect\(full\.index\(.*), \d+\)", r"\1, 16)"),
    "one arrival for two warpgroups": ("attention", r"(mbarrier\.init\(free.*count)=2", r"\1=1"),
    "steps of the last block are forgotten": ("attention, three stages, several blocks", r"done \+= 8", "done += 0"),
    "operands of the last block are taken for the next one's": (
        "attention, three stages, several blocks",
        r"wait\(kept\.index\(0\), turn & 1\)",
        "wait(kept.index(0), 0)",
    ),
    "a block is left out": ("gated MLP, several blocks", r"range\(\((\d+) - program\)", "range((2 - program)"),
    "every turn goes the same way": (
        "causal attention, several blocks",
        r" \+ \(turn & 1\) \* \(2 - 2 \* program\)",
        "",
    ),
}


@pytest.mark.parametrize("mutation", MUTANTS)
def test_wrong_orders_are_found(mutation: str) -> None:
    case, pattern, instead = MUTANTS[mutation]
    text, count = re.subn(pattern, instead, source_of(case).text)
    assert count and wrong(case, text)


def test_tasks_that_wait_for_each_other() -> None:
    tasks = Tasks(np.random.default_rng(0))
    barriers = [Barrier(1, 1), Barrier(1, 1)]

    def task(n: int) -> None:
        tasks.wait_until(lambda: barriers[n].completed == 1)
        barriers[1 - n].arrived(1, tasks.clock)

    with pytest.raises(KernelFault, match="wait for each other"):
        tasks.run([lambda: task(0), lambda: task(1)])


REFUSED: dict[str, tuple[Sized, str]] = {
    "rows that no warpgroups divide": (as_specialized(FLASH, {"i": 32}), "warpgroups"),
    "ragged tiles": (
        as_specialized(attention("f16", h=2, i=500, n=512, d=64, tiles={"h": 1, "i": 128, "n": 64}), {"i": 128}),
        "every tile is full",
    ),
    "32 bits": (
        as_specialized(gated_mlp("f32", i=256, k=256, j=128, tiles={"i": 128, "j": 64, "k": 64}), {"i": 128}),
        "not a product in the loop",
    ),
    "several blocks, without": (
        several(FLASH.graph, FLASH.schedule),
        "only programs with specialized warps compute several blocks",
    ),
    "too much for shared memory": (as_specialized(GATED, {"i": 128, "j": 256, "k": 128}, 4), "shared memory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    sized, why = REFUSED[case]
    with pytest.raises(UnsupportedError, match=why):
        sources(*sized)


def test_a_launch_of_its_own() -> None:
    first, *_ = GATED.graph.kernels
    assert isinstance(first, BlockGraph)
    second = replace(
        first, name="other", stores=tuple(replace(s, tensor=replace(s.tensor, name="Z")) for s in first.stores)
    )
    graph = replace(GATED.graph, kernels=(first, second), outputs=("Y", "Z"))
    (own,) = CASES["gated MLP"][1].kernels
    with pytest.raises(UnsupportedError, match="launch of its own"):
        list(launches(graph, Schedule((own, replace(own, specialized=False)), joint=True)))


def test_stored() -> None:
    for case in ("gated MLP", "gated MLP, several blocks"):
        schedule = CASES[case][1]
        assert schedule_from_json(schedule_to_json(schedule)) == schedule
    with pytest.raises(GraphError, match="specialized"):
        schedule_from_json({"kernels": [{"tiles": [], "num_warps": 8, "num_stages": 2, "specialized": 1}], "parts": []})
    with pytest.raises(GraphError, match="programs: found -1"):
        schedule_from_json({"kernels": [{"tiles": [], "num_warps": 8, "num_stages": 2, "programs": -1}], "parts": []})


@pytest.mark.parametrize("program", [FLASH, GATED], ids=["attention", "gated"])
def test_sizes_for_the_tuner(program: Program) -> None:
    """All are written and right; there are some on devices that have the instructions, and on no others."""
    found = specialized(program.graph, program.schedule, replace(DEVICES["H200"], blocks=2), most=100)
    assert {s.kernels[0].programs for s in found} == {0, 2}
    found = specialized(program.graph, program.schedule, DEVICES["H200"], most=100)
    assert len(found) > 3 and all(s.kernels[0].specialized for s in found)
    assert exact_check(program.graph, found[0]) == ""
    assert not specialized(program.graph, program.schedule, DEVICES["A100"], most=100)


def test_out_of_a_matrix() -> None:
    source = source_of("gated MLP")
    text = source.text.replace("* 128, at1]", "* 128 + 512, at1]")
    assert text != source.text
    inputs = [np.zeros(shape, np.float16) for shape in ((512, 512), (512, 256), (512, 256))]
    with pytest.raises(KernelFault, match="of a matrix of 512 x 512"):
        interpret_kernel(replace(source, text=text), inputs)


@pytest.mark.parametrize("name", PROGRAMS)
def test_sizes_that_are_not_asked_for_would_be_refused(name: str, monkeypatch) -> None:
    """What one size shows about a kernel's structure is true of all with the same axes of one element."""
    program = PROGRAMS[name]("f16")
    wide = program.graph.with_extents({a: 256 for a, _ in program.graph.extents})
    choose = functools.partial(specialized.__wrapped__, wide, program.schedule, DEVICES["H200"], 6)
    found = choose()
    monkeypatch.setattr(specialization, "StructureError", type("Never", (Exception,), {}))
    assert choose() == found and (found or name in ("lora", "ntrans", "qknorm_attention"))
