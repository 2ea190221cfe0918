"""Types and constants of candidates: what the search writes passes, what somebody put into a stored one does not."""

from contextlib import nullcontext
from random import Random

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirage_jax.audit import sources
from mirage_jax.errors import UnsupportedError, VerificationError
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.jaxpr_frontend.partition.regions import analyse
from mirage_jax.mugraph.comparisons import compared_with_themselves, torn
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.passes.float16_range import in_range, out_of_range
from mirage_jax.mugraph.passes.merge_axes import simplify_axes
from mirage_jax.search.driver import search
from mirage_jax.verify.types import check_types


def reference(fn, *shapes: tuple[int, ...], dtype: str = "float32") -> KernelGraph:
    args = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    (region,) = analyse(jax.make_jaxpr(fn)(*args)).regions
    return simplify_axes(region.graph)


def found(graph: KernelGraph, device: str = "H200", states: int = 3000) -> list[KernelGraph]:
    candidates, _ = search(graph, DEVICES[device], sources.SPACE, 60.0, states)
    return list(dict.fromkeys(c.graph for c in candidates))


def linear_attention(q, k, v):
    return (q @ k.T) @ v / k.shape[0]


LINEAR = reference(linear_attention, *[(256, 32)] * 3)
(ALGEBRA,) = found(LINEAR, "CPU")
STORED = str(ALGEBRA)


def test_what_is_changed() -> None:
    check_types(LINEAR, ALGEBRA)
    assert "library m0: f32[" in STORED


@pytest.mark.parametrize("dtype", ["bool", "u8", "i8", "i32", "bf16", "f16", "f64"])
def test_a_type_that_the_program_has_not(dtype: str) -> None:
    changed = parse(STORED.replace("m0: f32", f"m0: {dtype}"))
    with pytest.raises(VerificationError, match=r"m0|%"):
        check_types(LINEAR, changed)


MASKED = """mugraph {
  extents i=64 j=32
  input x0: f32[i,j]
  library t0: f32[i] = sum{axes=(j)} x0[i,j]
  library t1: f32[] = const{value=VALUE}
  library t2: MASK[i] = lt t1[] t0[i]
  library t3: f32[i,j] = where t2[i] x0[i,j] t1[]
  output t3
}"""


def _masked(mask: str, constant: str = "0") -> KernelGraph:
    return parse(MASKED.replace("MASK", mask).replace("VALUE", constant))


def test_a_type_that_rounds_nothing_needs_no_reason() -> None:
    """The program may have a mask and a constant in other types: 0 and 1 are the same in all."""
    check_types(_masked("f32"), _masked("bool"))
    for dtype, value, is_held in (("bf16", "1/8", True), ("bf16", "1/10", False), ("bool", "1/8", False)):
        program = str(_masked("bool", value))
        with nullcontext() if is_held else pytest.raises(VerificationError, match="t1"):
            check_types(parse(program), parse(program.replace("t1: f32", f"t1: {dtype}")))
    floats = str(_masked("bool")).replace("t0: f32", "t0: bool")
    with pytest.raises(VerificationError, match="t0"):
        check_types(_masked("bool"), parse(floats))


def _between(first: str, second: str) -> KernelGraph:
    """The algebra with two operators after m0."""
    own = next(line for line in STORED.splitlines(keepends=True) if "library m0" in line)
    axes = own.partition("f32[")[2].partition("]")[0]
    head, _, tail = STORED.partition(own)
    more = f"  library p0: f32[{axes}] = affine{{{first}}} m0[{axes}]\n"
    more += f"  library p1: f32[{axes}] = affine{{{second}}} p0[{axes}]\n"
    return parse(head + own + more + tail.replace(f"m0[{axes}]", f"p1[{axes}]"))


BIG = 10**39
CONSTANTS = [
    (f"scale={BIG}", f"scale=1/{BIG}"),
    (f"scale=1/{BIG}", f"scale={BIG}"),
    ("scale=1" + "0" * 30, "scale=1/1" + "0" * 30),
    (f"offset={10**9}", f"offset=-{10**9}"),
    (f"offset={10**6}", f"offset=-{10**6}"),
    (f"offset={10**40}", f"offset=-{10**40}"),
]


@pytest.mark.parametrize(("first", "second"), CONSTANTS)
def test_constants_that_the_program_does_not_justify(first: str, second: str) -> None:
    with pytest.raises(VerificationError, match=r"justify|is off by"):
        check_types(LINEAR, _between(first, second))


def test_constants_that_it_does() -> None:
    check_types(LINEAR, _between("scale=1/256", "scale=256"))
    check_types(LINEAR, _between("scale=2", "scale=1/2"))


PROGRAMS = ("lora_b1", "gated_mlp_b1", "rmsnorm_b1", "qknorm_gqa_b1", "linear_attention", "abv", "causal", "layer_norm")


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_the_search_finds_passes(name: str) -> None:
    for graph in sources._captured(name):
        for candidate in found(graph):
            check_types(graph, candidate)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_what_it_finds_for_random_programs_passes(seed: int) -> None:
    graph = sources.random_program(Random(seed))
    try:
        candidates = found(graph, states=1000)
    except UnsupportedError:
        return
    for candidate in candidates:
        check_types(graph, candidate)


# ---------------------------------------------------------------------- float16


def attend(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def lora(x, w, a, b):
    return x @ w + (x @ a) @ b


def gain(x, g, w):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * g @ w


HALVES = {
    "linear attention": (linear_attention, [(256, 32)] * 3),
    "attention": (attend, [(256, 64)] * 3),
    "lora": (lora, [(16, 256), (256, 512), (256, 16), (16, 512)]),
    "a norm with gain": (gain, [(16, 1024), (1024,), (1024, 512)]),
}


@pytest.mark.parametrize("name", HALVES)
def test_no_value_of_its_own_is_float16(name: str) -> None:
    fn, shapes = HALVES[name]
    graph = reference(fn, *shapes, dtype="float16")
    candidates = found(graph)
    assert candidates
    for candidate in candidates:
        assert not out_of_range(graph, candidate)
        check_types(graph, candidate)


def test_what_the_program_has_stays_float16() -> None:
    """Weights of a softmax are at most 1; `x a` is the program's own."""
    for fn, shapes in (HALVES["attention"], HALVES["lora"]):
        graph = reference(fn, *shapes, dtype="float16")
        assert any("wide_" not in str(c) and "kernel" in str(c) for c in found(graph))


PARTS = """mugraph {
  extents i=16 j=256 k=512 l=16
  input x0: f16[i,j]
  input x1: f16[j,k]
  input x2: f16[j,l]
  input x3: f16[l,k]
  kernel k0 grid(i,k) loop(j) {
    %x0 = load x1[j,k]
    %x1 = load x0[i,j]
    %x2 = load x2[j,l]
    %x3 = load x3[l,k]
    %0[i,k] = dot{axes=(j)} %x1 %x0
    %1[i,l] = dot{axes=(j)} %x1 %x2
    %2[i,k] = dot{axes=(l)} %1 %x3
    %3[i,k] = add %0 %2
    %4[i,k] = acc %3
    store t3: f16[i,k] = %4
  }
  output t3
}"""


def test_a_part_of_a_sum_is_another_value() -> None:
    """What `x a` is after one step of the loop may be larger than all of it."""
    graph, candidate = reference(lora, *HALVES["lora"][1], dtype="float16"), parse(PARTS)
    (only,) = out_of_range(graph, candidate)
    assert "a part of a sum" in str(only) and only.product == "2"
    wide = in_range(graph, candidate)
    assert not out_of_range(graph, wide) and "%2[i,k] = dot{axes=(l)} %1 %wide_x3" in str(wide)
    check_types(graph, wide)
    with pytest.raises(VerificationError, match="float16"):
        check_types(graph, candidate)


MULTIPLE = PARTS.replace(
    "    %2[i,k] = dot{axes=(l)} %1 %x3\n    %3[i,k] = add %0 %2\n    %4[i,k] = acc %3\n",
    """    %a[i,l] = acc %1
    %b[i,l] = affine{scale=S} %a
    %2[i,k] = dot{axes=(l)} %b %x3
    %3[i,k] = acc %0
    %4[i,k] = add{cb=T} %3 %2
""",
)


@settings(max_examples=30, deadline=None)
@given(power=st.integers(1, 12), up=st.booleans())
def test_a_multiple_of_what_the_program_has_is_smaller(power: int, up: bool) -> None:
    """`x a` times 1/2 to 1/16 is float16 as well as `x a`; times 2 it is not, nor where most bits would be lost."""
    graph = reference(lora, *HALVES["lora"][1], dtype="float16")
    large, small = f"{2**power}", f"1/{2**power}"
    text = MULTIPLE.replace("=S", f"={large if up else small}").replace("=T", f"={small if up else large}")
    assert bool(out_of_range(graph, parse(text))) == (up or power > 4)


LARGEST = """
mugraph {
  extents i=16 j=33 k=16
  input x: f32[i,j]
  input y: f32[j,k]
  BODY
  output e
}
"""
MAXIMUM = """kernel k0 grid(i) loop(j) {
    %x = load x[i,j]
    %y = load y[j,k]
    %0[i,k] = dot{axes=(j)} %x %y
    %1[i,k] = acc %0
    %2[i] = max{axes=(k)} %1
    store m: f32[i] = %2
  }
  """
IN_ONE_KERNEL = MAXIMUM.replace("k0", "k1").replace(
    "store m: f32[i] = %2", "%3[i,k] = eq %1 %2\n    store e: bool[i,k] = %3"
)
IN_TWO = MAXIMUM + IN_ONE_KERNEL.replace("    %y", "    %m = load m[i]\n    %y").replace("eq %1 %2", "eq %1 %m")
LIBRARY_MAXIMUM = "library m: f32[i] = max{axes=(k)} t[i,k]\n  "
FROM_MEMORY = f"""library t: f32[i,k] = dot{{axes=(j)}} x[i,j] y[j,k]
  {LIBRARY_MAXIMUM}library e: bool[i,k] = eq t[i,k] m[i]"""
BY_TWO = MAXIMUM + FROM_MEMORY.replace(LIBRARY_MAXIMUM, "")


@pytest.mark.parametrize("comparison", ["eq", "le", "lt"])
def test_compared_numbers_are_computed_once(comparison: str) -> None:
    """A maximum that is computed in other tiles than the elements may equal none, in a kernel and in XLA's code."""
    bodies = (FROM_MEMORY, IN_ONE_KERNEL, IN_TWO, BY_TWO)
    program, one, *twice = (parse(LARGEST.replace("BODY", b.replace("= eq", f"= {comparison}"))) for b in bodies)
    check_types(program, program)
    check_types(program, one)
    for candidate in twice:
        with pytest.raises(VerificationError, match="apart from the other"):
            check_types(program, candidate)
        check_types(candidate, candidate)  # a program that compares unrelated numbers
    assert compared_with_themselves(program) == {"t"}
    assert not compared_with_themselves(one) and not compared_with_themselves(twice[0])


OF_CHOICES = """library {t}: f32[i,k] = dot{{axes=(j)}} x[i,j] y[j,k]
  library {s}: f32[i,k] = where b[i,k] {t}[i,k] c[i,k]"""


def test_choices_are_compared_by_what_they_choose_from() -> None:
    """Both sides may be a constant mask's number, so they have that in common; the rest is computed twice."""
    once = OF_CHOICES.format(t="t", s="s") + "\n  library m: f32[i] = max{axes=(k)} s[i,k]"
    apart = once.replace("max{axes=(k)} s", "max{axes=(k)} s2").replace(
        "  library m", "  " + OF_CHOICES.format(t="t2", s="s2") + "\n  library m"
    )
    text = LARGEST.replace("  BODY", "  input b: bool[i,k]\n  input c: f32[i,k]\n  BODY")
    program, twice = (
        parse(text.replace("BODY", f"{body}\n  library e: bool[i,k] = eq s[i,k] m[i]")) for body in (once, apart)
    )
    check_types(program, program)
    with pytest.raises(VerificationError, match="apart from the other"):
        check_types(program, twice)


BESIDE = """mugraph {
  extents i=16 j=16 k=16
  input x: f32[i,j]
  input w: f32[j,k]
  input y: f32[i,k]
  library t: f32[i,k] = dot{axes=(j)} x[i,j] w[j,k]
  library m: f32[MAX] = MAXIMUM
  output t m
}"""


@pytest.mark.parametrize(("axes", "maximum"), [("i", "max{axes=(k)} t[i,k]"), ("i,k", "maximum t[i,k] y[i,k]")])
def test_numbers_beside_their_maximum_are_computed_with_it(axes: str, maximum: str) -> None:
    """Another region may compare them."""
    program = BESIDE.replace("[MAX]", f"[{axes}]").replace("MAXIMUM", maximum)
    twice = program.replace("  library m", "  library t2: f32[i,k] = dot{axes=(j)} w[j,k] x[i,j]\n  library m")
    check_types(parse(program), parse(program))
    with pytest.raises(VerificationError, match="computed apart: t and m"):
        check_types(parse(program), parse(twice.replace(maximum, maximum.replace("t[", "t2["))))


def test_an_input_beside_its_maximum_is_not_scaled_first() -> None:
    """Scaled and scaled back, it may be rounded in another way."""
    program = """mugraph {
  extents i=16 k=16
  input t: f32[i,k]
  library m: f32[i] = max{axes=(k)} t[i,k]
  output m
}"""
    scaled = """  library s: f32[i,k] = affine{scale=3} t[i,k]
  library n: f32[i] = max{axes=(k)} s[i,k]
  library m: f32[i] = affine{scale=1/3} n[i]
  output"""
    scaled = program.replace("  library m: f32[i] = max{axes=(k)} t[i,k]\n  output", scaled)
    check_types(parse(program), parse(program))
    with pytest.raises(VerificationError, match="computed apart: t and m"):
        check_types(parse(program), parse(scaled))


DIFFERENCES = """mugraph {
  extents i=16 k=16
  input t: f32[i,k]
  library s: f32[i,k] = affine{scale=SCALE} t[i,k]
  library m: f32[i] = max{axes=(k)} s[i,k]
  BODY
  output e
}"""
SCALED_BACK = ("library n: f32[i] = affine{scale=6/5} m[i]", "add{cb=-1} t[i,k] n[i]", "add{cb=-6/5} t[i,k] m[i]")


@pytest.mark.parametrize("scale", ["5/6", "1/2"])
def test_a_maximum_that_is_subtracted_keeps_its_digits(scale: str) -> None:
    """t - 6/5 max(5/6 t) is not 0 where it should be, and exponentials of large logits make much of that; t - 2 max(t /
    2) is: no bit of a number changes."""
    first, *differences = SCALED_BACK
    bodies = (
        "library e: f32[i,k] = add{cb=-1} s[i,k] m[i]",
        f"{first}\n  library e: f32[i,k] = {differences[0]}",
        f"library e: f32[i,k] = {differences[1]}",
        "library n: f32[i] = affine{scale=6/5} m[i]\n  library e: f32[i,k] = exps t[i,k] n[i]",
    )
    back = {"5/6": "6/5", "1/2": "2"}[scale]
    text = DIFFERENCES.replace("SCALE", scale)
    program, *others = (parse(text.replace("BODY", body.replace("6/5", back))) for body in bodies)
    assert not list(torn(program))
    for candidate in others:
        assert [sides.op.op for sides in torn(candidate)] == ([] if scale == "1/2" else [candidate.kernels[-1].op.op])
        check_types(candidate, candidate)  # a program that scales back itself
        if scale != "1/2":
            with pytest.raises(VerificationError, match="apart from the other"):
                check_types(program, candidate)


def test_constants_beyond_every_float_are_refused() -> None:
    """Whoever edits a stored decision may write any number."""
    text = DIFFERENCES.replace("SCALE", str(10**400)).replace("BODY", "library e: f32[i,k] = add{cb=-1} s[i,k] m[i]")
    with pytest.raises(VerificationError, match="beyond every float"):
        check_types(parse(text.replace(str(10**400), "5/6")), parse(text))
