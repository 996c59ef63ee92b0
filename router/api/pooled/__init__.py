"""Embedding and classification models: the routes to them, and what the routes share."""
