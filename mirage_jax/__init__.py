"""A superoptimizer for JAX functions: put ``@mirage_jax.optimize`` on one; `README.md` and `docs/` have the rest."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mirage_jax.api import Optimized as Optimized
    from mirage_jax.api import optimize as optimize
    from mirage_jax.api import tune as tune
    from mirage_jax.best_graphs import Superoptimized as Superoptimized
    from mirage_jax.best_graphs import superoptimize as superoptimize
    from mirage_jax.bisection import Bisection as Bisection
    from mirage_jax.bisection import bisect as bisect
    from mirage_jax.config import Budget as Budget
    from mirage_jax.config import disabled as disabled
    from mirage_jax.errors import MirageError as MirageError
    from mirage_jax.errors import UsageError as UsageError
    from mirage_jax.exporting import export as export
    from mirage_jax.extensions import register_backend as register_backend
    from mirage_jax.extensions import register_device as register_device
    from mirage_jax.extensions import register_operator as register_operator
    from mirage_jax.extensions import register_rule as register_rule
    from mirage_jax.report import Report as Report
    from mirage_jax.written_graph import MuGraph as MuGraph

_HOMES = {
    **dict.fromkeys(("Optimized", "optimize", "tune"), "api"),
    **dict.fromkeys(("Superoptimized", "superoptimize"), "best_graphs"),
    **dict.fromkeys(("Bisection", "bisect"), "bisection"),
    **dict.fromkeys(("Budget", "disabled"), "config"),
    **dict.fromkeys(("MirageError", "UsageError"), "errors"),
    "export": "exporting",
    **{f"register_{kind}": "extensions" for kind in ("operator", "rule", "device", "backend")},
    "Report": "report",
    "MuGraph": "written_graph",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is asked for, so that the command line starts without JAX."""
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("mirage-jax")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except (ImportError, AttributeError) as error:  # of a JAX that is too new, or too old
        if _HOMES[name] != "api":
            raise
        home = importlib.import_module(f"{__name__}.fallback")
        home.say_why(error)
    value = globals()[name] = getattr(home, name)
    return value
