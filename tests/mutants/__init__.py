"""Faults planted on purpose: each must turn a named test red, or that test proves less than it says."""
