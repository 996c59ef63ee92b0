"""Learns Medusa heads from the outputs that a shard generates: rows, the trainer's process, and what is adopted."""
