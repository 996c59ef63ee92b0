"""Tensor parallelism: partitioning of weights, process groups and collectives."""
