"""HTTP, text, admission, placement. Knows shards only through the wire in `proto`; imports no torch."""
