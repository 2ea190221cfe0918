"""Other machines that help `tune`: the nodes of a Ray cluster.

A machine gets processes only, and what it says counts as little as what a process of this machine says: candidates are
proven, compared and stored where `tune` was called. Everything that starts such a process here can start one there. It
runs the command of a `Machine`, which is a small process of this machine: the relay. The relay has an actor of Ray on
the machine start the same Python code, and passes on lines between its own standard streams and those over there. This
process never loads Ray.

The relay ends when the process over there does: with 0 if that ended well, else with `ENDED`, and a last line on
standard error about it. If it ends in any other way, the machine or the actor is lost, and nobody knows what it was at:
whoever waits for an answer asks again elsewhere.

    python -m mirage_jax.cluster look ADDRESS              prints the nodes as one line of JSON
    python -m mirage_jax.cluster relay ADDRESS NODE TASK   is a relay
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import platform
import queue
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from mirage_jax import children
from mirage_jax.errors import UsageError, in_one_line
from mirage_jax.limits import brief

log = logging.getLogger("mirage_jax")

MODULE = "mirage_jax.cluster"
INSTALL = "pip install 'mirage-jax[cluster]'"
NAMESPACE = "mirage_jax"  # of the actors
ENDED = 70  # the relay's exit code if the process over there ended, and not with 0
LOST = 75  # the same if the machine or the actor is lost
LOOK_SECONDS = 120.0  # for a first look at all nodes
NODE_SECONDS = 45.0  # for a node to answer then: its first Python may take long to start
DOOR_SECONDS = 5.0  # for an address to take a connection
TRIES, AGAIN_SECONDS = 3, 1.0  # to connect, where somebody listens
START_SECONDS = 60.0  # for an actor to start where others may have all GPUs
MAX_PARTS = 8  # that a machine searches at a time
ALWAYS = ("Python", "mirage_jax", "jax", "jaxlib")  # that must be the same for a search
FOR_VARIANTS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "triton", "jax-triton")  # and for kernels
FORWARDED = ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")  # variables that change what a kernel computes, or its time


@dataclass
class Machine:
    """A node of a cluster."""

    address: str  # of the cluster
    node: str  # Ray's name of it
    name: str  # for people
    processors: int = 1
    gpus: int = 0
    left_out: set[str] = field(default_factory=set)  # of what it is no use for any more

    @property
    def parts(self) -> int:
        """How many parts of a search it takes at a time."""
        return 0 if "parts" in self.left_out else min(self.processors, MAX_PARTS)

    def leave_out(self, purpose: str, why: str) -> None:
        """Ask it no more for "variants" or for "parts", and say so once."""
        if purpose not in self.left_out:
            self.left_out.add(purpose)
            log.warning("the machine %s is left out, for %s: %s", self.name, purpose, why)

    def command(
        self,
        code: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        processors: float = 0.0,
        gpus: float = 0.0,
        seconds: float = START_SECONDS,
    ) -> list[str]:
        """A command like `children.python(code, *arguments)`, of a process on this machine.

        Args:
            code: Python's.
            arguments: of the code.
            environment: more variables for it.
            processors: what Ray keeps for it, as for `gpus`: the process sees these GPUs only.
            gpus: so many, or a share of one.
            seconds: how long to wait until Ray has that.
        """
        own = {name: os.environ[name] for name in FORWARDED if name in os.environ} | dict(environment or {})
        task = {"code": code, "arguments": arguments, "environment": own}
        options = {"num_cpus": processors, "num_gpus": gpus, "seconds": seconds}
        return children.module(MODULE, "relay", self.address, self.node, json.dumps(task | options))


# ---------------------------------------------------------------------- in the process that tunes


_ADDRESS = re.compile(r"auto|ray://[^\s:/]+:\d{1,5}")


def join(address: object) -> list[Machine]:
    """The machines of a cluster that can help this one: the same versions are there, and it is another machine.

    Args:
        address: "auto" for the cluster that this machine is part of, or "ray://host:port".

    Raises:
        UsageError: it is no such address, Ray is not installed, or there is no cluster.
    """
    if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
        raise UsageError(f"cluster: found {brief(address)}; allowed are 'auto' and 'ray://host:port'")
    if importlib.util.find_spec("ray") is None:
        raise UsageError(f"cluster: Ray is not installed: {INSTALL}")
    here, found = _Here.make(), list[Machine]()
    for node in _look(address):
        machine = Machine(address, node["node"], node["name"], node["processors"], node["gpus"])
        if why := node["why"] or here.differences(node["versions"], ALWAYS):
            log.warning("the machine %s is left out: %s", machine.name, why)
        elif node["identity"] == here.identity:
            log.info("the machine %s is this one", machine.name)
        else:
            found.append(machine)
            if machine.gpus and (why := here.differences(node["versions"], FOR_VARIANTS)):
                machine.leave_out("variants", why)
    if not found:
        log.warning("no machine of the cluster at %s can help: this one tunes alone", address)
    return found


def _look(address: str) -> list[dict[str, Any]]:
    """What the nodes of a cluster say about themselves."""
    command, own = children.module(MODULE, "look", address), children.environment({})
    try:
        done = subprocess.run(
            command,
            env=own,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LOOK_SECONDS,
            check=False,
            start_new_session=True,
        )
        said = json.loads(done.stdout or "{}")
        nodes, why = said.get("nodes"), said.get("why") or _last_line(done.stderr)
    except subprocess.TimeoutExpired:
        nodes, why = None, f"nothing is heard from it for {LOOK_SECONDS:g} s"
    except (OSError, ValueError) as error:
        nodes, why = None, in_one_line(error)
    if nodes is None:
        raise UsageError(f"cluster: there is no Ray cluster at {address!r}: {why}")
    return nodes


@dataclass(frozen=True)
class _Here:
    """What a machine must share with this one."""

    identity: str
    versions: Mapping[str, str]

    @classmethod
    def make(cls) -> _Here:
        return cls(identity(), versions())

    def differences(self, there: Mapping[str, str], names: Sequence[str]) -> str:
        """What differs in the versions of these packages; empty if nothing does."""
        pairs = [(name, there.get(name), self.versions.get(name)) for name in names]
        return "; ".join(f"its {name} is {its}, here it is {mine}" for name, its, mine in pairs if its != mine)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1][:200]


# ---------------------------------------------------------------------- in processes of Ray, too


def identity() -> str:
    """Two nodes with the same identity are on one machine, or in one container there."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with suppress(OSError):
        return f"{platform.node()} {boot.read_text().strip()}"
    return platform.node()


def versions() -> dict[str, str]:
    """Versions of everything that a variant or a search depends on."""
    found = {"Python": platform.python_version().rpartition(".")[0]}
    try:
        found["mirage_jax"] = importlib.import_module("mirage_jax.children").source_digest()
    except ImportError:
        found["mirage_jax"] = "missing"
    except AttributeError:  # it has no such function yet
        found["mirage_jax"] = "older"
    for name in (*ALWAYS[2:], *FOR_VARIANTS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


class FarProcess:
    """An actor: a process on its machine, and the lines that this reads and writes."""

    def __init__(self, code: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._task = code, arguments, environment
        self._lines = queue.SimpleQueue[str | None]()

    def begin(self) -> None:
        """Start the process. Not when the actor starts: then errors would say less."""
        code, arguments, environment = self._task
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed at the end of this process)
        self._process = subprocess.Popen(
            children.python(code, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=children.environment(environment),
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def send(self, line: str) -> None:
        """Give the process a line."""
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(OSError):  # it has ended: `receive` says so
            stdin.write(line)
            stdin.flush()

    def receive(self) -> tuple[list[str], int | None, str]:
        """Wait for lines; with them the exit code and the last line on standard error, if there will be no more."""
        lines = [self._lines.get()]
        while not self._lines.empty():
            lines.append(self._lines.get())
        said = [line for line in lines if line is not None]
        if lines[-1] is not None:
            return said, None, ""
        code = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip().splitlines()
        return said, code, words[-1][:200] if words else ""


# ---------------------------------------------------------------------- the processes that know Ray


def _connected(address: str) -> Any:
    """Ray, connected to a cluster."""
    door = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if found := re.fullmatch(r"(?:ray://)?([^\s:/]+):(\d{1,5})", door):  # else Ray tries for minutes
        socket.create_connection((found[1], int(found[2])), timeout=DOOR_SECONDS).close()
    os.chdir("/")  # Ray would have its workers look for modules in the user's directory first
    os.environ["RAY_CLIENT_RECONNECT_GRACE_PERIOD"] = "0"  # what a killed relay has started ends with it
    import ray

    for left in reversed(range(TRIES)):
        try:
            ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
            break
        except ConnectionError:  # a busy head, which starts a process for each client, may refuse some
            if left == 0:
                raise
            time.sleep(AGAIN_SECONDS)
    return ray


def _on(ray: Any, node: str) -> Any:
    """Options of a task that runs on this node, and nowhere else."""
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def _nodes(address: str) -> list[dict[str, Any]]:
    """All nodes that are alive."""
    ray = _connected(address)
    importlib.import_module("ray.util.scheduling_strategies")
    alive = [node for node in ray.nodes() if node["Alive"]]
    probe = ray.remote(lambda: (identity(), versions()))
    asked = [
        probe.options(num_cpus=0, max_retries=0, scheduling_strategy=_on(ray, n["NodeID"])).remote() for n in alive
    ]
    ray.wait(asked, num_returns=len(asked), timeout=NODE_SECONDS)
    found = []
    for node, answer in zip(alive, asked, strict=True):
        its_identity, its_versions, why = "", {}, ""
        try:
            its_identity, its_versions = ray.get(answer, timeout=0.1)
        except Exception as error:
            why = in_one_line(error)
        own = node.get("Resources", {})
        machine = Machine(
            address, node["NodeID"], node["NodeManagerAddress"], int(own.get("CPU", 0)), int(own.get("GPU", 0))
        )
        row = {k: v for k, v in asdict(machine).items() if k != "left_out"}
        found.append({**row, "identity": its_identity, "versions": its_versions, "why": why})
    return found


def _relay(address: str, node: str, text: str) -> int:
    """Pass on lines until one side ends; returns the exit code."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no line of the other process
    task: dict[str, Any] = json.loads(text)
    ray = _connected(address)
    importlib.import_module("ray.util.scheduling_strategies")
    options = {"num_cpus": task["num_cpus"], "num_gpus": task["num_gpus"], "max_restarts": 0, "max_concurrency": 4}
    start = ray.remote(FarProcess).options(**options, scheduling_strategy=_on(ray, node))
    far = start.remote(task["code"], task["arguments"], task["environment"])
    try:
        ray.get(far.begin.remote(), timeout=task["seconds"])
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(f"Ray has no room for it there within {task['seconds']:g} s") from None

    def forward() -> None:
        for line in sys.stdin:
            ray.get(far.send.remote(line))  # one by one: an actor may take calls in another order
        with suppress(Exception):
            ray.kill(far)
        os._exit(0)

    threading.Thread(target=forward, daemon=True).start()
    while True:
        lines, code, words = ray.get(far.receive.remote())
        out.write("".join(lines))
        out.flush()
        if code is not None:
            sys.stderr.write(f"\nended with code {code}" + (f" ({words})" if words else "") + "\n")
            return ENDED if code else 0


def main(arguments: Sequence[str]) -> None:
    """Be one of the two processes that know Ray, and end."""
    code = LOST
    if arguments[0] == "look":
        try:
            said: dict[str, Any] = {"nodes": _nodes(*arguments[1:])}
        except Exception as why:
            said = {"why": in_one_line(why)}
        sys.stdout.write(json.dumps(said) + "\n")
        code = 0
    else:
        try:
            code = _relay(*arguments[1:])
        except Exception as why:
            sys.stderr.write(f"\n{in_one_line(why)}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Ray would take a second to say goodbye


if __name__ == "__main__":
    main(sys.argv[1:])
