"""Meanings of operators: each domain interprets the same records.

Read `protocol` first, then `floats` (the oracle and the portable lowering). `index_facts` tells what indices alone say
about masks; `finite_field`, the verifier's arithmetic, uses it. `exact` has numbers without rounding and
`exact_domain` graphs over them, for the exact check.
"""
