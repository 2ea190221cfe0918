"""Models as people write them: plain functions over trees of arrays, with random weights at published sizes.

`layers` has their common parts, `training` AdamW and its step. Every other module is one model: `init` draws its
weights, the rest are functions of sizes, weights and data. `mirage_jax.bench.steps` names the steps that are timed,
and each file in ``examples/`` runs one.
"""
