"""One search in a process of its own: reads a `SubSearch` as a line, prints candidates and report as another."""

from __future__ import annotations

import gc
import sys

from mirage_jax.children import end_with_standard_input
from mirage_jax.search.decompose.subprocesses import found_to_text, part_from_text, search_part

if __name__ == "__main__":
    gc.disable()  # a process that ends has no use for it
    part = part_from_text(sys.stdin.readline())
    end_with_standard_input()
    print(found_to_text(search_part(part)))
