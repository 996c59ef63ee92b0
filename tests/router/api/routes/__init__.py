"""The HTTP surface, against the real application, dispatcher and wire, and a shard that says what it was told."""
