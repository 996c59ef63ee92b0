"""Shards as the router sees them: discovery, connections, credit and placement."""
