"""The benchmark programs: interpreter against float64, compilation for three GPU generations, golden text."""

import hashlib
import random
import re
from dataclasses import replace
from fractions import Fraction as Q

import numpy as np
import pytest
from lower.kernels import (
    PROGRAMS,
    RAGGED,
    Block,
    Program,
    attention,
    graph,
    rmsnorm,
    schedule,
    split_attention,
    tensor,
)

from mirage_jax.mugraph.graph import KernelSchedule, Precision, Schedule
from mirage_jax.mugraph.parser import parse

triton = pytest.importorskip("triton")

from mirage_jax.lower.backends import compile_for  # noqa: E402
from mirage_jax.lower.runtime.launch import sources  # noqa: E402
from mirage_jax.lower.triton.emitter import DEFAULT_OPTIONS, EmitOptions  # noqa: E402
from mirage_jax.verify.exact.exact_check import exact_check  # noqa: E402
from mirage_jax.verify.exact.interpreters.triton import interpret  # noqa: E402

TOLERANCE = {"f16": 2e-3, "bf16": 8e-3, "f32": 2e-6}  # of the largest output


def error(program: Program, seed: int = 0, options: EmitOptions = DEFAULT_OPTIONS) -> float:
    """Largest error over the largest output; one input set, float64 as reference."""
    inputs = program.inputs(seed)
    (got,) = interpret(program.graph, program.schedule, inputs, options=options)
    want = program.want(inputs)
    assert got.shape == want.shape
    return float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max())


@pytest.mark.parametrize("ragged", [False, True], ids=["divisible", "ragged"])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers(name: str, dtype: str, ragged: bool) -> None:
    program = PROGRAMS[name](dtype, **(RAGGED[name] if ragged else {}))
    assert error(program) < TOLERANCE[dtype]


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiles(name: str, arch: int) -> None:
    for sizes in ({}, RAGGED[name]):
        program = PROGRAMS[name]("f16", **sizes)
        for source in sources(program.graph, program.schedule):
            assert source is not None
            resources = compile_for(source, arch)
            assert resources.fits and resources.registers and not resources.spills
            assert ".target sm_" in resources.ptx


@pytest.mark.parametrize("name", ["rmsnorm", "lora", "gated_mlp", "attention", "split_attention", "qknorm_attention"])
def test_one_row(name: str) -> None:
    """Vectors times matrices, at one row and at one row per block."""
    assert error(PROGRAMS[name]("f16", i=1)) < TOLERANCE["f16"]
    assert error(PROGRAMS[name]("f32", i=1)) < TOLERANCE["f32"]


def test_one_row_per_block() -> None:
    program = attention(i=3, n=40, tiles={"h": 1, "i": 1, "n": 16})
    assert "single" in sources(program.graph, program.schedule)[0].text
    assert error(program) < TOLERANCE["f16"]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_vector_that_a_loop_computes(scaled: bool) -> None:
    """A vector that is read is a matrix of one row; one that each step computes is multiplied and summed."""
    scale = "%2[i] = mul %x0 %x2" if scaled else ""
    program = parse(f"""mugraph {{
      extents i=200 j=70
      input x0: bf16[i]
      input x1: bf16[i,j]
      input x2: bf16[i]
      kernel k0 grid(j) loop(i) {{
        %x0 = load x0[i]
        %x1 = load x1[i,j]
        {"%x2 = load x2[i]" if scaled else ""}
        {scale}
        %0[j] = dot{{axes=(i)}} {"%2" if scaled else "%x0"} %x1
        %1[j] = acc %0
        store t0: f32[j] = %1
      }}
      output t0
    }}""")
    sizes = Schedule((KernelSchedule((("i", 64), ("j", 32)), 4, 3),))
    (source,) = sources(program, sizes)
    assert source is not None and ("tl.dot" in source.text) != scaled
    assert "num_stages=3" in source.text or not scaled, "its loads are pipelined all the same"
    assert exact_check(program, sizes, DEFAULT_OPTIONS) == ""
    assert compile_for(source, 90).fits


def test_loops_together_and_apart() -> None:
    """A load with two uses: two loops, or one loop that loads it twice."""
    program = rmsnorm(i=5, k=50, j=27)
    apart, together = (
        sources(program.graph, program.schedule, EmitOptions(split_loops=s))[0].text for s in (True, False)
    )
    assert apart.count("for ") == 2 and together.count("for ") == 1
    assert together.count("tl.load(in0") == 2 and together.count("evict_last") == 1
    assert error(program, options=EmitOptions(split_loops=False)) < TOLERANCE["f16"]


@pytest.mark.parametrize("name", ["rmsnorm", "gated_mlp"])
def test_few_rows(name: str) -> None:
    """A matrix streams past a few rows: its long side gives the rows of the product, in one loop."""
    for j, shape in ((32, "(16, 32)"), (128, "(128, 16)")):
        program = PROGRAMS[name]("f16", i=5, k=200, j=140, tiles={"i": 8, "j": j, "k": 64})
        (source,) = sources(program.graph, program.schedule)
        assert source is not None and f"tl.full({shape}, 0.0, tl.float32)" in source.text
        assert source.text.count("for ") == 1 + (name == "rmsnorm" and j == 32)
        assert error(program) < TOLERANCE["f16"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", PROGRAMS)
def test_any_sizes(name: str, seed: int) -> None:
    """Random extents, tiles and parts: the text may differ wildly, the numbers may not."""
    rng = random.Random(f"{name} {seed}")
    sizes = {axis: rng.randint(1, 40) for axis in ("i", "k", "j", "n", "d", "r") if axis in RAGGED[name]}
    program = PROGRAMS[name]("f32", **sizes)
    kernels = tuple(
        replace(k, tiles=tuple((a, 1 if a == "h" else rng.choice([1, 3, 4, 8, 16, 32])) for a, _ in k.tiles))
        for k in program.schedule.kernels
    )
    parts = tuple((a, rng.randint(1, 4)) for a, _ in program.schedule.parts)
    assert error(replace(program, schedule=Schedule(kernels, parts)), seed) < 5e-6


def test_what_underflows_in_padded_lanes_is_masked() -> None:
    """The exponential of a mask's -60,000 is no 0 on exact numbers, on which texts are compared."""
    text = """mugraph {
      extents i=2 j=3
      input x0: bool[i,j]
      input x1: f16[i,j]
      kernel k0 grid(i) {
        %x0 = load x0[i,j]
        %x1 = load x1[i,j]
        %0[] = const{value=-60000}
        %1[i,j] = where %x0 %x1 %0
        %2[i,j] = exp %1
        %3[i] = sum{axes=(j)} %2
        store y: f16[i] = %3
      }
      output y
    }"""
    assert exact_check(parse(text), schedule({"i": 1})) == ""


def test_large_logits() -> None:
    """Logits in the thousands: nothing may overflow, and the rescaling must be right to matter."""
    assert error(attention("f32", i=20, n=50, d=24, spread=500.0)) < 1e-4


def test_empty_part() -> None:
    """Nine keys in four parts of three leave one part empty: its shift is -inf and its sums are 0."""
    assert error(split_attention(i=9, n=9, d=20, parts=4)) < TOLERANCE["f16"]


def test_tiles_that_are_no_powers_of_two() -> None:
    assert error(rmsnorm(i=7, k=50, j=50, tiles={"i": 7, "j": 12, "k": 20})) < TOLERANCE["f16"]


def test_bitwise_repeatable() -> None:
    program = split_attention(i=20, n=50, d=24, parts=3, scale=Q(1, 4))
    first, second = (interpret(program.graph, program.schedule, program.inputs())[0] for _ in range(2))
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("name", ["rmsnorm", "lora", "split_attention", "qknorm_attention"])
def test_golden(name: str, golden) -> None:
    program = PROGRAMS[name]("f16", **RAGGED[name])
    golden("\n\n".join(s.text for s in sources(program.graph, program.schedule) if s is not None))


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_subtracted_from_zero(name: str) -> None:
    """Triton's unary minus is 0 - x: an instruction that no fma takes in, and +0 where XLA has -0."""
    program = PROGRAMS[name]("f16")
    texts = [source.text for source in sources(program.graph, program.schedule) if source]
    assert not [match for text in texts for match in re.findall(r"[(,=] ?-[a-z(].*", text)]


def test_text_is_a_function_of_its_input() -> None:
    """Same text each time, for any names in the graph, and with nothing of these names that is not an identifier."""
    program = attention()
    text = sources(program.graph, program.schedule)[0].text
    renamed = str(program.graph).replace("%v", "%w")
    assert renamed != str(program.graph)
    assert (
        hashlib.sha256(text.encode()).digest()
        == hashlib.sha256(sources(program.graph, program.schedule)[0].text.encode()).digest()
    )


def test_interpretation_leaves_the_compiler_intact() -> None:
    """Compile, interpret, compile again, in one process."""
    program = rmsnorm()
    source = sources(program.graph, program.schedule)[0]
    before = compile_for(source, 90)
    assert error(program) < TOLERANCE["f16"]
    assert compile_for(source, 90) == before


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_precise_products(dtype: str) -> None:
    """A computed operand as two numbers of 16 bits is worth one of f32; the sum of two as one rounding is not."""
    b = Block("sums", "i j", "k")
    x, y, w = b.load("X", "i k"), b.load("Y", "i k"), b.load("W", "k j")
    b.store(tensor("Z", "i j", "f32"), b.acc(b.dot(b.add(x, y), w, axes="k")))
    inputs = [tensor("X", "i k", "f32"), tensor("Y", "i k", "f32"), tensor("W", "k j", dtype)]
    g = graph(inputs, [b], "Z", {"i": 16, "j": 16, "k": 64})
    errors = []
    for precise in (Precision.FAST, Precision.SPLIT_ALL):
        (sizes,) = schedule({"i": 16, "j": 16, "k": 32}).kernels
        sized = Schedule((replace(sizes, precise=precise),))
        assert exact_check(g, sized) == ""
        errors.append(error(Program(g, sized, lambda x, y, w: (x + y) @ w)))
    one, two = errors
    assert one > 1e-4 and two < one / 60


@pytest.mark.parametrize(
    ("dtype", "added", "dots"),
    [("f32", False, (1, 1, 2, 2, 1)), ("bf16", False, (1, 1, 1, 2, 1)), ("bf16", True, (1, 1, 2, 2, 1))],
    ids=str,
)
def test_products_that_are_rounded_anyway_may_be_less_precise(dtype: str, added: bool, dots: tuple[int, ...]) -> None:
    """A result of 16 bits needs no better operands, unless something is added to it that it might cancel."""
    b = Block("sums", "i j", "k")
    x, y, w = b.load("X", "i k"), b.load("Y", "i k"), b.load("W", "k j")
    total = b.affine(b.acc(b.dot(b.add(x, y), w, axes="k")), scale=Q(1, 8))
    b.store(tensor("Z", "i j", dtype), b.add(total, b.load("V", "i j")) if added else total)
    inputs = [
        tensor("X", "i k", "f32"),
        tensor("Y", "i k", "f32"),
        tensor("W", "k j", "bf16"),
        tensor("V", "i j", "f32"),
    ]
    g = graph(inputs if added else inputs[:3], [b], "Z", {"i": 16, "j": 16, "k": 64})
    (sizes,) = schedule({"i": 16, "j": 16, "k": 32}).kernels
    for precise, count in zip(Precision, dots, strict=True):
        (source,) = sources(g, Schedule((replace(sizes, precise=precise),)))
        assert source is not None and source.text.count("tl.dot") == count
        assert ("ieee" in source.text) == (precise is Precision.FLOAT32)  # an operand is computed


def test_products_of_float32_have_precise_forms() -> None:
    """Numbers are cut off for TF32, or rounded; with three products of two parts each, hardly a bit is lost. Without
    matrix units none is.
    """
    program = attention("f32")
    (sizes,) = program.schedule.kernels
    texts: list[str] = []
    for precise in (Precision.FAST, Precision.ROUNDED, Precision.SPLIT_FLOAT32_RESULTS, Precision.FLOAT32):
        sized = Schedule((replace(sizes, precise=precise),))
        (source,) = sources(program.graph, sized, EmitOptions(dot_precision="tf32"))
        assert source is not None and compile_for(source, 90).fits
        texts += re.findall(r'"(tf32\w*|ieee)"', source.text)
        assert ("8193.0" in source.text) == (precise is Precision.ROUNDED)
        assert exact_check(program.graph, sized, EmitOptions(dot_precision="tf32")) == ""
    assert texts == ["tf32"] * 8 + ["tf32x3"] * 4 + ["ieee"] * 4  # two products in each of two forms


def test_numbers_are_rounded_to_tf32() -> None:
    """To the nearest number of 11 bits; what has no more bits, infinities and NaN stay, up to the end of the range."""
    b = Block("product", "i j", "k")
    b.store(tensor("Z", "i j", "f32"), b.acc(b.dot(b.load("X", "i k"), b.load("W", "k j"), axes="k")))
    g = graph([tensor("X", "i k", "f32"), tensor("W", "k j", "f32")], [b], "Z", {"i": 16, "j": 16, "k": 16})
    (sizes,) = schedule({"i": 16, "j": 16, "k": 16}).kernels
    sized = Schedule((replace(sizes, precise=Precision.ROUNDED),))
    x = np.ldexp(np.random.default_rng(0).uniform(-2, 2, (16, 16)), np.arange(-120, 136, 16)[:, None]).astype("f4")
    x[0, :8] = [3, 2049 / 2048, 2**-149, np.inf, -np.inf, np.nan, np.finfo("f4").min, 0]
    (z,) = interpret(g, sized, [x, np.eye(16, dtype="f4")], options=EmitOptions(dot_precision="tf32"))
    mantissa, exponent = np.frexp(x.astype(np.float64))
    want = np.where(np.abs(x) < 2.0**113, np.ldexp(np.rint(mantissa * 2048) / 2048, exponent), x)
    finite = np.isfinite(x).all(1)
    assert (z[finite] == want[finite]).all() and not np.isfinite(z[0]).any()


def test_what_a_loop_computes_is_the_left_operand() -> None:
    """The left operand of a matrix instruction comes from registers, the right one from shared memory. The results are
    stored transposed, once.
    """
    b = Block("gradients", "m", "j")
    q, k, d = b.load("Q", "j l"), b.load("K", "m l"), b.load("D", "n j")
    p = b.exp(b.dot(k, q, axes="l"))
    b.store(tensor("Z", "n m", "bf16"), b.acc(b.dot(d, p, axes="j")))
    inputs = [tensor("Q", "j l", "bf16"), tensor("K", "m l", "bf16"), tensor("D", "n j", "bf16")]
    g = graph(inputs, [b], "Z", {"j": 128, "l": 64, "m": 128, "n": 64})
    sized = schedule({"j": 64, "m": 64})
    (source,) = sources(g, sized)
    assert source is not None and re.search(r"acc\d+ = tl.dot\(half\d+, ", source.text)
    assert exact_check(g, sized) == ""


def test_nothing_is_rounded_twice_that_is_no_product() -> None:
    """What is precise as it is has the same text."""
    program = rmsnorm("f16")
    (sizes,) = program.schedule.kernels
    texts = [
        sources(program.graph, Schedule((replace(sizes, precise=p),)))[0] for p in (Precision.FAST, Precision.SPLIT_ALL)
    ]
    assert texts[0] == texts[1]


def test_factors_come_after_precise_products() -> None:
    """A row of factors does not depend on what is summed: the product reads the tile itself, once."""
    b = Block("scaled", "i j", "k")
    s, x, w = b.load("S", "i"), b.load("X", "i k"), b.load("W", "k j")
    b.store(tensor("Z", "i j", "f32"), b.acc(b.exp(b.dot(b.mul(s, x), w, axes="k"), scale=Q(1, 64))))
    inputs = [tensor("S", "i", "f32"), tensor("X", "i k", "bf16"), tensor("W", "k j", "bf16")]
    g = graph(inputs, [b], "Z", {"i": 16, "j": 16, "k": 16})
    errors = []
    for precise in (Precision.FAST, Precision.SPLIT_ALL):
        (sizes,) = schedule({"i": 16, "j": 16, "k": 16}).kernels
        sized = Schedule((replace(sizes, precise=precise),))
        (source,) = sources(g, sized)
        assert exact_check(g, sized) == "" and source is not None and source.text.count("tl.dot") == 1
        errors.append(error(Program(g, sized, lambda s, x, w: np.exp((s[:, None] * x) @ w / 64))))
    assert errors[1] < errors[0] / 30
