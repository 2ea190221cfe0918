"""Captures a whole function as one muGraph, to be compared with a graph that somebody wrote or saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from mirage_jax.errors import UsageError
from mirage_jax.jaxpr_frontend.partition.program import flatten
from mirage_jax.jaxpr_frontend.partition.regions import partition
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.mugraph.dtypes import numpy_dtype
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.passes.merge_axes import separate_copies, sink_renames

MAX_OPS = 1000  # equations in one region: the program is not to be divided


@dataclass(frozen=True)
class Captured:
    """A function as one muGraph, whose inputs are the function's arguments, in order.

    read_order: the arguments, by number from 0, in the order in which `explain` prints them as inputs. region: the same
    as a region, with its inputs in that order.
    """

    graph: KernelGraph
    read_order: tuple[int, ...]
    region: Region


def captured_whole(
    fn: Callable[..., Any], inputs: Sequence[tuple[tuple[int, ...], str]], whose: str = "graph's"
) -> Captured:
    """Capture a function of arrays as one muGraph.

    Args:
        fn: the function.
        inputs: shape and type of each argument; types are named as in muGraphs, "f32".
        whose: the owner of the inputs, for messages.

    Raises:
        UsageError: the function does not take these arguments, or is not one muGraph.
    """
    shown = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in inputs)
    specs = [jax.ShapeDtypeStruct(shape, numpy_dtype(dtype)) for shape, dtype in inputs]
    try:
        jaxpr = jax.make_jaxpr(fn)(*specs)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the program does not take the {whose} inputs {shown}: {error}") from None
    found = partition(flatten(jaxpr), max_ops=MAX_OPS)
    region = found.regions[0] if len(found.steps) == 1 and found.regions else None
    if region is None or not _is_whole(region, len(inputs), found.program.outputs):
        why = "; ".join(map(str, found.left_out)) or "it does not use them all, or returns one of them rearranged"
        raise UsageError(f"the program is not one muGraph of the {whose} inputs {shown}: {why}")
    arguments = found.program.inputs
    tensors = {b.value: t for b, t in zip(region.inputs, region.graph.inputs, strict=True)}
    graph = replace(region.graph, inputs=tuple(tensors[v] for v in arguments))
    read_order = tuple(arguments.index(b.value) for b in region.inputs)
    return Captured(separate_copies(sink_renames(graph)), read_order, region)


def _is_whole(region: Region, inputs: int, outputs: Sequence[object]) -> bool:
    """Whether the graph has all inputs, and the outputs of the program, in order and as they are."""
    segments = [p for b in region.outputs for p in b.segments]
    complete = len(region.inputs) == inputs and all(len(b.tensors) == 1 for b in region.inputs)
    plain = all(p.permutation == tuple(range(len(p.full))) and p.spread == p.full for p in segments)
    in_order = [b.value for b in region.outputs] == list(outputs)
    return complete and plain and in_order and len(segments) == len(region.outputs)
