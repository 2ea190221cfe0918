"""Decides who computes a region, once, by search, proof and measurement; later processes read the stored decision.

Reading order: `compiler` (all regions of a function), `decide` (one region: the order of the gates), `stored`,
`region`, `winner`; then, only if nothing is stored, `tuning_session`, `tuning`, `float_check`, and `isolation`, which
runs variants in child processes.
"""

from mirage_jax.compiler.compiler import Compiler as Compiler
