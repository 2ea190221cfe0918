"""A campaign of faults of file systems: what lies in the way of the cache and of the key, and calls that fail.

In each case a function whose decision is stored, or was, is decided anew and run. Whatever the fault, the result is
right.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

from mirage_jax import cache as caches
from mirage_jax import seals
from mirage_jax.audit.stress import CASES, Case, Fast, Lines, Stress, listening, options
from mirage_jax.cache import Cache, CacheKey
from mirage_jax.errors import in_one_line
from mirage_jax.progress import Say

ERRORS = ("ENOSPC", "EACCES", "EROFS", "EIO", "ESTALE", "EMFILE", "EDQUOT", "EBUSY", "EPERM", "ENOTSUP")
CALLS = ("open", "replace", "fsync", "mkdir", "link", "fstat", "unlink")

type Fault = Callable[[random.Random, Path, Path], None]  # a generator of chance, the entry's file, the key's file


def _gone(rng: random.Random, entry: Path, key: Path) -> None:
    entry.unlink()


def _empty(rng: random.Random, entry: Path, key: Path) -> None:
    entry.write_bytes(b"")


def _torn(rng: random.Random, entry: Path, key: Path) -> None:
    os.truncate(entry, rng.randrange(entry.stat().st_size))


def _noise(rng: random.Random, entry: Path, key: Path) -> None:
    entry.write_bytes(rng.randbytes(rng.randrange(1, 8192)))


def _a_gigabyte(rng: random.Random, entry: Path, key: Path) -> None:
    os.truncate(entry, 1 << 30)


def _a_link(rng: random.Random, entry: Path, key: Path) -> None:
    entry.rename(entry.with_name("kept"))
    entry.symlink_to(rng.choice(("kept", "/etc/passwd", "nowhere", entry.name)))


def _a_folder(rng: random.Random, entry: Path, key: Path) -> None:
    entry.unlink()
    entry.mkdir()


def _a_pipe(rng: random.Random, entry: Path, key: Path) -> None:
    entry.unlink()
    os.mkfifo(entry)


def _open_to_all(rng: random.Random, entry: Path, key: Path) -> None:
    entry.chmod(0o666)


def _unreadable(rng: random.Random, entry: Path, key: Path) -> None:
    entry.chmod(0)


def _folder_open_to_all(rng: random.Random, entry: Path, key: Path) -> None:
    rng.choice(list(entry.parents)[:3]).chmod(0o777)


def _folder_not_writable(rng: random.Random, entry: Path, key: Path) -> None:
    rng.choice(list(entry.parents)[:3]).chmod(0o500)


def _folder_not_readable(rng: random.Random, entry: Path, key: Path) -> None:
    rng.choice(list(entry.parents)[:3]).chmod(0)


def _folder_is_a_file(rng: random.Random, entry: Path, key: Path) -> None:
    folder = rng.choice(list(entry.parents)[:3])
    shutil.rmtree(folder)
    folder.write_text("in the way")


def _folder_is_a_link(rng: random.Random, entry: Path, key: Path) -> None:
    folder = entry.parent
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


def _folder_gone(rng: random.Random, entry: Path, key: Path) -> None:
    shutil.rmtree(rng.choice(list(entry.parents)[:3]))


def _rubbish(rng: random.Random, entry: Path, key: Path) -> None:
    for n in range(20):
        entry.with_name(f".host.{n}.tmp").write_bytes(rng.randbytes(100))
    entry.with_suffix(".bad").mkdir()


def _kernels_in_the_way(rng: random.Random, entry: Path, key: Path) -> None:
    entry.unlink()
    with suppress(OSError):
        entry.with_suffix(".py").unlink()
    entry.with_suffix(".py").mkdir()


def _no_key(rng: random.Random, entry: Path, key: Path) -> None:
    key.unlink()


def _another_key(rng: random.Random, entry: Path, key: Path) -> None:
    key.write_bytes(rng.randbytes(seals.KEY_BYTES))


def _torn_key(rng: random.Random, entry: Path, key: Path) -> None:
    key.write_bytes(rng.randbytes(rng.randrange(seals.KEY_BYTES)))


def _open_key(rng: random.Random, entry: Path, key: Path) -> None:
    key.chmod(0o644)


def _key_is_a_folder(rng: random.Random, entry: Path, key: Path) -> None:
    key.unlink()
    key.mkdir()


def _key_folder_not_writable(rng: random.Random, entry: Path, key: Path) -> None:
    key.unlink()
    key.parent.chmod(0o500)


FAULTS: tuple[Fault, ...] = (
    _gone, _empty, _torn, _noise, _a_gigabyte, _a_link, _a_folder, _a_pipe, _open_to_all, _unreadable,
    _folder_open_to_all, _folder_not_writable, _folder_not_readable, _folder_is_a_file, _folder_is_a_link, _folder_gone,
    _rubbish, _kernels_in_the_way, _no_key, _another_key, _torn_key, _open_key, _key_is_a_folder,
    _key_folder_not_writable,
)  # fmt: skip


@contextmanager
def failing(rng: random.Random, call: str) -> Iterator[None]:
    """Where the cache and the key call the system, this call fails, always or now and then."""
    real, often, name = getattr(os, call), rng.choice((1.0, 0.5)), rng.choice(ERRORS)

    def fail(*args: object, **kwargs: object) -> object:
        if rng.random() < often:
            raise OSError(getattr(errno, name), name)
        return real(*args, **kwargs)

    class Failing:
        """`os`, but for one function."""

        def __getattr__(self, attribute: str) -> object:
            return fail if attribute == call else getattr(os, attribute)

    with mock.patch.object(caches, "os", Failing()), mock.patch.object(seals, "os", Failing()):
        yield


@contextmanager
def of_another_user(rng: random.Random) -> Iterator[None]:
    """All files are somebody else's."""
    with mock.patch.object(os, "geteuid", lambda: 40_000 + rng.randrange(1000)):
        yield


def campaign(count: int, seed: int, say: Say = lambda _: None) -> Stress:
    """So many cases, the kinds of faults in turn."""
    found, start = Stress("faults", seed), time.perf_counter()
    kinds = [*(f.__name__ for f in FAULTS), *(f"{call} fails" for call in CALLS), "of another user", "no home"]
    state = Path(tempfile.mkdtemp(prefix="mirage_jax"))
    with mock.patch.dict(os.environ, {"XDG_STATE_HOME": str(state)}), listening() as lines:
        os.environ.pop(seals.KEY_FILE_VARIABLE, None)
        key = state / "mirage_jax" / "key"
        templates = []
        for n, case in enumerate(CASES):
            stored = case.store(state / f"template{n}")[0]
            templates.append((case, stored, state / f"template{n}"))
        secret = key.read_bytes()
        for n, kind in zip(range(count), itertools.cycle(kinds)):
            rng = random.Random(f"{seed}/{n}")
            case, stored, template = rng.choice(templates)
            folder = state / f"cache{n}"
            shutil.copytree(template, folder)
            _restore(key, secret)
            try:
                one(rng, kind, case, stored, folder, key, found, lines)
            finally:
                _remove(folder)
            say(f"faults | {n + 1:,} of {count:,}")
    _remove(state)
    found.seconds = time.perf_counter() - start
    return found


def one(
    rng: random.Random, kind: str, case: Case, stored: CacheKey, folder: Path, key: Path, found: Stress, lines: Lines
) -> None:
    """A function that is decided twice and run, with one fault."""
    for remembered in (caches._checked_here, caches._complained):
        remembered.clear()
    seals._kept.cache_clear()
    row, used = found.row(kind.strip("_").replace("_", " ")), False
    fault = next((f for f in FAULTS if f.__name__ == kind), None)
    compilers = [Fast(options(folder, on_miss)) for on_miss in ("search", "fallback")]  # a wrong option is an error
    lines.take()
    try:
        if fault is not None:
            fault(rng, Cache(folder).path(stored), key)
        with _while(kind, rng):
            decisions = [case.decide(compiler) for compiler in compilers]
        used = decisions[0].source == "cache"
        problem = "; ".join(filter(None, (case.problem(case.run(d)) for d in decisions)))
        row.add(used=used, lines=lines.take(), problem=problem)
        if len(lines.last) > 1:
            row.problems.append(f"{case.name}: {len(lines.last)} lines: {lines.last}")
    except Exception as why:
        row.add(used=used, lines=lines.take(), problem=f"{case.name}: {in_one_line(why)}", crashed=True)


@contextmanager
def _while(kind: str, rng: random.Random) -> Iterator[None]:
    if kind.endswith(" fails"):
        with failing(rng, kind.removesuffix(" fails")):
            yield
    elif kind == "of another user":
        with of_another_user(rng):
            yield
    elif kind == "no home":
        with mock.patch.object(seals.platformdirs, "user_state_dir", lambda *_: "~/.local/state/mirage_jax"):
            yield
    else:
        yield


def _restore(key: Path, secret: bytes) -> None:
    key.parent.chmod(0o700)
    if key.is_dir():
        key.rmdir()
    key.write_bytes(secret)
    key.chmod(0o600)


def _remove(folder: Path) -> None:
    """A folder and all in it, whatever its mode."""
    for path, _, _ in os.walk(folder, onerror=None):
        with suppress(OSError):
            os.chmod(path, stat.S_IRWXU)
    with suppress(OSError):
        os.chmod(folder, stat.S_IRWXU)
    for _ in range(3):  # what could not be looked into before
        for path in [folder, *folder.rglob("*")] if folder.is_dir() else [folder]:
            with suppress(OSError):
                if path.is_dir() and not path.is_symlink():
                    path.chmod(stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.unlink()
