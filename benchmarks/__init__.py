"""Benchmarks: speed and memory of the server and its parts, the published figures, and tools that search settings."""
