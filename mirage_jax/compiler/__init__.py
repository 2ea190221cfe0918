"""Who computes a region: decided once, by search, proof and measurement, or remembered from the last time.

`decide` is the order of events, `attempt` what is done to one region on one device, `tuning` which sizes are tried,
`winner` what runs.
"""

from mirage_jax.compiler.attempt import space_for as space_for
from mirage_jax.compiler.decide import Compiler as Compiler
