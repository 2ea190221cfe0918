"""mirage_jax: a superoptimizer for JAX functions. ``@mirage_jax.optimize`` and go; `README.md` has the rest."""

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
    from mirage_jax import plain

    plain.say_why(error)
    Optimized, optimize, tune = plain.Optimized, plain.optimize, plain.tune  # type: ignore[assignment, misc]

__version__ = "0.1.0"
