"""Fused modules: parts of the network that run as one kernel, and the checks that they compute the same."""
