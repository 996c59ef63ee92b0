"""A request inside the shard, what its output is constrained to, and its part of a step. No torch."""
