"""Kernels that Triton has compiled stay where Triton keeps its own (``TRITON_CACHE_DIR``, else the user's home), so
that the next process does not compile them again: jax-triton alone remembers them within a process only.

The key is all that the compiler reads: the kernel's intermediate code, which a process always makes anew from the text
that it generates, the options, the GPU, and the versions. What is stored is PTX with a checksum, as JSON; what is
damaged is compiled again. As for every Triton program, whoever can write to that directory decides what runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

log = logging.getLogger("mirage_jax")

FILE = "mirage_jax.json"

type Compile = Callable[[Any, Any, Any, Any], Any]  # intermediate code, backend, options, target -> CompilationResult


def kept(compile_kernel: Compile, result_type: Any) -> Compile:
    """jax-triton's `compile_ttir_inplace`, with a memory on disk, whose failures are none of the compilation."""

    @functools.wraps(compile_kernel)
    def run(ttir: Any, backend: Any, options: Any, target: Any) -> Any:
        try:
            manager = _manager(str(ttir), options, target)
            if (found := _read(manager, result_type)) is not None:
                return found
        except Exception as why:  # a file system, or a version of Triton whose cache is another
            log.info("compiled kernels are not remembered: %s: %s", type(why).__name__, why)
            return compile_kernel(ttir, backend, options, target)
        result = compile_kernel(ttir, backend, options, target)
        try:
            manager.put(_encode(result), FILE, binary=False)
        except Exception as why:
            log.info("a compiled kernel is not kept: %s: %s", type(why).__name__, why)
        return result

    return run


@functools.cache
def _versions() -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("triton", "jax-triton"))


def _manager(ttir: str, options: Any, target: Any) -> Any:
    from triton.runtime.cache import get_cache_manager

    key = "\n".join((_versions(), str(target), options.hash(), ttir))
    return get_cache_manager(hashlib.sha256(key.encode()).hexdigest())


def _encode(result: Any) -> str:
    """Without the code between source and PTX, which only jax-triton's debugging prints."""
    body = json.dumps(asdict(replace(result, ttgir="", llir="")), sort_keys=True)
    return json.dumps({"result": body, "sha256": hashlib.sha256(body.encode()).hexdigest()})


def _read(manager: Any, result_type: Any) -> Any:
    if (path := manager.get_file(FILE)) is None:
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
