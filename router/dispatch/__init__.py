"""Queues, sending to shards, delivery of outputs, and recovery of requests whose shard failed."""
