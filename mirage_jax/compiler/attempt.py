"""One region on one device, where no decision is stored: candidates for it, how long they take, and whether their
floats are good enough.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirage_jax import progress, timing
from mirage_jax.cache import Cache, CacheKey, Entry
from mirage_jax.compiler.inputs import one_set
from mirage_jax.compiler.subject import Subject
from mirage_jax.compiler.trials import Failure, Trials
from mirage_jax.compiler.winner import Winner
from mirage_jax.errors import MirageError, TrialError, UnsupportedError
from mirage_jax.jaxpr_frontend.translate import Region
from mirage_jax.lower import twin
from mirage_jax.mugraph import evaluate
from mirage_jax.mugraph.arrays import is_float
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.footprint import BYTES, Footprint, footprint
from mirage_jax.mugraph.graph import KernelGraph, Library
from mirage_jax.search import structures
from mirage_jax.search.cost import arithmetic, bound_by_products, estimate, fused_estimate
from mirage_jax.search.devices import Device, device_for
from mirage_jax.search.driver import search
from mirage_jax.search.frontier import Space
from mirage_jax.search.structures import Candidate
from mirage_jax.search.window_search import FAMILIES
from mirage_jax.verify import certificate as certificates
from mirage_jax.verify import float_gate
from mirage_jax.verify.noise import SAMPLES, noisy

log = logging.getLogger("mirage_jax")

SPACE = Space(max_ops=14)
LEAST = 2.0  # seconds for a search, however late it is
LONG = 10.0  # seconds of a search that is worth remembering for other sizes
STORED = 48  # structures kept for other sizes, where others may be the best
EVERY_CLASS = 5e8  # operations of a region up to which the float gate runs every class; beyond, float64 takes its time
CORE_CLASSES = (
    "normal",
    "large",
    "near overflow",
    "heavy tail",
    "zero rows",
    "cancelling",
    "integers",
    "large logits",
    "nan",
    "inf",
)
NEARBY, AROUND = 4, (0.97, 1.03)  # inputs on which the program's roundings are seen, and how much larger they are
BRINK = 13  # inputs of size one times 2**13 are still float16 numbers
BEYOND = 3  # powers of two beyond the last at which XLA gives only finite numbers
NEAREST, FARTHEST, MOST_NEAR = 2.0**-4, 2.0**10, 3  # constants of a program near which inputs are tried, and how many
PROMISING = 0.97  # other algebra is measured if the model puts it below this fraction of the program's own
SLOWER = 1.5  # kernels are measured up to this multiple of the model's estimate of XLA, which it knows but roughly,
NO_SLOWER = 1.0  # but well where the time goes into products of libraries


def space_for(region: Region) -> Space:
    """What is searched. Where operands are read in windows, pointwise operators stand there once for each."""
    in_windows = any(len(b.tensors) > 1 for b in region.inputs)
    return replace(SPACE, max_ops=2 * SPACE.max_ops) if in_windows else SPACE


@dataclass
class Attempt(Subject):
    """A subject on its way to a decision."""

    tried: Counter[str] = field(default_factory=Counter)
    measured: list[tuple[float, float]] = field(default_factory=list)  # of each variant: the model's seconds, and real
    devices: Sequence[Any] = ()  # of the same kind, on which variants may be tried
    until: float = math.inf  # of `time.monotonic`: what tuning can do without is left out from then on
    trials: Trials | None = None  # where variants are tried first; None: in this process
    say: progress.Say = lambda _: None

    @cached_property
    def space(self) -> Space:
        return space_for(self.region)

    def wide_inputs(self, values: Sequence[Any]) -> list[Any]:
        """What `in_float64` takes; on the device where a processor would take minutes."""
        arrays = self.region.prepare([np.asarray(v) for v in values])
        if self.is_small or self.platform == "cpu":
            return arrays
        with jax.enable_x64(True):
            return [jax.device_put(x, self.device) for x in arrays]

    def in_float64(self, inputs: Sequence[Any], sample: int | None = None) -> list[np.ndarray]:
        """The region in float64, inputs upcast from their own dtype; with noise if `sample` is a number."""
        graph = self.region.graph
        with np.errstate(all="ignore"):  # infinities and NaN are among the inputs
            if self.is_small or self.platform == "cpu":
                results = _wide(graph, inputs, np, sample)
            else:
                with jax.enable_x64(True):
                    number = None if sample is None else float(sample)
                    results = [np.asarray(y) for y in self._on_device(number, *inputs)]
        tensors = dict(zip(graph.outputs, results, strict=True))
        return [b.joined(tensors, np) for b in self.region.outputs]  # Region.finish without the cast

    def noise(self, inputs: Sequence[Any], exact: Sequence[np.ndarray], samples: int) -> list[np.ndarray]:
        """How far rounding may carry its results from these exact ones: root mean square of so many samples."""
        squares = [np.zeros(r.shape) for r in exact]
        with np.errstate(all="ignore"):
            for sample in range(samples):
                for total, r, moved in zip(squares, exact, self.in_float64(inputs, sample), strict=True):
                    if r.dtype.kind == "f":
                        total += (moved - r) ** 2 / samples
            return [np.sqrt(x) for x in squares]

    def _allowances(
        self, values: Sequence[np.ndarray], inputs: Sequence[Any], exact: Sequence[np.ndarray]
    ) -> Iterator[tuple[Sequence[np.ndarray | None], Sequence[np.ndarray | None]]]:
        """Noise and `written_errors` of each result that the gate allows for: none, then more and more, since they take
        time and only some results are near them.
        """
        nothing = noise = [None] * len(exact)
        yield noise, nothing
        for samples in (1, SAMPLES):
            noise = self.noise(inputs, exact, samples)
            yield noise, nothing
        if (written := self.written_errors(values)) is not None:
            yield noise, written

    def written_errors(self, values: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        """How far the user's equations are from float64 if they run one by one, each result rounded to its type: the
        largest of a few times, with all inputs a little larger or smaller, since one rounding may undo another. None
        where they cannot run so.
        """
        found: list[np.ndarray] = []
        for sample in range(NEARBY):
            rng = np.random.default_rng(sample)
            factors = rng.uniform(*AROUND, len(values))
            with np.errstate(all="ignore"):  # the largest numbers of a type may overflow
                near = [
                    np.asarray(v * v.dtype.type(f), v.dtype) if is_float(v.dtype) else v
                    for v, f in zip(values, factors, strict=True)
                ]
            try:
                results = [np.asarray(y) for y in self.xla(*(jax.device_put(v, self.device) for v in near))]
            except Exception as why:  # no memory for all intermediate results, say
                log.info("not run operation by operation: %s: %s", type(why).__name__, str(why).partition("\n")[0])
                return None
            with np.errstate(all="ignore"):
                exact = self.in_float64(self.wide_inputs(near))
                errors = [np.abs(y.astype(np.float64) - r) for y, r in zip(results, exact, strict=True)]
                found = [np.fmax(*pair) for pair in zip(found or errors, errors, strict=True)]
        return found

    @cached_property
    def unit(self) -> float:
        """A unit in the last place of 1 in the narrowest type of floats among the user's values."""
        types = {np.dtype(a.dtype) for eqn in self.region.equations for a in (*eqn.in_avals, *eqn.out_avals)}
        return max((float(jnp.finfo(t).eps) for t in types if is_float(t)), default=0.0)

    @cached_property
    def is_small(self) -> bool:
        """Is float64 soon done with it?"""
        return footprint(self.reference).flops < EVERY_CLASS

    @cached_property
    def _on_device(self) -> Callable[..., Any]:
        return jax.jit(lambda sample, *xs: _wide(self.region.graph, xs, jnp, sample))

    @cached_property
    def specs(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shapes and dtypes of the region's inputs."""
        avals = [self.region.avals[b.value] for b in self.region.inputs]
        return [(tuple(a.shape), np.dtype(a.dtype)) for a in avals]

    # ------------------------------------------------------------------ stages

    @property
    def description(self) -> Device:
        """What the cost model knows of the device."""
        return device_for(self.device.device_kind)

    @property
    def headroom(self) -> float:
        """Seconds that may be saved, by the model: what XLA takes less what products, or inputs and outputs, take
        alone.
        """
        reference, device = self.reference, self.description
        boundary = (*reference.inputs, *(reference.tensors[name] for name in reference.outputs))
        moved = sum(math.prod(map(reference.extent, t.axes)) * BYTES[t.dtype] for t in boundary)
        operators = [k for k in reference.kernels if isinstance(k, Library)]
        products = sum(arithmetic(k, reference, device) for k in operators if k.op.op == "dot")
        return fused_estimate(reference, device) - max(products, moved / device.bandwidth)

    def candidates(self, cache: Cache, key: CacheKey, say: progress.Say) -> tuple[list[Candidate], str]:
        """Well-formed candidates, best estimate first, and the search's report.

        Kernels that a long search found for the same structure at other sizes are tiled for these; only algebra is
        searched then, because what order of evaluation is cheap depends on sizes.
        """
        budget, device = self.options.budget, self.description
        seconds = min(budget.seconds, max(self.until - time.monotonic(), LEAST))
        key = replace(key, graph=structures.structure(self.reference), extents=(), policy=f"structures, {self.space}")
        known = cache.get(key) if device.is_gpu else None
        kernels = [] if known is None else structures.restore(known.schedule, self.reference, device)
        families = ("algebra",) if kernels or self.options.backend == "jax" else FAMILIES
        notify = progress.searching(say, seconds)
        states = budget.states or 2_000_000
        found, report = search(self.reference, device, self.space, seconds, states, families, notify, budget.workers)
        text = str(report)
        if kernels:
            text = f"kernels: {len(kernels)} structures known from other sizes, only tiles were chosen\nalgebra: {text}"
        elif report.seconds >= LONG:  # else the next time too: nothing beats candidates made for the sizes
            kept = islice(structures.diverse(c for c in found if c.family == "kernels"), STORED)
            if new := structures.to_json(list(kept)):
                cache.put(key, Entry("structures", schedule=new))
        found = sorted([*kernels, *found], key=lambda c: c.seconds)
        self.tried["found"] = len(found)
        return found, text

    @cached_property
    def slowest(self) -> float:
        """Seconds, by the model, up to which kernels are measured."""
        most = NO_SLOWER if bound_by_products(self.reference, self.description) else SLOWER
        return most * fused_estimate(self.reference, self.description)

    def promising(self, c: Candidate) -> bool:
        """Is a candidate worth measuring? Library operators must do clearly less than the program as it stands, kernels
        must not be far slower than XLA's.
        """
        if c.family == "kernels":
            promising = c.seconds <= self.slowest
            self.tried["far slower than XLA by the model"] += not promising
            return promising

        def estimate(f: Footprint) -> float:
            return max(f.flops / self.description.matrix_flops_f32, f.bytes / self.description.bandwidth)

        promising = estimate(footprint(c.graph)) < PROMISING * estimate(self.before)
        self.tried["not cheaper than the program"] += not promising
        return promising

    def verified(self, found: Iterable[Candidate]) -> Iterator[Candidate]:
        """Those that are well formed and pass one draw of the fingerprint."""
        fingerprint = certificates.Fingerprint(self.reference)
        for c in found:
            try:
                check_graph(c.graph)
                same = fingerprint(c.graph)
            except MirageError as why:
                self.tried["refused by the checker"] += 1
                log.info("candidate refused: %s", why)
                continue
            if same:
                yield c
            else:
                self.tried["refused by the fingerprint"] += 1

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Random inputs of the region, on its device."""
        with jax.default_device(self.device):
            return one_set(tuple(jax.ShapeDtypeStruct(*spec) for spec in self.specs), jax.random.key(seed))

    def timings(self, functions: Mapping[str, Callable[..., Any]], rounds: int) -> dict[str, timing.Timing]:
        """Interleaved times of functions of the region's values; a function that fails is left out and counted."""
        on_gpu = self.platform == "cuda"
        size = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.specs)
        sets = timing.sets_for(size) if on_gpu else 1
        args = [self.inputs(i) for i in range(sets)]

        def prepare(item: tuple[str, Callable[..., Any]]) -> tuple[str, timing.Call] | None:
            label, f = item
            try:
                compiled = (timing.chain(f).lower(args) if on_gpu else jax.jit(f).lower(*args[0])).compile()
                call = (
                    (lambda: jax.block_until_ready(compiled(args)))
                    if on_gpu
                    else (lambda: jax.block_until_ready(compiled(*args[0])))
                )
                call()
            except Exception as why:  # a kernel that cannot be compiled or launched is one candidate less
                self.tried["not compiled"] += 1
                log.info("%s not compiled: %s: %s", label, type(why).__name__, str(why).partition("\n")[0])
                return None
            return label, call

        with ThreadPoolExecutor(8 if on_gpu else 1) as pool:
            calls = dict(x for x in pool.map(prepare, functions.items()) if x is not None)
        return timing.time_device(calls, sets, rounds) if on_gpu else timing.time_wall(calls, rounds)

    def screen(self, winners: Sequence[Winner]) -> dict[int, timing.Timing]:
        """Variants timed once each, by position; in another process where there is one, so that none that faults or
        hangs is ever run in this one. Those that fail are left out and counted.
        """
        if self.trials is None:
            found = self.timings({str(i): self.ours(w) for i, w in enumerate(winners)}, rounds=1)
            return {int(i): t for i, t in found.items()}
        try:
            tell = progress.measuring(self.say, len(winners))
            notify = lambda outcome: tell(outcome.seconds if isinstance(outcome, timing.Timing) else None)  # noqa: E731
            outcomes = self.trials.times([w.to_json() for w in winners], notify)
            failures = [o for o in outcomes if isinstance(o, Failure)]
            if len(failures) == len(outcomes) and any(f.wants_memory for f in failures):
                raise TrialError(
                    "this process leaves no memory of the device (XLA_PYTHON_CLIENT_PREALLOCATE=false does)"
                )
        except TrialError as why:
            log.warning("variants are tried in this process: %s", why)
            self.trials = None
            return self.screen(winners)
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, Failure):
                self.tried[outcome.kind] += 1
                log.info("%d %s: %s", i, outcome.kind, outcome.why)
        return {i: t for i, t in enumerate(outcomes) if isinstance(t, timing.Timing)}

    def record(self, timed: Iterable[tuple[Winner, timing.Timing]]) -> None:
        """Keep what the model said about variants that were timed, and what they took."""
        for winner, t in timed:
            self.measured.append((estimate(winner.graph, winner.schedule, self.description), t.seconds))

    def exact(self, winner: Winner) -> tuple[bool, str]:
        """Does the text of the winner's kernels compute what its graph says, on numbers without rounding?

        Where it cannot be done, the float gate decides alone, and the report says so.
        """
        if winner.cuda is None:
            return True, ""
        try:
            wrong = twin.exact_check(winner.graph, winner.schedule, winner.options)
        except UnsupportedError as why:
            return True, f"not done: {why}"
        except Exception as why:  # Triton's interpreter changes from version to version; a wrong text did compile
            log.warning("kernels are not checked on exact numbers: %s: %s", type(why).__name__, why)
            return True, f"not done: {type(why).__name__}: {str(why).partition('\n')[0]}"
        return not wrong, wrong or "kernels agree with the graph bit for bit on exact numbers, at small sizes"

    def gate(self, winner: Winner, only: Sequence[str] = ()) -> tuple[bool, str]:
        """Are the winner's floats as good as XLA's on every input class, or on those that are named?"""
        ours, xla = jax.jit(self.ours(winner)), jax.jit(self.xla)
        passed = 0
        reordered = winner.family == "algebra"  # another order meets other roundings, infinities in another order
        # Of infinities and NaN one may stand for another where infinity times a rest of zero is NaN.
        kinds = not reordered and not any(k.precise for k in winner.schedule.kernels)
        skips = any(k.span for k in winner.graph)
        near = _cancelled_by(self.region.graph)
        classes = float_gate.input_classes(self.specs, 0, near)
        narrowest = min((dtype.itemsize for _, dtype in self.specs if jnp.issubdtype(dtype, jnp.floating)), default=4)
        for name in only or (classes if self.is_small else (*CORE_CLASSES, *classes.own)):
            values = classes[name]
            args = [jax.device_put(v, self.device) for v in values]
            candidate = [np.asarray(y) for y in ours(*args)]
            if any(
                not np.array_equal(a, np.asarray(b), equal_nan=True)
                for a, b in zip(candidate, ours(*args), strict=True)
            ):
                return False, f"{name}: two runs differ"
            inputs = self.wide_inputs(values)
            reference, found = self.in_float64(inputs), [np.asarray(x) for x in xla(*args)]
            if name in float_gate.ORDINARY:
                for r, x in zip(reference, found, strict=True):
                    if wrong := float_gate.misread(r, x, narrowest):
                        return False, f"{name}: {wrong}"
            degenerate = name in float_gate.DEGENERATE or (reordered and name in float_gate.LOGITS)
            gate = partial(
                float_gate.float_gate,
                kinds=kinds and name not in float_gate.SPOILED,
                spread=(2.0 if reordered else 1.0) * (2.0 if degenerate else 1.0),
                skips=skips,
                unit=self.unit,
            )
            for noise, written in self._allowances(values, inputs, reference):
                with ThreadPoolExecutor(len(reference)) as pool:
                    rows = zip(reference, found, candidate, noise, written, strict=True)
                    tasks = [pool.submit(gate, r, x, c, noise=n, written=w) for r, x, c, n, w in rows]
                    reasons = [reason for task in tasks for reason in task.result().reasons]
                if not reasons:
                    break
            if reasons:
                return False, f"{name}: {'; '.join(reasons)}"
            passed += 1
        if not only and (overflow := self._overflow(ours, xla)):
            return False, overflow
        return True, f"passed on {passed} input classes, repeated runs equal bit for bit"

    def _overflow(self, ours: Callable[..., Any], xla: Callable[..., Any]) -> str:
        """Does the candidate leave the range of float16 before XLA does? Other orders have other intermediate values.

        All inputs together, then each of them alone, are scaled up until XLA is about to overflow.
        """
        floats = [i for i, (_, dtype) in enumerate(self.specs) if jnp.issubdtype(dtype, jnp.floating)]
        if not any(dtype == np.float16 for _, dtype in self.specs):
            return ""
        values = self.inputs(0)

        def scaled(which: Sequence[int], n: int) -> list[jax.Array]:
            return [x * jnp.asarray(2.0**n, x.dtype) if i in which else x for i, x in enumerate(values)]

        for which in (floats, *([i] for i in floats if len(floats) > 1)):
            in_range = lambda n, w=which: all(bool(jnp.isfinite(y).all()) for y in xla(*scaled(w, n)))  # noqa: E731
            last = float_gate.brink(in_range, BRINK)
            for n in range(max(last, 0), min(last + BEYOND, BRINK) + 1):
                args = scaled(which, n)
                results = zip(xla(*args), ours(*args), strict=True)
                if any(float_gate.shorter_range(np.asarray(x), np.asarray(y)) for x, y in results):
                    what = "all inputs" if which is floats else f"input {which[0]}"
                    return f"overflows with {what} times 2**{n}, where XLA does not"
        return ""


def _wide(graph: KernelGraph, arrays: Sequence[Any], xp: Any, sample: Any) -> list[Any]:
    return evaluate.run(graph, arrays, xp=xp) if sample is None else noisy(graph, arrays, xp, sample)


def _cancelled_by(graph: KernelGraph) -> list[float]:
    """Values that cancel a constant of the program: c of x - c. Other orders of evaluation differ there."""
    found: dict[float, None] = {}
    for op in (op for k in graph.kernels for op in k.ops):
        scale, offset = (float(op.attributes.get(n, d)) for n, d in (("scale", 1), ("offset", 0)))  # pyright: ignore[reportArgumentType]
        if scale and NEAREST <= abs(offset / scale) <= FARTHEST:
            found[-offset / scale] = None
    return list(found)[:MOST_NEAR]
