"""From an adapter's own files to checked tensors in the layout that shards serve from."""
