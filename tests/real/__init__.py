"""Real models from package registries, in a cache outside the tree: `make test-real`."""
