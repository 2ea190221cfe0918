"""Who computes a region: decided once, by search, proof and measurement, or remembered from the last time.

`decide` is the order of events, `subject` a region on a device, `attempt` what is done to it where nothing is stored,
`tuning` which sizes are tried, `trials` and `worker` how they are tried in another process, `winner` what runs.
"""

from mirage_jax.compiler.compiler import Compiler as Compiler
