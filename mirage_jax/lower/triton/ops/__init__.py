"""Functions that emit one operator each, registered by its name (`context.rule`). Importing this package registers all.

Each takes the context of the kernel, `c`, and the operator, and returns the tile of the result.
"""

from mirage_jax.lower.triton.ops import pointwise, products, reductions, softmax

__all__ = ["pointwise", "products", "reductions", "softmax"]
