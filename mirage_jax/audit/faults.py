"""A campaign of faults of file systems: obstacles in the way of the cache and of the key, and calls that fail.

In each case a function whose decision is stored, or was, is decided again and run. The result is right despite the
fault.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from unittest import mock

from mirage_jax import cache as caches
from mirage_jax import seals
from mirage_jax.audit.stress import CASES, Case, Fast, Stress, listening, options, stress_campaign
from mirage_jax.cache import Cache
from mirage_jax.progress import Say

ERRORS = ("ENOSPC", "EACCES", "EROFS", "EIO", "ESTALE", "EMFILE", "EDQUOT", "EBUSY", "EPERM", "ENOTSUP")
CALLS = ("open", "replace", "fsync", "mkdir", "link", "fstat", "unlink")

type Fault = Callable[[random.Random, Path, Path], object]  # a generator of chance, the entry's file, the key's file


def _torn(rng: random.Random, entry: Path, key: Path) -> None:
    os.truncate(entry, rng.randrange(entry.stat().st_size))


def _is_a_link(rng: random.Random, entry: Path, key: Path) -> None:
    entry.rename(entry.with_name("kept"))
    entry.symlink_to(rng.choice(("kept", "/etc/passwd", "nowhere", entry.name)))


def _replaced_by(make: Callable[[Path], object], of_key: bool = False) -> Fault:
    """Something else is in the place of the entry's file, or of the key's."""

    def fault(rng: random.Random, entry: Path, key: Path) -> None:
        file = key if of_key else entry
        file.unlink()
        make(file)

    return fault


def _folder(rng: random.Random, entry: Path) -> Path:
    """A folder around the entry."""
    return rng.choice(list(entry.parents)[:3])


def _folder_is_a_file(rng: random.Random, entry: Path, key: Path) -> None:
    folder = _folder(rng, entry)
    shutil.rmtree(folder)
    folder.write_text("in the way")


def _folder_is_a_link(rng: random.Random, entry: Path, key: Path) -> None:
    folder = entry.parent
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


def _rubbish(rng: random.Random, entry: Path, key: Path) -> None:
    for n in range(20):
        entry.with_name(f".host.{n}.tmp").write_bytes(rng.randbytes(100))
    entry.with_suffix(".bad").mkdir()


def _kernels_in_the_way(rng: random.Random, entry: Path, key: Path) -> None:
    entry.unlink()
    with suppress(OSError):
        entry.with_suffix(".py").unlink()
    entry.with_suffix(".py").mkdir()


FAULTS: dict[str, Fault] = {
    "gone": lambda rng, entry, key: entry.unlink(),
    "empty": lambda rng, entry, key: entry.write_bytes(b""),
    "torn": _torn,
    "noise": lambda rng, entry, key: entry.write_bytes(rng.randbytes(rng.randrange(1, 8192))),
    "a gigabyte": lambda rng, entry, key: os.truncate(entry, 1 << 30),
    "a link": _is_a_link,
    "a folder": _replaced_by(Path.mkdir),
    "a pipe": _replaced_by(os.mkfifo),
    "open to all": lambda rng, entry, key: entry.chmod(0o666),
    "unreadable": lambda rng, entry, key: entry.chmod(0),
    "folder open to all": lambda rng, entry, key: _folder(rng, entry).chmod(0o777),
    "folder not writable": lambda rng, entry, key: _folder(rng, entry).chmod(0o500),
    "folder not readable": lambda rng, entry, key: _folder(rng, entry).chmod(0),
    "folder is a file": _folder_is_a_file,
    "folder is a link": _folder_is_a_link,
    "folder gone": lambda rng, entry, key: shutil.rmtree(_folder(rng, entry)),
    "rubbish": _rubbish,
    "kernels in the way": _kernels_in_the_way,
    "no key": lambda rng, entry, key: key.unlink(),
    "another key": lambda rng, entry, key: key.write_bytes(rng.randbytes(seals.KEY_BYTES)),
    "torn key": lambda rng, entry, key: key.write_bytes(rng.randbytes(rng.randrange(seals.KEY_BYTES))),
    "open key": lambda rng, entry, key: key.chmod(0o644),
    "key is a folder": _replaced_by(Path.mkdir, of_key=True),
    "key folder not writable": _replaced_by(lambda file: file.parent.chmod(0o500), of_key=True),
}


@contextmanager
def _failing(rng: random.Random, call: str) -> Iterator[None]:
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


def _circumstances(rng: random.Random) -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """Faults that last while a function is decided."""
    home = partial(mock.patch.object, seals.platformdirs, "user_state_dir", lambda *_: "~/.local/state/mirage_jax")
    return {
        **{f"{call} fails": partial(_failing, rng, call) for call in CALLS},
        "of another user": lambda: mock.patch.object(os, "geteuid", lambda: 40_000 + rng.randrange(1000)),
        "no home": home,
    }


KINDS = (*FAULTS, *_circumstances(random.Random()))


@stress_campaign("faults")
def campaign(found: Stress, folder: Path, count: int, say: Say) -> None:
    """Run `count` cases, the kinds of faults in turn."""
    state = folder / "state"
    state.mkdir()
    with mock.patch.dict(os.environ, {"XDG_STATE_HOME": str(state)}), listening() as lines:
        os.environ.pop(seals.KEY_FILE_VARIABLE, None)
        key = state / "mirage_jax" / "key"
        templates = []
        for n, case in enumerate(CASES):
            stored = case.store(state / f"template{n}")[0]
            templates.append((case, stored, state / f"template{n}"))
        secret = key.read_bytes()
        for n, kind in zip(range(count), itertools.cycle(KINDS)):
            rng = random.Random(f"{found.seed}/{n}")
            case, stored, template = rng.choice(templates)
            cache = state / f"cache{n}"
            shutil.copytree(template, cache)
            _restore(key, secret)
            try:
                found.attempt(kind, lines, partial(_decide, rng, kind, case, cache, Cache(cache).path(stored), key))
            finally:
                _remove(cache)
            say(f"faults | {n + 1:,} of {count:,}")
    _remove(state)


def _decide(rng: random.Random, kind: str, case: Case, folder: Path, entry: Path, key: Path) -> tuple[bool, str]:
    """Decide a function twice, with one fault, and run it; whether a stored decision was used, and the problem."""
    for remembered in (caches._checked_here, caches._complained):
        remembered.clear()
    seals._kept.cache_clear()
    compilers = [Fast(options(folder, on_miss)) for on_miss in ("search", "fallback")]  # a wrong option is an error
    if kind in FAULTS:
        FAULTS[kind](rng, entry, key)
    with _circumstances(rng).get(kind, nullcontext)():
        decisions = [case.decide(compiler) for compiler in compilers]
    problem = "; ".join(filter(None, (case.problem(case.run(d)) for d in decisions)))
    return decisions[0].source == "cache", problem


def _restore(key: Path, secret: bytes) -> None:
    key.parent.chmod(0o700)
    if key.is_dir():
        key.rmdir()
    key.write_bytes(secret)
    key.chmod(0o600)


def _remove(folder: Path) -> None:
    """Remove a folder and everything in it, whatever the modes."""
    with suppress(OSError):
        folder.chmod(stat.S_IRWXU)
    for path, names, _ in os.walk(folder):
        for name in names:  # which are looked into next
            with suppress(OSError):
                Path(path, name).chmod(stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.unlink()
