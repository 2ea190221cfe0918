"""Back ends: a third one, added from outside, is asked for all that is its own; the others keep the rest."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from lower.kernels import Program, rmsnorm

from mirage_jax.errors import UnsupportedError, UsageError
from mirage_jax.lower import backends
from mirage_jax.lower.backend import Interpreter
from mirage_jax.lower.kernel_source import KernelSource
from mirage_jax.lower.runtime.aot import Resources
from mirage_jax.lower.runtime.launch import launches, run_cuda, sources
from mirage_jax.lower.triton.backend import TritonBackend
from mirage_jax.lower.triton.frame import EmitOptions
from mirage_jax.lower.triton.horizontal_fusion import join
from mirage_jax.mugraph.evaluate import run
from mirage_jax.mugraph.graph import Axis, BlockGraph, KernelGraph, KernelSchedule
from mirage_jax.verify.exact.exact_check import exact_check
from mirage_jax.verify.exact.interpreters.triton import interpret

WARPS = 16  # of the schedules that the toy takes


@dataclass
class Toy:
    """Takes kernels of 16 warps. Its text is a name; it runs the kernel's graph, and interprets by Triton's text."""

    name: str = "toy"
    shares_launches: bool = False
    asked: list[str] = field(default_factory=list)
    written: dict[str, tuple[KernelGraph, KernelSource]] = field(default_factory=dict)

    def takes(self, sizes: KernelSchedule) -> bool:
        return sizes.num_warps == WARPS

    def emit(
        self,
        kernel: BlockGraph,
        graph: KernelGraph,
        sizes: KernelSchedule,
        parts: Mapping[Axis, int],
        options: EmitOptions,
    ) -> KernelSource:
        self.asked.append("emit")
        source = TritonBackend().emit(kernel, graph, sizes, parts, options)
        text = f"toy {len(self.written)}"
        self.written[text] = graph, source
        return replace(source, text=text, backend=self.name)

    def launch(
        self, source: KernelSource, arrays: Sequence[Any], *, compute_capability: int | None, in_place: bool
    ) -> list[Any]:
        self.asked.append("launch")
        graph, _ = self.written[source.text]
        return run(graph, arrays)

    def compile(self, source: KernelSource, arch: int) -> Resources:
        self.asked.append("compile")
        return Resources(arch, 0, 0, 0, source.text)

    def interpret(self, source: KernelSource, interpreter: Interpreter) -> list[np.ndarray]:
        self.asked.append("interpret")
        _, text = self.written[source.text]
        return interpreter.run_triton(text)


@pytest.fixture
def toy() -> Iterator[Toy]:
    added = Toy()
    backends.register(added)
    yield added
    del backends.BACKENDS[added.name]


def small(warps: int) -> Program:
    program = rmsnorm("f32", i=4, k=32, j=16)
    kernels = tuple(replace(k, num_warps=warps) for k in program.schedule.kernels)
    return replace(program, schedule=replace(program.schedule, kernels=kernels))


def test_a_back_end_from_outside_writes_launches_and_compiles_its_kernels(toy: Toy) -> None:
    program = small(WARPS)
    inputs = program.inputs()
    (source,) = launches(program.graph, program.schedule)
    assert isinstance(source, KernelSource) and source.text == "toy 0"
    assert backends.compile_for(source, 90).ptx == "toy 0"
    (got,) = run_cuda(program.graph, program.schedule, inputs, lambda *_: None)
    np.testing.assert_allclose(got, program.want(inputs), rtol=1e-5)
    assert toy.asked == ["emit", "compile", "emit", "launch"]


def test_it_interprets_its_kernels_in_the_exact_check_too(toy: Toy) -> None:
    pytest.importorskip("triton")
    program = small(WARPS)
    inputs = program.inputs()
    (got,) = interpret(program.graph, program.schedule, inputs)
    np.testing.assert_allclose(got, program.want(inputs), rtol=1e-4)
    assert toy.asked == ["emit", "interpret"]
    assert exact_check(program.graph, program.schedule) == "" and toy.asked.count("interpret") > 1


def test_other_back_ends_keep_what_is_theirs(toy: Toy) -> None:
    program = small(4)
    (source,) = sources(program.graph, program.schedule)
    assert source is not None and source.backend == "triton" and "@triton.jit" in source.text and not toy.asked
    assert backends.backend_for(replace(program.schedule.kernels[0], specialized=True)).name == "hopper"


def test_its_kernels_share_no_launch(toy: Toy) -> None:
    program = small(WARPS)
    (kernel,), (sizes,) = program.graph.kernels, program.schedule.kernels
    members = [
        lambda options, name=name: replace(toy.emit(kernel, program.graph, sizes, {}, options), name=name)
        for name in ("one", "two")
    ]
    with pytest.raises(UnsupportedError, match="back end toy is a launch of its own"):
        join(members, EmitOptions())


def test_a_name_is_given_once(toy: Toy) -> None:
    with pytest.raises(UsageError, match="'toy'"):
        backends.register(Toy())
