"""Which modules of other packages have added something (`mirage_jax.extensions`).

Processes that search or try kernels load the same modules first (`children`). The text of each is part of every cache
key: a decision belongs to the registrations under which it was made.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

_LOADING = """\
import importlib, importlib.util, sys
for name, file in {modules!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:  # it lies where only the first process looks
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
"""

_lock = threading.Lock()
_modules: dict[str, str] = {}  # their files, by name
_notes: list[str] = []


def add(name: str, file: str) -> None:
    """Remember a module, and where its text lies."""
    with _lock:
        _modules[name] = str(Path(file).resolve())


def note(text: str) -> None:
    """Remember a registration that no other process needs, but on which decisions depend."""
    with _lock:
        _notes.append(text)


def loading() -> str:
    """Python code that loads them; empty if there are none."""
    return _LOADING.format(modules=list(_modules.items())) if _modules else ""


def digest() -> str:
    """Hash all registrations; empty if there are none."""
    texts = [f"{name}\n{Path(file).read_text()}" for name, file in sorted(_modules.items())]
    everything = [*texts, *sorted(_notes)]
    return hashlib.sha256("\n\n".join(everything).encode()).hexdigest()[:16] if everything else ""
