"""Variants that crash, hang or fail take nothing with them: not the process that tunes, and not the other variants."""

import gc
import os
import subprocess
import threading
import time
import weakref
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from deciding import chain, measured, operands
from lower.kernels import PROGRAMS

import mirage_jax
from mirage_jax import children, gpu_lock, timing
from mirage_jax.compiler import tuning
from mirage_jax.compiler.isolation import child
from mirage_jax.compiler.isolation import parent as module
from mirage_jax.compiler.isolation.parent import Patience, Session, TrialFailure, Trials
from mirage_jax.compiler.tuning_session import TuningSession
from mirage_jax.compiler.winner import Winner
from mirage_jax.config import Options
from mirage_jax.errors import TrialError

RUN = f"import runpy\nrunpy.run_path({str(Path(__file__).with_name('fake_worker.py'))!r}, run_name='__main__')"
FAKE = tuple(children.python(RUN))  # which finds the package where it was found here
REGION: Any = SimpleNamespace(in_float32=False)
PROGRAM = PROGRAMS["rmsnorm"]("f16")
WINNER = Winner(PROGRAM.graph, PROGRAM.schedule, (), (), "kernels", "cuda")
QUICK = Patience(start=60, compile=30, run=1.0, deaths=4)


H200 = SimpleNamespace(device_kind="NVIDIA H200")


def fine(seconds: float) -> dict:
    return {"do": "fine", "seconds": seconds}


def timed(seconds: float) -> timing.Timing:
    return timing.Timing((seconds,), 1.0)


def test_no_more_begin_when_the_time_is_over() -> None:
    """What children have begun is finished, and something is always timed."""
    with Session(FAKE, patience=QUICK, kind="fake device") as session:
        found = Trials([session]).times([fine(1.0), fine(2.0), fine(3.0)], until=0.0)
    assert found[0] == timed(1.0) and {f.kind for f in found[1:]} == {"left for lack of time"}


def test_a_child_compiles_no_more_when_the_time_is_over(monkeypatch) -> None:
    """It was sent several variants, of which one takes long to compile."""
    monkeypatch.setattr(module, "COMPILE_THREADS", 1)
    slow = {"do": "compile slowly", "seconds": 1.0}
    with Session(FAKE, patience=QUICK) as session:
        session.times([fine(1.0)])  # it has started
        found = session.times([slow, fine(2.0), fine(3.0)], until=time.monotonic() + 0.1)
    assert found == [timed(1.0), module.LATE, module.LATE]


def test_what_is_known_to_fail_is_not_begun(monkeypatch) -> None:
    """One of two variants shows that the other one fails too."""
    monkeypatch.setattr(module, "BATCHES_PER_CHILD", 9)
    told: dict = {}

    def doomed(i: int) -> TrialFailure | None:
        return TrialFailure("not compiled", "as the first did") if i == 1 and 0 in told else None

    with Session(FAKE, patience=QUICK) as session:
        found = Trials([session]).times([{"do": "raise"}, {"do": "hang"}, fine(1.0)], told.__setitem__, doomed=doomed)
    assert found[1] == TrialFailure("not compiled", "as the first did")
    assert found[2] == timed(1.0) and told == dict(enumerate(found))


def test_the_fake_child_finds_what_this_process_finds() -> None:
    """In this process's own path: not only what is installed, which ``-S`` leaves out."""
    program, *arguments = FAKE
    command, env = [program, "-S", *arguments, "never ready"], children.environment({})
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.strip().endswith("no device")


def test_the_rest_goes_on(monkeypatch) -> None:
    monkeypatch.setattr(module, "BATCH_VARIANTS", 4)  # the second batch meets the child that the first one left
    todo = [fine(1.0), {"do": "abort"}, fine(2.0), {"do": "refuse"}, {"do": "hang"}, {"do": "raise"}, fine(3.0)]
    todo += [{"do": "poison"}, fine(4.0)]  # an error after which the child gives up its device, and ends
    with Session(FAKE, patience=QUICK, kind="fake device") as session:
        found = session.times(todo)
        pid = session._child._process.pid
    assert [found[i] for i in (0, 2, 6, 8)] == [timed(1.0), timed(2.0), timed(3.0), timed(4.0)]
    crashed, refused, hung, raised, poisoned = (found[i] for i in (1, 3, 4, 5, 7))
    assert crashed.kind == "crashed" and "code -6 (illegal access) while running" in crashed.why
    assert refused == TrialFailure("not compiled", "ValueError: cannot be compiled")
    assert hung == TrialFailure("hung", "said nothing for 1 s while running")
    assert raised == TrialFailure("failed to run", "RuntimeError: launch failure")
    assert poisoned == TrialFailure("failed to run", "RuntimeError: illegal address")
    with pytest.raises(ProcessLookupError):  # nothing is left behind
        os.kill(pid, 0)


def test_generated_kernels_in_the_interpreter() -> None:
    """Their texts are generated in the child, from the graph and the schedule that it was sent."""
    pytest.importorskip("triton")
    good = {"do": "interpret", "seconds": 1.0, **WINNER.to_json()}
    short = {**good, "schedule": {"kernels": [], "parts": []}}
    with Session(FAKE) as session:
        found = session.times([good, short])
    assert found[0] == timed(1.0)
    assert found[1] == TrialFailure("failed to run", "LoweringError: the schedule has 0 kernels, the graph 1")


def test_an_interrupt_ends_all() -> None:
    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    with Session(FAKE) as a, Session(FAKE) as b, pytest.raises(KeyboardInterrupt):
        Trials([a, b]).times([fine(1.0), {"do": "hang"}], interrupt)
    assert a._child._process.poll() is not None and b._child._process.poll() is not None


def test_a_crash_of_the_compiler_is_found_among_several() -> None:
    with Session(FAKE, patience=QUICK) as session:
        found = session.times([fine(1.0), {"do": "abort while compiling"}, {"do": "abort while compiling"}, fine(2.0)])
    assert [found[0], found[3]] == [timed(1.0), timed(2.0)]
    assert {f.kind for f in found[1:3]} == {"crashed"} and all("while compiling" in f.why for f in found[1:3])


def test_too_many_crashes() -> None:
    with Session(FAKE, patience=Patience(deaths=0)) as session:
        found = session.times([{"do": "abort"}, fine(1.0)])
    assert [f.kind for f in found] == ["crashed", "not tried"]


@pytest.mark.parametrize(("command", "kind"), [((*FAKE, "never ready"), None), (FAKE, "another device")])
def test_no_child(command, kind) -> None:
    with pytest.raises(TrialError), Session(command, kind=kind) as session:
        session.times([fine(1.0)])


def test_several_devices_share_the_work() -> None:
    told: list = []
    with Session(FAKE) as a, Session(FAKE) as b:
        found = Trials([a, b]).times([fine(1.0), {"do": "abort"}, fine(2.0)], lambda *what: told.append(what))
    assert found[0] == timed(1.0) and found[2] == timed(2.0)
    assert a._deaths + b._deaths == 1
    assert set(told) == set(enumerate(found))  # as they come


@pytest.mark.parametrize(("needed", "count"), [(1, 6), (30, 6), (40, 4), (70, 2), (1000, 2)])
def test_no_more_children_than_find_room(needed: int, count: int) -> None:
    """Of three on each of two devices."""
    sessions = [Session(FAKE) for _ in range(6)]
    assert Trials(sessions, devices=2).with_room(needed, free=100).sessions == sessions[:count]
    assert Trials(sessions, devices=2, lanes=2).with_room(needed, free=200).sessions == sessions[:count]


def test_children_go_on_to_the_next_region(monkeypatch) -> None:
    """Unless one has died: what it was given may have spoiled more."""
    started: list[Session] = []

    @contextmanager
    def one(devices, lanes, machines):
        with Session(FAKE) as session:
            started.append(session)
            yield Trials([session])

    monkeypatch.setattr(module, "trials", one)
    with module.shared(["a"]) as lend:
        with lend() as first:
            assert first.times([fine(1.0)]) == [timed(1.0)]
        with lend() as again:
            assert again is first
            again.times([{"do": "abort"}])
        with lend() as second:
            assert second is not first and started[0]._closed and second.times([fine(2.0)]) == [timed(2.0)]
            with lend() as third:  # at the same time
                assert third is not second
    assert len(started) == 3 and all(s._closed for s in started)


def test_children_take_turns_on_a_device(tmp_path) -> None:
    """One that hangs while it has the device is ended, and then the other one has it."""
    shared = {"TURNS": str(tmp_path / "lock")}
    with Session(FAKE, shared, QUICK) as a, Session(FAKE, shared, QUICK) as b:
        found = Trials([a, b]).times([{"do": "hang"}, fine(2.0)])
    assert isinstance(found[0], TrialFailure) and found[0].kind == "hung" and found[1] == timed(2.0)


def test_a_child_that_waits_is_not_taken_to_hang(tmp_path) -> None:
    """Another process of the user has the device for longer than a child may take to say something."""
    lock = tmp_path / "lock"
    environment = {"TURNS": str(lock), "OFTEN": "0.1"}
    with Session(FAKE, environment, Patience(start=60, compile=1.0, run=1.0)) as session:
        session._ready()
        with gpu_lock.alone(lock):
            found = []
            waiting = threading.Thread(target=lambda: found.extend(session.times([fine(1.0)])))
            waiting.start()
            waiting.join(2.5)
            assert waiting.is_alive() and session._deaths == 0
        waiting.join(30)
    assert found == [timed(1.0)]


def test_what_fails_is_counted(caplog) -> None:
    outcomes = [TrialFailure("crashed", "ended with code -6"), timed(1.0), TrialFailure("hung", "said nothing")]
    tried = SimpleNamespace(times=lambda *_: outcomes)
    attempt = TuningSession(SimpleNamespace(in_float32=False), "cuda", H200, Options(), trials=tried)
    assert attempt.screen([WINNER] * 3) == {1: timed(1.0)}
    assert attempt.tried == {"crashed": 1, "hung": 1}
    others = [replace(WINNER, family=name) for name in "abc"]
    assert tuning.Screen(attempt)(others) == [others[1]]  # even a few are tried before they run here


def test_without_a_child_variants_run_here(caplog, monkeypatch) -> None:
    def times(*_):
        raise TrialError("no process can be started")

    attempt = TuningSession(
        SimpleNamespace(in_float32=False), "cuda", H200, Options(), trials=SimpleNamespace(times=times)
    )
    monkeypatch.setattr(attempt, "timings", lambda functions, rounds: {"1": timed(2.0)})
    assert attempt.screen([WINNER] * 2) == {1: timed(2.0)}
    assert "are tried in this process: no process can be started" in caplog.text and attempt.trials is None


@pytest.mark.parametrize("why", ["RESOURCE_EXHAUSTED: Out of memory while trying", "CUDA_ERROR_OUT_OF_MEMORY"])
def test_without_memory_for_a_child_variants_run_here(why: str, caplog, monkeypatch) -> None:
    outcomes = [TrialFailure("not compiled", "too many registers"), TrialFailure("failed to run", why)]
    attempt = TuningSession(
        SimpleNamespace(in_float32=False), "cuda", H200, Options(), trials=SimpleNamespace(times=lambda *_: outcomes)
    )
    monkeypatch.setattr(attempt, "timings", lambda functions, rounds: {"1": timed(2.0)})
    assert attempt.screen([WINNER] * 2) == {1: timed(2.0)} and not attempt.tried
    assert "leaves no memory" in caplog.text and attempt.trials is None


def test_the_environment_of_a_child(monkeypatch) -> None:
    device = SimpleNamespace(local_hardware_id=1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert module.environment(device)["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, MIG-7")
    assert module.environment(device)["CUDA_VISIBLE_DEVICES"] == "MIG-7"


def test_a_child_that_computes() -> None:
    """The real worker on this machine: graphs arrive as text, run on what it draws, and have times."""
    program = PROGRAMS["rmsnorm"]("f16")
    winner = Winner(program.graph, program.schedule, (), (), "kernels", "cpu")
    broken = {**winner.to_json(), "graph": "mugraph {"}
    with Session(environment={"JAX_PLATFORMS": "cpu"}, patience=Patience(start=60)) as session:
        good, bad = session.times([winner.to_json(), broken])
    assert isinstance(good, timing.Timing) and good.seconds > 0
    assert isinstance(bad, TrialFailure) and bad.kind == "not compiled" and "ParseError" in bad.why
    again = Winner.from_json(winner.to_json(), "cpu")
    assert (again.graph, again.schedule, again.family) == (winner.graph, winner.schedule, "kernels")


@pytest.mark.parametrize(("budget", "lanes"), [("30s", 1), ("30s/5m", 1), ("30s/5m", 2)])
def test_the_whole_way(budget: str, lanes: int, monkeypatch) -> None:
    """A program of two regions is tuned with children on this CPU, as it is on a GPU."""
    started = 0

    @contextmanager
    def on_the_cpu(devices, among, machines):
        nonlocal started
        assert among == lanes
        started += 1
        with Session(environment={"JAX_PLATFORMS": "cpu"}, kind=devices[0].device_kind) as session:
            yield Trials([session])

    def twice(a, b, v):
        return jnp.sort(chain(a, b, v)), chain(a[:32], b, v)

    monkeypatch.setattr(module, "trials", on_the_cpu)
    monkeypatch.setattr("mirage_jax.compiler.compiler._processors", lambda _: 64 if lanes > 1 else 1)
    with measured(2.0):
        found = mirage_jax.optimize(twice, strict=True, budget=budget).explain(*operands()).regions
    assert [r.decision.winner is not None and r.decision.tried["timed"] >= 1 for r in found] == [True, True]
    assert started == lanes


def test_variants_share_inputs_as_long_as_one_has_them() -> None:
    """Those that take other arrays have inputs of their own, in between too."""
    ones, twos = ((jax.ShapeDtypeStruct((n, 4), jnp.float32),) for n in (1, 2))
    first, other = child.draw(ones, 3), child.draw(twos, 2)
    assert child.draw(ones, 3) is first and child.draw(twos, 2) is other
    assert [x.shape for (x,) in first] == [(1, 4)] * 3 and not jnp.array_equal(first[0][0], first[1][0])
    gone = weakref.ref(first)
    del first
    assert gone() is None and child.draw(ones, 3) is not gone()


def test_where_no_process_can_be_started_this_one_tries(monkeypatch, caplog) -> None:
    def no_process(*_: Any) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(module, "_Child", no_process)
    monkeypatch.setattr(module, "environment", lambda _: {})
    with module.trials([SimpleNamespace(platform="gpu", device_kind="H200")]) as found:
        assert found is None
    assert "tried in this process: no process can be started that tries variants: Resource" in caplog.text


def test_a_child_ends_with_its_parent() -> None:
    session = Session((*FAKE,), patience=QUICK).__enter__()
    process = session._ready()._process
    session._child.send({"variants": [{"do": "hang"}], "threads": 1})
    assert session._child.receive(10) == {"compiling": 0}
    process.stdin.close()
    assert process.wait(10) == 0
    session.__exit__()


def served(variants: list, threads: int, measure) -> list:
    """What a child says about these variants, but for what it says while it compiles."""
    said: list = []

    def prepare(variant):
        def run():
            if variant["do"] == "raise":
                raise RuntimeError("no")
            return timed(variant["seconds"])

        return run

    request = module.json.dumps({"variants": variants, "threads": threads})
    child.serve([request], said.append, prepare, measure, lambda: True)
    return [m for m in said if "compiling" not in m and "compiled" not in m]


def result(i: int) -> dict:
    return {"timed": i, "samples": (float(i),), "launches": 1.0}


def test_nothing_is_kept_while_a_child_waits() -> None:
    """Inputs of variants fill a device's memory, which others may want meanwhile."""

    class Inputs:
        pass

    made, left = [], []

    def prepare(variant):
        inputs = Inputs()
        made.append(weakref.ref(inputs))
        return lambda: inputs

    def requests():
        for _ in range(2):
            yield module.json.dumps({"variants": [fine(0.0), fine(1.0)], "threads": 2})
            gc.collect()
            left.append(sum(ref() is not None for ref in made))

    timings = lambda runs: [timed(0.1) for _ in runs]  # noqa: E731
    child.serve(requests(), lambda message: None, prepare, timings, lambda: True)
    assert len(made) == 4 and left == [0, 0]


VARIANTS = [fine(0.0), {"do": "raise"}, fine(2.0)]
RUN = [{"running": 0}, {"running": 1}, {"failed": 1, "why": "RuntimeError: no"}, {"running": 2}]


def test_what_ran_is_timed_together() -> None:
    assert served(VARIANTS, 2, lambda runs: [run() for run in runs]) == [
        *RUN, {"timing": [0, 2]}, result(0), result(2), {"done": 3},
    ]  # fmt: skip


def test_one_thread_times_one_by_one() -> None:
    assert served(VARIANTS, 1, lambda runs: [run() for run in runs]) == [
        *RUN, {"timing": [0]}, result(0), {"timing": [2]}, result(2), {"done": 3},
    ]  # fmt: skip


def test_what_cannot_be_timed_together_is_timed_alone() -> None:
    def measure(runs):
        if len(runs) > 1 or runs[0]() == timed(2.0):
            raise RuntimeError("no profile")
        return [run() for run in runs]

    assert served(VARIANTS, 2, measure) == [
        *RUN, {"timing": [0, 2]}, {"timing": [0]}, result(0),
        {"timing": [2]}, {"failed": 2, "why": "RuntimeError: no profile"}, {"done": 3},
    ]  # fmt: skip


def test_variants_are_timed_together_for_a_while() -> None:
    assert child._groups({1: 0.5, 2: 0.5, 5: 1.0, 6: 0.1, 7: 9.0, 8: 0.1}) == [[1, 2, 5], [6], [7], [8]]


def test_a_child_that_ends_while_it_times_several() -> None:
    with Session(FAKE, environment={"ABORT_TOGETHER": "1"}, patience=QUICK) as session:
        assert session.times([fine(1.0), fine(2.0)]) == [timed(1.0), timed(2.0)]
        assert session._deaths == 1


@pytest.mark.gpu
def test_a_kernel_that_faults_on_a_gpu() -> None:
    """The child's device is lost, and only its: this process goes on computing, and so do the other variants."""
    with Session(FAKE, environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}) as session:
        found = session.times([{"do": "fault"}, fine(1.0)])
    assert isinstance(found[0], TrialFailure) and found[0].kind in ("failed to run", "crashed")
    assert found[1] == timed(1.0)
    assert float(jnp.ones(8).sum()) == 8.0


@pytest.mark.gpu
def test_kernels_are_timed_on_a_gpu() -> None:
    program = PROGRAMS["rmsnorm"]("f16")
    winner = Winner(program.graph, program.schedule, (), (), "kernels", "cuda")
    with module.trials(jax.devices()[:1]) as session:
        (found,) = session.times([winner.to_json()])
    assert isinstance(found, timing.Timing) and 0 < found.seconds < 1e-3 and found.launches == 1
