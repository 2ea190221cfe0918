"""The search: from a region's reference muGraph to ranked candidates.

Reading order, with sections of Mirage (OSDI'25):

1. `driver`: the way in; divides a region and combines the results (section 1, the partitioner).
2. `enumerate`: the search of one window (section 4).
3. `decompose`: windows, output slices, fusion and subprocesses, for regions too wide to exhaust (no section).
4. `candidates`: structures without sizes, and their best sizes (no section).
5. `loop_bounds`: loops over masked values that end early (no section).
6. `report`: counts, and the clock that ends a search (the search times of section 8).
"""
