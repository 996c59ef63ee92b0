"""Tensor parallelism over several processes: the first rank runs the engine and sends its commands to the others."""
