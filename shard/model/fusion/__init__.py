"""Fused modules: which parts of the network run as one kernel, and the checks that they compute the same."""
