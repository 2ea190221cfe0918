"""One process at a time measures on a GPU, and none waits for ever."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from mirage_jax import gpu_lock
from mirage_jax.hardware.gpus import AbsentGpu

HOLDER = """
import sys, pathlib
from mirage_jax import gpu_lock
with gpu_lock.alone(pathlib.Path(sys.argv[1])):
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that has the lock until its standard input ends."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "mine\n"
        yield process
        process.kill()


def test_another_process_is_waited_for(other, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_lock, "NOTICE_SECONDS", 0.0)
    told = []

    def waiting() -> None:
        told.append("waiting")
        if len(told) == 3:
            other.stdin.close()

    with gpu_lock.alone(tmp_path / "lock", waiting):
        assert len(told) >= 3
    assert other.wait(10) == 0


def test_the_turn_of_a_process_that_is_killed_ends(other, tmp_path) -> None:
    threading.Timer(0.1, other.kill).start()
    with gpu_lock.alone(tmp_path / "lock"):
        assert other.wait(10) != 0


def test_nobody_waits_for_ever(other, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(gpu_lock, "MAX_WAIT_SECONDS", 0.05)
    with gpu_lock.alone(tmp_path / "lock"):
        assert other.poll() is None
    assert "times may be wrong" in caplog.text


def test_a_turn_within_a_turn(tmp_path) -> None:
    with gpu_lock.alone(tmp_path / "lock"), gpu_lock.alone(tmp_path / "lock"):
        pass
    assert not gpu_lock._held


def most_at_a_time(turn: Callable[[], AbstractContextManager[None]]) -> int:
    """Of four threads that each take a turn, the most that have it together."""
    inside, most = [], []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        with turn():
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return max(most)


def test_threads_of_a_process_take_turns(tmp_path) -> None:
    assert most_at_a_time(lambda: gpu_lock.alone(tmp_path / "lock")) == 1


def test_threads_that_fill_a_gpu_take_turns() -> None:
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 100})
    assert most_at_a_time(lambda: gpu_lock.memory_turn(gpu, 30)) == 1
    assert most_at_a_time(lambda: gpu_lock.memory_turn(gpu, 20)) > 1, "a small share waits for nobody"
    assert most_at_a_time(lambda: gpu_lock.memory_turn(AbsentGpu("NVIDIA H200", 90), 30)) > 1


def test_where_no_file_can_be_locked_there_are_no_turns(tmp_path) -> None:
    with gpu_lock.alone(tmp_path / "no folder" / "lock"):
        pass


def test_a_link_is_not_followed(tmp_path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("text")
    (tmp_path / "lock").symlink_to(precious)
    with gpu_lock.alone(tmp_path / "lock"):
        pass
    assert precious.read_text() == "text"


def test_each_gpu_has_turns_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_lock.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,MIG-a/b")
    for ordinal in (0, 1):
        with gpu_lock.gpu_lock(SimpleNamespace(platform="gpu", local_hardware_id=ordinal)):
            pass
    with gpu_lock.gpu_lock(), gpu_lock.gpu_lock(jax.devices("cpu")[0]):
        pass
    names = {Path(p).name.split("gpu-")[1] for p in tmp_path.iterdir()}
    assert names == {"3.lock", "MIG-a-b.lock"}
