"""``python -m mirage_jax``."""

from mirage_jax.cli import run

run()
