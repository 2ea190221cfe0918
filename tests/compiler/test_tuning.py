"""The climb from the model's sizes to better ones, and to products that round less, on a device with made-up times."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from lower.kernels import PROGRAMS

from mirage_jax import timing
from mirage_jax.cache import CacheKey
from mirage_jax.compiler import Compiler, tuning
from mirage_jax.compiler.isolation.parent import SLOW, TrialFailure
from mirage_jax.compiler.refused_kernels import RefusedKernels
from mirage_jax.compiler.region import precisions
from mirage_jax.compiler.stored import POLICY
from mirage_jax.compiler.tuning_session import TuningSession
from mirage_jax.compiler.winner import Winner
from mirage_jax.config import Options
from mirage_jax.cost.residuals import FIRST
from mirage_jax.cost.roofline import estimate, register_pressure
from mirage_jax.hardware.device_model import DEVICES
from mirage_jax.lower.triton.frame import name_in_text
from mirage_jax.mugraph.graph import BlockGraph, KernelGraph, KernelSchedule, Precision, Schedule
from mirage_jax.mugraph.parser import parse
from mirage_jax.mugraph.schedule_json import schedule_from_json
from mirage_jax.report import Decision
from mirage_jax.search.candidates import Candidate, as_launched
from mirage_jax.verify.gate import Verdict

PROGRAM = PROGRAMS["rmsnorm"]("f16", i=64, k=1024, j=512)
REGION: Any = SimpleNamespace(in_float32=False)
WINNER = Winner(PROGRAM.graph, PROGRAM.schedule, (), (), "kernels", "cuda")


def seconds(schedule: Schedule) -> float | None:
    """Best at 64 x 128 with 8 warps and 4 stages; the more changes away, the slower. Too much is too much."""
    (kernel,) = schedule.kernels
    tiles = dict(kernel.tiles)
    if tiles["j"] * tiles["k"] > 64 * 512:
        return None
    away = [tiles["j"] / 64, tiles["k"] / 128, kernel.num_warps / 8, kernel.num_stages / 4]
    return 1.0 + sum(max(x, 1 / x) - 1 for x in away)


def attempt(tried: list[Schedule]) -> TuningSession:
    def times(variants: Any, *_: Any) -> list[Any]:
        schedules = [schedule_from_json(v["schedule"]) for v in variants]
        tried.extend(schedules)
        return [
            TrialFailure("not compiled", "") if (s := seconds(x)) is None else timing.Timing((s,)) for x in schedules
        ]

    device = SimpleNamespace(device_kind="NVIDIA H200")
    return TuningSession(REGION, "cuda", device, Options(), trials=SimpleNamespace(times=times))  # type: ignore[arg-type]


TOO_LARGE = "LoweringError: kernel mirage_rmsnorm takes 294912 bytes of shared memory, sm_90 has 232448"


@pytest.mark.parametrize(("why", "is_known"), [(TOO_LARGE, True), ("LoweringError: kernel mirage_rmsnorm: no", False)])
def test_a_kernel_that_does_not_fit_is_tried_once(why: str, is_known: bool) -> None:
    (kernel,) = PROGRAM.graph.kernels
    (sizes,) = PROGRAM.schedule.kernels
    assert name_in_text(kernel) in why
    tried: list[Any] = []

    def times(variants: Any, *more: Any) -> list[Any]:
        notify = more[0]
        tried.extend(variants)
        for n in range(len(variants)):
            notify(n, TrialFailure("not compiled", why))
        return [TrialFailure("not compiled", why)] * len(variants)

    here = replace(attempt([]), trials=SimpleNamespace(times=times))  # type: ignore[arg-type]
    screen = tuning.Screen(here)

    def with_sizes(**changes: Any) -> Winner:
        return replace(WINNER, schedule=replace(WINNER.schedule, kernels=(replace(sizes, **changes),)))

    screen([with_sizes(num_stages=4)])
    screen([with_sizes(num_stages=5), with_sizes(num_stages=4), with_sizes(num_stages=3), with_sizes(num_warps=8)])
    assert len(tried) == (3 if is_known else 4)


def test_kernels_that_spill_are_tried_where_all_do() -> None:
    (sizes,) = PROGRAM.schedule.kernels
    wide = replace(sizes, tiles=(("i", 64), ("j", 512), ("k", 64)), num_warps=2)
    spilling = replace(WINNER, schedule=Schedule((wide,)))
    assert register_pressure(PROGRAM.graph, spilling.schedule) > tuning.MAX_REGISTER_PRESSURE
    tried: list[Schedule] = []
    tuning.Screen(attempt(tried))([WINNER, spilling])
    assert tried == [WINNER.schedule]
    tuning.Screen(attempt(tried))([spilling])
    assert tried[1:] == [spilling.schedule]


def test_neighbours_differ_in_one_kernel_by_one_step() -> None:
    near = list(tuning.neighboring_schedules(WINNER, DEVICES["H200"]))
    assert len(set(near)) == len(near) > 8 and PROGRAM.schedule not in near
    (old,) = PROGRAM.schedule.kernels
    for s in near:
        (new,) = s.kernels
        changed = [n / o for (_, n), (_, o) in zip(new.tiles, old.tiles, strict=True) if n != o]
        if changed and new.num_warps != old.num_warps:  # other blocks
            assert changed == [new.num_warps / old.num_warps] and changed[0] in (0.5, 2.0)
            assert new.num_stages == old.num_stages
            continue
        launch = (new.num_warps, new.num_stages) != (old.num_warps, old.num_stages)
        assert launch != bool(changed)
        assert sorted(changed) in ([], [0.5], [2.0], [0.5, 2.0], [0.5, 0.5], [2.0, 2.0])
        loop = PROGRAM.graph.kernels[0].loop
        assert len(set(changed)) != 1 or len(changed) == 1 or dict(new.tiles)[loop] != dict(old.tiles)[loop]


def test_parts_of_a_split_axis_change_alone_and_with_the_blocks_that_compute_them() -> None:
    program = PROGRAMS["split_attention"]("f16", h=32, i=256, n=4096, d=64, parts=8, tiles={"h": 1, "i": 64, "n": 64})
    ((axis, count),) = program.schedule.parts
    kernels = (replace(program.schedule.kernels[0], num_warps=4), *program.schedule.kernels[1:])
    schedule = replace(program.schedule, kernels=kernels)
    near = list(tuning.neighboring_schedules(replace(WINNER, graph=program.graph, schedule=schedule), DEVICES["H200"]))
    assert len(set(near)) == len(near)
    changed = [s for s in near if s.parts != schedule.parts]
    assert {s.parts for s in changed} == {((axis, 2 * count),), ((axis, count // 2),)}
    assert {s.parts for s in changed if s.kernels == kernels} == {s.parts for s in changed}
    for s in changed:
        assert s.kernels[1:] == kernels[1:]
        sizes = [n / o for (_, n), (_, o) in zip(s.kernels[0].tiles, kernels[0].tiles, strict=True) if n != o]
        assert sizes == ([] if s.kernels == kernels else [s.kernels[0].num_warps / 4])


def test_the_climb_finds_the_best_sizes() -> None:
    tried: list[Schedule] = []
    screen = tuning.Screen(attempt(tried))
    best = screen([WINNER])
    for _ in range(8):
        origins = screen.leaders(2)
        best = screen(
            [replace(w, schedule=s) for w in origins for s in tuning.neighboring_schedules(w, DEVICES["H200"])]
        )
    (kernel,) = best[0].schedule.kernels
    assert (dict(kernel.tiles)["j"], dict(kernel.tiles)["k"]) == (64, 128)
    assert (kernel.num_warps, kernel.num_stages) == (8, 4)
    assert len(set(tried)) == len(tried)  # nothing is timed twice
    assert len(best) == tuning.SCREEN_SURVIVORS and screen.leaders(5) == best[:1]  # one muGraph


def test_kernels_with_specialized_warps_do_not_hide_others() -> None:
    """Whichever is ahead before the climb, both are climbed from."""
    screen = tuning.Screen(attempt([]))
    (kernel,) = PROGRAM.schedule.kernels
    ahead = replace(WINNER, schedule=replace(PROGRAM.schedule, kernels=(replace(kernel, specialized=True),)))
    slow = replace(WINNER, schedule=replace(PROGRAM.schedule, kernels=(replace(kernel, num_stages=6),)))
    screen.seconds |= {ahead: 1.0, WINNER: 2.0, slow: 3.0}
    assert screen.origins(2) == [ahead, WINNER] and screen.leaders(2) == [ahead]


def test_what_is_promised_is_what_is_asked_for() -> None:
    assert f"ratio at least {tuning.MIN_SPEEDUP}" in POLICY


@pytest.mark.parametrize("until", [0.0, math.inf])
def test_no_climb_when_the_time_is_used_up(until: float, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Schedule] = []
    late = replace(attempt(tried), until=until)
    monkeypatch.setattr(late, "winner", lambda graph, schedule, *_: replace(WINNER, schedule=schedule))
    monkeypatch.setattr(late, "timings", lambda functions, *_, **__: dict.fromkeys(functions, timing.Timing((1.0,))))
    found = tuning.compare(late, [Candidate(PROGRAM.graph, PROGRAM.schedule, 1.0, "kernels")], Precision.FAST)
    assert found.best is not None and (len(tried) > 8) == (until > 0)


@pytest.mark.parametrize("until", [0.0, math.inf])
def test_what_was_timed_is_not_timed_again_and_ends_a_late_screen(until: float) -> None:
    """Another screen of the same session, for more precise products say, begins with what is known."""
    tried: list[Schedule] = []
    session = replace(attempt(tried), until=until)
    assert session.screen([WINNER]) == {0: timing.Timing((seconds(WINNER.schedule),))}
    others = [replace(WINNER, schedule=s) for s in tuning.neighboring_schedules(WINNER, DEVICES["H200"])]
    found = tuning.Screen(session)([WINNER, *others])
    assert tried.count(WINNER.schedule) == 1
    assert (found == [WINNER] and len(tried) == 1) if until == 0 else len(tried) > 8


@pytest.mark.parametrize("most", [tuning.MAX_VARIANTS, 8])
def test_no_more_is_tried_of_what_is_far_slower(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model likes both muGraphs alike; two variants show that one of them takes ten times as long."""
    tried = Counter[str]()

    def times(variants: Any, notify: Any, until: float, doomed: Any) -> list[Any]:
        found: list[Any] = []
        for n, v in enumerate(variants):
            if (failure := doomed(n)) is None:
                tried[v["graph"]] += 1
                failure = timing.Timing((10.0 if "slow" in v["graph"] else 1.0,))
            found.append(failure)
            notify(n, failure)
        return found

    here = replace(attempt([]), trials=SimpleNamespace(times=times))
    monkeypatch.setattr(tuning, "_climb", lambda screen, best: best)
    winner = lambda graph, schedule, *_: replace(WINNER, graph=graph, schedule=schedule)  # noqa: E731
    monkeypatch.setattr(here, "winner", winner)
    monkeypatch.setattr(here, "timings", lambda functions, *_, **__: dict.fromkeys(functions, timing.Timing((1.0,))))
    monkeypatch.setattr(tuning, "MAX_VARIANTS", most)
    (kernel,) = PROGRAM.graph.kernels
    slow = replace(PROGRAM.graph, kernels=(replace(kernel, name="slow"),))
    (sizes,) = PROGRAM.schedule.kernels
    others = (tuple(replace(sizes, num_stages=n, num_warps=w) for n in range(2, 6) for w in (2, 8)),)
    candidates = [Candidate(graph, PROGRAM.schedule, 1.0, "kernels", others) for graph in (slow, PROGRAM.graph)]
    tuning.compare(here, candidates, Precision.FAST)
    few, many = tried[str(slow)], tried[str(PROGRAM.graph)]
    assert few <= 2 * FIRST < many, "two with specialized warps and two without"
    assert here.tried[SLOW.kind] > 0 and here.tried["timed"] == few + many


def test_what_is_best_for_each_kernel_is_tried_together() -> None:
    """Two kernels whose times add up; no variant has the best sizes of both."""
    program = PROGRAMS["split_attention"]("f16")
    assert len(program.schedule.kernels) == 2
    screen = tuning.Screen(attempt([]))
    for one, two in ((2, 2), (4, 2), (8, 2), (2, 4), (2, 8)):
        warps = (one, two)
        kernels = tuple(replace(k, num_warps=n) for k, n in zip(program.schedule.kernels, warps, strict=True))
        variant = replace(WINNER, graph=program.graph, schedule=replace(program.schedule, kernels=kernels))
        screen.seconds[variant] = abs(one - 4) + 3 * abs(two - 8)
    (composed,) = screen.composed()
    assert [k.num_warps for k in composed.schedule.kernels] == [4, 8] and composed not in screen.seconds
    screen.seconds[composed] = 0.0
    assert list(screen.composed()) == [composed]
    ((axis, count),) = program.schedule.parts
    parted = replace(composed, schedule=replace(composed.schedule, parts=((axis, 2 * count),)))
    screen.seconds[parted] = -1.0
    assert list(screen.composed()) == [parted], "kernels of other parts take other times"


def exponential_of_product(after: str) -> KernelGraph:
    """A product in one kernel, and what that kernel and others do after its loop."""
    return parse(f"""mugraph {{
      extents i=64 j=1024 k=512
      input x0: f16[i,j]
      input x1: f16[j,k]
      kernel k0 grid(i,k) loop(j) {{
        %x0 = load x0[i,j]
        %x1 = load x1[j,k]
        %0[i,k] = dot{{axes=(j)}} %x0 %x1
        %1[i,k] = acc %0
        {after}
      }}
      output t0
    }}""")


FUSED = exponential_of_product("""%2[i,k] = exp %1
        store t0: f16[i,k] = %2""")
APART = exponential_of_product("""store m0: f32[i,k] = %1
      }
      kernel k1 grid(i,k) {
        %x0 = load m0[i,k]
        %0[i,k] = exp %x0
        store t0: f16[i,k] = %0""")


def test_the_fastest_lends_its_sizes_to_the_same_loop_in_other_graphs() -> None:
    """What follows the loop is in the kernel here and in the next kernel there; k1 has no loop to lend sizes to."""
    usual, best = (KernelSchedule((("i", 32), ("j", 64), ("k", n))) for n in (32, 128))
    after = KernelSchedule((("i", 32), ("k", 32)))
    fused = replace(WINNER, graph=FUSED, schedule=Schedule((usual,)))
    apart = replace(WINNER, graph=APART, schedule=Schedule((best, after)))
    screen = tuning.Screen(attempt([]))
    assert list(screen.borrowed()) == []  # nothing is timed yet
    screen.seconds |= {apart: 1.0, fused: 2.0}
    assert [w.schedule for w in screen.borrowed()] == [Schedule((best,))]
    screen.seconds[fused] = 0.5
    assert [w.schedule for w in screen.borrowed()] == [Schedule((usual, after))]
    screen.seconds[replace(apart, schedule=replace(apart.schedule, parts=(("j", 2),)))] = 0.1
    assert list(screen.borrowed()) == [], "a split axis has its own best sizes"


def twice() -> tuple[BlockGraph, KernelGraph]:
    """A kernel, and a graph with two copies of it."""
    (kernel,) = PROGRAM.graph.kernels
    assert isinstance(kernel, BlockGraph)
    stores = tuple(replace(s, tensor=replace(s.tensor, name=f"{s.tensor.name}2")) for s in kernel.stores)
    both = kernel, replace(kernel, name="again", stores=stores)
    outputs = *PROGRAM.graph.outputs, *(s.tensor.name for s in stores)
    return kernel, replace(PROGRAM.graph, kernels=both, outputs=outputs)


def test_a_launch_of_several_kernels_that_does_not_fit_is_tried_once() -> None:
    kernel, graph = twice()
    (sizes,) = PROGRAM.schedule.kernels
    apart = replace(WINNER, graph=graph, schedule=Schedule((sizes, sizes)))
    joint = replace(apart, schedule=replace(apart.schedule, joint=True))
    refused = RefusedKernels()
    refused.learn(joint, f"kernel {name_in_text(kernel)}_again takes 262144 bytes of shared memory, sm_90 has 232448")
    assert refused.why(joint) and not refused.why(apart)
    smaller = (sizes, replace(sizes, num_warps=8))
    assert not refused.why(replace(joint, schedule=replace(joint.schedule, kernels=smaller)))


def test_kernels_that_do_not_wait_for_each_other_are_tried_in_one_launch() -> None:
    """Two copies of a kernel: the best sizes of both, then these in one launch, with the warps of its widest or with
    as many as most kernels have.
    """
    kernel, graph = twice()
    (sizes,) = PROGRAM.schedule.kernels
    first = replace(WINNER, graph=graph, schedule=Schedule((sizes, replace(sizes, num_warps=8))))
    screen = tuning.Screen(attempt([]))
    assert list(screen.joint()) == []  # nothing is timed yet
    screen.seconds[WINNER], screen.seconds[first] = 1.0, 2.0
    joint, usual = screen.joint()
    assert joint.schedule.joint and [k.num_warps for k in joint.schedule.kernels] == [8, 8]
    assert usual.schedule.joint and [k.num_warps for k in usual.schedule.kernels] == [4, 4]
    screen.seconds[joint] = 0.5
    assert screen.leaders(1) == [joint] and list(screen.joint()) == [joint, usual]
    near = list(tuning.neighboring_schedules(joint, DEVICES["H200"]))
    assert all(s.joint and len({k.num_warps for k in s.kernels}) == 1 for s in near)
    assert {k.num_warps for s in near for k in s.kernels} == set(tuning.WARPS)
    alike = [s for s in near if len({k.num_stages for k in s.kernels}) == 1 and s.kernels[0].tiles == sizes.tiles]
    assert {s.kernels[0].num_stages for s in alike} == set(tuning.STAGES), "all loops of a launch at once"
    loop = kernel.loop
    steps = {tuple(dict(k.tiles)[loop] / dict(sizes.tiles)[loop] for k in s.kernels) for s in near if loop}
    assert (2.0, 2.0) in steps
    assert (joint.footprint.kernels, first.footprint.kernels) == (1, 2)
    assert (joint.together, first.together) == (f"{kernel.name} + again", "")
    launches = estimate(graph, joint.schedule, DEVICES["H200"]), estimate(graph, first.schedule, DEVICES["H200"])
    assert launches[0] < launches[1]
    candidate = Candidate(graph, first.schedule, launches[1], "kernels")
    assert as_launched(candidate, DEVICES["H200"]).seconds <= launches[0], "ranked as it would be launched"
    assert as_launched(replace(candidate, graph=PROGRAM.graph), DEVICES["H200"]).seconds == launches[1]


@pytest.mark.parametrize(
    ("gains", "wanted"),
    [
        ([(1.0, 1.08), (0.9, 0.95)], ["xla", "0"]),  # enough, but may be noise
        ([(1.0, 1.08), (1.04, 1.06)], []),  # another is faster beyond noise
        ([(0.98, 1.04)], []),  # not enough, whatever the noise
        ([], []),
    ],
)
def test_times_that_are_too_few_are_taken_again(gains: list[tuple[float, float]], wanted: list[str]) -> None:
    xla = timing.Timing((1.0,) * 10)
    timed = {
        str(n): timing.Timing(tuple(1 / (low, high)[i % 2] for i in range(10))) for n, (low, high) in enumerate(gains)
    }
    assert list(tuning.unsure({"xla": xla, **timed})) == wanted
    assert not tuning.unsure(timed)


@pytest.mark.parametrize(("seconds", "rounds"), [(1e-6, [10, 60]), (0.041, [10, 48]), (0.25, [10])])
def test_rounds_of_slow_programs_are_not_many(
    seconds: float, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    region = SimpleNamespace(in_float32=False, graph=PROGRAM.graph)
    session, taken = TuningSession(region, "cpu", jax.devices()[0], Options()), list[int]()  # type: ignore[arg-type]
    each = seconds / 2 / session.sets  # of two programs
    monkeypatch.setattr(session, "_calls", lambda functions: dict.fromkeys(functions))
    monkeypatch.setattr(
        session, "_times", lambda calls, n: taken.append(n) or dict.fromkeys(calls, timing.Timing((each,)))
    )
    session.timings({"xla": jax.numpy.sin, "0": jax.numpy.sin}, 10, lambda found: ["xla", "0"])
    assert taken == rounds


@pytest.mark.parametrize("accurate", [0, 1, 2, None])
def test_where_the_gates_refuse_the_fastest_slower_ones_are_compared(
    accurate: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three muGraphs the slower two are compared with XLA only if the fastest is refused."""
    xla, compared = timing.Timing((4.0,) * 6), list[Winner]()
    winners = [replace(WINNER, family=str(n)) for n in range(3)]

    def against_xla(_: Any, best: Sequence[Winner]) -> tuning.Comparison:
        compared.extend(best)
        rows = [(w, timing.Timing((1.0 + n,) * 6), timing.ratio(xla, xla)) for n, w in enumerate(best)]
        return tuning.Comparison(xla, tuple(rows), rows[0][1:])

    class Refusing(Compiler):
        def compare(self, session: Any, finalists: Any, precise: Precision) -> tuning.Comparison:
            return replace(against_xla(session, winners[:1]), others=tuple(winners[1:]))

        def accepted(self, session: Any, base: Any, tried: Any) -> Any:
            return replace(base, winner=next((w for w in tried if w.family == str(accurate)), None))

    monkeypatch.setattr(tuning, "against_xla", against_xla)
    compiler = Refusing(Options(cache_dir=str(tmp_path)))
    decision = compiler._fastest(
        SimpleNamespace(measured=[], variants=(), timed_step=lambda _: nullcontext()),
        Decision(None, "", "search", "cuda"),
        [],
        Precision.FAST,
    )  # type: ignore[arg-type]
    assert decision is not None and decision.winner == (None if accurate is None else winners[accurate])
    assert compared == (winners if accurate != 0 else winners[:1])


@pytest.mark.parametrize("rounding", [True, False])
def test_where_the_gate_refuses_rounding_products_are_more_precise(rounding: bool, tmp_path: Path) -> None:
    """Candidates that round what their products read are measured again; others would be the same again."""
    program = PROGRAMS["attention" if rounding else "rmsnorm"]("f16")
    wide = parse(re.sub(r"(store \w+: )f16", r"\1f32", str(program.graph)))  # else its products are rounded anyway
    candidate = Candidate(wide, program.schedule, 1.0, "kernels")
    timed: list[Precision] = []

    class Refusing(Compiler):
        def compare(self, attempt: Any, finalists: Any, precise: Precision) -> tuning.Comparison:
            timed.append(precise)
            same = timing.Timing((1.0,))
            winner = replace(WINNER, schedule=tuning.as_precise(program.schedule, precise))
            return tuning.Comparison(same, ((winner, same, timing.ratio(same, same)),), None)

        def accepted(self, attempt: Any, base: Any, winners: Any) -> Any:
            (winner,) = winners
            if winner.schedule.kernels[0].precise and not slow:
                return replace(base, winner=winner)
            if winner.schedule.kernels[0].precise:
                return replace(base, why="XLA is as fast")
            attempt.tried["refused by the float gate"] += 1
            return replace(base, why="refused")

        def _keep(self, key: Any, d: Any) -> Any:
            return d

    compiler = Refusing(Options(cache_dir=str(tmp_path)))
    subject = SimpleNamespace(
        timed_step=lambda _: nullcontext(),
        tried=Counter(),
        measured=[],
        variants=(),
        trials=None,
        precisions=precisions(REGION),
    )
    key = CacheKey.here(graph="", extents={}, backend="auto", policy="", device=jax.devices()[0])

    def decide() -> Decision:
        return compiler._measure(subject, key, Decision(None, "", "search", "cuda"), [candidate])  # type: ignore[arg-type]

    slow = True
    assert decide().why == "refused", "what was fast enough, not what was tried instead"
    timed.clear()
    slow = False
    decision = decide()
    assert timed == ([0, 2] if rounding else [0]) and (decision.winner is not None) == rounding

    timed.clear()
    subject.trials, subject.winner, subject.timed = object(), lambda *_: WINNER, {}
    subject.screen = lambda winners: dict.fromkeys(range(len(winners)), timing.Timing((1.0,)))
    refusing = SimpleNamespace(check=lambda winner: Verdict(False, "refused"))
    subject.float_gate = lambda classes: refusing
    assert (decide().winner is not None) == rounding
    assert timed == [2 if rounding else 0], "what ordinary inputs refuse is not measured"


def test_precision_is_asked_of_the_fastest_first_variant(tmp_path: Path) -> None:
    """First variants of all candidates are timed at once, and nothing that was never tried runs here."""
    candidates = [Candidate(PROGRAM.graph, PROGRAM.schedule, 1.0, name) for name in ("fails", "slow", "fast")]
    seconds = {"slow": 2.0, "fast": 1.0}
    screened: list[tuple[str, ...]] = []
    checked: list[str] = []

    def screen(winners: Sequence[Winner]) -> dict[int, timing.Timing]:
        screened.append(tuple(w.family for w in winners))
        return {n: timing.Timing((seconds[w.family],)) for n, w in enumerate(winners) if w.family in seconds}

    def check(winner: Winner) -> Verdict:
        checked.append(winner.family)
        return Verdict(winner.schedule.kernels[0].precise > 0, "")

    session = SimpleNamespace(
        trials=object(),
        precisions=[Precision.FAST],
        timed={},
        screen=screen,
        float_gate=lambda classes: SimpleNamespace(check=check),
        winner=lambda graph, schedule, family: replace(WINNER, schedule=schedule, family=family),
    )
    possible = [list(Precision)] * len(candidates)
    found = Compiler(Options(cache_dir=str(tmp_path)))._least_precise(session, candidates, possible)  # type: ignore[arg-type]
    assert found == Precision.ROUNDED and checked == ["fast", "fast"]
    assert screened[0] == ("fails", "slow", "fast") and set(screened[1:]) == {("fast",)}
