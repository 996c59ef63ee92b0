"""Speculative decoding apart from requests: its parameters, acceptance rates, costs, and prompt lookup."""
