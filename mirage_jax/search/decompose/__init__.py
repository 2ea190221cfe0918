"""Regions too wide to exhaust: divided, searched in parts, and put together.

Reading order; Mirage (OSDI'25, section 1) partitions programs too, but no section describes these steps:

1. `windows`: divides a region at tensors.
2. `output_slices`: divides it by outputs, and joins their candidates.
3. `fusion`: fuses kernels side by side, and inlines small pointwise ones.
4. `subprocesses`: searches the parts, in processes if asked.
"""
