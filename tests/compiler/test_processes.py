"""Processes that run one program lower the same code, which the first of them decides."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mirage_jax.compiler import processes
from mirage_jax.compiler.processes import ProcessGroup
from mirage_jax.jaxpr_frontend import jax_compat

OFFER = {"a": 1, "b": 2, "c": 3}


class LocalStore:
    """The store of threads that play processes."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            if self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                return self.values[key]
        raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")


def exchanged(takes, offer=lambda: OFFER, name="test") -> list[frozenset[str]]:
    """What each of several processes learns: that all use."""
    store = LocalStore()
    groups = [ProcessGroup(range(1 + len(takes)), n, store) for n in range(1 + len(takes))]
    with ThreadPoolExecutor(len(groups)) as pool:
        pairs = zip(groups, [lambda offered: [], *takes], strict=True)
        tasks = [pool.submit(g.agree, name, offer, take) for g, take in pairs]
        return [task.result(30) for task in tasks]


def test_what_one_process_refuses_nobody_uses() -> None:
    seen: list[dict[str, int]] = []

    def fails(offered):
        raise ValueError("no such device")

    takes = [lambda offered: ["b"], lambda offered: seen.append(offered) or []]
    assert exchanged(takes) == [frozenset("ac")] * 3 and seen == [OFFER]
    assert exchanged(takes) == [frozenset("ac")] * 3, "the same again"
    assert exchanged([*takes, fails]) == [frozenset()] * 4


def test_nobody_waits_for_a_first_process_that_fails() -> None:
    store, seen = LocalStore(), []

    def fails():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ProcessGroup((0, 1), 0, store).agree("fails", fails, lambda offered: [])
    assert ProcessGroup((0, 1), 1, store).agree("fails", lambda: OFFER, lambda x: seen.append(x) or []) == frozenset()
    assert seen == [{}]


def test_who_waits_says_so_and_hears_of_other_errors(monkeypatch, caplog) -> None:
    class Broken(LocalStore):
        left = 3

        def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
            self.left -= 1
            raise RuntimeError("DEADLINE_EXCEEDED" if self.left else "UNAVAILABLE: a process died")

    monkeypatch.setattr(processes, "NOTICE_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="a process died"):
        ProcessGroup((0, 1), 1, Broken()).agree("broken", lambda: OFFER, lambda offered: [])
    assert caplog.text.count("process 1 has waited for process 0") == 2


def test_one_process_has_nobody_to_agree_with(monkeypatch) -> None:
    assert ProcessGroup.of(()) is None and ProcessGroup.of((0,)) is None
    assert ProcessGroup.of((0, 1)) is None, "without jax.distributed"
    monkeypatch.setattr(jax_compat, "key_value_store", LocalStore)
    group = ProcessGroup.of((0, 1))
    assert group is not None and (group.processes, group.me) == ((0, 1), 0)


PROGRAM = """
    import json, sys
    import jax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    process, port, cache, how = int(sys.argv[1]), *sys.argv[2:]
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    import mirage_jax
    from deciding import measured
    from mirage_jax.compiler import compiler

    searched = []
    search = compiler.Compiler._search_all
    compiler.Compiler._search_all = lambda self, *args: searched.append(process) or search(self, *args)
    if how == "failing" and process == 0:
        def fails(self, *args):
            search(self, *args)
            raise ValueError("no more")
        compiler.Compiler._search_all = fails
        searched.append(0)
    if how == "broken" and process == 1:
        def restore(*args):
            raise ValueError("it is of no use here")
        compiler.restore = restore

    @mirage_jax.optimize(cache_dir=cache, budget="2s/20s")
    def f(a, b, v):
        return a @ (b @ v[:, None])[:, 0] if False else ((a @ b) @ v[:, None])[:, 0]

    mesh = jax.make_mesh((2,), ("d",))
    both = jax.jit(jax.shard_map(lambda *x: jax.lax.psum(f(*x), "d"), mesh=mesh, in_specs=P("d"), out_specs=P()))
    rng = np.random.default_rng(0)
    whole = [rng.standard_normal(s).astype(np.float32) for s in ((512, 256), (512, 256), (512,))]
    place = NamedSharding(mesh, P("d"))
    args = [jax.make_array_from_process_local_data(place, np.split(x, 2)[process]) for x in whole]
    with measured(2.0):
        lowered = both.lower(*args)
    result = np.asarray(both(*args).addressable_shards[0].data)
    a, b, v = (np.split(x, 2) for x in whole)
    wanted = sum((a[n] @ b[n]) @ v[n] for n in range(2))
    kinds = sorted({(d.source, d.winner is not None) for d in f.compiler.decisions.values()})
    print(json.dumps({
        "text": lowered.as_text(), "searched": searched, "kinds": kinds,
        "error": float(abs(result - wanted).max() / abs(wanted).max()),
    }))
"""


def in_two_processes(folder: Path, how: str) -> list[dict]:
    """What each of two processes of one program says, each with stored decisions of its own."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    file = folder / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen(
            [sys.executable, str(file), str(n), str(port), str(folder / f"{how}{n}"), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for n in range(2)
    ]
    found = []
    try:
        for process in running:
            out, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors[-3000:]
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in running:
            process.kill()
    return found


@pytest.mark.parametrize("how", ["well", "broken", "failing"])
def test_two_processes_lower_the_same_code(how: str, tmp_path) -> None:
    """The first one searches; where it fails, or the other cannot use what was found, neither has kernels."""
    first, second = in_two_processes(tmp_path, how)
    assert first["text"] == second["text"]
    assert (first["searched"], second["searched"]) == ([0], [])
    assert max(first["error"], second["error"]) < 1e-4
    if how == "well":
        assert first["kinds"] == [["search", True]] and second["kinds"] == [["cache", True]]
    else:
        assert first["kinds"] == second["kinds"] == [["policy", False]]
