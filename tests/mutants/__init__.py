"""Planted faults: each names a test, which must fail when the fault is planted."""
