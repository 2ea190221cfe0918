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
from mirage_jax.lower.backends import backend_of
from mirage_jax.lower.kernel_source import KernelSource
from mirage_jax.lower.triton.expressions import meanings
from mirage_jax.lower.triton.frame import EmitOptions
from mirage_jax.lower.triton.writer import PREFIX, Writer

type Emit = Callable[[EmitOptions], KernelSource]


def join(members: Sequence[Emit], options: EmitOptions) -> KernelSource:
    """One source for the kernels that `members` write. It takes all their inputs, then all their outputs, in order.

    A single kernel stays as it is. Raises `UnsupportedError` if a back end does not share launches.
    """
    if len(members) == 1:
        return members[0](options)
    sources = _sources(members, options)
    name = joint_name([s.name for s in sources])
    ends = list(accumulate(s.grid[0] for s in sources))
    texts = [sources[0].text, *("\n\n" + s.text[s.text.index("@triton.jit") :] for s in sources[1:])]
    dtypes_in = chain(*(s.dtypes[: len(s.inputs)] for s in sources))
    dtypes_out = chain(*(s.dtypes[len(s.inputs) :] for s in sources))
    return KernelSource(
        name,
        "".join(texts) + _dispatch(name, sources, ends),
        (ends[-1],),
        tuple(chain(*(s.inputs for s in sources))),
        tuple(chain(*(s.outputs for s in sources))),
        (*dtypes_in, *dtypes_out),
        tuple(chain(*(s.shapes for s in sources))),
        max(s.num_warps for s in sources),
        max(s.num_stages for s in sources),
        meanings([s.numbers for s in sources]),
        rewrites=any(s.rewrites for s in sources),
    )


def joint_name(names: Sequence[str]) -> str:
    """The name of a launch of kernels with these names."""
    return "_".join((names[0], *(name.removeprefix(PREFIX) for name in names[1:])))


def _sources(members: Sequence[Emit], options: EmitOptions) -> list[KernelSource]:
    """Each kernel, written for the blocks that begin where those before it end."""
    sources: list[KernelSource] = []
    for member in members:
        sources.append(member(replace(options, first=sum(s.grid[0] for s in sources))))
    if len({s.name for s in sources}) < len(sources):
        raise LoweringError(f"kernels of one launch need different names: {', '.join(s.name for s in sources)}")
    for source in sources:
        if not backend_of(source).shares_launches:
            raise UnsupportedError(f"a kernel of the back end {source.backend} is a launch of its own")
    return sources


def _dispatch(name: str, sources: Sequence[KernelSource], ends: Sequence[int]) -> str:
    """The kernel that calls, in each block, the kernel whose block it is; `ends`: the first blocks after each."""
    in_numbers, out_numbers = count(), count()
    ins = [[f"in{next(in_numbers)}" for _ in s.inputs] for s in sources]
    outs = [[f"out{next(out_numbers)}" for _ in s.outputs] for s in sources]
    heads = [f"if block < {ends[0]}:", *(f"elif block < {end}:" for end in ends[1:-1]), "else:"]
    w = Writer()
    for line in ("", "", "@triton.jit"):
        w.line(line)
    with w.block(f"def {name}({', '.join(chain(*ins, *outs))}):"):
        w.line("block = tl.program_id(0)")
        for head, source, arguments in zip(heads, sources, map(chain, ins, outs), strict=True):
            with w.block(head):
                w.line(f"{source.name}({', '.join(arguments)})")
    return w.text()
