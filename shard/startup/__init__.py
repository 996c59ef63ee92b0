"""Starting a shard: model, engine, graph capture, and the worker ranks of tensor parallelism."""
