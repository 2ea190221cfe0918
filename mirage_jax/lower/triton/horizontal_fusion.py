"""Several kernels in one launch (Li et al., "Automatic horizontal fusion for GPU kernels", CGO 2022).

Kernels that do not wait for each other share a grid, one after the other: each takes the blocks that are its own and
does there what it would have done alone. A launch less is two to three microseconds less, and small kernels fill the
device together. Warps and stages are those of the largest; the text of each kernel is the same but for the number of
its first block (`Options.first`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, count

from mirage_jax.errors import LoweringError, UnsupportedError
from mirage_jax.lower.triton.emitter import KernelSource
from mirage_jax.lower.triton.expressions import meanings
from mirage_jax.lower.triton.frame import EmitOptions
from mirage_jax.lower.triton.writer import Writer

type Emit = Callable[[EmitOptions], KernelSource]


def join(members: Sequence[Emit], options: EmitOptions) -> KernelSource:
    """One source for kernels that are written by `members`; it takes the inputs of all of them, then their outputs, in
    their order. One kernel stays as it is.
    """
    if len(members) == 1:
        return members[0](options)
    sources: list[KernelSource] = []
    for member in members:
        blocks = sum(s.grid[0] for s in sources)
        sources.append(member(replace(options, first=blocks)))
    if len({s.name for s in sources}) < len(sources):
        raise LoweringError(f"kernels of one launch need different names: {', '.join(s.name for s in sources)}")
    if any(s.descriptors for s in sources):
        raise UnsupportedError("a kernel with specialized warps is a launch of its own")
    name = "_".join((sources[0].name, *(s.name.removeprefix("mirage_") for s in sources[1:])))
    in_numbers, out_numbers = count(), count()
    ins = [[f"in{next(in_numbers)}" for _ in s.inputs] for s in sources]
    outs = [[f"out{next(out_numbers)}" for _ in s.outputs] for s in sources]
    ends = list(accumulate(s.grid[0] for s in sources))
    w = Writer()
    for line in ("", "", "@triton.jit"):
        w.line(line)
    with w.block(f"def {name}({', '.join(chain(*ins, *outs))}):"):
        w.line("block = tl.program_id(0)")
        for i, s in enumerate(sources):
            head = "else:" if i == len(sources) - 1 else f"{'el' if i else ''}if block < {ends[i]}:"
            with w.block(head):
                w.line(f"{s.name}({', '.join((*ins[i], *outs[i]))})")
    texts = [sources[0].text, *("\n\n" + s.text[s.text.index("@triton.jit") :] for s in sources[1:])]
    dtypes_in = [d for s in sources for d in s.dtypes[: len(s.inputs)]]
    dtypes_out = [d for s in sources for d in s.dtypes[len(s.inputs) :]]
    return KernelSource(
        name,
        "".join(texts) + w.text(),
        (ends[-1],),
        tuple(n for s in sources for n in s.inputs),
        tuple(n for s in sources for n in s.outputs),
        (*dtypes_in, *dtypes_out),
        tuple(shape for s in sources for shape in s.shapes),
        max(s.num_warps for s in sources),
        max(s.num_stages for s in sources),
        meanings([s.numbers for s in sources]),
    )
