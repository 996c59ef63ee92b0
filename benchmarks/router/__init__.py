"""The router by itself in front of simulated shards, and its placement of adapters."""
