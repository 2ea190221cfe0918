"""A superoptimizer for JAX functions: put ``@mirage_jax.optimize`` on one; `README.md` and `docs/` have the rest."""

from typing import Any

from mirage_jax.config import Budget as Budget
from mirage_jax.config import disabled as disabled
from mirage_jax.errors import MirageError as MirageError
from mirage_jax.errors import UsageError as UsageError
from mirage_jax.report import Report as Report

try:
    from mirage_jax.api import Optimized as Optimized
    from mirage_jax.api import optimize as optimize
    from mirage_jax.api import tune as tune
except (ImportError, AttributeError) as error:  # of a JAX that is too new, or too old
    from mirage_jax import fallback

    fallback.say_why(error)
    Optimized, optimize, tune = fallback.Optimized, fallback.optimize, fallback.tune  # type: ignore[assignment, misc]


def __getattr__(name: str) -> Any:
    """`__version__`, read when asked for: package metadata take longer to find than the rest takes to import."""
    if name == "__version__":
        from importlib.metadata import version

        return version("mirage-jax")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
