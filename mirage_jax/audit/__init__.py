"""Campaigns that try to break the optimizer: mutants that must be rejected, rewrites that must not be, random
programs.
"""
