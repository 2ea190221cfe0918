"""Kernels that Triton has compiled stay where Triton keeps its own (``TRITON_CACHE_DIR``, else the user's home), so
that the next process does not compile them again: jax-triton alone remembers them within a process only.

Processes that try kernels keep them in a folder that their parent lends them and reads, for as long as it tunes.

The key is all that the compiler reads: the kernel's intermediate code, which a process always makes anew from the text
that it generates, the options, the GPU, and the versions. What is stored is PTX with a checksum, as JSON; what is
damaged is compiled again. As for every Triton program, whoever can write to that directory decides what runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any, Protocol

log = logging.getLogger("mirage_jax")

FILE = "mirage_jax.json"

type Compile = Callable[[Any, Any, Any, Any], Any]  # intermediate code, backend, options, target -> CompilationResult

_lent: list[str] = []  # folders of the processes that try kernels for this one


class _Place(Protocol):
    """Where one compiled kernel is kept, or will be: one of Triton's cache managers, or `_InFolder`."""

    def get_file(self, filename: str) -> str | None:
        """The path of the file, if it is there."""
        ...

    def put(self, data: str, filename: str, binary: bool) -> object:
        """Write the file."""
        ...


@contextmanager
def lent_folder() -> Iterator[tuple[str, ...]]:
    """A folder for other processes' kernels, which this one reads meanwhile; none where no folder can be made."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="mirage_jax-", ignore_cleanup_errors=True)
    except OSError as why:
        log.info("compiled kernels are not shared: %s: %s", type(why).__name__, why)
        yield ()
        return
    with folder as path:
        _lent.append(path)
        try:
            yield (path,)
        finally:
            _lent.remove(path)


def kept(compile_kernel: Compile, result_type: Any, folder: str = "") -> Compile:
    """jax-triton's `compile_ttir_inplace`, with a memory on disk, whose failures are none of the compilation.

    The memory is a folder, or Triton's own cache if none is named.
    """

    @functools.wraps(compile_kernel)
    def run(ttir: Any, backend: Any, options: Any, target: Any) -> Any:
        try:
            key = _key(str(ttir), options, target)
            place = _InFolder(folder, key) if folder else _of_triton(key)
            if (found := _read(place, result_type)) is not None:
                return found
            result = next(filter(None, (_read(_InFolder(lent, key), result_type) for lent in tuple(_lent))), None)
        except Exception as why:  # a file system, or a version of Triton whose cache is another
            log.info("compiled kernels are not remembered: %s: %s", type(why).__name__, why)
            return compile_kernel(ttir, backend, options, target)
        if result is None:
            result = compile_kernel(ttir, backend, options, target)
        try:
            place.put(_encode(result), FILE, binary=False)
        except Exception as why:
            log.info("a compiled kernel is not kept: %s: %s", type(why).__name__, why)
        return result

    return run


@functools.cache
def _versions() -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("triton", "jax-triton"))


def _key(ttir: str, options: Any, target: Any) -> str:
    key = "\n".join((_versions(), str(target), options.hash(), ttir))
    return hashlib.sha256(key.encode()).hexdigest()


def _of_triton(key: str) -> _Place:
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(key)


@dataclass(frozen=True, slots=True)
class _InFolder:
    folder: str
    key: str

    def _path(self, filename: str) -> str:
        return os.path.join(self.folder, f"{self.key}-{filename}")

    def get_file(self, filename: str) -> str | None:
        """The path of the file, if it is there."""
        path = self._path(filename)
        return path if os.path.exists(path) else None

    def put(self, data: str, filename: str, binary: bool) -> None:
        """Write the file; who reads a part finds it damaged."""
        with open(self._path(filename), "wb" if binary else "w") as file:
            file.write(data)


def _encode(result: Any) -> str:
    """Without the code between source and PTX, which only jax-triton's debugging prints."""
    body = json.dumps(asdict(replace(result, ttgir="", llir="")), sort_keys=True)
    return json.dumps({"result": body, "sha256": hashlib.sha256(body.encode()).hexdigest()})


def _read(place: _Place, result_type: Any) -> Any:
    if (path := place.get_file(FILE)) is None:
        return None
    try:
        with open(path) as file:
            stored = json.load(file)
        if hashlib.sha256(stored["result"].encode()).hexdigest() == stored["sha256"]:
            return result_type(**json.loads(stored["result"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    log.info("a compiled kernel is damaged and is compiled again: %s", path)
    return None
