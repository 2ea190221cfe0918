"""The cost model: estimates that order candidates before anything is measured.

Reading order, with sections of Mirage (OSDI'25):

1. `outline`: loads, operators and stores of a kernel, written or not (the block graphs of section 2).
2. `roofline`: seconds of a kernel, of a scheduled graph, and of XLA's operators (no section).
3. `tilings`: the best tile sizes, warps and stages of a kernel (section 4.1, grid dimensions and loop ranges).
4. `formula`: the same estimate as a formula in extents, for people (no section).
"""
