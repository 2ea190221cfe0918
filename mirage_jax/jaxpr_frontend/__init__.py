"""From a JAX function to regions that a muGraph can replace, and back.

Read in this order:

1. `capture/call_primitive.py` traces a function into one call primitive, which every JAX transformation understands.
2. `capture/lowering.py` plans the jaxpr that arrives at its lowering, and runs it with kernels in place of regions.
3. `partition/program.py` flattens the jaxpr into one list of equations over numbered values.
4. `partition/regions.py` drives the partition: `eligibility.py` finds the equations that a muGraph can express,
   `cutting.py` cuts them into pieces (`clusters.py`, `product_boundaries.py`), and refused equations are left out.
5. `translate/translate.py` makes a reference muGraph of a piece, by one rule for each primitive (`rules.py`) over named
   axes (`axes.py`, `builder.py`); `assemble.py` writes the graph.

Read when needed: `translate/slicing.py`, `concatenation.py`, `gathers.py` and `integers.py` for these primitives;
`capture/rematerialize.py` for recomputation; `capture/sharding.py` for divided arrays; `flax_modules.py` for nnx.
All private names of JAX, and its versions, are in `jax_compat.py`.
"""
