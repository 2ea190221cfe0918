"""Starts other Pythons that import what this one does, and nothing from the current directory.

``python -m`` and ``python -c`` put the current directory first on `sys.path`: a `numpy.py` that lies there would run. A
child is started with ``-P`` and given this process's own `sys.path`, without the current directory. This package comes
from where it was imported here, whatever else is installed: from a checkout, a zip file or an editable install.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mirage_jax import extension_modules

PACKAGE = "mirage_jax"
ROOT = str(Path(__file__).parents[1])

_FLAGS = {"isolated": "-I", "ignore_environment": "-E", "no_user_site": "-s", "no_site": "-S"}
_BOOT = f"""\
import json, sys
from importlib.machinery import PathFinder
sys.path[:], root = json.loads(sys.argv.pop(1)), sys.argv.pop(1)
class Ours:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [root]) if name == {PACKAGE!r} else None
sys.meta_path.insert(0, Ours)
"""


def module(name: str, *arguments: str) -> list[str]:
    """A command like ``python -m name arguments``, for a module of ours, which loads extensions first, as this did."""
    return python(running(name), *arguments)


def running(name: str) -> str:
    """Python code that runs a module of ours, after the extensions of this process."""
    run = f"import runpy\nrunpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return extension_modules.loading() + run


def python(code: str, *arguments: str) -> list[str]:
    """A command like ``python -c code arguments``."""
    flags = [flag for name, flag in _FLAGS.items() if getattr(sys.flags, name, 0)]
    return [sys.executable, *flags, "-P", "-c", _BOOT + code, json.dumps(safe_path()), ROOT, *arguments]


def safe_path() -> list[str]:
    """`sys.path` without the current directory, by whatever name."""
    return [p for p in sys.path if p and not _is_here(p)]


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and `more`, such that no child of a child looks into the current directory either."""
    env = {**os.environ, **more, "PYTHONSAFEPATH": "1"}
    if kept := [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(p) and not _is_here(p)]:
        env["PYTHONPATH"] = os.pathsep.join(kept)
    else:
        env.pop("PYTHONPATH", None)
    return env


@functools.cache
def source_digest() -> str:
    """Digest of this package's own source, so that a changed optimizer does not believe its predecessor. What only uses
    the optimizer is left out.
    """
    digest = hashlib.sha256()
    root = os.path.dirname(__file__)
    if not os.path.isdir(root):  # imported from an archive, which counts as a whole
        with open(os.path.dirname(root), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    folders = ((d, names) for d, _, names in os.walk(root) if not d[len(root) + 1 :].startswith(("audit", "bench")))
    for folder, name in sorted((d, n) for d, names in folders for n in names if n.endswith(".py")):
        with open(os.path.join(folder, name), "rb") as file:  # pathlib takes twice as long
            digest.update(f"{folder[len(root) :]}/{name}\n".encode() + file.read())
    return digest.hexdigest()[:16]


def _is_here(path: str) -> bool:
    try:
        return os.path.samefile(path, os.curdir)
    except OSError:  # a file is not there
        return False


_pools = threading.Lock()


@contextmanager
def safe_pool() -> Iterator[None]:
    """While processes of `multiprocessing` are started in here, they do not look into the current directory first."""
    with _pools:
        before = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONSAFEPATH"]
            else:
                os.environ["PYTHONSAFEPATH"] = before


def end_with_standard_input() -> None:
    """From now on this process ends when its standard input does, whatever it is doing: its parent has ended."""

    def watch() -> None:
        while os.read(0, 1):  # not `sys.stdin`, whose lock Python wants when it ends
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
