"""muGraphs: the language of everything that is searched, proven and run."""

from mirage_jax.mugraph.importer.graphs import Imported as Imported
from mirage_jax.mugraph.importer.graphs import Refused as Refused
from mirage_jax.mugraph.importer.graphs import from_mirage_json as from_mirage_json
