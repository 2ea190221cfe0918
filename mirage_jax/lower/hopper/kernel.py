"""Text of a kernel whose warps have different tasks, in Gluon (Triton's language of layouts and barriers), for Hopper.

One warp only loads: it keeps multi-stage buffers in shared memory full, with the copy engine (TMA). One or more
warpgroups only compute, each on `WARPGROUP_ROWS` rows of the block's tile, with asynchronous matrix instructions
(wgmma). Tiles pass through barriers in both directions, one pair for each stage of a buffer. This is the schedule of
FlashAttention-3 (Shah et al., 2024, sections 3.1 and 3.2), derived from the block graph. The first GEMM, which reads
loaded operands, is issued before the second GEMM of the step before, which reads computed ones: that one runs during
pointwise work. A program may compute several blocks, and then loads for the next one while it stores.

Values, units and masks are the same as in other kernels (`context`, `loops`). `warpgroups` decides who computes what,
`shared_memory` where operands lie. Other patterns raise `UnsupportedError`: ragged tiles, computed right operands,
several loops.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from mirage_jax.errors import UnsupportedError
from mirage_jax.hardware.gpus import BARRIER_BYTES, shared_limit
from mirage_jax.lower.hopper.shared_memory import Descriptor, SharedTiles, StageBuffer, Tile
from mirage_jax.lower.hopper.warpgroups import WARPGROUP_ROWS, WARPGROUP_WARPS
from mirage_jax.lower.tiling import MatrixProduct, TileAxis, Tiling
from mirage_jax.lower.triton.context import TRITON_TYPES
from mirage_jax.lower.triton.expressions import TileVariable
from mirage_jax.lower.triton.frame import PLAIN, EmitOptions, Form
from mirage_jax.lower.triton.ops.products import operand, operand_type, remainder, rounded, splits_operands
from mirage_jax.lower.triton.ops.softmax import lows
from mirage_jax.mugraph.graph import Op

TILE_BYTES = shared_limit(90) - BARRIER_BYTES  # bytes of tiles: the only GPUs with these instructions are Hopper's
CONSUMER_REGISTERS = {
    1: 240,
    2: 240,
    3: 160,
}  # of a thread that computes, by warpgroups; one that loads has `PRODUCER_REGISTERS`
PRODUCER_REGISTERS = 24

IMPORTS = """\
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # as Triton 3.6 calls it
"""


@dataclass(frozen=True)
class Several:
    """Names of what a program with several blocks counts: which it is, blocks that it has done, and their steps."""

    program: str
    turn: str
    done: str


@dataclass
class LoopState:
    """Names of what the loop carries: running maxima, sums, and computed operands of the products of the last step."""

    first: str  # element of the loop's axis
    axis: TileAxis
    body: Sequence[Op]
    running: Mapping[str, str]
    sums: Mapping[str, str]
    held: Mapping[str, tuple[str, ...]]  # a number of 16 bits, or first what its rounding leaves out
    ends: Mapping[str, TileVariable] = field(default_factory=dict)

    @property
    def operands(self) -> list[str]:
        """What is held, once each: two products may read the same."""
        return list(dict.fromkeys(chain(*self.held.values())))


class GluonKernel(SharedTiles):
    """The functions of one kernel: one task that loads, one that computes, and the kernel that starts them."""

    def __init__(self, tiling: Tiling, options: EmitOptions, form: Form = PLAIN) -> None:
        super().__init__(tiling, options, form)
        self.blocks_tiling = tiling
        self.several: Several | None = None

    # --- the functions

    def function(self, name: str) -> str:
        """Write the tasks and the kernel."""
        own = [*self.tile_names, *self.barriers]
        self.reserve(name)
        self.imports()
        arguments = [*self.arguments.values(), *own]
        self.tasks(name, arguments)
        self._function(f"{name}({', '.join(self.arguments.values())})", lambda: self.launch(name, arguments))
        return self.text()

    def both_forms(self, name: str, complete: GluonKernel, lows: Sequence[str], clear: str) -> str:
        """The text of a kernel with two forms (`two_forms`). Each task runs its part of the first; where that finds in
        some block of the program that it does not hold, each runs its part of the second, for all blocks again.
        """
        if clear and self.form.guards:
            raise UnsupportedError("specialized warps: maxima that the kernel makes and others that it is given")
        looks = bool(self.form.guards)
        tensors, own = list(self.arguments.values()), [*self.tile_names, *self.barriers]
        shared, arguments = [*own, *(["swept", "lows"] if looks else [])], [*tensors, *own]
        self.reserve(name, "swept", "lows", *(f"low{n}" for n in range(len(self.form.guards))))
        complete.reserve(name, *([complete.form.fresh] if looks else []))
        self.imports()
        self.tasks(f"{name}_usual", arguments)
        complete.tasks(f"{name}_complete", arguments)
        self.w.append(complete.w)
        for task, warps, group in (("load", 1, []), ("compute", WARPGROUP_WARPS, ["group"])):
            fresh = ["found - 1"] if looks else []
            run_first = f"{name}_usual_{task}({', '.join((*arguments, *group))})"
            run_second = f"{name}_complete_{task}({', '.join((*arguments, *fresh, *group))})"
            signature = ", ".join((*tensors, *lows, *shared, *(f"{g}: gl.constexpr" for g in group)))
            body = partial(self._chosen, run_first, run_second, clear)
            if looks:
                body = partial(self._swept, run_first, run_second, warps)
            self._function(f"{name}_{task}({signature})", body)
        ins = len(tensors) - len(self.graph.stores)
        everything = [*tensors[:ins], *lows, *tensors[ins:]]
        self._function(f"{name}({', '.join(everything)})", lambda: self.launch(name, [*tensors, *lows, *shared], looks))
        return self.text()

    def _chosen(self, usual: str, complete: str, clear: str) -> None:
        """One form or the other, as is known before."""
        for head, call in ((f"if {clear}:", usual), ("else:", complete)):
            with self.w.block(head):
                self.w.line(call)

    def _swept(self, usual: str, complete: str, warps: int) -> None:
        """One form, and the other one too if a warpgroup found a block in which the first does not hold. All tasks meet
        before it: barriers begin once more, which nobody may use meanwhile.
        """
        layout = f"gl.BlockedLayout([1], [32], [{warps}], [0])"
        if warps == 1:
            self.w.line(usual)
        else:
            self.w.line(f"low = {usual}")
            self.w.line(f"lows.index(group).store(gl.full([1], 0, gl.int32, {layout}) + low)")
        self.meet(0)
        found = " | ".join(f"gl.max(lows.index({n}).load({layout}), axis=0)" for n in range(self.groups))
        self.w.line(f"found = {found}")
        with self.w.block("if found > 0:"):
            if warps > 1:
                with self.w.block("if group == 0:"):
                    for barrier, counts in self.barriers.items():
                        self.begin(barrier, *counts, is_used=True)
                    self.w.line("fence_async_shared()")
            self.meet(1)
            self.w.line(complete)

    def meet(self, phase: int) -> None:
        """Wait for all tasks."""
        self.w.line("mbarrier.arrive(swept.index(0), count=1)")
        self.w.line(f"mbarrier.wait(swept.index(0), {phase})")

    def begin(self, barrier: str, count: int, arrivals: int, is_used: bool = False) -> None:
        """Let barriers count from the beginning."""
        for n in range(count):
            if is_used:
                self.w.line(f"mbarrier.invalidate({barrier}.index({n}))")
            self.w.line(f"mbarrier.init({barrier}.index({n}), count={arrivals})")

    @property
    def descriptors(self) -> tuple[Descriptor | None, ...]:
        """By input: how the copy engine sees it; None if it does not copy it."""
        copied = {t.load.tensor: t.descriptor for t in self.tiles.values()}
        return tuple(map(copied.get, self.inputs))

    @property
    def tile_names(self) -> list[str]:
        """Names of the tiles in shared memory."""
        return [t.name for t in self.tiles.values()]

    @property
    def barriers(self) -> dict[str, tuple[int, int]]:
        """Barriers by name: how many, and how many arrivals complete a phase of each."""
        found = {"kept": (1, 1)} if self.resident else {}
        found |= {"kept_free": (1, self.groups)} if self.resident and self.shares_blocks else {}
        for buffer in self.buffers:
            found |= {buffer.full: (self.stages, 1), buffer.free: (self.stages, self.groups)}
        return found

    def reserve(self, name: str, *others: str) -> None:
        """Names that no variable may have."""
        for taken in (f"{name}_load", f"{name}_compute", *self.tile_names, *self.barriers, *others):
            self.w.name(taken)

    def imports(self) -> None:
        """Write the imports. Raises `UnsupportedError` if the tiles exceed shared memory."""
        held = sum(t.bytes * (1 if t in self.resident else self.stages) for t in self.tiles.values()) + self.passed_on
        if held > TILE_BYTES:
            raise UnsupportedError(f"tiles of {held} bytes in shared memory, which has room for {TILE_BYTES}")
        for line in IMPORTS.splitlines():
            self.w.line(line)

    def tasks(self, name: str, arguments: Sequence[str]) -> None:
        """What loads, and what computes."""
        taken = ", ".join((*arguments, *([self.form.fresh] if self.form.fresh else [])))
        self._function(f"{name}_load({taken})", self.load)
        self._function(f"{name}_compute({taken}, group: gl.constexpr)", self.compute)

    def text(self) -> str:
        """Return the text, with Triton's functions under Gluon's names."""
        text = re.sub(r"\btl\.(?!PropagateNan)", "gl.", self.w.text())  # which Gluon's language does not export
        return f"import triton.language as tl\n{text}" if "tl.PropagateNan" in text else text

    def _function(self, signature: str, body: Callable[[], None]) -> None:
        for line in ("", "", "@gluon.jit"):
            self.w.line(line)
        with self.w.block(f"def {signature}:"):
            self.env, self.tiling = ChainMap(), self.blocks_tiling
            body()

    def launch(self, name: str, arguments: Sequence[str], looks: bool = False) -> None:
        """Shared memory, barriers and tasks. `looks`: of a kernel that may run a second time."""
        used = [self.tiling.graph.tensors[t] for t in self.arguments]
        self.header(used)
        for tile in self.tiles.values():
            count = tile.copies * (1 if tile in self.resident else self.stages)
            d, dtype = tile.descriptor, TRITON_TYPES[self.tiling.graph.tensors[tile.load.tensor].dtype]
            shape = [count, *d.block]
            self.w.line(f"{tile.name} = gl.allocate_shared_memory({dtype}, {shape}, {d.layout})")
        barriers = dict(self.barriers)
        if looks:
            barriers["swept"] = (1, self.groups + 1)
            layout = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
            self.w.line(f"lows = gl.allocate_shared_memory(gl.int32, [{self.groups}, 1], {layout})")
        for barrier, (count, arrivals) in barriers.items():
            self.w.line(f"{barrier} = gl.allocate_shared_memory(gl.int64, [{count}, 1], mbarrier.MBarrierLayout())")
            self.begin(barrier, count, arrivals)
        self.w.line("fence_async_shared()")
        self.w.line("gl.warp_specialize([")
        given = ", ".join(arguments)
        for group in range(self.groups):
            self.w.line(f"    ({name}_compute, ({given}, {group})),")
        self.w.line(f"    ({name}_load, ({given})),")
        warps = [WARPGROUP_WARPS] * (self.groups - 1) + [1]
        registers = [CONSUMER_REGISTERS[self.groups]] * (self.groups - 1) + [PRODUCER_REGISTERS]
        self.w.line(f"], {warps}, {registers})")

    @property
    def shares_blocks(self) -> bool:
        """Does a program compute several blocks?"""
        return self.blocks_tiling.launched < self.blocks_tiling.grid

    @property
    def number(self) -> str:
        """The number of the block that is computed; it changes within a program that shares blocks."""
        if self.several is None:
            return super().number
        program, turn, programs = self.several.program, self.several.turn, self.tiling.launched
        turned = f" + ({turn} & 1) * ({programs - 1} - 2 * {program})" if self.graph.loop_bounds else ""
        return f"{turn} * {programs} + {program}{turned}"

    def each_block(self, body: Callable[[str, str], None]) -> None:
        """For the block of a program, or one after the other: which it is, its loop's `steps`, and what is done. Where
        loops get shorter from block to block, every other turn goes backwards, for programs to have as much to do.
        """
        if not self.shares_blocks:
            self.blocks()
            body(*self.steps())
            return
        blocks, programs, outer = self.tiling.grid, self.tiling.launched, self.env
        self.several = own = Several(*map(self.w.name, ("program", "turn", "done")))
        self.w.line(f"{own.program} = {super().number}")
        self.w.line(f"{own.done} = 0")
        turns, left = divmod(blocks, programs)
        is_turned = self.graph.loop_bounds is not None and turns % 2
        count = f"({blocks} + {own.program})" if is_turned else f"({blocks + programs - 1} - {own.program})"
        with self.w.block(f"for {own.turn} in range({f'{count} // {programs}' if left else turns}):", own.turn):
            self.env = outer.new_child()
            self.blocks()
            first, steps = self.steps()
            body(first, steps)
            self.w.line(f"{own.done} += {steps}")
        self.env, self.several = outer, None

    def steps(self) -> tuple[str, str]:
        """First element of the loop, and the number of its steps: at least one, so that there is a first."""
        assert self.graph.loop is not None
        axis = self.axes[self.graph.loop]
        first, end = self.bounds(axis)
        if first.isdigit() and end.isdigit():
            return first, str(-(-(int(end) - int(first)) // axis.size))
        if first != "0":
            first = self.w.let("first", f"tl.minimum({first}, {axis.local - axis.size})")
        return first, self.w.let("steps", f"tl.maximum(({end} - {first} + {axis.size - 1}) // {axis.size}, 1)")

    # --- the warp that loads

    def load(self) -> None:
        """Write the task of the warp that loads."""
        self.each_block(self.load_block)

    def load_block(self, first: str, steps: str) -> None:
        """Load one block: what stays for all steps, then the tiles of each step."""
        assert self.graph.loop is not None
        axis = self.axes[self.graph.loop]
        if self.resident:
            if self.several:
                self.w.line(f"mbarrier.wait(kept_free.index(0), ({self.several.turn} & 1) ^ 1)")
            self.w.line(f"mbarrier.expect(kept.index(0), {sum(t.bytes for t in self.resident)})")
            for tile in self.resident:
                self.copy(tile, "0", "kept.index(0)", "")
        step = self.w.name("step")
        with self.w.block(f"for {step} in range({steps}):"):
            at = self.w.let("at", self.position(first, step, axis))
            slot, phase = self.slot(step), self.phase(step)
            for buffer in self.buffers:
                self.w.line(f"mbarrier.wait({buffer.free}.index({slot}), {phase} ^ 1)")
                self.w.line(f"mbarrier.expect({buffer.full}.index({slot}), {buffer.bytes})")
                for tile in buffer.tiles:
                    self.copy(tile, slot, f"{buffer.full}.index({slot})", at)

    def position(self, first: str, step: str, axis: TileAxis) -> str:
        """Of a step's first element."""
        if step == "0":
            return first
        return f"{step} * {axis.size}" if first == "0" else f"{first} + {step} * {axis.size}"

    def in_all(self, step: str) -> str:
        """Steps of this program before a step of the block."""
        if self.several is None:
            return step
        return self.several.done if step == "0" else f"{self.several.done} + {step}"

    def slot(self, step: str) -> str:
        """Place in a buffer."""
        number = self.in_all(step)
        return str(int(number) % self.stages) if number.isdigit() else f"{_term(number)} % {self.stages}"

    def phase(self, step: str) -> str:
        """Of its barriers: how often the buffer has been filled by then, modulo 2."""
        number = self.in_all(step)
        return str(int(number) // self.stages & 1) if number.isdigit() else f"({_term(number)} // {self.stages} & 1)"

    def copy(self, tile: Tile, slot: str, barrier: str, at: str) -> None:
        """Copy a tile, for each warpgroup its own rows."""
        tensor = self.tiling.graph.tensors[tile.load.tensor]
        for group in range(tile.copies):
            row, column = self.coordinates(tile, at, group)
            place = self.place(tile, slot, str(group))
            self.w.line(f"copy_tile({self.arguments[tensor.name]}, [{row}, {column}], {barrier}, {place})")

    # --- the warps that compute

    def compute(self) -> None:
        """Write the task of a warpgroup."""
        for line in self.layouts():
            self.w.line(line)
        if not self.form.guards:
            self.each_block(self.compute_block)
            return
        names = [f"low{n}" for n in range(len(self.form.guards))]
        for name in names:
            self.w.line(f"{name} = tl.full([{WARPGROUP_ROWS}], 0, tl.int32, {self.vector_layout(self.plan.row)})")
        self.each_block(self.compute_block)
        self.w.line(f"return {' | '.join(f'tl.max({name}, axis=0)' for name in names)}")

    def compute_block(self, first: str, steps: str) -> None:
        """Compute one block: the loop, guards, and stores."""
        outer, row = self.tiling, self.plan.row
        block = self.env.get(("block", row), "0")
        self.tiling = self.inner
        self.env["block", row] = self.w.let("rows", f"{block} * {self.groups} + group" if block != "0" else "group + 0")
        for axis in self.axes.values():
            if axis.axis != self.graph.loop:
                self.index(axis)
        self.steps_of(first, steps)
        for n, (shift, text) in enumerate(lows(self).items()):
            if self.tiling.dims(self.graph.axes_of[shift]) != (row,):
                raise UnsupportedError(f"specialized warps: {shift} has other axes than the rows of a warpgroup")
            self.w.line(f"low{n} = tl.maximum(low{n}, {text})")
        for store in self.graph.stores:
            self.store(store)
        self.tiling = outer

    def steps_of(self, first: str, steps: str) -> None:
        """Write the loop, with the first GEMM of a step ahead of the second GEMM of the step before."""
        assert self.graph.loop is not None
        axis, outer = self.axes[self.graph.loop], self.env
        body = [op for op in self.graph.ops if op.name in self.work.body]
        if self.resident:
            self.w.line(f"mbarrier.wait(kept.index(0), {f'{self.several.turn} & 1' if self.several else 0})")
        self.env, self.uses = outer.new_child(), self.work.uses
        self.before_loop(body)
        state = self._state(first, axis, body)
        before, start = self.env, "0"
        if self.is_pipelined:
            self.env, self.holding, start = before.new_child(), frozenset(), "1"
            self.step(state, "0")
        write_step = self.step if self.is_pipelined or not self.plan.second else self.step_alone
        for begin, end, holding in self.ranges(axis, body, first, steps, start):
            self.env, self.holding = before.new_child(), holding
            number = self.w.name("step")
            with self.w.block(f"for {number} in range({begin}, {end}):", number):
                write_step(state, number)
        self.holding = frozenset()
        self.finish_products(state, steps)
        if self.several:
            self.give_back_last(steps)
        self.end_running(state.running, state.ends)
        for op in self.work.accumulators:
            if op.op == "last":
                outer["value", op.name] = self.last_maximum(op)
            else:
                outer["value", op.name] = self.finished(op, self.absorbs(op), state.sums[op.name])
        self.env, self.uses = outer, set()

    @property
    def is_pipelined(self) -> bool:
        """Does the first GEMM run a step ahead of the second?"""
        return bool(self.plan.second) and not self.form.is_complete

    def finish_products(self, state: LoopState, steps: str) -> None:
        """Issue the second GEMM of the last step, and wait for all products that are not waited for in the loop."""
        if self.is_pipelined:
            self.issue_second_gemm(state, _before(steps))
        second = self.plan.second if self.is_pipelined else ()
        first = () if self.plan.values else self.plan.sums
        if first or second:
            operands = state.operands if self.is_pipelined else ()
            self.wait(0, [*(state.sums[acc.name] for _, _, acc in (*second, *first)), *operands])

    def give_back_last(self, steps: str) -> None:
        """Give back the tiles of the last step, for the next block."""
        self.give_back(self.second_gemm_buffer if self.is_pipelined else None, _before(steps))
        if not self.plan.values:
            self.give_back(self.first_gemm_buffer, _before(steps))
        if self.resident:
            self.w.line("mbarrier.arrive(kept_free.index(0), count=1)")

    def _state(self, first: str, axis: TileAxis, body: Sequence[Op]) -> LoopState:
        """Start what the loop carries."""
        running, sums = self.start_carried(body, self.work)
        held = dict[str, tuple[str, ...]]()
        same = dict[object, tuple[str, ...]]()
        for op, product, _ in self.plan.second:
            key = (
                self.sides(op, product)[0],
                operand_type(self, op),
                self.columns(product.column),
                self.numbers_of(op),
            )
            held[op.name] = same[key] = same.get(key) or tuple(self.w.name("held") for _ in range(key[-1]))
        return LoopState(first, axis, body, running, sums, held)

    def step(self, state: LoopState, number: str) -> None:
        """Write one step of the first GEMM and pointwise work, while the second GEMM of the step before runs."""
        has_last = bool(self.plan.second) and number != "0"
        decayed, operands = self.made_of(state, number, has_last)
        if has_last:
            self.wait(0, [*(state.sums[acc.name] for _, _, acc in self.plan.second), *state.operands])
            self.give_back(self.second_gemm_buffer, _before(number))
            self.decay(state, decayed)
        self.hold(operands)

    def step_alone(self, state: LoopState, number: str) -> None:
        """Write one step, its second GEMM included. It takes longer, but registers for one step only."""
        decayed, operands = self.made_of(state, number, False)
        self.decay(state, decayed)
        self.hold(operands)
        self.issue_second_gemm(state, number)
        self.wait(0, [*(state.sums[acc.name] for _, _, acc in self.plan.second), *state.operands])
        self.give_back(self.second_gemm_buffer, number)

    def made_of(
        self, state: LoopState, number: str, has_last: bool
    ) -> tuple[dict[str, str], dict[tuple[str, ...], list[str]]]:
        """Issue the first GEMM of a step and compute from it sums relative to the new shifts, and operands of the
        second GEMM by their names. `has_last`: the second GEMM of the step before is issued, too.
        """
        self.index(state.axis, self.w.let("at", self.position(state.first, number, state.axis)))
        needed, absorbed = self.needed(self.work), {x[0].name for x in (*self.plan.sums, *self.plan.second)}
        for name in dict.fromkeys(a for op in state.body if op.name in needed for a in op.args):
            if name in self.loads and name not in self.tiles and self.graph.stages[name].body:
                self.raw(self.loads[name], "tile")  # on its way while products run
        self.issue_first_gemm(state, number, has_last)
        for op in state.body:
            if op.name in needed and op.name not in absorbed:
                self.value(op.name)
        decayed = self.accumulate_all(state)
        operands = {state.held[op.name]: self.register_operands(op, product) for op, product, _ in self.plan.second}
        state.ends = self.update_running(state.running)
        return decayed, operands

    def decay(self, state: LoopState, decayed: Mapping[str, str]) -> None:
        """Make sums of the second GEMM relative to the shifts of this step."""
        for _, _, acc in self.plan.second:
            if decayed.get(acc.name, state.sums[acc.name]) != state.sums[acc.name]:
                self.w.line(f"{state.sums[acc.name]} = {decayed[acc.name]}")

    def hold(self, operands: Mapping[tuple[str, ...], Sequence[str]]) -> None:
        """Assign operands of the second GEMM to the variables that the loop carries."""
        for names, texts in operands.items():
            for name, text in zip(names, texts, strict=True):
                self.w.line(f"{name} = {text}")

    def issue_first_gemm(self, state: LoopState, number: str, has_last: bool) -> None:
        """Issue the first GEMM of a step and the second of the step before, and wait for the first; where its
        products are all sums, for those of the last step.
        """
        plan, slot = self.plan, self.slot(number)
        self.env["slot"] = slot
        self.wait_for(self.first_gemm_buffer, number)
        if self.shares:
            self.wait_for(self.second_gemm_buffer, number)
        made: list[str] = []
        for op, product in plan.values:
            first, *others = self.factors(op, product, slot)
            start = f"{self.full(product.dims, '0.0')}, use_acc=False"
            made.append(self.w.let("dot", f"warpgroup_mma({first}, {start}, is_async=True)"))
            self.add_products(made[-1], others)
            self.env["value", op.name] = TileVariable(made[-1], product.dims)
        sums = [state.sums[acc.name] for _, _, acc in plan.sums]
        for (op, product, _), total in zip(plan.sums, sums, strict=True):
            self.add_products(total, self.factors(op, product, slot))
        if has_last:
            self.issue_second_gemm(state, _before(number))
        for name in self.values_too:  # while products run, and before the tiles are given back
            self.value(name)
        if plan.values:
            self.wait(sum(map(len, state.held.values())) if has_last else 0, [*made, *sums])
            self.give_back(self.first_gemm_buffer, number)
        elif sums:
            self.wait(sum(self.numbers_of(op) for op, *_ in plan.sums), sums)
            before = f"({number} + {self.stages - 1})"  # the place of the step before, and no negative number
            self.give_back(self.first_gemm_buffer, before, f", pred={number} > 0")

    def issue_second_gemm(self, state: LoopState, step: str) -> None:
        """Issue the products of what a step computed."""
        if not self.shares:
            self.wait_for(self.second_gemm_buffer, step)
        for op, product, acc in self.plan.second:
            (inner,), total = product.inner, state.sums[acc.name]
            right = self.smem(self.sides(op, product)[1], self.slot(step), (inner, product.column))
            self.add_products(total, [f"{name}, {right}" for name in state.held[op.name]])

    def add_products(self, total: str, factors: Iterable[str]) -> None:
        """Issue products that are added to a sum."""
        for pair in factors:
            self.w.line(f"{total} = warpgroup_mma({pair}, {total}, is_async=True)")

    def accumulate_all(self, state: LoopState) -> dict[str, str]:
        """Add up what no product does; what becomes of sums of products where the running shift moved."""
        decayed = dict[str, str]()
        first = {acc.name for _, _, acc in self.plan.sums}
        for op in self.work.accumulators:
            if op.op == "last":
                continue
            total, how = state.sums[op.name], self.absorbs(op)
            if how != "dot":
                self.accumulate(op, how, total, state.running)
            elif op.op == "accs":
                decayed[op.name] = self.decayed(op, total, self.carrier(op, how), state.running)
            if op.name in first and decayed.get(op.name, total) != total:
                raise UnsupportedError(f"{op}: a sum of products of what is loaded, relative to a shift of the loop")
        return decayed

    def wait_for(self, buffer: StageBuffer | None, step: str) -> None:
        """Until the tiles of a step are there."""
        if buffer is not None:
            self.w.line(f"mbarrier.wait({buffer.full}.index({self.slot(step)}), {self.phase(step)})")

    def give_back(self, buffer: StageBuffer | None, step: str, condition: str = "") -> None:
        """The tiles of a step may be loaded over."""
        if buffer is not None:
            self.w.line(f"mbarrier.arrive({buffer.free}.index({self.slot(step)}), count=1{condition})")

    def before_loop(self, body: Sequence[Op]) -> None:
        """Emit what the loop reads and does not change, but for what lies in shared memory."""
        for op in (*body, *self.work.accumulators):
            for a in op.args:
                if not self.graph.stages[a].body and (a not in self.tiles or not self.tiling.product(op)):
                    self.value(a)
        for op, product in self.plan.products:
            left, _ = self.sides(op, product)
            if left not in self.loads and not self.graph.stages[left].body:
                self.env["operands", op.name] = [self.w.let("operand", x) for x in self.register_operands(op, product)]

    def factors(self, op: Op, product: MatrixProduct, slot: str) -> list[str]:
        """Both operands of a product of the first GEMM; several pairs if the left operand is split."""
        left, right = self.sides(op, product)
        (inner,) = product.inner
        y = self.smem(right, slot, (inner, product.column))
        if left in self.loads:
            return [f"{self.smem(left, slot, (product.row, inner))}, {y}"]
        return [f"{x}, {y}" for x in self.env["operands", op.name]]

    def numbers_of(self, op: Op) -> int:
        """Of 16 bits, as which a product reads its left operand (`ops.products`)."""
        product = self.tiling.product(op)
        assert product is not None
        return 2 if splits_operands(self, op) and self.sides(op, product)[0] not in self.loads else 1

    def register_operands(self, op: Op, product: MatrixProduct) -> list[str]:
        """A computed left operand, as matrix instructions take it from registers, the smaller number first."""
        left, dtype = self.sides(op, product)[0], operand_type(self, op)
        value = operand(self, left, dtype, False)
        half, rest = rounded(self, value, left, dtype), None
        if self.numbers_of(op) == 2:
            rest = remainder(self, value, left, dtype)
        layout = f"gl.DotOperandLayout(0, mma{self.columns(product.column)}, 2)"
        return [f"gl.convert_layout({x.text}, {layout})" for x in (rest, half) if x is not None]

    def wait(self, outstanding: int, names: Sequence[str]) -> None:
        """Until all but so many products are done."""
        self.w.line(f"{', '.join(names)} = warpgroup_mma_wait({outstanding}, [{', '.join(names)}])")

    def ranges(
        self, axis: TileAxis, body: Sequence[Op], first: str, steps: str, start: str
    ) -> list[tuple[str, str, frozenset[str]]]:
        """Parts of the loop as numbers of steps, from step `start` on."""
        if self.loop_bounds is None or steps.isdigit():
            return [(start, steps, frozenset())]
        parts = self.parts(axis, body)
        marks = [f"({end} - {first}) // {axis.size}" for _, end, _ in parts[:-1]]
        names = [self.w.let("mark", f"tl.minimum(tl.maximum({m}, {start}), {steps})") for m in marks]
        begins, ends = [start, *names], [*names, steps]
        return [(b, e, holding) for b, e, (_, _, holding) in zip(begins, ends, parts, strict=True)]


def _term(text: str) -> str:
    return text if text.isidentifier() or text[0] == "(" else f"({text})"


def _before(step: str) -> str:
    return str(int(step) - 1) if step.isdigit() else f"({step} - 1)"
