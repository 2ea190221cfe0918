"""Transformations around random programs, or their parts, for which JAX has no one-line form; scripts print them."""

import jax
import jax.numpy as jnp


def gradients(f):
    """Differentiate the sum of squares of all results by every argument of floats."""

    def total(*args):
        """Sum the squares of all results."""
        return sum(jnp.sum(jnp.square(y.astype(jnp.float32))) for y in jax.tree.leaves(f(*args)))

    def run(*args):
        floats = tuple(i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating))
        return jax.grad(total, argnums=floats)(*args)

    return run


def scanned(f, mapped):
    """Run f for each index along the leading dimension of the mapped arguments, in turn."""

    def run(*args):
        def body(carry, slices):
            rest = iter(slices)
            return carry, f(*(next(rest) if m else a for m, a in zip(mapped, args, strict=True)))

        return jax.lax.scan(body, None, [a for m, a in zip(mapped, args, strict=True) if m])[1]

    return run


def looped(f, way):
    """Run f in the body of a loop of two steps, which reads constants, carried values, or slices of arrays."""

    def run(*args):
        if way == "constants":
            results = jax.lax.scan(lambda carry, _: (carry, f(*args)), None, None, length=2)[1]
        elif way == "carried":
            results = jax.lax.scan(lambda carry, _: (carry, f(*carry)), args, None, length=2)[1]
        else:
            slices = [jnp.stack([a, a]) for a in args]
            results = jax.lax.scan(lambda carry, xs: (carry, f(*xs)), None, slices, length=2)[1]
        return tuple(y[-1] for y in results)

    return run


def layered(f, argument, result):
    """Run two equal layers: one result of the first is an argument of the second."""

    def run(*args):
        def layer(x, _):
            results = f(*args[:argument], x, *args[argument + 1 :])
            return results[result], results

        return tuple(y[-1] for y in jax.lax.scan(layer, args[argument], None, length=2)[1])

    return run


def branched(f):
    """Run f in one branch of two; the other gives zeros and is not taken."""

    def run(*args):
        return jax.lax.cond(True, f, lambda *args: jax.tree.map(jnp.zeros_like, f(*args)), *args)

    return run


def awaited(f):
    """Run f in the body of a while loop that runs once, and has no gradients."""

    def run(*args):
        zeros = tuple(jnp.zeros(y.shape, y.dtype) for y in jax.eval_shape(f, *args))
        return jax.lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, f(*args)), (0, zeros))[1]

    return run


HELPERS = {h.__name__: h for h in (gradients, scanned, looped, layered, branched, awaited)}
