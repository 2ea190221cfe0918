"""Kernels that do not wait for each other, in one launch."""

from dataclasses import replace
from fractions import Fraction as Q

import jax
import numpy as np
import pytest
from lower.kernels import NUMPY, Block, attention, graph, rmsnorm, schedule, tensor

from mirage_jax.errors import GraphError, LoweringError
from mirage_jax.lower.runtime.launch import launches, run_cuda, sources
from mirage_jax.lower.triton import frame
from mirage_jax.lower.triton.emitter import KernelSource
from mirage_jax.mugraph.graph import KernelGraph, Schedule
from mirage_jax.mugraph.schedule_json import schedule_from_json, schedule_to_json

pytest.importorskip("triton")
from mirage_jax.lower.backends import compile_for
from mirage_jax.verify.exact.exact_check import exact_check
from mirage_jax.verify.exact.interpreters.triton import interpret

EXTENTS = {"i": 16, "j": 48, "k": 64, "l": 20}


def product(name: str, inputs: str, axes: str, loop: str | None = None, scale: Q = Q(1, 8)) -> Block:
    """A matrix product of float16, scaled, in a kernel called `name`."""
    row, depth, column = axes.split()
    b = Block(name, f"{row} {column}", loop)
    left, right = inputs.split()
    found = b.dot(b.load(left, f"{row} {depth}"), b.load(right, f"{depth} {column}"), axes=depth)
    found = b.acc(found) if loop else found
    b.store(tensor(f"{name}_out", f"{row} {column}", "f16"), b.affine(found, scale=scale))
    return b


def three_products(names: str = "one two three") -> tuple[KernelGraph, Schedule]:
    """X W and X V, which share X and wait for nothing, then (X W) U, which waits for one of them."""
    one, two, three = names.split()
    inputs = [
        tensor("X", "i k", "f16"),
        tensor("W", "k j", "f16"),
        tensor("V", "k l", "f16"),
        tensor("U", "j l", "f16"),
    ]
    kernels = [product(one, "X W", "i k j", "k"), product(two, "X V", "i k l"), product(three, f"{one}_out U", "i j l")]
    tiles = ({"i": 16, "j": 16, "k": 32}, {"i": 16, "l": 16}, {"i": 16, "l": 16})
    g = graph(inputs, kernels, f"{one}_out {two}_out {three}_out", EXTENTS)
    return g, replace(schedule(*tiles), joint=True)


def arrays(g: KernelGraph) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal([g.extent(a) for a in t.axes]).astype(NUMPY[t.dtype]) for t in g.inputs]


def test_what_waits_for_nothing_is_launched_together() -> None:
    g, sizes = three_products()
    assert g.waves == ((0, 1), (2,)) and sizes.waves(g) == g.waves
    assert replace(sizes, joint=False).waves(g) == ((0,), (1,), (2,))
    first, second = launches(g, sizes)
    assert isinstance(first, KernelSource) and isinstance(second, KernelSource)
    assert first.name == "mirage_one_two" and first.inputs == ("X", "W", "X", "V") and first.grid == (3 + 2,)
    assert first.outputs == ("one_out", "two_out") and first.shapes == ((16, 48), (16, 20))
    assert second == sources(g, sizes)[2]


def test_the_same_results() -> None:
    g, sizes = three_products()
    xs = arrays(g)
    for together, apart in zip(interpret(g, sizes, xs), interpret(g, replace(sizes, joint=False), xs), strict=True):
        np.testing.assert_array_equal(together, apart)
    x, w, v, u = (a.astype(np.float64) for a in xs)
    want = x @ w / 8, x @ v / 8, x @ w / 8 @ u / 8
    for have, expected in zip(interpret(g, sizes, xs), want, strict=True):
        np.testing.assert_allclose(have, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles(arch: int) -> None:
    g, sizes = three_products()
    first, _ = launches(g, sizes)
    assert isinstance(first, KernelSource) and compile_for(first, arch).fits


def test_blocks_of_the_wrong_kernel_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact check runs what is launched: a kernel whose first block is off by one is wrong there."""
    g, sizes = three_products()
    assert exact_check(g, sizes) == ""
    plain = frame.Frame.blocks

    def shifted(self: frame.Frame) -> None:
        if self.options.first:
            self.options = replace(self.options, first=self.options.first + 1)
        plain(self)

    monkeypatch.setattr(frame.Frame, "blocks", shifted)
    assert exact_check(g, replace(sizes, joint=False)) == ""
    assert "loads element -16 of input V" in exact_check(g, sizes)


@pytest.mark.parametrize("off", [0, 1])
def test_one_float_for_two_numbers(monkeypatch: pytest.MonkeyPatch, off: int) -> None:
    """1/3, and the float next to it: the kernels are checked one by one."""
    inputs = [tensor("X", "i k", "f16"), tensor("W", "k j", "f16"), tensor("V", "k l", "f16")]
    kernels = [product("a", "X W", "i k j", scale=Q(1, 3)), product("b", "X V", "i k l", scale=Q(float(Q(1, 3))))]
    sizes = replace(schedule({"i": 16, "j": 16}, {"i": 16, "l": 16}), joint=True)
    g = graph(inputs, kernels, "a_out b_out", EXTENTS)
    plain = frame.Frame.mask
    monkeypatch.setattr(frame.Frame, "mask", lambda *args: "" if off else plain(*args))
    assert bool(exact_check(g, sizes)) == bool(off)


def test_names_that_are_one_identifier() -> None:
    g, sizes = three_products("a.b a_b c")
    with pytest.raises(LoweringError, match="different names: mirage_a_b, mirage_a_b"):
        list(launches(g, sizes))
    assert len(list(launches(g, replace(sizes, joint=False)))) == 3


def test_one_kernel_alone_is_as_it_was() -> None:
    for program in (rmsnorm(), attention()):
        assert list(launches(program.graph, replace(program.schedule, joint=True))) == sources(
            program.graph, program.schedule
        )


def test_stored_schedules() -> None:
    _, sizes = three_products()
    for joint in (True, False):
        assert schedule_from_json(schedule_to_json(replace(sizes, joint=joint))) == replace(sizes, joint=joint)
    old = schedule_to_json(sizes)
    del old["joint"]
    assert not schedule_from_json(old).joint
    with pytest.raises(GraphError, match="joint: found 'no'"):
        schedule_from_json(old | {"joint": "no"})
    with pytest.raises(GraphError, match="malformed"):
        schedule_from_json([])


@pytest.mark.gpu
def test_on_gpu() -> None:
    g, sizes = three_products()
    xs = arrays(g)
    together, apart = (
        jax.jit(lambda *xs, s=s: run_cuda(g, s, xs, None))(*xs) for s in (sizes, replace(sizes, joint=False))
    )
    for x, y, interpreted in zip(together, apart, interpret(g, sizes, xs), strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_allclose(x, interpreted, rtol=2e-3, atol=2e-3)
