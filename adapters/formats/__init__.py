"""Reads and checks an adapter's files and converts them to the layout that shards serve from."""
