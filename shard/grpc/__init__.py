"""The gRPC service of a shard: commands in, step outputs out."""
