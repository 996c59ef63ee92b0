"""Starting a shard: model, engine, graph capture, calibration, and the worker ranks of tensor parallelism."""
