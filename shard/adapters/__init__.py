"""Adapters in the shard: reading served files and moving them into slots."""
