"""Kernels for adapters and heads on a GPU: their times, and the search for their configurations."""
