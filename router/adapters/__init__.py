"""Adapters in the router: name resolution, authorization and loading through the adapter loader."""
