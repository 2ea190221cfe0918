"""Programs by other people's libraries, forward and as gradients, that nothing here was written or tuned for.

One module for each library or a few. To add an entry, write it there; to add a library, add it to `LIBRARIES`.
"""

from __future__ import annotations

from collections.abc import Iterator

from mirage_jax.bench.zoo.entries import ZooEntry
from mirage_jax.bench.zoo.equinox_models import DIFFRAX, EQUIMO, EQUINOX
from mirage_jax.bench.zoo.flax_layers import FLAX
from mirage_jax.bench.zoo.gaussian import GPJAX, TINYGP
from mirage_jax.bench.zoo.graphs import E3NN, JAX_MD, JRAPH
from mirage_jax.bench.zoo.haiku_nets import HAIKU
from mirage_jax.bench.zoo.jax_nn import JAX_NN, OPTAX
from mirage_jax.bench.zoo.language import FLASH, GEMMA, GRIFFIN, MAMBA, TRANSFORMERS
from mirage_jax.bench.zoo.probability import BLACKJAX, DISTRAX, DYNAMAX, JAXOPT, NUMPYRO, TFP
from mirage_jax.bench.zoo.tangents import NEURAL_TANGENTS
from mirage_jax.bench.zoo.transport import OTT

LIBRARIES = (
    *(JAX_NN, OPTAX, FLAX, EQUINOX, EQUIMO, DIFFRAX, HAIKU),
    *(OTT, TINYGP, GPJAX, NUMPYRO, TFP, DISTRAX, DYNAMAX, BLACKJAX, JAXOPT),
    *(JRAPH, E3NN, JAX_MD, NEURAL_TANGENTS),
    *(GEMMA, GRIFFIN, MAMBA, TRANSFORMERS, FLASH),
)


def entries() -> Iterator[ZooEntry]:
    """All entries, in the order of the table."""
    for library in LIBRARIES:
        yield from library.entries
