"""Transformations that random programs are wrapped in, where JAX has no one-line form. Their text goes into scripts."""

import jax
import jax.numpy as jnp


def gradients(f):
    """The gradients of the sum of squares of all results, with respect to every argument of floats."""

    def total(*args):
        return sum(jnp.sum(jnp.square(y.astype(jnp.float32))) for y in jax.tree.leaves(f(*args)))

    def run(*args):
        floats = tuple(i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating))
        return jax.grad(total, argnums=floats)(*args)

    return run


def scanned(f, mapped):
    """f for each index along the leading dimension of the mapped arguments, one after the other."""

    def run(*args):
        def body(carry, slices):
            rest = iter(slices)
            return carry, f(*(next(rest) if m else a for m, a in zip(mapped, args, strict=True)))

        return jax.lax.scan(body, None, [a for m, a in zip(mapped, args, strict=True) if m])[1]

    return run


HELPERS = {"grad": gradients, "scan": scanned}
