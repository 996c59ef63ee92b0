"""The processes of a server: their configuration, start, supervision and restart."""
