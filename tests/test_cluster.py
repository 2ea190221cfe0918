"""Other machines help, and may be lost: two nodes of a Ray cluster on this machine, which pretends to be another."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from deciding import chain, measured, operands
from lower.kernels import PROGRAMS
from search.references import H200, TWO_KERNELS, captured

import mirage_jax
from mirage_jax import children, cluster, timing
from mirage_jax.cluster import Machine
from mirage_jax.compiler import tuning_session
from mirage_jax.compiler.isolation import parent
from mirage_jax.compiler.isolation.parent import Patience, Session, Trials, far_sessions
from mirage_jax.compiler.winner import Winner
from mirage_jax.errors import TrialError, UsageError
from mirage_jax.search.decompose import subprocesses
from mirage_jax.search.decompose.subprocesses import SubSearch, search_parts

HERE = Path(__file__).parent


def running(file: str) -> str:
    return f"import runpy\nrunpy.run_path({str(HERE / file)!r}, run_name='__main__')"


FAKE = running("compiler/fake_worker.py")
DEVICE = SimpleNamespace(device_kind="fake device", local_hardware_id=0)
PATIENT = Patience(start=60, compile=60, run=60)
NODES = 2
NO_RAY = "Ray is not installed (the extra `cluster`)"


class LocalCluster:
    """A process that has a cluster, and the machines of it."""

    def __init__(self) -> None:
        here = {"PYTHONPATH": children.ROOT}  # for its workers: another checkout may be installed
        # A node that is gone refuses connections, and is given up soon. One that is only slow has 10 s each time.
        soon = {"RAY_health_check_period_ms": "300", "RAY_health_check_initial_delay_ms": "300"}
        environment = {**os.environ, **here, **soon, "RAY_USAGE_STATS_ENABLED": "0", "JAX_PLATFORMS": "cpu"}
        command = children.python(running("local_cluster.py"), str(NODES))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        said = self._heard()
        self.address, self.client, self.nodes = said["address"], said["client"], said["nodes"]

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def kill(self, machine: Machine) -> None:
        """End a node, with all that runs there."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self.nodes.index(machine.node)}\n")
        self._process.stdin.flush()
        self._heard()

    def close(self) -> None:
        """End the cluster, and wait for it."""
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[LocalCluster]:
    pytest.importorskip("ray", reason=NO_RAY)
    found = LocalCluster()
    yield found
    found.close()


@pytest.fixture(scope="module")
def joined(ray_cluster: LocalCluster) -> list[Machine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray_cluster.address)
        patch.setattr(cluster, "identity", lambda: "another machine")
        return cluster.join("auto")


@pytest.fixture
def machines(ray_cluster: LocalCluster, joined: list[Machine], monkeypatch) -> list[Machine]:
    """The first one has no GPU; the last one is killed by the last test that needs it."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    monkeypatch.setattr(cluster, "identity", lambda: "another machine")
    return sorted((replace(m, left_out=set()) for m in joined), key=lambda m: ray_cluster.nodes.index(m.node))


@pytest.fixture(scope="module")
def pair(ray_cluster: LocalCluster, joined: list[Machine]) -> Iterator[list[Session]]:
    """Sessions on two machines, which tests use one after the other."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", ray_cluster.address)
            found = [stack.enter_context(session) for session in sessions_on([replace(m, gpus=0) for m in joined])]
        yield found


def fine(seconds: float) -> dict[str, Any]:
    return {"do": "fine", "seconds": seconds}


def timed(seconds: float) -> timing.Timing:
    return timing.Timing((seconds,), 1.0)


def sessions_on(machines: list[Machine]) -> list[Session]:
    return [replace(far_sessions(m, DEVICE, code=FAKE)[0][0], patience=PATIENT) for m in machines]


def wait_for(what: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


@contextmanager
def at_the_same_time(work: Callable[[], None]) -> Iterator[None]:
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        yield
        done.result()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].startswith(" Z")


def test_machines_of_a_cluster(ray_cluster: LocalCluster, machines: list[Machine], caplog) -> None:
    assert sorted(m.node for m in machines) == sorted(ray_cluster.nodes)
    assert sorted((m.processors, m.gpus, m.parts) for m in machines) == [(1, 0, 1), (1, 1, 1)]
    assert {m.node for m in cluster.join(ray_cluster.client)} == set(ray_cluster.nodes) and not caplog.records


def test_machines_with_other_versions_are_left_out(monkeypatch, caplog) -> None:
    """One line for each. Where only kernels would be others, a machine may still search."""
    pytest.importorskip("ray", reason=NO_RAY)
    here = cluster.versions()
    row = {"node": "1", "processors": 1, "gpus": 1, "identity": "another machine", "versions": here, "why": ""}
    rows = [
        row | {"name": "a", "versions": here | {"jax": "0.1"}},
        row | {"name": "b", "versions": here | {"mirage_jax": "missing"}},
        row | {"name": "c", "versions": here | {"triton": "2.0"}},
        row | {"name": "d", "why": "RuntimeError: no"},
        row | {"name": "e"},
        row | {"name": "f", "identity": cluster.identity()},
    ]
    monkeypatch.setattr(cluster, "_look", lambda address: rows)
    assert [(m.name, m.left_out) for m in cluster.join("auto")] == [("c", {"variants"}), ("e", set())]
    assert [r.getMessage() for r in caplog.records] == [
        f"the machine a is left out: its jax is 0.1, here it is {here['jax']}",
        f"the machine b is left out: its mirage_jax is missing, here it is {here['mirage_jax']}",
        f"the machine c is left out, for variants: its triton is 2.0, here it is {here['triton']}",
        "the machine d is left out: RuntimeError: no",
    ]
    rows[:] = rows[-1:]
    assert cluster.join("auto") == [] and "this one tunes alone" in caplog.text


def test_variants_are_tried_on_two_machines(machines: list[Machine], pair: list[Session]) -> None:
    """Each has a thread here. Outcomes come back in order."""
    todo = [{"do": "compile slowly", "seconds": float(n)} for n in range(1, 7)]
    todo[2:4] = [{"do": "abort"}, {"do": "raise"}]
    told: dict[int, Any] = {}
    threads: set[int] = set()

    def notify(i: int, outcome: Any) -> None:
        told[i] = outcome
        threads.add(threading.get_ident())

    for session in pair:
        session.begin()
    found = Trials(pair).times(todo, notify)
    assert len(threads) == 2
    assert [found[n] for n in (0, 1, 4, 5)] == [timed(n + 1.0) for n in (0, 1, 4, 5)]
    assert found[2].kind == "crashed" and "code -6 (illegal access) while running" in found[2].why
    assert found[3] == parent.TrialFailure("failed to run", "RuntimeError: launch failure")
    assert told == dict(enumerate(found)) and not any(session.machine.left_out for session in pair)


def test_a_killed_actor_loses_nothing(machines: list[Machine], pair: list[Session], tmp_path: Path) -> None:
    """It is killed while it runs a variant; the same machine, or another one, tries that again."""
    file = tmp_path / "actor"
    todo = [fine(1.0), {"do": "hang once", "file": str(file), "seconds": 2.0}, fine(3.0), fine(4.0)]

    def counted() -> tuple[int, int]:
        return sum(s._losses for s in pair), sum(s._deaths for s in pair)

    losses, deaths = counted()

    def kill() -> None:
        wait_for(file.exists)
        actor = int(file.read_text())
        os.kill(actor, signal.SIGKILL)
        wait_for(lambda: not is_alive(actor))

    with at_the_same_time(kill):
        assert Trials(pair).times(todo) == [timed(float(n)) for n in range(1, 5)]
    assert counted() == (losses + 1, deaths)


def test_children_on_devices_of_other_machines(machines: list[Machine], monkeypatch) -> None:
    """The real worker, on one that Ray has for it; a machine without any has none."""
    program = PROGRAMS["rmsnorm"]("f16")
    variant = Winner(program.graph, program.schedule, (), (), "kernels", "cpu").to_json()
    device = SimpleNamespace(platform="gpu", device_kind="cpu", local_hardware_id=0)
    monkeypatch.setattr(parent, "environment", lambda _: {"JAX_PLATFORMS": "cpu"})
    monkeypatch.setattr(parent, "processors", lambda: 1)
    with parent.trials([device], machines=machines) as trials:
        assert trials is not None and trials.devices == 2
        here, there = trials.sessions
        assert (here.machine, there.machine) == (None, machines[1])
        (found,) = Trials([there]).times([variant])
        assert isinstance(found, timing.Timing) and found.seconds > 0


@pytest.mark.parametrize(("gpus", "processors", "lanes", "share", "count"), [
    (2, 64, 1, 0.25, 4), (2, 64, 2, 0.125, 4), (8, 64, 1, 0.25, 4), (8, 16, 2, 0.5, 1), (1, 1, 1, 1.0, 1),
])  # fmt: skip
def test_children_share_devices(gpus: int, processors: int, lanes: int, share: float, count: int) -> None:
    machine = Machine("auto", "1", "a", processors, gpus)
    rounds = far_sessions(machine, DEVICE, lanes, most=4)
    tasks = [json.loads(session.command[-1]) for each in rounds for session in each]
    assert len(rounds) == count and len(tasks) == count * gpus
    assert {task["num_gpus"] for task in tasks} == {share}
    assert "CUDA_VISIBLE_DEVICES" not in tasks[0]["environment"]


def test_another_kind_of_device_is_left_out(machines: list[Machine], caplog) -> None:
    command = children.python(FAKE)  # what the relay would say
    right, wrong = Session(command), Session(command, kind="another device", machine=machines[0])
    with right, wrong:
        wait_for(lambda: wrong.has_spoken)
        assert Trials([wrong, right]).times([fine(1.0), fine(2.0)]) == [timed(1.0), timed(2.0)]
    (record,) = caplog.records
    assert "is left out, for variants: the process that tries variants has" in record.getMessage()


def test_nothing_is_left_behind(machines: list[Machine], pair: list[Session], tmp_path: Path) -> None:
    """Whatever it is doing, a process on another machine ends with its session."""
    file = tmp_path / "actor"
    session = pair[0]

    def close() -> None:
        wait_for(file.exists)
        session.close()

    with at_the_same_time(close), pytest.raises((TrialError, ValueError)):  # which nobody sees
        session.times([{"do": "hang once", "file": str(file), "seconds": 1.0}])
    wait_for(lambda: not is_alive(int(file.read_text())))


def test_parts_are_searched_on_machines(machines: list[Machine], monkeypatch, caplog) -> None:
    fns = (lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), lambda x, w, v: (x @ w) @ v.T)
    graphs = [captured(fn, (64, 256), (256, 128), (256, 128)) for fn in fns]
    parts = [SubSearch(graph, H200, TWO_KERNELS, 1_000_000, ("algebra", "kernels")) for graph in graphs]
    asked: list[Machine | None] = []
    answer = subprocesses._Processes._answer

    def noted(self, text, seconds, place):
        asked.append(place)
        return answer(self, text, seconds, place)

    monkeypatch.setattr(subprocesses._Processes, "_answer", noted)
    alone, helped = search_parts(parts, 60.0), search_parts(parts, 60.0, machines=machines[:1])
    assert [cs[:8] for cs, _ in helped] == [cs[:8] for cs, _ in alone] and not caplog.records
    assert asked in ([None, machines[0]], [machines[0], None])


def test_a_lost_machine_costs_a_part_nothing_but_time(machines: list[Machine], caplog) -> None:
    gone = replace(machines[0], node="0" * 56)
    graph = captured(lambda x, w, v: (x @ w) @ v.T, (64, 256), (256, 128), (256, 128))
    part = SubSearch(graph, H200, TWO_KERNELS, 1_000_000, ("algebra",), seconds=30.0)
    processes = subprocesses._Processes([gone, gone, None])
    assert processes.search(part)[0] == subprocesses.search_part(part)[0]
    assert gone.left_out == {"parts"} and len(caplog.records) == 1


def test_tune_decides_as_it_does_alone(machines: list[Machine], tmp_path: Path, monkeypatch) -> None:
    searched: list[Any] = []
    search = tuning_session.search
    monkeypatch.setattr(tuning_session, "search", lambda *args: searched.append(args[-1]) or search(*args))
    with measured(2.0):
        alone, helped = (
            mirage_jax.tune(mirage_jax.optimize(chain, cache_dir=tmp_path / str(name)), *operands(), cluster=name)
            for name in (None, "auto")
        )
    assert searched[0] == () and sorted(m.node for m in searched[1]) == sorted(m.node for m in machines)
    (one,), (other,) = (report.regions for report in (alone, helped))
    assert one.decision.winner is not None and one.decision.winner.graph == other.decision.winner.graph
    assert one.decision.key == other.decision.key and one.decision.source == other.decision.source == "search"


def test_a_killed_machine_loses_nothing(ray_cluster: LocalCluster, machines: list[Machine], tmp_path: Path) -> None:
    """The variant that it ran, and those that it would have run, are tried elsewhere."""
    file = tmp_path / "actor"
    todo = [{"do": "hang once", "file": str(file), "seconds": 1.0}, fine(2.0), fine(3.0), fine(4.0)]
    stays, (dies,) = Session(children.python(FAKE)), sessions_on(machines[-1:])

    def kill() -> None:
        wait_for(file.exists)
        ray_cluster.kill(machines[-1])

    with dies:
        dies.begin()
        with at_the_same_time(kill), pytest.raises(TrialError, match="no process is left"):
            Trials([dies]).times(todo[:1])
        with stays:
            assert Trials([dies, stays]).times(todo) == [timed(float(n)) for n in range(1, 5)]
    assert machines[-1].left_out == {"variants"}


@pytest.mark.parametrize("value", [5, "", "here", "ray://", "ray://host", "ray://host:port", "host:6379"])
def test_bad_addresses(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^cluster: found .*; allowed are 'auto' and 'ray://host:port'$"):
        mirage_jax.tune(chain, *operands(), cluster=value)


def test_without_ray(monkeypatch) -> None:
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=re.escape("Ray is not installed: pip install 'mirage-jax[cluster]'")):
        mirage_jax.tune(chain, *operands(), cluster="auto")


@pytest.mark.parametrize("address", ["auto", "ray://127.0.0.1:9"])
def test_no_cluster(address: str, monkeypatch) -> None:
    pytest.importorskip("ray", reason=NO_RAY)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(UsageError, match=f"^cluster: there is no Ray cluster at '{address}': ConnectionRefused[^\n]*$"):
        cluster.join(address)
