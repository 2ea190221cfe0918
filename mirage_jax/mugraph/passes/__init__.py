"""Rules over whole graphs.

Before a search: `diagonals`, `log_sum_exp`, `nested_exponentials`, then `merge_axes`. About kernels: `thread_fusion`
(registers), `sentinels` (huge negative numbers as minus infinity). Of candidates: `differences` (sums that cancel).
After a search: `float16_range` (values that float16 holds).
"""
