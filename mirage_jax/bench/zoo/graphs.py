"""Graphs, molecules and equivariant networks by Jraph, e3nn and JAX MD."""

# The libraries need not be here.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mirage_jax.bench.zoo.entries import LibraryEntries, Made, normal

JRAPH, E3NN, JAX_MD = LibraryEntries("jraph"), LibraryEntries("e3nn-jax"), LibraryEntries("jax-md")


def _on_graph(
    nodes: int, edges: int, layer: Callable[..., Any], *shapes: tuple[int, ...], width: int, edge_width: int
) -> Made:
    """A layer ``layer(*weights)`` on a random graph with features of nodes and edges."""
    import jraph

    def _fn(x: jax.Array, e: jax.Array, senders: jax.Array, receivers: jax.Array, *weights: jax.Array) -> jax.Array:
        counts = {"n_node": jnp.array([nodes]), "n_edge": jnp.array([edges])}
        graph = jraph.GraphsTuple(
            nodes=x, edges=e, senders=senders, receivers=receivers, globals=jnp.zeros((1, 1)), **counts
        )
        return layer(*weights)(graph).nodes

    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        """Make the arguments."""
        k1, k2, k3, k4 = jax.random.split(key, 4)
        x, e = normal((nodes, width), (edges, edge_width))(k1)
        ends = (jax.random.randint(k, (edges,), 0, nodes) for k in (k2, k3))
        weights = (w * w.shape[0] ** -0.5 for w in normal(*shapes)(k4))
        return x, e, *ends, *weights

    return _fn, draw


@JRAPH.entry("a layer of a GCN (Kipf and Welling, 2017) on ogbn-arxiv: 169,343 nodes, 1,166,243 edges, width 128")
def _jraph_convolution(small: bool) -> Made:
    """A product for each node, and sums over edges."""
    import jraph

    nodes, edges, d = (16, 64, 8) if small else (169343, 1166243, 128)

    def layer(w: jax.Array) -> Any:
        """Make the layer."""
        return jraph.GraphConvolution(lambda x: jax.nn.relu(x @ w), add_self_edges=True)

    return _on_graph(nodes, edges, layer, (d, d), width=d, edge_width=1)


@JRAPH.entry("a layer of a GAT (Velickovic et al., 2018) on PubMed: 19,717 nodes, 88,648 edges, 500 -> 64")
def _jraph_attention(small: bool) -> Made:
    """Attention over the neighbours of each node."""
    import jraph

    nodes, edges, d, h = (16, 64, 8, 4) if small else (19717, 88648, 500, 64)

    def layer(w: jax.Array, a: jax.Array) -> Any:
        """Make the layer."""

        def logit(sent: jax.Array, received: jax.Array, e: Any) -> jax.Array:
            return jax.nn.leaky_relu(jnp.concatenate([sent, received], -1) @ a, 0.2)

        return jraph.GAT(lambda x: x @ w, logit)

    return _on_graph(nodes, edges, layer, (d, h), (2 * h, 1), width=d, edge_width=1)


@JRAPH.entry("a step of MeshGraphNets (Pfaff et al., 2021): 4,096 nodes, 24,576 edges, MLPs of width 128")
def _jraph_mesh(small: bool) -> Made:
    """MLPs of edges and their ends, sums at nodes, MLPs of nodes."""
    import jraph

    nodes, edges, d = (16, 64, 8) if small else (4096, 24576, 128)

    def layer(e1: jax.Array, e2: jax.Array, n1: jax.Array, n2: jax.Array) -> Any:
        """Make the layer."""

        def edge(e: jax.Array, sent: jax.Array, received: jax.Array, g: Any) -> jax.Array:
            return jax.nn.relu(jnp.concatenate([e, sent, received], -1) @ e1) @ e2

        def node(x: jax.Array, sent: jax.Array, received: jax.Array, g: Any) -> jax.Array:
            """Update a node."""
            return jax.nn.relu(jnp.concatenate([x, received], -1) @ n1) @ n2

        return jraph.GraphNetwork(edge, node)

    return _on_graph(nodes, edges, layer, (3 * d, d), (d, d), (2 * d, d), (d, d), width=d, edge_width=d)


@E3NN.entry("NequIP's features (Batzner et al., 2022): 65,536 edges, spherical harmonics up to degree 3")
def _e3nn_harmonics(small: bool) -> Made:
    """Spherical harmonics of vectors, times weights."""
    import e3nn_jax as e3nn

    n = 16 if small else 65536
    degrees = e3nn.Irreps.spherical_harmonics(3)

    def _fn(r: jax.Array, w: jax.Array) -> jax.Array:
        return e3nn.spherical_harmonics(degrees, r, normalize=True).array @ w

    return _fn, normal((n, 3), (16, 32))


@E3NN.entry("MACE's products (Batatia et al., 2022): 4,096 atoms, 32 scalars and 32 vectors, an equivariant linear map")
def _e3nn_product(small: bool) -> Made:
    """A tensor product of features with vectors, and an equivariant linear layer after it."""
    import e3nn_jax as e3nn

    n, k = (8, 2) if small else (4096, 32)
    features, vectors = e3nn.Irreps(f"{k}x0e + {k}x1o"), e3nn.Irreps("1x0e + 1x1o")

    def product(x: jax.Array, y: jax.Array) -> Any:
        return e3nn.tensor_product(e3nn.IrrepsArray(features, x), e3nn.IrrepsArray(vectors, y))

    linear = e3nn.flax.Linear(features)

    def _fn(weights: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return linear.apply(weights, product(x, y)).array

    def draw(key: jax.Array) -> tuple[Any, ...]:
        """Make the arguments."""
        k1, k2 = jax.random.split(key)
        x, y = normal((n, features.dim), (n, vectors.dim))(k2)
        return linear.init(k1, product(x, y)), x, y

    return _fn, draw


def _particles(energy: Callable[[Any, float], Callable[[jax.Array], jax.Array]], n: int) -> Made:
    """Energy of n particles in a periodic box, at one particle for each unit of volume."""
    from jax_md import space

    side = n ** (1 / 3)
    displacement, _ = space.periodic(side)
    run = energy(displacement, side)
    return run, lambda key: (jax.random.uniform(key, (n, 3)) * side,)


@JAX_MD.entry("4,096 soft spheres in a periodic box; its gradient are the forces")
def _jax_md_soft_spheres(small: bool) -> Made:
    """The energy of all pairs."""
    from jax_md import energy

    return _particles(lambda d, _: energy.soft_sphere_pair(d, per_particle=True), 32 if small else 4096)


@JAX_MD.entry("4,096 particles with Morse potentials in a periodic box")
def _jax_md_morse(small: bool) -> Made:
    """The energy of all pairs, cut off smoothly."""
    from jax_md import energy

    return _particles(lambda d, _: energy.morse_pair(d, per_particle=True), 32 if small else 4096)


@JAX_MD.entry("256 atoms of silicon (Stillinger and Weber, 1985)")
def _jax_md_stillinger_weber(small: bool) -> Made:
    """The energy of all pairs and triples."""
    from jax_md import energy

    return _particles(lambda d, _: energy.stillinger_weber(d, cutoff=1.6, sigma=0.9), 16 if small else 256)
