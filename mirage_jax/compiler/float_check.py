"""Are a winner's floats as good as XLA's? Both run on classes of inputs, against the region in float64; the rule that
compares three results is `verify.floats.gate`.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mirage_jax import timing
from mirage_jax.compiler.region import RegionOnDevice
from mirage_jax.compiler.threads import as_here
from mirage_jax.compiler.winner import Winner
from mirage_jax.errors import in_one_line
from mirage_jax.gpu_lock import gpu_lock, memory_turn, process_turn
from mirage_jax.interruptible import spread
from mirage_jax.jaxpr_frontend.translate.translate import Region
from mirage_jax.mugraph import evaluate
from mirage_jax.mugraph.domains.floats import FloatDomain
from mirage_jax.mugraph.dtypes import is_float, numpy_dtype
from mirage_jax.mugraph.footprint import footprint
from mirage_jax.mugraph.graph import KernelGraph, Library, Op, Precision
from mirage_jax.mugraph.operators import COMPARISONS
from mirage_jax.mugraph.passes.sentinels import MASKING
from mirage_jax.verify.floats import gate, input_classes, range_edges
from mirage_jax.verify.floats.noise import HALF_UNIT, SAMPLES, TF32_UNIT, noisy
from mirage_jax.verify.gate import Verdict

log = logging.getLogger("mirage_jax.gate")

MAX_NUMPY_FLOPS = 5e8  # operations of a region up to which numpy is soon done with it in float64
MAX_NUMPY_FLOPS_BESIDE_GPU = 2e7  # the same where a GPU could do it, for which one function has to be compiled
MOST_HALVINGS = 6  # of inputs so large that rounding decides whole rows
NEARBY, AROUND = 4, (0.97, 1.03)  # inputs on which the program's roundings are seen, and how much larger they are
OCTAVES_BEYOND = 3  # powers of two beyond the last at which XLA gives only finite numbers
NEAREST, MOST_NEAR = 2.0**-4, 4  # constants of a program near which inputs are tried, and how many
SUMS = frozenset({"add", "affine", "maximum", "minimum", "max", "shift", "lesslogs"})  # of logits
CHOICES = frozenset({"where", "mask"})
EXPONENTIALS = frozenset({"exp", "exps"})
LARGE = 8.0  # a factor that puts ordinary numbers above 1
COPIES = 8  # of all results in float64, that the device holds at a time
LARGE_BYTES = 4e9  # of all copies, from which on noise that is not looked at is let go
IN_FLOAT64 = {"xla_disable_hlo_passes": "triton-softmax-rewriter"}  # its tiles of float64 compile for half a minute


@dataclass
class _Roundings:
    """How far rounding may carry results for some inputs: no candidate changes that."""

    noises: dict[tuple[int, float], list[Any]] = field(  # by the number of samples, and by their size
        default_factory=dict[tuple[int, float], list[Any]]
    )
    written: list[list[Any] | None] = field(default_factory=list[list[Any] | None])  # `written_errors`, if known


@dataclass(frozen=True)
class _Evaluated:
    """Inputs, and the results of three programs; the last two where they are compared. `is_repeatable`: two runs of the
    winner gave the same bits. `in_range`: the reference has the range of the program's own types.
    """

    inputs: Sequence[Any]
    reference: Sequence[Any]
    xla: Sequence[Any]
    results: Sequence[Any]
    is_repeatable: bool
    in_range: bool = False
    roundings: _Roundings = field(default_factory=_Roundings)


@dataclass
class Accuracy:
    """XLA's floats for a subject, and what its winners are held to."""

    subject: RegionOnDevice

    def gate(self, winner: Winner, only: Sequence[str] = ()) -> tuple[bool, str]:
        """Are the winner's floats as good as XLA's on every input class, or on those that are named? And why.

        Of the named ones those count that the program has: some are of programs whose inputs mask, say.
        """
        with memory_turn(self.subject.device, self._bytes):
            return self._judged(winner, only)

    def _judged(self, winner: Winner, only: Sequence[str]) -> tuple[bool, str]:
        ours, classes = self._compiled(self.subject.ours(winner)), self._classes
        names = [name for name in only or classes if name in classes]
        for name in sorted(names, key=lambda name: -self._refusals[name]):
            if wrong := self._on_class(winner, name, ours):
                self._refusals[name] += 1  # candidates that are alike fail alike: the next one runs on it first
                return False, f"{name}: {wrong}"
        with process_turn(self.subject.device):
            wrong = "" if only else self._at_brinks(winner, ours)
        if wrong:
            return False, wrong
        return True, f"passed on {len(names)} input classes, repeated runs equal bit for bit"

    def prepare(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Let XLA compile what the gate runs, with XLA's own results as the candidate's.

        What every candidate needs comes first, then what few need, until there is `enough`.
        """
        if self.is_small or enough():
            return
        values = self._classes[input_classes.ORDINARY[0]]
        self._compile_at_once(values)
        with memory_turn(self.subject.device, self._bytes):
            run = self._run(values, self._xla)
            self._misread(run)
            for noise, written in self._allowances(run):
                _of_all(self._float_gate, run.reference, run.xla, run.xla, noise, written)
                if enough():
                    return

    def _compile_at_once(self, values: Sequence[np.ndarray]) -> None:
        """Compile all programs that candidates are compared with, each on a thread of its own."""
        in_float64 = (partial(self._on_device, exact, self._inputs(values)) for exact in (True, False))
        programs = [lambda: self._xla, lambda: self._unfused, *in_float64]
        spread(as_here(lambda compiled: compiled()), programs, len(programs))

    @cached_property
    def _refusals(self) -> Counter[str]:
        """How many candidates each class has refused."""
        return Counter()

    @cached_property
    def _xla(self) -> Callable[..., list[jax.Array]]:
        return self._compiled(self.subject.xla)  # once for all winners

    @cached_property
    def _unfused(self) -> Callable[..., list[jax.Array]]:
        return self._compiled(self.subject.unfused)

    def _compiled(self, function: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
        """Compile a function of the region's values, without autotuning: that takes seconds, and it runs kernels that
        would be seen in the profile of another region.
        """
        return self.subject.compiled(function, self._options)

    @property
    def _options(self) -> dict[str, Any] | None:
        """XLA's options for what the gate alone runs."""
        return None if self.subject.platform == "cpu" else timing.ONCE

    @cached_property
    def _classes(self) -> input_classes.InputClasses:
        region = self.subject.region
        near, roots, counts = self._cancelled_by, inputs_under_roots(region), indices_compared(region)
        logits = biases(region), scaled_logits(region)
        return input_classes.input_classes(self.subject.specs, 0, near, roots, counts, switches(region), *logits)

    def _on_class(self, winner: Winner, name: str, ours: Callable[..., list[jax.Array]]) -> str:
        """Say why the winner's results for inputs of a class are wrong; empty if they are not.

        On ordinary inputs XLA may not differ from float64 by more than rounding can, all in all and in each row; nor
        where inputs mask logits: a translated mask has to be one. (Beside float16's lowest number others
        keep some of their digits.) Rounding decides a softmax between large logits, and then says nothing about its
        rows. So the same inputs are tried again, half as large, until the rows agree.
        """
        values, is_ordinary = self._classes[name], self._is_ordinary(name)
        compared = self._comparison(winner, name)
        different = ""
        for halvings in range(MOST_HALVINGS + 1):
            run = self._run([input_classes.halved(x, halvings) for x in values], ours)
            run = replace(self._with_flushed_inputs(run, name), roundings=self._roundings(name, halvings))
            if not run.is_repeatable:
                return "two runs differ"
            with gpu_lock(self.subject.device):  # once: each look at float64 would wait for others' turns
                run, different = self._read(run, name) if is_ordinary else (run, "")
                if different and (all_in_all := self._misread(run, rows=False)):
                    return all_in_all
                if (wrong := compared(run)) or not different:
                    return wrong
        return different

    def _read(self, run: _Evaluated, name: str) -> tuple[_Evaluated, str]:
        """Compare the translated program with XLA's results on inputs of a class; the run, and what differs.

        Where inputs mask with the lowest number of their type, the program itself may make an infinity of it, which
        float64 does not. So there the reference may have the range of the program's types, and candidates are then
        compared with that.
        """
        different = self._misread(run)
        if not different or not input_classes.masks_with_lowest(name):
            return run, different
        in_range = replace(
            run, reference=self.in_float64(run.inputs, in_range=True), roundings=_Roundings(), in_range=True
        )
        return (run, different) if self._misread(in_range) else (in_range, "")

    def _comparison(self, winner: Winner, name: str) -> Callable[[_Evaluated], str]:
        """How a winner's results for inputs of a class are compared."""
        reordered = winner.family == "algebra"  # another order meets other roundings, infinities in another order
        # Of infinities and NaN one may stand for another where infinity times a rest of zero is NaN.
        splits = any(Precision.ROUNDED < k.precise < Precision.FLOAT32 for k in winner.schedule.kernels)
        kinds = not reordered and not splits
        degenerate = name in input_classes.DEGENERATE or (reordered and name in input_classes.LOGITS)
        return partial(
            self._compared,
            winner,
            kinds=kinds and not input_classes.is_spoiled(name),
            spread=(2.0 if reordered else 1.0) * (2.0 if degenerate else 1.0),
            masks=input_classes.may_mask(name),
            brink=math.inf if self._keeps_range or name not in input_classes.EXTREME else gate.LATE,
            least=self._least(name),
        )

    def _least(self, name: str) -> float:
        """Numbers below it may be zero, on inputs of a class."""
        return 0.0 if self._keeps_range or name != input_classes.DENORMAL else gate.LEAST_NORMAL

    def _is_ordinary(self, name: str) -> bool:
        """Is a translation compared with XLA on inputs of this class?"""
        return name in input_classes.ORDINARY or (input_classes.masks_with_lowest(name) and not self._has_float16)

    def _run(self, values: Sequence[np.ndarray], ours: Callable[..., list[jax.Array]]) -> _Evaluated:
        """Run the region in float64, XLA's code and the winner's."""
        args, xla = [jax.device_put(v, self.subject.device) for v in values], self._xla
        inputs = values if self._on_host else args
        reference = self.in_float64(inputs)
        with process_turn(self.subject.device):
            results, again = ours(*args), ours(*args)
            same = all(same_bits(a, b) for a, b in zip(results, again, strict=True))
            placed = self._placed(jax.block_until_ready(xla(*args))), self._placed(results)
        return _Evaluated(inputs, reference, *placed, bool(same))

    def _compared(
        self,
        winner: Winner,
        run: _Evaluated,
        *,
        kinds: bool,
        spread: float,
        masks: bool = False,
        brink: float = math.inf,
        least: float = 0.0,
    ) -> str:
        """Say why the winner's results are wrong, against float64 and XLA's; empty if they are not.

        least: numbers below it may be zero.
        """
        reference = run.reference
        skips = any(k.loop_bounds for k in winner.graph)
        compare = partial(self._float_gate, kinds=kinds, spread=spread, skips=skips, brink=brink)
        outputs = zip(reference, run.xla, strict=True)
        has_masks = [masks and is_float(x.dtype) and gate.has_masks(r) for r, x in outputs]
        reasons: list[str] = []
        for noise, written in self._allowances(run):
            if least:
                noise = self._at_least(least, noise, reference)
            found = _of_all(compare, reference, run.xla, run.results, noise, written, has_masks)
            reasons = list(itertools.chain.from_iterable(found))
            if not reasons:
                break
        return "; ".join(reasons)

    def _float_gate(
        self, r: Any, x: Any, c: Any, noise: Any, written: Any, has_masks: bool = False, **rules: Any
    ) -> list[str]:
        """What is wrong with one result; with what it masks left out, too, if it `has_masks`."""
        sizes = (math.inf, MASKING) if has_masks else (math.inf,)
        own = partial(gate.float_gate, r, x, c, noise=noise, written=written, unit=self.unit, **rules)
        return [reason for below in sizes for reason in own(below=below).reasons]

    def _with_flushed_inputs(self, run: _Evaluated, name: str) -> _Evaluated:
        """The same, with XLA's numbers where the program has none if inputs that may be zero are: 0 / 0, say."""
        if not (least := self._least(name)):
            return run
        flushed = self.in_float64([self._flushed(x, least) for x in run.inputs])
        with self._arithmetic():
            pairs = zip(flushed, run.xla, run.results, strict=True)
            results = [self._xp.where(self._xp.isfinite(f), c, x) if is_float(c.dtype) else c for f, x, c in pairs]
        return replace(run, results=results)

    def _flushed(self, x: Any, least: float) -> Any:
        return self._xp.where(abs(x) < least, self._xp.zeros_like(x), x) if is_float(x.dtype) else x

    def _at_least(self, least: float, noise: Sequence[Any], reference: Sequence[Any]) -> list[Any]:
        """The noise, and `least` besides, for each element."""
        with self._arithmetic():
            nothing = [self._xp.zeros(r.shape) if n is None else n for n, r in zip(noise, reference, strict=True)]
            return [least + n for n in nothing]

    def _misread(self, run: _Evaluated, rows: bool = True) -> str:
        """Find where the translated program differs from XLA's results by more than rounding can explain.

        Noise takes time, and only results that cancel to nothing need it. It has float32's size; XLA rounds as coarsely
        as the narrowest type, or as TF32.
        """

        def wrong(noise: Sequence[Any]) -> str:
            misread = lambda r, x, n: gate.misread(r, x, self.narrowest, n, rows)  # noqa: E731
            return next(filter(None, _of_all(misread, run.reference, run.xla, noise)), "")

        if not wrong([None] * len(run.xla)):
            return ""
        coarsest = max(self.unit, TF32_UNIT if self.subject.multiplies_in_tf32 else 0.0)
        scale = coarsest / (2 * HALF_UNIT)
        with self._arithmetic():
            scaled = [scale * n for n in self._noise_of(run, SAMPLES)]
        if not wrong(scaled):
            return ""
        # Coarse rounding changes which side of a step numbers are on (a ReLU's gradient); fine rounding hardly ever.
        return wrong(self._noise_of(run, SAMPLES, scale * HALF_UNIT))

    def _allowances(self, run: _Evaluated) -> Iterator[tuple[Sequence[Any], Sequence[Any]]]:
        """Noise and `written_errors` of each result that the gate allows for: none, then more and more, since they take
        time and only some results are near them.
        """
        nothing = noise = [None] * len(run.reference)
        yield noise, nothing
        for samples in (1, SAMPLES):
            noise = self._noise_of(run, samples)
            yield noise, nothing
        known = run.roundings.written
        if not known:
            known.append(self.written_errors(run.inputs, run.in_range))
        if (written := known[0]) is not None:
            yield noise, written

    # ------------------------------------------------------------------ the ends of a type's range

    def _at_brinks(self, winner: Winner, ours: Callable[..., Any]) -> str:
        """Does the candidate overflow, or lose digits near zero, before XLA does? Other orders have other values on the
        way. Of a program without float16 that is asked if its range is to be kept (`strict_range`).
        """
        if not self._keeps_range:
            return ""
        for direction in self._directions:
            last = self._brink(direction)
            for n in range(max(last, 0), min(last + OCTAVES_BEYOND, direction.most(self._dtypes)) + 1):
                args = self._scaled(direction, n)
                results, xla = ours(*args), self._xla(*args)
                if any(map(gate.shorter_range, xla, results)):
                    return f"overflows with {direction}, n = {n}, where XLA does not"
                if n == last and (self.is_small or self.subject.platform != "cpu"):
                    spread = 2.0 * (2.0 if winner.family == "algebra" else 1.0)
                    run = self._run([np.asarray(x) for x in args], ours)
                    if why := self._compared(winner, run, kinds=False, spread=spread):
                        return f"{direction}, n = {n}: {why}"
        return self._beside_zeros(ours)

    def _beside_zeros(self, ours: Callable[..., Any]) -> str:
        """Does the candidate overflow where the program multiplies by zeros what would? An input may hold the lowest
        number of its type, which masks; another order of products and sums meets that before the zeros.
        """
        for name, args in self._many_zeros():
            if any(map(gate.shorter_range, self._xla(*args), ours(*args))):
                return f"overflows where {name}, and XLA does not"
        return ""

    def _many_zeros(self) -> Iterator[tuple[str, list[jax.Array]]]:
        """Inputs, and in words what they hold."""
        zeros, lowest = ([_filled(x, fill) for x in self._ordinary] for fill in (0.0, -np.inf))
        for i in self._floats:
            for name, row in (("first", 0), ("last", -1)):
                alone = _row_of(self._ordinary[i], row)
                yield f"all inputs but the {name} row of input {i} are zero", [*zeros[:i], alone, *zeros[i + 1 :]]
            yield f"input {i} holds the lowest number and the others zeros", [*zeros[:i], lowest[i], *zeros[i + 1 :]]
            yield f"input {i} holds zeros and the others the lowest number", [*lowest[:i], zeros[i], *lowest[i + 1 :]]

    @cached_property
    def _directions(self) -> list[range_edges.Direction]:
        return list(range_edges.directions(self._floats, inputs_that_meet(self.subject.region)))

    @property
    def _floats(self) -> list[int]:
        """Inputs of floats, by position."""
        return [i for i, dtype in enumerate(self._dtypes) if is_float(dtype)]

    @property
    def _dtypes(self) -> list[np.dtype]:
        return [dtype for _, dtype in self.subject.specs]

    @cached_property
    def _known_brinks(self) -> dict[range_edges.Direction, int]:
        return {}

    def _brink(self, direction: range_edges.Direction) -> int:
        """The last power of two at which XLA's results are finite and have all of their digits."""
        if direction not in self._known_brinks:

            def is_in_range(n: int) -> bool:
                results = [y for y in self._xla(*self._scaled(direction, n)) if is_float(y.dtype) and y.size]
                return range_edges.in_range([float(x) for x in _largest(results)], [y.dtype for y in results])

            most = direction.most(self._dtypes)
            self._known_brinks[direction] = most if is_in_range(most) else range_edges.brink(is_in_range, most)
        return self._known_brinks[direction]

    @cached_property
    def _ordinary(self) -> Sequence[jax.Array]:
        return jax.device_put(self._classes[input_classes.ORDINARY[0]], self.subject.device)

    def _scaled(self, direction: range_edges.Direction, n: int) -> list[jax.Array]:
        """Inputs at a distance in a direction."""
        powers = [direction.power(i, n) for i in range(len(self._ordinary))]
        return [
            _times(x, np.asarray(power, x.dtype), direction.positive) if is_float(x.dtype) else x
            for x, power in zip(self._ordinary, powers, strict=True)
        ]

    @property
    def _keeps_range(self) -> bool:
        """May no candidate overflow before XLA does?"""
        return self.subject.options.strict_range or self._has_float16

    @cached_property
    def _has_float16(self) -> bool:
        """Is float16 among the types of the user's values?"""
        avals = (a for eqn in self.subject.region.equations for a in (*eqn.in_avals, *eqn.out_avals))
        return any(a.dtype == np.float16 for a in avals)

    # ------------------------------------------------------------------ the region in float64

    @cached_property
    def is_small(self) -> bool:
        """Is float64 soon done with it?"""
        most = MAX_NUMPY_FLOPS if self.subject.platform == "cpu" else MAX_NUMPY_FLOPS_BESIDE_GPU
        return footprint(self.subject.reference).flops < most

    @cached_property
    def _cancelled_by(self) -> list[float]:
        """Values that cancel a constant of the program, as far as inputs hold such numbers: c of x - c. Other orders of
        evaluation differ there.
        """
        farthest = max((float(jnp.finfo(self._dtypes[i]).max) for i in self._floats), default=0.0)
        found: dict[float, None] = {}
        for op in (op for k in self.subject.region.graph.kernels for op in k.ops):
            scale, offset = (float(op.number(n, d)) for n, d in (("scale", 1), ("offset", 0)))
            if scale and NEAREST <= abs(offset / scale) < farthest:
                found[-offset / scale] = None
        return list(found)[:MOST_NEAR]

    @property
    def _bytes(self) -> float:
        """Bytes that comparing takes, roughly: results, and what float64 holds in between, once it is compiled."""
        plans = (run.memory_analysis() for run in self._evaluators.values())
        between = (plan.temp_size_in_bytes for plan in plans if plan is not None)
        return self._result_bytes + max(between, default=0)

    @cached_property
    def _result_bytes(self) -> float:
        """Bytes of the results of three programs and of noise, in float64, and of what makes them, roughly."""
        tensors = (self.subject.reference.tensors[name] for name in self.subject.reference.outputs)
        return COPIES * sum(8.0 * math.prod(map(self.subject.reference.extent, t.axes)) for t in tensors)

    @property
    def _on_host(self) -> bool:
        """Does the processor evaluate in float64 and compare? Else the device, where a processor would take minutes."""
        return self.is_small

    @property
    def _xp(self) -> Any:
        return np if self._on_host else jnp

    def _placed(self, results: Sequence[jax.Array]) -> list[Any]:
        """Results where they are compared."""
        return [np.asarray(y) for y in results] if self._on_host else list(results)

    def _inputs(self, values: Sequence[Any]) -> Sequence[Any]:
        """Values of the region's inputs where they are evaluated in float64."""
        return values if self._on_host else [jax.device_put(v, self.subject.device) for v in values]

    def in_float64(
        self, values: Sequence[Any], sample: int | None = None, half_unit: float = HALF_UNIT, in_range: bool = False
    ) -> list[Any]:
        """The region in float64, inputs upcast from their own dtype; with noise of this size if `sample` is given.

        in_range: with the range of the program's own types.
        """
        inputs, noise = self._inputs(values), () if sample is None else (sample, half_unit)
        with self._arithmetic():
            if self._on_host:
                results = self._wide(np, in_range, noise, *inputs)
            else:
                run = self._on_device(not noise, inputs, in_range)
                with gpu_lock(self.subject.device):
                    results = jax.block_until_ready(run(noise, *inputs))
            tensors = dict(zip(self.subject.region.translated.outputs, results, strict=True))
            return [b.joined(tensors, self._xp) for b in self.subject.region.outputs]  # Region.finish without the cast

    def translated(self, name: str) -> tuple[list[np.ndarray], list[Any]]:
        """Inputs of a class, and the results of the translated program in float64."""
        values = self._classes[name]
        return values, self.in_float64(values)

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """Where arithmetic may be in float64, and infinities and NaN are among the inputs."""
        with np.errstate(all="ignore"), nullcontext() if self._on_host else jax.enable_x64(True):
            yield

    def _on_device(self, is_exact: bool, inputs: Sequence[Any], in_range: bool = False) -> Callable[..., Any]:
        """The region in float64, without noise or with, compiled once for all inputs."""
        if (key := (is_exact, in_range)) not in self._evaluators:
            start = time.monotonic()
            with self._arithmetic():
                lowered = jax.jit(partial(self._wide, jnp, in_range)).lower(() if is_exact else (0, HALF_UNIT), *inputs)
                self._evaluators[key] = lowered.compile(self._options and self._options | IN_FLOAT64)
            kind = "float64" if is_exact else "float64 with noise"
            log.info("the region in %s compiled in %.1f s", kind, time.monotonic() - start)
        return self._evaluators[key]

    def _wide(self, xp: Any, in_range: bool, noise: tuple[Any, ...], *values: Any) -> list[Any]:
        """The tensors of the region's program, from values of its inputs; `noise`: which, and how large, if any."""
        region = self.subject.region
        graph, arrays = region.translated, region.prepare(list(map(xp.asarray, values)))
        if noise:
            return noisy(graph, arrays, xp, *noise, in_range=in_range)
        domain = partial(FloatDomain if xp is np else _AsWritten, in_range=in_range)
        return evaluate.run(graph, arrays, xp=xp, domain=domain)

    @cached_property
    def _evaluators(self) -> dict[tuple[bool, bool], jax.stages.Compiled]:
        return {}

    # ------------------------------------------------------------------ what rounding may do

    def _noise_of(self, run: _Evaluated, samples: int, half_unit: float = HALF_UNIT) -> list[Any]:
        """Noise of a run, found once."""
        known = run.roundings.noises
        if (samples, half_unit) not in known:
            if self._result_bytes > LARGE_BYTES:
                known.clear()
            known[samples, half_unit] = self.noise(run.inputs, run.reference, samples, half_unit, run.in_range)
        return known[samples, half_unit]

    def _roundings(self, name: str, halvings: int) -> _Roundings:
        """What is known of rounding for inputs of a class, if a candidate ran on them last. Candidates with the same
        fault are refused on the same inputs, and noise takes longer than they do.
        """
        known = self._known_roundings
        if (name, halvings) not in known or self._result_bytes > LARGE_BYTES:
            known.clear()
            known[name, halvings] = _Roundings()
        return known[name, halvings]

    @cached_property
    def _known_roundings(self) -> dict[tuple[str, int], _Roundings]:
        return {}

    def noise(
        self,
        values: Sequence[Any],
        exact: Sequence[Any],
        samples: int,
        half_unit: float = HALF_UNIT,
        in_range: bool = False,
    ) -> list[Any]:
        """How far rounding may carry its results from these exact ones: root mean square of so many samples."""
        xp = self._xp
        with self._arithmetic():
            farther = _farther if self._on_host else _farther_on_device
            squares = [xp.zeros(r.shape) for r in exact]
            for sample in range(samples):
                squares = farther(squares, self.in_float64(values, sample, half_unit, in_range), exact)
            return [xp.sqrt(x / samples) for x in squares]

    def written_errors(self, values: Sequence[Any], in_range: bool = False) -> list[Any] | None:
        """How far the user's equations are from float64 if they run one by one, each result rounded to its type: the
        largest of a few times, with all inputs a little larger or smaller, since one rounding may undo another. None
        where they cannot run so. Switches stay: added to a mask that is nearly 0, ordinary numbers have no digits.
        """
        found: list[Any] = []
        switched = switches(self.subject.region)
        for sample in range(NEARBY):
            rng = np.random.default_rng(sample)
            factors = rng.uniform(*AROUND, len(values))
            factors[switched] = 1.0
            with np.errstate(all="ignore"):  # the largest numbers of a type may overflow
                pairs = zip(values, factors, strict=True)
                near = [v * np.asarray(f, v.dtype) if is_float(v.dtype) else v for v, f in pairs]
            try:
                with gpu_lock(self.subject.device):
                    args = (jax.device_put(v, self.subject.device) for v in near)
                    results = self._placed(jax.block_until_ready(self._unfused(*args)))  # a failure is met here
            except Exception as why:  # no memory for all intermediate results, say
                log.info("not run one operation after another: %s", in_one_line(why))
                return None
            exact = self.in_float64(near, in_range=in_range)
            with self._arithmetic():
                errors = [self._xp.abs(y.astype(np.float64) - r) for y, r in zip(results, exact, strict=True)]
                found = [self._xp.fmax(*pair) for pair in zip(found or errors, errors, strict=True)]
        return found

    @cached_property
    def unit(self) -> float:
        """A unit in the last place of 1 in the narrowest type of floats among the user's values."""
        types = {np.dtype(a.dtype) for eqn in self.subject.region.equations for a in (*eqn.in_avals, *eqn.out_avals)}
        return max((float(jnp.finfo(t).eps) for t in types if is_float(t)), default=0.0)

    @cached_property
    def narrowest(self) -> int:
        """Bytes of the narrowest floats among the inputs."""
        floats = (dtype for _, dtype in self.subject.specs if jnp.issubdtype(dtype, jnp.floating))
        return min((dtype.itemsize for dtype in floats), default=4)


@dataclass(frozen=True)
class FloatGate:
    """The gate for floats: runs a winner on classes of inputs, on all if none is named."""

    compare: Callable[[Winner, Sequence[str]], tuple[bool, str]]
    classes: Sequence[str] = ()
    name = "float gate"

    def check(self, candidate: Winner) -> Verdict:
        """Compare the winner's floats with float64's and XLA's.

        Raises:
            LoweringError, UnsupportedError: the winner does not compile here.
        """
        return Verdict(*self.compare(candidate, self.classes))


def _of_all[T](check: Callable[..., T], *columns: Sequence[Any]) -> list[T]:
    """What a check finds for each result, each on a thread of its own: most of the time goes into compiling it."""
    with ThreadPoolExecutor(len(columns[0])) as pool:
        tasks = [pool.submit(check, *row) for row in zip(*columns, strict=True)]
        return [task.result() for task in tasks]


def _farther(squares: Sequence[Any], moved: Sequence[Any], exact: Sequence[Any]) -> list[Any]:
    """The sums of squares, and the squares of how far results moved."""
    triples = zip(squares, moved, exact, strict=True)
    return [total + (m - e) ** 2 if e.dtype.kind == "f" else total for total, m, e in triples]


_farther_on_device = jax.jit(_farther, donate_argnums=0)


@jax.jit
def _largest(results: Sequence[jax.Array]) -> list[jax.Array]:
    """The largest magnitude in each result; not finite if one of its elements is not."""
    return [jnp.abs(y).max() for y in results]


@partial(jax.jit, static_argnums=2)
def _times(x: jax.Array, power: jax.Array, positive: bool) -> jax.Array:
    return (jnp.abs(x) if positive else x) * power


@partial(jax.jit, static_argnums=1)
def _filled(x: jax.Array, value: float) -> jax.Array:
    """An array of one value, or of the number of its type that is nearest to it; integers stay as they are."""
    return jnp.full_like(x, max(value, float(jnp.finfo(x.dtype).min))) if is_float(x.dtype) else x


@partial(jax.jit, static_argnums=1)
def _row_of(x: jax.Array, row: int) -> jax.Array:
    """`x` with large numbers in its first or last row, and zeros in all others. Elements of a vector are its rows."""
    place = (row,) * max(x.ndim - 1, min(x.ndim, 1))
    return jnp.zeros_like(x).at[place].set(LARGE * x[place])


@jax.jit
def same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    """Are two arrays of one type equal bit for bit?"""
    if a.dtype != bool:
        a, b = (lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for x in (a, b))
    return jnp.array_equal(a, b)


@dataclass(frozen=True)
class _AsWritten(FloatDomain):
    """Floats under XLA, which would take a product with a truth value for a choice: zero times NaN is NaN here."""

    def _common(self, *xs: Any) -> list[Any]:
        pairs = zip(super()._common(*xs), xs, strict=True)
        return [lax.optimization_barrier(a) if getattr(x, "dtype", None) == np.bool_ else a for a, x in pairs]


def inputs_under_roots(region: Region) -> list[int]:
    """Inputs, by position, that have to be positive, since what is under a root or a logarithm grows with them."""
    operators = [k for k in region.graph.kernels if isinstance(k, Library)]
    roots = [k for k in operators if _is_root(k.op)]
    others = {k.name: k for k in operators if not _is_root(k.op)}
    found: set[str] = set()
    todo = [x for k in roots for x in _grows_with(k)]
    while todo:
        name = todo.pop()
        if name in others and name not in found:
            todo += _grows_with(others[name])
        found.add(name)
    return [i for i, b in enumerate(region.inputs) if not found.isdisjoint(b.tensors)]


def indices_compared(region: Region) -> dict[int, int]:
    """Inputs of integers, by position, that are compared with indices, and with how many: lengths and labels."""
    graph = region.graph
    inputs = {t.name for t in graph.inputs if t.dtype == "i32"}
    counts = defaultdict[str, list[int]](list)
    for tensor, other in _compared(graph):
        if tensor in inputs and other not in inputs:
            counts[tensor] += map(graph.extent, graph.tensors[other].axes)
    positions = {i: [n for t in b.tensors for n in counts.get(t, ())] for i, b in enumerate(region.inputs)}
    return {i: max(found) for i, found in positions.items() if found}


def _compared(graph: KernelGraph) -> Iterator[tuple[str, str]]:
    """Pairs of tensors that a kernel compares, in both orders."""
    for k in graph.kernels:
        if isinstance(k, Library) and k.op.op in COMPARISONS:
            x, y = _operands(k)
            yield from ((x, y), (y, x))


def switches(region: Region) -> list[int]:
    """Inputs of floats, by position, that a huge factor makes a mask of logits: `(x - 1) * 1e9`."""
    tensors = {t.name for t in region.graph.inputs if is_float(numpy_dtype(t.dtype))}
    found: set[str] = set()
    for k in region.graph.kernels:
        if isinstance(k, Library) and k.op.op in ("affine", "add"):
            factors = ("scale",) if k.op.op == "affine" else ("ca", "cb")
            pairs = zip(_operands(k), factors, strict=True)
            found |= {tensor for tensor, factor in pairs if abs(k.op.number(factor)) > MASKING}
    return [i for i, b in enumerate(region.inputs) if not tensors.intersection(found).isdisjoint(b.tensors)]


def _is_root(op: Op) -> bool:
    return op.op in ("log", "logs", "lesslogs") or (op.op == "pow" and op.number("exponent").denominator > 1)


def _grows_with(k: Library) -> list[str]:
    """Operands that it is positive with, if they are."""
    tensors = _operands(k)
    match k.op.op:
        case "mul" | "dot" if tensors[0] == tensors[1]:
            return []  # a square
        case "add":
            return [t for t, factor in zip(tensors, ("ca", "cb"), strict=True) if k.op.number(factor) > 0]
        case "affine" | "pow" | "log":
            return tensors if k.op.number("scale") > 0 else []
        case "logs":
            return tensors[:1]
        case "lesslogs":
            return tensors[1:2]
        case "where" | "mask":
            return tensors[1:]
        case "mul" | "dot" | "div" | "sum" | "max":
            return tensors
        case _:
            return []


def inputs_that_meet(region: Region) -> list[tuple[int, int]]:
    """Pairs of inputs of floats, by position, of which a product has one on each side, the earliest products first."""
    above = _inputs_above(region)
    found: dict[tuple[int, int], None] = {}
    for k in region.graph.kernels:
        sides = [above[x.tensor] for x in k.loads]
        if k.ops[0].op in ("mul", "dot", "div"):
            x, y = sides if len(sides) == 2 else (sides[0], sides[0])
            found |= dict.fromkeys((min(i, j), max(i, j)) for i in sorted(x) for j in sorted(y) if i != j)
    return list(found)


def _inputs_above(region: Region) -> dict[str, set[int]]:
    """Inputs of floats, by position, from which each tensor is computed."""
    positions, floats = {t: i for i, b in enumerate(region.inputs) for t in b.tensors}, _floats(region)
    above = {t.name: {positions[t.name]} & floats for t in region.graph.inputs}
    for k in region.graph.kernels:
        inputs = set[int]().union(*(above[x.tensor] for x in k.loads))
        above |= {store.tensor.name: inputs for store in k.stores}
    return above


def _floats(region: Region) -> set[int]:
    return {i for i, b in enumerate(region.inputs) if is_float(region.avals[b.value].dtype)}


def biases(region: Region) -> list[int]:
    """Inputs of floats, by position, that are nothing but added to what an exponential is taken of, or a mask chooses
    from: logits and what masks them.
    """
    operators = {k.name: k for k in region.graph.kernels if isinstance(k, Library)}
    todo = [x for k in operators.values() for x in _logits(k, operators)]
    found: set[str] = set()
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            todo += _passed_on(operators[name]) if name in operators else []
    others = set(switches(region))  # 0 or 1, and nothing else
    return [i for i in sorted(_floats(region) - others) if not found.isdisjoint(region.inputs[i].tensors)]


def scaled_logits(region: Region) -> list[int]:
    """Inputs of floats, by position, from which logits are computed that a quotient, power or exponential scales.

    Where all inputs are large, such a factor may make the logits small, or leave the range of its type.
    """
    above = _inputs_above(region)
    scaled: set[str] = set()  # tensors with such a factor
    found: set[int] = set()
    for k in region.graph.kernels:
        operands = [x.tensor for x in k.loads]
        if k.ops[0].op in EXPONENTIALS and operands[0] in scaled:
            found |= above[k.name]
        if _scales(k.ops[0]) or not scaled.isdisjoint(operands):
            scaled.add(k.name)
    return sorted(found)


def _scales(op: Op) -> bool:
    """Whether an operator's result may be small where its operands are large."""
    return op.op in (*EXPONENTIALS, "inner_exp", "div") or (op.op == "pow" and op.number("exponent") < 0)


def _passed_on(k: Library) -> list[str]:
    """Operands that an operator adds or chooses from: logits if its result is one."""
    if k.op.op in SUMS:
        return _operands(k)
    return _operands(k)[1:] if k.op.op in CHOICES else []


def _logits(k: Library, operators: Mapping[str, Library]) -> list[str]:
    """Operands that are logits, or may be: not those in whose place a mask puts an ordinary number, such as 0."""
    match k.op.op:
        case op if op in EXPONENTIALS:
            return _operands(k)[:1]
        case op if op in CHOICES:
            options = _passed_on(k)
            return [] if any(_is_ordinary(operators.get(name)) for name in options) else options
        case _:
            return []


def _is_ordinary(k: Library | None) -> bool:
    """Whether an operator is a constant that masks nothing."""
    return k is not None and k.op.op == "const" and abs(k.op.number("value")) <= MASKING


def _operands(k: Library) -> list[str]:
    return [x.tensor for x in k.operands]
