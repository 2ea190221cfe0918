"""One search in a process of its own: the text of a `parts.Part` comes in, that of what was found goes out."""

from __future__ import annotations

import sys

from mirage_jax.search.parts import found_to_text, part_from_text, search_part

if __name__ == "__main__":
    print(found_to_text(search_part(part_from_text(sys.stdin.read()))))
