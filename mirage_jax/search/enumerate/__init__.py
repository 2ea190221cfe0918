"""The search of one window, exhaustive within a `Space`.

Reading order, with sections of Mirage (OSDI'25):

1. `normal_form`: abstract expressions (section 4.3).
2. `axioms`: the axioms of table 2, run backwards (section 4.3).
3. `targets`: outputs as normal forms, and batch axes (sections 2 and 4.3).
4. `shift_degrees`: values relative to a running maximum (no section).
5. `kernels`: all operator DAGs of one kernel, over pending sets (section 4.1, block graphs).
6. `plans`: all sequences of kernels (section 4.1, kernel graphs).
7. `pricing`: estimates of kernels that are not written yet (no section).
8. `extract`: muGraphs of plans, with explicit shifts (section 2).
9. `window_search`: runs all this (section 4).
"""
