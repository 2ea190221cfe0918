"""mirage_jax: a superoptimizer for JAX functions. ``@mirage_jax.optimize`` and go; `README.md` has the rest."""

from mirage_jax.api import Optimized as Optimized
from mirage_jax.api import optimize as optimize
from mirage_jax.api import tune as tune
from mirage_jax.config import Budget as Budget
from mirage_jax.config import disabled as disabled
from mirage_jax.errors import MirageError as MirageError
from mirage_jax.errors import UsageError as UsageError
from mirage_jax.report import Report as Report

__version__ = "0.1.0"
