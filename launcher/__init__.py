"""Flags, download, processes, readiness, signals. Starts router and shards as processes; imports neither."""
