"""Saved muGraphs of CMU's Mirage, as its JSON files have them: an array of graphs, each an array of operators.

Input: the text, or parsed JSON. Output: one `SavedGraph` per graph, in which every used tensor was made before, with
the same shape. `mirage_import.graphs` gives operators their meaning.

The file repeats a tensor wherever it is used; its `guid` tells tensors apart. Layouts, strides and places in shared
memory tell only where elements lie: they are not read.

Mirage has numbered its types in three ways (`DATA_TYPES`). Most files show which one they use by the numbers in them.
For the others the caller says it.

Early versions saved checkpoints of a search: objects with the graphs found so far. These do not mark their outputs,
which are the tensors that nothing reads, nor their accumulators: a block sums over its loop as it stores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from mirage_jax.config import unknown
from mirage_jax.errors import ParseError, UsageError

_WIDE = {930: "f8", 935: "i8", 950: "f32", 960: "f64"}
DATA_TYPES: dict[str, Mapping[int, str]] = {  # by the versions that wrote them: number -> type
    "early": {900: "i8", 910: "u16", 920: "bf16", 921: "f16", 930: "f32", 940: "f64"},
    "evaluation": {**_WIDE, 940: "bf16", 941: "f16", 945: "u16"},
    "mpk": {**_WIDE, 936: "u8", 940: "f16", 941: "bf16", 946: "u16", 955: "i32"},
}
MAX_DIMS = 4
_OP_TYPE = re.compile(r"(kn|tb)_(\w+)_op")

type Json = dict[str, Json] | list[Json] | str | float | bool | None
type Source = str | list[Any] | dict[str, Any]  # text, or parsed JSON
type Triple = tuple[int, int, int]  # by x, y and z of the grid
NOWHERE: Triple = (-1, -1, -1)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    guid: int
    shape: tuple[int, ...]
    dtype: str
    after_accum: bool = False  # of tensors in shared memory: does it wait for the end of the loop?


@dataclass(frozen=True, slots=True)
class SavedOp:
    """One operator, of the kernel graph or of a block graph; `kind` is its op_type without the level and ``_op``."""

    kind: str
    where: str
    inputs: tuple[SavedTensor, ...]
    outputs: tuple[SavedTensor, ...]
    block: SavedBlock | None = None  # of a customized operator
    device: SavedTensor | None = None  # of a block's input or output: the tensor in device memory
    divided: Triple = NOWHERE  # of a block's input or output: the dimension that each grid dimension divides (or -1)
    forloop_dim: int = -1  # of a block's input: the dimension that the loop divides (or -1)


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """A block graph. `dimx`: the size that reductions "to dimx" leave of a dimension."""

    grid: Triple
    forloop_range: int
    dimx: int
    ops: tuple[SavedOp, ...]


@dataclass(frozen=True, slots=True)
class SavedGraph:
    number: int
    ops: tuple[SavedOp, ...]

    @property
    def inputs(self) -> tuple[SavedTensor, ...]:
        """Arguments of the program, in order."""
        return tuple(op.outputs[0] for op in self.ops if op.kind == "input")

    @property
    def outputs(self) -> tuple[SavedTensor, ...]:
        """Results of the program, in order."""
        return tuple(op.inputs[0] for op in self.ops if op.kind == "output")


def read_mirage_json(source: Source, data_types: str | None = None) -> list[SavedGraph]:
    """Read the graphs of a file, a checkpoint of a search, or one graph.

    Args:
        source: the text, or parsed JSON.
        data_types: whose numbers of types the file has, a key of `DATA_TYPES`. None means that the file tells.

    Raises:
        ParseError: with the place of a mistake, or the file does not tell its types.
        UsageError: there are no such `data_types`.
    """
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise ParseError(f"not JSON: {error}") from None
    is_checkpoint = isinstance(source, dict)
    top = _Node(source, "the file", _types(source, data_types), is_checkpoint)
    if is_checkpoint:
        top = top["generated_graphs"]
    items = top.items()
    if not items:
        top.fail("at least one graph")
    if isinstance(items[0].value, dict):  # a graph by itself
        return [_graph(top, 0)]
    return [_graph(node.called(f"graph {n}"), n) for n, node in enumerate(items)]


def _numbers(value: Json) -> set[int]:
    """The numbers of types in a file."""
    found: set[int] = set()
    todo = [value]
    while todo:
        match todo.pop():
            case list() as values:
                todo += values
            case dict() as fields:
                if isinstance(number := fields.get("data_type"), int):
                    found.add(number)
                todo += fields.values()
            case _:
                pass
    return found


def _types(source: Json, data_types: str | None) -> Mapping[int, str]:
    """What the numbers of a file mean. Raises `ParseError` if that depends on the version that wrote it."""
    if data_types is not None:
        if data_types not in DATA_TYPES:
            raise UsageError(unknown("data_types", data_types, DATA_TYPES))
        return DATA_TYPES[data_types]
    numbers = _numbers(source)
    possible = {name: types for name, types in DATA_TYPES.items() if numbers <= types.keys()}
    for number in sorted(numbers):
        meanings = {name: types[number] for name, types in possible.items()}
        if len(set(meanings.values())) > 1:
            found = ", ".join(f"{means} ({name})" for name, means in meanings.items())
            raise ParseError(f"data type {number} is {found}; the file does not say which: name data_types")
    # The one whose numbers they are; else reading finds the place of the first number that is unknown.
    return next(iter(possible.values()), max(DATA_TYPES.values(), key=lambda types: len(numbers & types.keys())))


@dataclass(frozen=True, slots=True)
class _Node:
    """A value of the file and where it stands. `types`: what its numbers of types mean."""

    value: Json
    where: str
    types: Mapping[int, str]
    in_checkpoint: bool = False

    def fail(self, expected: str) -> NoReturn:
        """Raise a `ParseError` that shows the value."""
        shown = json.dumps(self.value, default=repr)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise ParseError(f"{self.where}: expected {expected}, found {shown}")

    def called(self, where: str) -> _Node:
        """Give the place another name."""
        return replace(self, where=where)

    def __getitem__(self, key: str) -> _Node:
        fields = self.value if isinstance(self.value, dict) else self.fail("an object")
        if key not in fields:
            raise ParseError(f"{self.where}: no {key!r}; it has {', '.join(map(repr, sorted(fields))) or 'nothing'}")
        return replace(self, value=fields[key], where=f"{self.where}, {key}")

    def items(self) -> list[_Node]:
        """Elements of an array."""
        values = self.value if isinstance(self.value, list) else self.fail("an array")
        return [replace(self, value=v, where=f"{self.where}[{n}]") for n, v in enumerate(values)]

    def integer(self, low: int, high: int | None = None) -> int:
        """An integer within bounds."""
        value = self.value
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            self.fail(f"an integer from {low}" + (f" to {high}" if high is not None else ""))
        return value

    def boolean(self) -> bool:
        """True or false."""
        return self.value if isinstance(self.value, bool) else self.fail("true or false")

    def text(self) -> str:
        """A string."""
        return self.value if isinstance(self.value, str) else self.fail("a string")

    def triple(self, low: int, high: int | None = None) -> Triple:
        """Integers by x, y and z."""
        x, y, z = (self[axis].integer(low, high) for axis in "xyz")
        return x, y, z


def _tensor(node: _Node, shared: bool = False) -> SavedTensor:
    rank = node["num_dims"].integer(1, MAX_DIMS)
    dims = node["dim"].items()
    if len(dims) < rank:
        node["dim"].fail(f"at least {rank} numbers")
    dtype = node["data_type"].integer(0)
    if dtype not in node.types:
        node["data_type"].fail(f"one of {', '.join(f'{k} ({v})' for k, v in node.types.items())}")
    after = shared and not node.in_checkpoint and node["after_accum"].boolean()
    return SavedTensor(node["guid"].integer(0), tuple(d.integer(1) for d in dims[:rank]), node.types[dtype], after)


class _Made:
    """Tensors that operators have made so far."""

    def __init__(self) -> None:
        self.tensors: dict[int, SavedTensor] = {}

    def use(self, node: _Node, shared: bool = False) -> SavedTensor:
        """Read a tensor that an operator has made. Raises `ParseError` if none has."""
        tensor = _tensor(node, shared)
        known = self.tensors.get(tensor.guid)
        if known is None:
            raise ParseError(f"{node.where}: tensor {tensor.guid} is used, and no operator before this one makes it")
        if known != tensor:
            raise ParseError(f"{node.where}: found {_shown(tensor)}, which was made as {_shown(known)}")
        return tensor

    def make(self, node: _Node, shared: bool = False) -> SavedTensor:
        """Read a tensor that this operator makes."""
        tensor = _tensor(node, shared)
        if tensor.guid in self.tensors:
            raise ParseError(f"{node.where}: tensor {tensor.guid} is made a second time")
        self.tensors[tensor.guid] = tensor
        return tensor


def _shown(tensor: SavedTensor) -> str:
    after = ", after accumulation" if tensor.after_accum else ""
    return f"{tensor.dtype}{list(tensor.shape)} (guid {tensor.guid}{after})"


def _ops(node: _Node, level: str) -> Iterator[tuple[_Node, str]]:
    """Operators of one level, each with its kind."""
    for n, op in enumerate(node.items()):
        op_type = op["op_type"].text()
        match = _OP_TYPE.fullmatch(op_type)
        if match is None or match[1] != level:
            op["op_type"].fail(f"{level}_..._op")
        kind = match[2].replace("forloop_accum_", "accum_")  # older files: tb_accum_...
        yield op.called(f"{node.where}, operator {n} ({op_type})"), kind


def _graph(node: _Node, number: int) -> SavedGraph:
    made = _Made()
    ops: list[SavedOp] = []
    for op, kind in _ops(node, "kn"):
        inputs = tuple(map(made.use, op["input_tensors"].items()))
        outputs = tuple(map(made.make, op["output_tensors"].items()))
        block = _block(op["bgraph"], inputs, outputs) if kind == "customized" else None
        ops.append(SavedOp(kind, op.where, inputs, outputs, block))
        _count(ops[-1])
    if node.in_checkpoint:
        ops += [SavedOp("output", node.where, (t,), ()) for t in _unread(ops)]
    graph = SavedGraph(number, tuple(ops))
    for what, found in (("kn_input_op", graph.inputs), ("kn_output_op", graph.outputs)):
        if not found:
            raise ParseError(f"{node.where}: no {what}")
    return graph


def _unread(ops: Sequence[SavedOp]) -> Iterator[SavedTensor]:
    """Results that no operator reads."""
    read = {t for op in ops for t in op.inputs}
    return (t for op in ops if op.kind != "input" for t in op.outputs if t not in read)


def _sums_as_it_stores(op: SavedOp) -> list[SavedOp]:
    """An output of a block in a checkpoint: the accumulator that it is, and the output."""
    total = replace((op.outputs or op.inputs)[0], after_accum=True)
    return [replace(op, kind="accum_nored", outputs=(total,)), replace(op, inputs=(total,), outputs=())]


def _block(node: _Node, inputs: tuple[SavedTensor, ...], outputs: tuple[SavedTensor, ...]) -> SavedBlock:
    made = _Made()
    ops: list[SavedOp] = []
    stored: list[SavedTensor] = []
    for op, kind in _ops(node["operators"], "tb"):
        used = tuple(made.use(t, shared=True) for t in op["input_tensors"].items())
        new = tuple(made.make(t, shared=True) for t in op["output_tensors"].items())
        saved = SavedOp(kind, op.where, used, new)
        if node.in_checkpoint and kind == "output":
            total, saved = _sums_as_it_stores(saved)
            ops.append(total)
        if kind == "input":
            device = _device(op, inputs, "an input")
            saved = replace(
                saved,
                device=device,
                divided=op["input_map"].triple(-1, len(device.shape) - 1),
                forloop_dim=op["forloop_dim"].integer(-1, len(device.shape) - 1),
            )
        elif kind == "output":
            device = _device(op, outputs, "an output")
            stored.append(device)
            saved = replace(saved, device=device, divided=op["output_map"].triple(-1, len(device.shape) - 1))
        _count(saved)
        _check_accumulation(saved)
        ops.append(saved)
    if stored != list(outputs):
        found = ", ".join(str(t.guid) for t in stored)
        raise ParseError(
            f"{node.where}: its tb_output_op write tensors {found or 'none'}; "
            f"the kernel's outputs are {', '.join(str(t.guid) for t in outputs)}"
        )
    return SavedBlock(
        node["grid_dim"].triple(1), node["forloop_range"].integer(1), node["reduction_dimx"].integer(1), tuple(ops)
    )


def _device(op: _Node, known: Sequence[SavedTensor], what: str) -> SavedTensor:
    tensor = _tensor(op["dtensor"])
    if tensor not in known:
        raise ParseError(f"{op.where}: {_shown(tensor)} is not {what} of the kernel")
    return tensor


def _count(op: SavedOp) -> None:
    """Inputs have one tensor, outputs one operand, other operators (but for kernels) one result."""
    want = {"input": (0, 1), "output": (1, 0)}.get(op.kind, (None, 1))
    for what, n, found in (("input", want[0], op.inputs), ("output", want[1], op.outputs)):
        if n is not None and len(found) != n and op.kind != "customized":
            raise ParseError(f"{op.where}: {len(found)} {what} tensors; it has {n}")


def _check_accumulation(op: SavedOp) -> None:
    """Every path from an input to an output of a block has exactly one accumulator (Mirage, definition 2.1)."""
    before, after = {t.after_accum for t in op.inputs}, {t.after_accum for t in op.outputs}
    if op.kind.startswith("accum_"):
        right = before == {False} and after == {True}
    elif op.kind == "input":
        right = after == {False}
    elif op.kind == "output":
        right = before == {True}
    else:
        right = len(before) == 1 and before == after
    if not right:
        raise ParseError(
            f"{op.where}: after_accum is {sorted(before)} for its inputs and {sorted(after)} for its outputs; "
            "every path through a block has one accumulator"
        )
