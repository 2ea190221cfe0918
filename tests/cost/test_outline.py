"""What registers hold while a kernel's threads work together: the cost model's estimate of spills."""

import pytest

from mirage_jax.cost.outline import outline
from mirage_jax.cost.roofline import ADDRESS_REGISTERS, register_pressure
from mirage_jax.hardware.gpus import MAX_THREAD_REGISTERS
from mirage_jax.mugraph.graph import KernelGraph, KernelSchedule, Schedule
from mirage_jax.mugraph.parser import parse

INPUTS = """extents i=512 j=512 d=64
  input q: bf16[i,d]
  input k: bf16[j,d]
  input v: bf16[j,d]
  input w: bf16[i,d]"""


def of(kernel: str, result: str) -> KernelGraph:
    return parse(f"mugraph {{\n  {INPUTS}\n  {kernel}\n  output {result}\n}}")


def live(graph: KernelGraph) -> set[frozenset[tuple[str, float]]]:
    return {frozenset(("".join(axes), n) for axes, n in values) for values in outline(graph.kernels[0], graph).live}


def held(*at_a_time: dict[str, float]) -> set[frozenset[tuple[str, float]]]:
    return {frozenset(values.items()) for values in at_a_time}


SCORES = """kernel t0 grid(i,j) {
    %q = load q[i,d]
    %k = load k[j,d]
    %0[i,j] = dot{axes=(d)} %q %k
    %1[i,j] = affine{scale=1/8} %0
    %2[i,j] = exp %1
    store t0: bf16[i,j] = %2
  }"""
SOFTMAX = """kernel t0 grid(i) {
    %q = load q[i,d]
    %k = load k[j,d]
    %0[i,j] = dot{axes=(d)} %q %k
    %1[i] = max{axes=(j)} %0
    %2[i,j] = add{cb=-1} %0 %1
    %3[i,j] = exp %2
    %4[i] = sum{axes=(j)} %3
    %5[i,j] = div %3 %4
    store t0: bf16[i,j] = %5
  }"""
BACKWARD = """kernel t0 grid(j) loop(i) {
    %q = load q[i,d]
    %k = load k[j,d]
    %v = load v[j,d]
    %w = load w[i,d]
    %0[i,j] = dot{axes=(d)} %q %k
    %1[i,j] = exp %0
    %2[j,d] = dot{axes=(i)} %1 %w
    %3[j,d] = acc %2
    %4[i,j] = dot{axes=(d)} %w %v
    %5[i,j] = mul %4 %1
    %6[j,d] = dot{axes=(i)} %5 %q
    %7[j,d] = acc %6
    store t0: bf16[j,d] = %3
    store t1: bf16[j,d] = %7
  }"""


def test_pointwise_operators_hold_nothing_of_their_own() -> None:
    product = stored = {"ij": 1.0}
    assert live(of(SCORES, "t0")) == held(product, stored)


def test_what_is_read_again_is_held() -> None:
    product = stored = {"ij": 1.0}
    assert live(of(SOFTMAX, "t0")) == held(product, {"ij": 1.0, "i": 1.0}, stored)


def test_loops_carry_their_sums_and_add_products_to_them() -> None:
    sums = {"jd": 2.0}
    scores, weights, second = {"ij": 1.0}, {"ij": 1.0}, {"ij": 2.0}
    last = {"ij": 0.5}  # an operand, of 16 bits
    assert live(of(BACKWARD, "t0 t1")) == held(*({**sums, **x} for x in (scores, weights, second, last)), sums)


def test_all_that_is_stored_is_there_at_the_end() -> None:
    several = SCORES.replace("  }", "    store t1: bf16[i,j] = %1\n  }")
    assert live(of(several, "t0 t1")) == held({"ij": 1.0}, {"ij": 2.0})


@pytest.mark.parametrize(("tile", "spills"), [(32, False), (128, True)])
def test_pressure_counts_all_of_it(tile: int, spills: bool) -> None:
    graph = of(BACKWARD, "t0 t1")
    schedule = Schedule((KernelSchedule((("i", 128), ("j", tile)), num_warps=4),))
    assert (register_pressure(graph, schedule) > 1) == spills
    elements = 2 * 64 * tile + 2 * tile * 128
    registers = elements / 128 + ADDRESS_REGISTERS
    assert register_pressure(graph, schedule) == pytest.approx(registers / MAX_THREAD_REGISTERS)
