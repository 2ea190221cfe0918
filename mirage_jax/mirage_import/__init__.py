"""Reads muGraphs that CMU's Mirage has saved."""
